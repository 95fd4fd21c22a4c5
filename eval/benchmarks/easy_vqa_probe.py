"""easy-VQA, official test split: does the model see, and how much of its score is seeing?

    accuracy            every answer token is the argmax over the WHOLE vocabulary: what greedy decoding would
                        say
    accuracy_of_13      the likeliest of the 13 answers (multiple choice) is right
    blind_accuracy      `accuracy` with every picture replaced by a mean-grey one of the same size
    removed_accuracy    `accuracy` with the picture left out of the document
    majority_accuracy   always the most frequent training answer to the same question text; no model

Documents are put as in training (data/sources/easy_vqa.py) with one question each. Documents that are equal
(a blind one, say, depends on its question alone) are scored once. Accuracies are shares of questions, 0 to 1;
with `limit` they are over that many questions spread evenly over the split, and the result says so.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image as PilImage

from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Image, Sample, Segment, Text, answer_text, question_text
from earlyfusion.data.sources.easy_vqa import load_split, picture_of
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.scoring import Asked, Picture, Score, score_answers
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import prepare_image

SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
ANSWERS = ("yes", "no", *SHAPES, *COLOURS)
CONTROLS = ("grey", "removed")


@dataclass(frozen=True)
class EasyVqaResult:
    """Accuracies (0 to 1, None where not asked for) in all and by kind of question."""

    accuracy: float
    accuracy_of_13: float | None
    blind_accuracy: float | None
    removed_accuracy: float | None
    majority_accuracy: float
    by_kind: dict[str, dict[str, float | int | None]]
    questions: int
    questions_total: int
    split: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For `eval.results.save_result` under the name "easy_vqa"."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """One question of the split; picture is the picture's number."""

    picture: int
    text: str
    answer: str

    @property
    def kind(self) -> str:
        """yes/no, shape or colour, by the answer."""
        return "yes/no" if self.answer in ("yes", "no") else "shape" if self.answer in SHAPES else "colour"


def questions_of(split: str, limit: int | None = None) -> list[Question]:
    """All questions of "test" or "train" in the split's order, or `limit` of them at even distances."""
    every = [Question(entry.index, q, a) for entry in load_split(split) for q, a in entry.questions]
    if limit is None or limit >= len(every):
        return every
    if limit < 1:
        raise ValueError(f"limit={limit}: ask at least one question, or pass None for all {len(every)}")
    return [every[i * len(every) // limit] for i in range(limit)]


def evaluate_easy_vqa(
    model: NativeFusion,
    tokenizer: Tokenizer,
    *,
    split: str = "test",
    limit: int | None = None,
    controls: Sequence[str] = ("grey",),
    restricted: bool = True,
    tokens_per_batch: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> EasyVqaResult:
    """Measure `model`. controls: image-blind variants, of CONTROLS. restricted: also choose among the 13
    answers. progress: told (documents scored, all) of a view, now and then.

    Raises ValueError for an unknown control.
    """
    unknown = [control for control in controls if control not in CONTROLS]
    if unknown:
        raise ValueError(f"unknown control {unknown[0]!r}; known: {', '.join(CONTROLS)}")
    start = time.perf_counter()
    questions = questions_of(split, limit)
    exam = _Exam(model, tokenizer, split, questions, tokens_per_batch, progress)
    verdicts: dict[str, list[bool]] = {"accuracy": exam.said("seen")}
    verdicts["accuracy_of_13"] = exam.chosen_right() if restricted else []
    verdicts["blind_accuracy"] = exam.said("grey") if "grey" in controls else []
    verdicts["removed_accuracy"] = exam.said("removed") if "removed" in controls else []
    majority = majority_answers()
    verdicts["majority_accuracy"] = [majority.get(q.text) == q.answer for q in questions]
    groups = defaultdict(list)
    for index, question in enumerate(questions):
        groups[question.kind].append(index)
    by_kind = {
        kind: {
            "questions": len(groups[kind]),
            **{name: _share(right, groups[kind]) for name, right in verdicts.items()},
        }
        for kind in ("yes/no", "shape", "colour")
        if groups[kind]
    }
    whole = {name: _share(right, range(len(questions))) for name, right in verdicts.items()}
    return EasyVqaResult(
        **whole,  # type: ignore[arg-type]
        by_kind=by_kind,  # type: ignore[arg-type]
        questions=len(questions),
        questions_total=sum(len(entry.questions) for entry in load_split(split)),
        split=split,
        seconds=time.perf_counter() - start,
    )


def majority_answers() -> dict[str, str]:
    """Question text -> its most frequent answer in the training split (ties: the alphabetically first)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in load_split("train"):
        for question, answer in entry.questions:
            counts[question][answer] += 1
    return {question: min(c, key=lambda answer: (-c[answer], answer)) for question, c in counts.items()}


def _share(right: Sequence[bool], indices: Sequence[int]) -> float | None:
    return sum(right[i] for i in indices) / len(indices) if right and len(indices) else None


class _Exam:
    """The questions as documents, with and without their pictures."""

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Tokenizer,
        split: str,
        questions: list[Question],
        tokens_per_batch: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.progress = progress
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.tokens_per_batch = tokens_per_batch
        needed = {question.picture for question in questions}
        self.images = {e.index: picture_of(e).open() for e in load_split(split) if e.index in needed}
        level = round(
            float(np.mean([np.asarray(image.convert("RGB")).mean() for image in self.images.values()]))
        )
        self.grey = (level, level, level)
        self._templates: dict[Hashable, Encoded] = {}
        self.answer_ids = [tuple(tokenizer.encode(answer_text(answer))) for answer in ANSWERS]
        self._scores: list[Score] | None = None

    @property
    def distinct_starts(self) -> bool:
        """Whether the first token of an answer tells which of the 13 it is."""
        return len({ids[0] for ids in self.answer_ids}) == len(ANSWERS)

    def said(self, view: str) -> list[bool]:
        """For every question: would greedy decoding give its answer?"""
        return [score.said for score in self._ask(view)]

    def chosen_right(self) -> list[bool]:
        """For every question: is its answer the likeliest of the 13?"""
        if self.distinct_starts:
            return [ANSWERS[s.best or 0] == q.answer for s, q in zip(self._ask("seen"), self.questions)]
        every = [Question(q.picture, q.text, answer) for q in self.questions for answer in ANSWERS]
        likelihoods = [score.log_likelihood for score in self._score(every, "seen")]
        rows = [likelihoods[i : i + len(ANSWERS)] for i in range(0, len(every), len(ANSWERS))]
        return [ANSWERS[int(np.argmax(row))] == q.answer for row, q in zip(rows, self.questions)]

    def _ask(self, view: str) -> list[Score]:
        if view != "seen":
            return self._score(self.questions, view)
        if self._scores is None:
            self._scores = self._score(self.questions, view)
        return self._scores

    def _score(self, questions: Sequence[Question], view: str) -> list[Score]:
        """Scores of the questions; equal documents go through the model once."""
        documents = [self._document(question, view) for question in questions]
        distinct = list(dict.fromkeys(documents))
        wanted = dict.fromkeys(d.picture for d in distinct if d.picture is not None)
        scores = score_answers(
            self.model,
            distinct,
            {key: self._prepared(key) for key in wanted},
            candidates=[ids[0] for ids in self.answer_ids] if self.distinct_starts else (),
            silent_ids=self._silent(),
            tokens_per_batch=self.tokens_per_batch,
            progress=self.progress,
        )
        found = dict(zip(distinct, scores))
        return [found[document] for document in documents]

    def _silent(self) -> list[int]:
        """What `model.generate.generate` never produces."""
        text = self.model.config.text
        media = [i for name, i in self.tokenizer.special_ids.items() if name.startswith("<|media_")]
        beyond = range(self.tokenizer.vocab_size, text.vocab_size)
        return [text.bos_token_id, text.pad_token_id, *media, *beyond]

    def _picture_key(self, question: Question, view: str) -> Hashable | None:
        if view == "removed":
            return None
        return question.picture if view == "seen" else ("grey", self.images[question.picture].size)

    def _image(self, key: Hashable) -> PilImage.Image:
        if isinstance(key, tuple):
            return PilImage.new("RGB", key[1], self.grey)
        return self.images[key]  # type: ignore[index]

    def _prepared(self, key: Hashable) -> Picture:
        patches, grid = prepare_image(self._image(key), self.model.config.vision)
        return patches, [grid]

    def _document(self, question: Question, view: str) -> Asked:
        """The encoded document. Its ids depend on the picture's size only, so they are made once per size and
        text."""
        key = self._picture_key(question, view)
        size = None if key is None else self._image(key).size if isinstance(key, int) else key[1]  # type: ignore[index]
        template = self._templates.get((size, question.text))
        if template is None:
            segments: list[Segment] = [] if key is None else [Image(self._image(key))]
            segments.append(Text(question_text(question.text)))
            sample = Sample(segments, "easy_vqa", question.text)
            template = encode(sample, self.tokenizer, self.model.config.vision, eos=False)
            self._templates[size, question.text] = template
        ids, media = template.ids.tolist(), template.media_positions.tolist()
        return Asked(tuple(ids), self.answer_ids[ANSWERS.index(question.answer)], tuple(media), key)
