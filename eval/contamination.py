"""Contamination guard: which benchmark questions have word n-grams in common with the training text.

    earlyfusion eval --contamination SHARDS --tasks mmlu_pro --data DIR --out OUT

Text is lower-cased and split into runs of letters and digits; an n-gram is n words in a row (13 by default,
as in GPT-3's report, appendix C). A question shorter than n words is compared as one gram of its own length,
but at least SHORTEST words, below which a match says nothing. What is looked for is the question and its
options, not the shots before it. N-grams are compared by 64-bit hashes: with 10^9 training words and 10^6
benchmark grams, a false match is expected in about one of 20,000 runs.

Training text: .txt, .md, .html, .py, .jsonl and .json (all strings in them), .parquet (string columns), also
.gz and .zst, tar shards of such members, and folders of them. Reports ids and shares, never text.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from earlyfusion.eval.benchmarks.base import mean
from earlyfusion.eval.harness import label_of, read_records
from earlyfusion.eval.protocol import EvalError, Question, Task, prompt_text
from earlyfusion.eval.results import write_json

NGRAM, SHORTEST = 13, 8
TEXT_ENDINGS = (".txt", ".md", ".html", ".py", ".jsonl", ".json")
_WORD = re.compile(r"[^\W_]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class WordHashes:
    """Text -> a 64-bit number per word. The numbers are the same in every run."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> np.ndarray:
        words = _WORD.findall(text.lower())
        known = self._known
        for word in words:
            if word not in known:
                known[word] = _fnv(word.encode())
        return np.fromiter((known[word] for word in words), dtype=np.uint64, count=len(words))


def _fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 29


def grams(words: np.ndarray, n: int) -> np.ndarray:
    """Hashes of all n-grams, uint64 [len - n + 1]: sum_i mix(word_i) m^(n-1-i) modulo 2^64."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    mixed = words ^ (words >> np.uint64(31))
    total = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = mixed * _MULTIPLIER
        for offset in range(n):
            total = total * _MULTIPLIER + mixed[offset : offset + count]
    return total


@dataclass
class Overlap:
    """What was found. shares: question id -> share of its n-grams that stand in the training text (0 to 1).
    too_short: ids of questions with fewer than SHORTEST words. words: of training text read."""

    shares: dict[str, float]
    too_short: list[str]
    words: int = 0
    documents: int = 0
    files: dict[str, int] = field(default_factory=dict)

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
    hashes = WordHashes()
    own: dict[str, np.ndarray] = {}
    lengths: dict[str, int] = {}
    too_short = []
    for question in questions:
        words = hashes(" ".join([_asked(question), *question.choices]))
        if len(words) < SHORTEST:
            too_short.append(question.id)
            continue
        lengths[question.id] = min(n, len(words))
        own[question.id] = np.unique(grams(words, lengths[question.id]))
    wanted = {
        k: np.unique(np.concatenate([own[i] for i in own if lengths[i] == k])) for k in set(lengths.values())
    }
    seen = {k: np.zeros(len(values), dtype=bool) for k, values in wanted.items()}
    result = Overlap({}, too_short)
    for name, text in documents:
        words = hashes(text)
        result.words += len(words)
        result.documents += 1
        for k, values in wanted.items():
            places = _matches(grams(words, k), values)
            if len(places):
                seen[k][places] = True
                result.files[name] = result.files.get(name, 0) + len(places)
    for identity, values in own.items():
        k = lengths[identity]
        found = seen[k][np.searchsorted(wanted[k], values)]
        result.shares[identity] = float(found.mean())
    return result


def _asked(question: Question) -> str:
    """The question's own text: where the prompt carries shots, only what comes after them."""
    row = question.meta.get("row")
    if isinstance(row, dict) and "question" in row:
        return str(row["question"])
    text = prompt_text(question.prompt)
    head = question.meta.get("head")
    return text[head:] if isinstance(head, int) else text


def _matches(found: np.ndarray, sorted_values: np.ndarray) -> np.ndarray:
    """Indices into sorted_values of those that occur in found."""
    if not len(found):
        return np.empty(0, dtype=np.int64)
    places = np.searchsorted(sorted_values, found)
    places[places == len(sorted_values)] = 0
    return np.unique(places[sorted_values[places] == found])


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
        yield from _file_texts(file)


def _readable(name: str) -> bool:
    bare = re.sub(r"\.(gz|zst)$", "", name.lower())
    return bare.endswith((*TEXT_ENDINGS, ".tar", ".parquet")) and not name.endswith(".index.jsonl")


def _file_texts(file: Path) -> Iterator[tuple[str, str]]:
    name = file.name.lower()
    if name.endswith(".parquet"):
        yield from ((file.name, text) for text in _parquet_texts(file))
        return
    with _opened(file) as raw:
        if re.search(r"\.tar(\.gz|\.zst)?$", name):
            with tarfile.open(fileobj=raw, mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isfile() and _readable(member.name) else None
                    if content is not None:
                        yield from ((file.name, text) for text in _texts(member.name.lower(), content))
        else:
            yield from ((file.name, text) for text in _texts(name, raw))


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
    bare = re.sub(r"\.(gz|zst)$", "", name)
    if bare.endswith(".jsonl"):
        for line in io.TextIOWrapper(raw, encoding="utf-8", errors="replace"):
            if line.strip():
                yield from _strings(line, name)
    else:
        text = raw.read().decode("utf-8", "replace")
        yield from _strings(text, name) if bare.endswith(".json") else [text]


def _strings(text: str, name: str) -> list[str]:
    """All strings of a JSON value as one text, in order."""
    try:
        value = json.loads(text)
    except ValueError:
        raise EvalError(f"{name}: not valid JSON") from None
    found: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict | list):
            for inner in part.values() if isinstance(part, dict) else part:
                walk(inner)

    walk(value)
    return ["\n".join(found)]


def _parquet_texts(file: Path) -> Iterator[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise EvalError(f"{file}: parquet needs pyarrow; pip install 'earlyfusion[eval]'") from None
    opened = parquet.ParquetFile(str(file))
    columns = [
        f.name
        for f in opened.schema_arrow
        if arrow.types.is_string(f.type) or arrow.types.is_large_string(f.type)
    ]
    for batch in opened.iter_batches(columns=columns):
        for row in batch.to_pylist():
            yield "\n".join(value for value in row.values() if value)


def report(tasks: Sequence[Task], path: Path, n: int, limit: int | None, seed: int, out: Path | None) -> int:
    """The verb's --contamination: one line per task; details in OUT/<label>/contamination.json.

    Where OUT/<label>/records.jsonl stands (an evaluation has run), the score on the untouched questions is
    told too.
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
            "files": dict(sorted(overlap.files.items(), key=lambda item: -item[1])[:50]),
            "shares": {identity: round(overlap.shares[identity], 4) for identity in hits},
        }
        if out is not None:
            result |= _clean_scores(out / label_of(task) / "records.jsonl", set(hits))
            write_json(out / label_of(task) / "contamination.json", result)
        print(
            f"{result['task']}: {len(hits)} of {len(questions)} questions share a {n}-gram with {path} "
            f"({100 * result['hit_share']:.2f} %), {result['mostly_hit']} of them more than half of theirs; "
            f"{overlap.words:,} words read, {len(overlap.too_short)} questions too short to judge"
        )
        if "clean_score" in result:
            print(f"  score {result['score']:.4f} on all, {result['clean_score']:.4f} on the untouched ones")
    if out is not None:
        print(f"details: {out}", file=sys.stderr)
    return 0


def _clean_scores(path: Path, hits: set[str]) -> dict[str, float]:
    records = list(read_records(path).values())
    clean = [float(r["score"]) for r in records if r["id"] not in hits]
    if not records or not clean:
        return {}
    return {"score": mean([float(r["score"]) for r in records]), "clean_score": mean(clean)}
