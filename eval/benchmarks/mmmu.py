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

from __future__ import annotations

import ast
import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.sample import Image, Segment, Text, question_text
from earlyfusion.data.tasks.scoring.open_answers import open_match
from earlyfusion.eval.benchmarks.visual import aggregate, generate_request, grey, views_of
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Model, Question, Record, TaskOptions
from earlyfusion.eval.registry import benchmark

LETTERS = "ABCDEFGHIJ"
_PICTURE_FIELDS = ("image", "images", "img", "picture", "photo", "image_path", "video", "videos")
_PLACEHOLDER = re.compile(r"<image (\d)>")
CHOICE_REQUEST = "\n\nAnswer with the option's letter from the given choices directly."
OPEN_REQUEST = "\n\nAnswer the question using a single word or phrase."
DOMAINS = {
    "Art & Design": "Art Art_Theory Design Music",
    "Business": "Accounting Economics Finance Manage Marketing",
    "Science": "Biology Chemistry Geography Math Physics",
    "Health & Medicine": (
        "Basic_Medical_Science Clinical_Medicine Diagnostics_and_Laboratory_Medicine Pharmacy Public_Health"
    ),
    "Humanities & Social Science": "History Literature Psychology Sociology",
    "Tech & Engineering": (
        "Agriculture Architecture_and_Engineering Computer_Science Electronics Energy_and_Power Materials "
        "Mechanical_Engineering"
    ),
}
_DOMAIN_OF = {subject: domain for domain, subjects in DOMAINS.items() for subject in subjects.split()}


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """The letter an answer means: "(B)", then " B ", then "B.", then the text of an option; of several the
    last said.

    None when there is none of these. Option texts count only in answers of more than five words, as
    published.
    """
    # Blanks around the answer let " B " match a letter that stands alone.
    answer = f" {text.strip().strip(',.!?;:' + chr(39))} "
    letters = LETTERS[: len(options)]
    for form in ("({})", " {} ", "{}."):
        places = {letter: answer.rfind(form.format(letter)) for letter in letters}
        if max(places.values()) >= 0:
            return max(places, key=lambda letter: places[letter])

    if len(answer.split()) <= 5:
        return None
    said = {
        letter: answer.lower().rfind(option.lower())
        for letter, option in zip(letters, options)
        if option.strip()
    }
    found = {letter: place for letter, place in said.items() if place >= 0}
    return max(found, key=lambda letter: found[letter]) if found else None


def parse_options(written: Any) -> tuple[str, ...]:
    """The options of a row: a list, or a Python list written as a string. Raises ValueError for anything
    else."""
    listed = ast.literal_eval(written) if isinstance(written, str) and written.strip() else written or []
    if not isinstance(listed, list | tuple) or len(listed) > len(LETTERS):
        raise ValueError(f"options {str(written)[:60]!r}: expected a list of at most {len(LETTERS)}")
    return tuple(str(option).strip() for option in listed)


@benchmark("mmmu", "exam questions with pictures, MMMU format, own file")
class MmmuTask:
    """See the module. options.extra "views": "blind" (default, grey pictures) or nothing."""

    name = "mmmu"
    version = "2"
    kind = "generate"
    private = False
    needs = frozenset({"image"})

    def __init__(self, options: TaskOptions) -> None:
        if options.data is None:
            raise EvalError(
                "mmmu: no data given; pass --data FILE (.jsonl or .parquet in MMMU's schema, or a folder)"
            )
        self.options = options
        self.views = views_of(self.name, options, ("blind",))
        self.files = _files(Path(options.data))
        self.qa = False

    def data_hash(self) -> str:
        """Over the content of the files in order of their names."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def prepare(self, model: Model) -> None:
        """Whether the model is asked in the form of pretraining."""
        self.qa = bool(getattr(model, "asks_qa", False))

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Rows in file order, or `limit` of them at even distances. The category is the subject."""
        if shots:
            raise EvalError(f"mmmu: shots={shots}; MMMU is asked without examples: leave --shots out")
        rows: list[tuple[Path, int, dict[str, Any]]] = []
        for path in self.files:
            rows += [(path, number, row) for number, row in enumerate(read_rows(path), 1)]
        if limit is not None and limit < len(rows):
            rows = [rows[i * len(rows) // limit] for i in range(limit)]

        for path, number, row in rows:
            try:
                yield _question(row, path.parent)
            except (KeyError, ValueError, SyntaxError, TypeError) as error:
                raise EvalError(
                    f"{path}: row {number} ({row.get('id')!r}) is not in MMMU's schema: {error}; expected id,"
                    " question, options, answer, question_type and image_1 ... (each named in the question"
                    " as <image 1> ...)"
                ) from None

    def requests(self, question: Question, repeat: int) -> Sequence[GenerateRequest]:
        """With the pictures, then with grey ones."""
        shown: list[Segment] = list(question.prompt)  # type: ignore[arg-type]
        blank: list[Segment] = [grey(part) if isinstance(part, Image) else part for part in shown]
        prompts = [shown, *[blank] * len(self.views)]
        tokens = self.options.max_new_tokens or 64
        stop: tuple[str, ...] = ()
        if self.qa:
            prompts, stop = [as_pretrained(prompt) for prompt in prompts], ("\n",)
        return [
            generate_request(prompt, self.options, question.id, repeat, tokens, stop=stop)
            for prompt in prompts
        ]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Letter equality, or one of the open answers found; blind_score likewise."""
        judged = [_judge(question, output.text) for output in outputs]
        record: Record = {"extracted": judged[0][0], "score": judged[0][1], "target": question.target}
        record["options"] = len(question.choices)
        record["domain"] = _DOMAIN_OF.get(question.category, "other")
        return record | {f"{view}_score": score for view, (_, score) in zip(self.views, judged[1:])}

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Micro average, by subject and by_domain; chance: 1 / number of options, 0 for open questions."""
        chance = [1 / r["options"] if r["options"] else 0.0 for r in records]
        domains = aggregate([{**r, "category": r["domain"]} for r in records], views=self.views)[
            "by_category"
        ]
        whole = aggregate(records, views=self.views)
        return {**whole, "chance": sum(chance) / len(chance), "by_domain": domains}


def as_pretrained(prompt: Sequence[Segment]) -> list[Segment]:
    """A prompt as a question of pretraining: the pictures that it begins with, then "Q: ", the rest, and
    "A:"."""
    # Pictures that open the question stand before it, as in pretraining.
    segments = [part for part in prompt if not isinstance(part, Text) or part.text.strip()]
    first = next((i for i, part in enumerate(segments) if isinstance(part, Text)), len(segments))
    before, after = question_text("\0").split("\0")
    rest = segments[first:] or [Text("")]
    opening = Text(before + rest[0].text.lstrip()) if isinstance(rest[0], Text) else Text(before)
    asked = [opening, *rest[1:]]
    last = asked[-1]
    closed = (
        [*asked[:-1], Text(last.text.rstrip() + after)] if isinstance(last, Text) else [*asked, Text(after)]
    )
    return [*segments[:first], *closed]


def _judge(question: Question, text: str) -> tuple[Any, float]:
    if question.choices:
        letter = parse_choice(text, question.choices)
        return letter, float(letter == question.target)
    return text.strip() or None, float(open_match(text, question.meta["answers"]))


def _question(row: dict[str, Any], folder: Path) -> Question:
    options = parse_options(row.get("options"))
    chosen = options if row.get("question_type", "multiple-choice") == "multiple-choice" else ()
    text = str(row["question"])
    listed = "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, chosen))
    whole = f"{text}\n\n{listed}{CHOICE_REQUEST}" if chosen else f"{text}{OPEN_REQUEST}"
    _check_pictures(row, whole)

    answer = row["answer"]
    golds = (
        ast.literal_eval(answer) if isinstance(answer, str) and answer.strip().startswith("[") else [answer]
    )
    if chosen and answer not in LETTERS[: len(chosen)]:
        raise ValueError(f"answer {answer!r} is none of the letters {LETTERS[: len(chosen)]}")

    return Question(
        id=str(row["id"]),
        prompt=_interleave(whole, row, folder),
        target=answer,
        category="_".join(str(row["id"]).split("_")[1:-1]) or "all",
        choices=chosen,
        meta={"answers": [str(gold) for gold in golds]},
    )


def _check_pictures(row: dict[str, Any], text: str) -> None:
    """Raises ValueError for a picture of the row that neither the prompt nor the explanation names."""
    named = set(_PLACEHOLDER.findall(text)) | set(_PLACEHOLDER.findall(str(row.get("explanation") or "")))
    for field, value in row.items():
        held = any(value.values()) if isinstance(value, dict) else value not in (None, "", [], b"")
        number = re.fullmatch(r"image_(\d)", field)
        if held and number and number[1] not in named:
            raise ValueError(f"{field} is not used: write <image {number[1]}> where the question shows it")
        if held and not number and field in _PICTURE_FIELDS:
            raise ValueError(
                f"{field!r} is not read: call it image_1 and write <image 1> where the question shows it"
            )


def _interleave(text: str, row: dict[str, Any], folder: Path) -> list[Segment]:
    """Texts and pictures in order; a picture stands where it is first named, later mentions stay words."""
    segments: list[Segment] = []
    shown: set[str] = set()
    start = 0

    for match in _PLACEHOLDER.finditer(text):
        number = match[1]
        if number in shown:
            continue
        shown.add(number)
        if match.start() > start:
            segments.append(Text(text[start : match.start()]))
        segments.append(Image(_picture(row.get(f"image_{number}"), f"image_{number}", folder)))
        start = match.end()
    return [*segments, Text(text[start:])]


def _picture(given: Any, name: str, folder: Path) -> bytes | Path:
    """Bytes, or a path beside the file; base64 and data URIs are decoded."""
    if isinstance(given, dict):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str) or not given:
        raise ValueError(f"{name} is named in the question but missing")
    if len(given) < 4096 and (folder / given).is_file():
        return folder / given
    try:
        return base64.b64decode(given.partition("base64,")[2] or given, validate=True)
    except binascii.Error:
        raise ValueError(f"{name}: {given[:60]!r} is neither a file in {folder} nor base64") from None


def _files(path: Path) -> list[Path]:
    found = (
        sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".parquet")) if path.is_dir() else [path]
    )
    if not found or not all(p.is_file() for p in found):
        raise EvalError(f"mmmu: {path}: no such file, or a folder without .jsonl or .parquet files")
    return found
