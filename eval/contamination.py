"""Contamination guard: which benchmark questions have word n-grams in common with the training text.

    earlyfusion eval --contamination SHARDS --tasks mmlu_pro --data DIR --out OUT

Text is lower-cased and split into runs of letters and digits; an n-gram is n words in a row (13 by default,
as in GPT-3's report, appendix C). A question shorter than n words is compared as one gram of its own length,
but at least SHORTEST words, below which a match says nothing. What is looked for is the question and its
options, not the shots before it.

Training text: .txt, .md, .html, .py, .jsonl and .json (all strings in them), .parquet (string columns), also
.gz and .zst, tar shards of such members, and folders of them. Reports ids and shares, never text.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from earlyfusion.eval.benchmarks.base import mean
from earlyfusion.eval.harness import label_of, read_records
from earlyfusion.eval.protocol import EvalError, Question, Task, prompt_text
from earlyfusion.kernels.files import write_json

NGRAM, SHORTEST = 13, 8
TEXT_ENDINGS = (".txt", ".md", ".html", ".py", ".jsonl", ".json")
_WORD = re.compile(r"[^\W_]+")
_PACKED = re.compile(r"\.(gz|zst)$")


@dataclass
class Overlap:
    """What was found. shares: question id -> share of its n-grams that stand in the training text (0 to 1).
    too_short: ids of questions with fewer than SHORTEST words. words: of training text read. files: name ->
    n-grams found in it."""

    shares: dict[str, float] = field(default_factory=dict)
    too_short: list[str] = field(default_factory=list)
    words: int = 0
    documents: int = 0
    files: Counter[str] = field(default_factory=Counter)

    @property
    def hit(self) -> list[str]:
        """Ids with any n-gram in common."""
        return [identity for identity, share in self.shares.items() if share > 0]


def find_overlap(
    questions: Sequence[Question], documents: Iterable[tuple[str, str]], n: int = NGRAM
) -> Overlap:
    """Compare questions with training documents (file name, text), which are read once.

    Raises EvalError for n below SHORTEST.
    """
    if n < SHORTEST:
        raise EvalError(f"--ngram {n}: give at least {SHORTEST} words; shorter runs occur everywhere")

    # The grams of every question, and all of one length together.
    result = Overlap()
    own: dict[str, set[str]] = {}
    sought: dict[int, set[str]] = defaultdict(set)
    for question in questions:
        words = _words(" ".join([_asked(question), *question.choices]))
        if len(words) < SHORTEST:
            result.too_short.append(question.id)
            continue
        length = min(n, len(words))
        own[question.id] = set(_grams(words, length))
        sought[length] |= own[question.id]

    # One pass over the training text, whatever the number of questions.
    found: set[str] = set()
    for name, text in documents:
        words = _words(text)
        result.words += len(words)
        result.documents += 1
        for length, grams in sought.items():
            here = {gram for gram in _grams(words, length) if gram in grams}
            found |= here
            if here:
                result.files[name] += len(here)
    result.shares = {identity: len(grams & found) / len(grams) for identity, grams in own.items()}
    return result


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> Iterator[str]:
    return (" ".join(words[start : start + n]) for start in range(len(words) - n + 1))


def _asked(question: Question) -> str:
    """The question's own text: where the prompt carries shots, only what comes after them."""
    # Worked examples are shared by all questions and would all be found together.
    row = question.meta.get("row")
    if isinstance(row, dict) and "question" in row:
        return str(row["question"])
    text = prompt_text(question.prompt)
    head = question.meta.get("head")
    return text[head:] if isinstance(head, int) else text


# training text


def training_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of everything readable below `path`. Raises EvalError when there is nothing."""
    if not path.exists():
        raise EvalError(f"--contamination {path}: no such file or folder")
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and _readable(p.name))
    )
    if not files:
        raise EvalError(f"--contamination {path}: holds no text, json, parquet or tar file")
    for file in files:
        yield from ((file.name, text) for text in _file_texts(file))


def _readable(name: str) -> bool:
    bare = _PACKED.sub("", name.lower())
    return bare.endswith((*TEXT_ENDINGS, ".tar", ".parquet")) and not name.endswith(".index.jsonl")


def _file_texts(file: Path) -> Iterator[str]:
    bare = _PACKED.sub("", file.name.lower())
    if bare.endswith(".parquet"):
        yield from _parquet_texts(file)
        return
    with _opened(file) as raw:
        if not bare.endswith(".tar"):
            yield from _texts(bare, raw)
            return
        with tarfile.open(fileobj=raw, mode="r|") as tar:
            for member in tar:
                if member.isfile() and _readable(member.name):
                    yield from _texts(member.name.lower(), tar.extractfile(member))  # type: ignore[arg-type]


def _opened(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if file.suffix == ".zst":
        try:
            import zstandard
        except ModuleNotFoundError:
            raise EvalError(f"{file}: needs zstandard; pip install 'earlyfusion[shards]'") from None
        return zstandard.open(file, "rb")
    return file.open("rb")


def _texts(name: str, raw: IO[bytes]) -> Iterator[str]:
    """The text of a file; of JSON all strings, a line (or the file) at a time."""
    if not name.endswith((".jsonl", ".json")):
        yield raw.read().decode("utf-8", "replace")
        return
    for part in raw if name.endswith(".jsonl") else [raw.read()]:
        if part.strip():
            try:
                yield "\n".join(_strings(json.loads(part.decode("utf-8", "replace"))))
            except ValueError:
                raise EvalError(f"{name}: not valid JSON") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _parquet_texts(file: Path) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise EvalError(f"{file}: parquet needs pyarrow; pip install 'earlyfusion[eval]'") from None
    opened = parquet.ParquetFile(str(file))
    columns = [
        column.name for column in opened.schema_arrow if str(column.type) in ("string", "large_string")
    ]
    for batch in opened.iter_batches(columns=columns):
        for row in batch.to_pylist():
            yield "\n".join(value for value in row.values() if value)


# the verb


def report(tasks: Sequence[Task], path: Path, n: int, limit: int | None, seed: int, out: Path | None) -> int:
    """The verb's --contamination: one line per task; details in OUT/<label>/contamination.json.

    Where OUT/<label>/records.jsonl stands (an evaluation has run), the score on the untouched questions is
    shown too.
    """
    for task in tasks:
        questions = list(task.questions(limit, None, seed))
        overlap = find_overlap(questions, training_texts(path), n)
        hits = overlap.hit
        result: dict[str, Any] = {
            "task": label_of(task),
            "data_hash": task.data_hash(),
            "training": str(path),
            "ngram": n,
            "questions": len(questions),
            "too_short": len(overlap.too_short),
            "hit": len(hits),
            "hit_share": len(hits) / len(questions),
            "mostly_hit": sum(share > 0.5 for share in overlap.shares.values()),
            "words_read": overlap.words,
            "documents_read": overlap.documents,
            "files": dict(overlap.files.most_common(50)),
            "shares": {identity: round(overlap.shares[identity], 4) for identity in hits},
        }
        print(
            f"{result['task']}: {len(hits)} of {len(questions)} questions share a {n}-gram with {path} "
            f"({100 * result['hit_share']:.2f} %), {result['mostly_hit']} of them more than half of theirs; "
            f"{overlap.words:,} words read, {len(overlap.too_short)} questions too short to judge"
        )
        if out is None:
            continue

        # What an evaluation in the same folder scored without the questions that were seen.
        folder = out / label_of(task)
        records = list(read_records(folder / "records.jsonl").values())
        clean = [float(record["score"]) for record in records if record["id"] not in hits]
        if clean:
            result["score"] = mean([float(record["score"]) for record in records])
            result["clean_score"] = mean(clean)
            print(f"  score {result['score']:.4f} on all, {result['clean_score']:.4f} on the untouched ones")
        write_json(folder / "contamination.json", result)
    if out is not None:
        print(f"details: {out}", file=sys.stderr)
    return 0
