"""What all visual tasks share: three views of every question, the request, the record, and the sums.

    score          with the picture
    blind_score    a grey picture of the same size in its place: what can be guessed from the words of the
                   question
    words_score    the text twin in its place: what the model can do once the picture is read for it

A record keeps all three; `seeing` = score - blind_score is what the picture adds. An answer that the token
limit cut off is no answer: its beginning may be right by luck of where the cut fell.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from earlyfusion.data.sample import Text, question_text
from earlyfusion.data.tasks.scoring.text import first_line
from earlyfusion.eval.benchmarks.base import request_seed, sampling, standard_error
from earlyfusion.eval.benchmarks.questions import MAX_OBJECTS, MAX_SIDE, MIN_SIDE, Item, make_items
from earlyfusion.eval.benchmarks.twins import twin_prompt
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    Model,
    Prompt,
    Question,
    Record,
    TaskOptions,
)
from earlyfusion.kernels.errors import did_you_mean

VIEWS = ("blind", "words")
DEFAULT_QUESTIONS = 600

Judge = Callable[[Item, str], tuple[Any, float, dict[str, float]]]
"""(item, answer) -> (what was read out of the answer or None, score, further metrics)"""


class PictureTask:
    """Generated pictures with one question each.

    options.extra: "views", comma-separated of blind and words (default both), and "n", questions in all
    (default 600). Prompts stand as in training: picture, line end, "Q: ...", line end, "A:"; an answer ends
    with its line.
    """

    kind = "generate"
    version = "2"  # 1 judged answers that the limit cut off by their beginning
    private = False

    def __init__(
        self, name: str, options: TaskOptions, judge: Judge, *, media: str = "image", max_new_tokens: int = 24
    ) -> None:
        self.name, self.options, self.judge = name, options, judge
        self.needs = frozenset({media})
        self.max_new_tokens = options.max_new_tokens or max_new_tokens
        self.views = views_of(name, options)
        self.count = _whole(name, options.extra.get("n", DEFAULT_QUESTIONS))

    def data_hash(self) -> str:
        """Of the generator's name, version, limits and seed."""
        facts = ["data/synth", self.name, self.version, self.options.seed, MIN_SIDE, MAX_SIDE, MAX_OBJECTS]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def prepare(self, model: Model) -> None:
        """Nothing to prepare."""

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """The first `limit` of `n` questions; categories stand in turn. Raises EvalError for shots: there are
        none."""
        refuse_shots(self.name, shots)
        count = self.count if limit is None else min(limit, self.count)
        for index, item in enumerate(make_items(self.name, count, self.options.seed)):
            yield Question(
                id=f"{self.name}/{index:05d}",
                prompt=[item.media(), Text(question_text(item.question))],
                target=item.answer,
                category=item.category,
                meta={"item": item},
            )

    def requests(self, question: Question, repeat: int) -> Sequence[GenerateRequest]:
        """The question with its picture, then one request for each view."""
        item: Item = question.meta["item"]
        prompts: list[Prompt] = [question.prompt]
        for view in self.views:
            blind = [item.blind(), Text(question_text(item.question))]
            prompts.append(blind if view == "blind" else twin_prompt(item.graph, item.question))
        return [self.generate_request(prompt, question.id, repeat) for prompt in prompts]

    def generate_request(self, prompt: Prompt, question: str, repeat: int) -> GenerateRequest:
        """How every prompt of this task is continued."""
        return generate_request(prompt, self.options, question, repeat, self.max_new_tokens)

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """The record of the picture, with the score of each view beside it."""
        record = self.judged(question, outputs[0])
        for view, output in zip(self.views, outputs[1:]):
            record[f"{view}_score"] = self.judged(question, output)["score"]
        return record

    def judged(self, question: Question, output: Any) -> Record:
        """extracted, score, metrics (with `cut`: the limit ended it) and target of one answer."""
        extracted, score, metrics = self.judge(question.meta["item"], whole(output))
        metrics = {**metrics, "cut": float(output.finish == "length")}
        return {"extracted": extracted, "score": score, "metrics": metrics, "target": question.target}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """See `aggregate`."""
        return aggregate(records, views=self.views)


def refuse_shots(name: str, shots: int | None) -> None:
    """Raises EvalError for worked examples: a visual task has none."""
    if shots:
        raise EvalError(
            f"{name}: shots={shots}; visual questions are asked without examples: leave --shots out"
        )


def generate_request(
    prompt: Prompt,
    options: TaskOptions,
    question: str,
    repeat: int,
    max_new_tokens: int,
    stop: tuple[str, ...] = ("\n",),
) -> GenerateRequest:
    """A short answer that ends with its line; greedy for one sample (see eval.tasks.sampling)."""
    temperature, top_p = sampling(options)
    return GenerateRequest(
        prompt,
        max_new_tokens=max_new_tokens,
        stop=stop,
        temperature=temperature,
        top_p=top_p,
        seed=request_seed(options.seed, question, repeat),
    )


def views_of(name: str, options: TaskOptions, known: Sequence[str] = VIEWS) -> tuple[str, ...]:
    """The further views the user wants (option "views"), in order; all known ones when the option is not
    given."""
    given = options.extra.get("views", known)
    listed = (
        [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else list(given)
    )
    for view in listed:
        if view not in known:
            raise EvalError(f"{name}: unknown view {view!r}; {did_you_mean(view, known)}")
    return tuple(dict.fromkeys(listed))


def _whole(name: str, given: Any) -> int:
    try:
        count = int(given)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise EvalError(f"{name}: n={given!r}; expected how many questions to make, at least 1")
    return count


def whole(output: Generation) -> str:
    """The text of an answer that ended by itself, "" of one that the limit cut off."""
    return "" if output.finish == "length" else output.text


def answer_line(text: str) -> str | None:
    """The first line of an answer, None when it is empty."""
    return first_line(text) or None


def aggregate(records: Sequence[Record], *, views: Sequence[str]) -> dict[str, Any]:
    """n (questions), samples (records), score, standard_error, unextracted, the views, what seeing adds,
    means of all metrics, by_category, and baselines.

    majority: always the most frequent gold answer of the category, known in advance: the best a constant can
    do. chance is None: answers are free text. Raises ValueError for no records.
    """
    if not records:
        raise ValueError("no records to aggregate; ask at least one question")
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[str(record.get("category", ""))].append(record)
    scores: dict[str, list[float]] = defaultdict(list)
    for record in records:
        scores[str(record["id"])].append(record["score"])
    result = _sums(records, views)
    result["standard_error"] = standard_error([_mean(values) for values in scores.values()])
    result |= {"chance": None, "majority": _majority(groups)}
    result["by_category"] = {name: _sums(group, views) for name, group in groups.items()}
    return result


def _sums(records: Sequence[Record], views: Sequence[str]) -> dict[str, Any]:
    """Means over records; every question has equally many."""
    sums: dict[str, Any] = {
        "n": len({record["id"] for record in records}),
        "samples": len(records),
        "score": _mean([record["score"] for record in records]),
        "unextracted": sum(record["extracted"] is None for record in records) / len(records),
    }
    for view in views:
        sums[f"{view}_score"] = _mean([record[f"{view}_score"] for record in records])
    if "blind" in views:
        sums["seeing"] = sums["score"] - sums["blind_score"]
    names = dict.fromkeys(name for record in records for name in record.get("metrics", {}))
    for name in names:
        sums[name] = _mean(
            [record["metrics"][name] for record in records if name in record.get("metrics", {})]
        )
    return sums


def _majority(groups: Mapping[str, Sequence[Record]]) -> float:
    """Share of questions the most frequent answer of each category gets right."""
    right = sum(
        Counter(json.dumps(r["target"]) for r in group).most_common(1)[0][1] for group in groups.values()
    )
    return right / sum(map(len, groups.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
