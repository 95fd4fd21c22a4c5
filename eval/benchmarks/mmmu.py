"""MMMU-format exams from the user's own file: multiple choice and open questions with pictures in the text.

Rows as in the public data set: id ("validation_Accounting_1"), question with "<image 1>" ... placeholders,
options (a Python list written as a string), answer (a letter, or the open answer, or a list of accepted ones
as a string), question_type ("multiple-choice" or "open"), image_1 ... image_7 (a path beside the file,
base64, or {"bytes", "path"}). --data names a .jsonl or .parquet file, or a folder of them. Every picture of a
row must be placed by the question or an option (or belong to the row's explanation): one that is not is an
error, for the question would be asked blind.

A model of ours without a chat form is asked as in pretraining: "Q: ... A:", a picture that begins the
question before it. Prompts and parsing follow the published evaluation (MMMU-Benchmark/MMMU, eval/), but for
one thing: where nothing can be read out of an answer it guesses at random, unseeded; here the answer is wrong
and counts as unextracted.
"""

import ast
import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.sample import Image, Segment, Text, question_text
from earlyfusion.data.tasks.scoring import LETTERS, open_match, parse_choice
from earlyfusion.eval.benchmarks.base import benchmark, data_files, evenly
from earlyfusion.eval.benchmarks.visual import PictureTask, media_of
from earlyfusion.eval.protocol import EvalError, Model, Prompt, Question
from earlyfusion.kernels.files import Record

_PICTURE_FIELDS = "image images img picture photo image_path video videos".split()
_PLACEHOLDER = re.compile(r"<image (\d)>")
CHOICE_REQUEST = "\n\nAnswer with the option's letter from the given choices directly."
OPEN_REQUEST = "\n\nAnswer the question using a single word or phrase."


@benchmark("mmmu", "exam questions with pictures, MMMU format, own file")
class MmmuTask(PictureTask):
    """See the module. Every question is asked again with grey pictures."""

    name = "mmmu"
    version = "2"
    stop: tuple[str, ...] = ()

    def setup(self) -> None:
        # Found at once, so that a wrong --data is told before the model is read.
        self.files = data_files(self.data_path(), "*.jsonl", "*.parquet")
        self.qa = False

    def prepare(self, model: Model) -> None:
        """Whether the model is asked in the form of pretraining."""
        self.qa = bool(getattr(model, "asks_qa", False))
        self.stop = ("\n",) if self.qa else ()

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """Rows in file order, or `limit` of them at even distances. The category is the subject."""
        rows: list[tuple[Path, int, Record]] = []
        for path in self.files:
            rows += [(path, number, row) for number, row in enumerate(read_rows(path), 1)]
        for path, number, row in evenly(rows, limit):
            try:
                yield _question(row, path.parent)
            except (KeyError, ValueError, SyntaxError, TypeError) as error:
                raise EvalError(
                    f"{path}: row {number} ({row.get('id')!r}) is not in MMMU's schema: {error}; expected id,"
                    " question, options, answer, question_type and image_1 ... (each named in the question"
                    " as <image 1> ...)"
                ) from None

    def prompts(self, question: Question) -> list[Prompt]:
        """As published, or as in pretraining."""
        # The blind view takes the same form, or it would not be a control.
        prompts = super().prompts(question)
        return [as_pretrained(media_of(prompt)) for prompt in prompts] if self.qa else prompts

    def judged(self, question: Question, output: Any) -> Record:
        """Letter equality, or one of the open answers found."""
        text = output.text
        # No guess where nothing can be read: a random letter would add a quarter to a silent model.
        if question.choices:
            letter, chance = parse_choice(text, question.choices), 1 / len(question.choices)
            score = float(letter == question.target)
            return {"target": question.target, "chance": chance, "extracted": letter, "score": score}
        score = float(open_match(text, question.meta["answers"]))
        return {"target": question.target, "chance": 0.0, "extracted": text.strip() or None, "score": score}


def as_pretrained(prompt: Sequence[Segment]) -> list[Segment]:
    """A prompt as a question of pretraining: the pictures that it begins with, then "Q: ", the rest, and
    "A:"."""
    before, after = question_text("\0").split("\0")
    shown: list[Segment] = []
    asked = ""
    # Pictures that open the question stand before it, as in pretraining; the others are part of it.
    for segment in prompt:
        if not isinstance(segment, Text):
            shown += [Text(asked), segment] if asked else [segment]
            asked = ""
        elif asked or any(isinstance(part, Text) for part in shown):
            asked += segment.text
        elif segment.text.strip():
            asked = before + segment.text.lstrip()
    return [*shown, Text(asked.rstrip() + after)]


def _question(row: Record, folder: Path) -> Question:
    """Raises KeyError, ValueError, SyntaxError or TypeError for a row that is not in the schema."""
    options = _literal(row.get("options") or [])
    chosen: tuple[str, ...] = ()
    if not isinstance(options, list | tuple) or len(options) > len(LETTERS):
        raise ValueError(f"options {str(options)[:60]!r}: expected a list of at most {len(LETTERS)}")
    if row.get("question_type", "multiple-choice") == "multiple-choice":
        chosen = tuple(str(option).strip() for option in options)

    text, answer = str(row["question"]), row["answer"]
    if chosen:
        listed = "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, chosen))
        text += f"\n\n{listed}{CHOICE_REQUEST}"
        if answer not in LETTERS[: len(chosen)]:
            raise ValueError(f"answer {answer!r} is none of the letters {LETTERS[: len(chosen)]}")
    else:
        text += OPEN_REQUEST
    accepted = _literal(answer) if str(answer).strip().startswith("[") else [answer]

    # Ids of the public set name their subject: validation_Art_Theory_2.
    subject = "_".join(str(row["id"]).split("_")[1:-1]) or "all"
    meta = {"answers": [str(gold) for gold in accepted]}
    _check_pictures(row, text)
    return Question(str(row["id"]), _interleave(text, row, folder), answer, subject, chosen, meta)


def _literal(written: Any) -> Any:
    """What a Python literal written as a string says; anything else as it is."""
    return ast.literal_eval(written) if isinstance(written, str) else written


def _check_pictures(row: Record, text: str) -> None:
    """Raises ValueError for a picture of the row that neither the prompt nor the explanation names."""
    # A picture of the explanation belongs to the solution and must not be shown.
    named = _PLACEHOLDER.findall(f"{text} {row.get('explanation')}")
    for field, value in row.items():
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if not value:
            continue
        number = re.fullmatch(r"image_(\d)", field)
        if number and number[1] not in named:
            raise ValueError(f"{field} is not used: write <image {number[1]}> where the question shows it")
        if field in _PICTURE_FIELDS:
            raise ValueError(
                f"{field!r} is not read: call it image_1 and write <image 1> where the question shows it"
            )


def _interleave(text: str, row: Record, folder: Path) -> list[Segment]:
    """Texts and pictures in order; a picture stands where it is first named, later mentions stay words."""
    segments: list[Segment] = []
    start = 0
    for match in _PLACEHOLDER.finditer(text):
        # A mention that stands again before this one has been shown there.
        if match[0] in text[: match.start()]:
            continue
        if match.start() > start:
            segments.append(Text(text[start : match.start()]))
        name = f"image_{match[1]}"
        segments.append(Image(_picture(row.get(name), name, folder)))
        start = match.end()
    return [*segments, Text(text[start:])]


def _picture(given: Any, name: str, folder: Path) -> bytes | Path:
    """Bytes, or a path beside the file; base64 and data URIs are decoded."""
    if isinstance(given, dict):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if not given:
        raise ValueError(f"{name} is named in the question but missing")
    # A path is short; asking the system for a name of megabytes of base64 would fail.
    if len(given) < 4096 and (folder / given).is_file():
        return folder / given
    try:
        return base64.b64decode(given.rpartition("base64,")[2], validate=True)
    except binascii.Error:
        raise ValueError(f"{name}: {given[:60]!r} is neither a file in {folder} nor base64") from None
