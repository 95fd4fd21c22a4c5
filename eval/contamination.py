"""Contamination guard: which benchmark questions have word n-grams in common with the training text.

    earlyfusion eval --contamination SHARDS --tasks mmlu_pro --data DIR --out OUT

Text is lower-cased and split into runs of letters and digits; an n-gram is NGRAM words in a row (as in
GPT-3's report, appendix C). A shorter question is compared as one gram of its own length, but at least
SHORTEST words, below which a match says nothing. What is looked for is the question and its options, not the
shots before it.

Training text: .txt, .md, .html, .py, .jsonl and .json (all strings in them), .parquet, also .gz and .zst, tar
shards of such members, and folders of them. Reports ids and shares, never text.
"""

import gzip
import json
import re
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.row_files import read_rows
from earlyfusion.eval.benchmarks.base import BaseTask, mean
from earlyfusion.eval.harness import RECORDS, read_records
from earlyfusion.eval.protocol import EvalError, Question, prompt_text
from earlyfusion.kernels.files import Record, write_json

NGRAM, SHORTEST = 13, 8
_WORD = re.compile(r"[^\W_]+")
_READABLE = re.compile(r"\.(txt|md|html|py|jsonl|json|tar|parquet)(\.gz|\.zst)?$")


def find_overlap(
    questions: Sequence[Question], documents: Iterable[tuple[str, str]]
) -> tuple[dict[str, float], Record]:
    """Compare questions with training documents (file name, text), which are read once. Returns, of every
    question that is long enough, the share of its n-grams that stand in the training text (0 to 1), and how
    much was looked at: too_short (questions with fewer than SHORTEST words), words_read, and how many n-grams
    were found in each of the files that hold most.
    """
    # The grams of every question, and all of one length together.
    own: dict[str, set[str]] = {}
    sought: dict[int, set[str]] = defaultdict(set)
    for question in questions:
        # Worked examples are shared by all questions and would all be found together.
        row = question.meta.get("row")
        text = row["question"] if row else prompt_text(question.prompt)
        words = _words(" ".join([text, *question.choices]))
        if len(words) < SHORTEST:
            continue
        # A question shorter than that would never be found with grams of full length.
        length = min(NGRAM, len(words))
        own[question.id] = _grams(words, length)
        sought[length] |= own[question.id]

    # One pass over the training text, whatever the number of questions.
    found: set[str] = set()
    files, read = Counter[str](), 0
    for name, text in documents:
        words = _words(text)
        read += len(words)
        # Most questions have the full length, so this is one pass and a few short ones.
        for length, grams in sought.items():
            here = _grams(words, length) & grams
            found |= here
            files[name] += len(here)
    shares = {key: len(grams & found) / len(grams) for key, grams in own.items()}
    looked = {
        "too_short": len(questions) - len(own),
        "words_read": read,
        "files": dict(files.most_common(50)),
    }
    return shares, looked


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> set[str]:
    return {" ".join(words[start : start + n]) for start in range(len(words) - n + 1)}


# training text


def training_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of everything readable below `path`. Raises EvalError when there is nothing."""
    # An index lists the shard's members and would find every question's words again.
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in files if _READABLE.search(file.name) and not file.name.endswith(".index.jsonl")]
    if not files:
        raise EvalError(f"--contamination {path}: no such path, or no text, json, parquet or tar file in it")
    for file in files:
        if file.suffix == ".parquet":
            for row in read_rows(file):
                yield file.name, "\n".join(_strings(row))
            continue
        opened: Any = open
        if file.suffix == ".gz":
            opened = gzip.open
        if file.suffix == ".zst":
            try:
                import zstandard
            except ModuleNotFoundError:
                raise EvalError(f"{file}: needs zstandard; pip install 'earlyfusion[shards]'") from None
            opened = zstandard.open
        # The name inside decides how it is read, whatever packs it.
        with opened(file, "rb") as raw:
            for text in _texts(file.name.removesuffix(".gz").removesuffix(".zst"), raw):
                yield file.name, text


def _texts(name: str, raw: Any) -> Iterator[str]:
    """The text of an open file; of JSON all strings, a line (or the file) at a time."""
    if name.endswith(".tar"):
        # A stream: shards are read once, from front to back.
        with tarfile.open(fileobj=raw, mode="r|") as tar:
            for member in tar:
                if member.isfile() and _READABLE.search(member.name):
                    yield from _texts(member.name, tar.extractfile(member))
        return
    for part in raw if name.endswith(".jsonl") else [raw.read()]:
        text = part.decode("utf-8", "replace")
        try:
            if name.endswith((".jsonl", ".json")) and text.strip():
                text = "\n".join(_strings(json.loads(text)))
        except ValueError:
            raise EvalError(f"{name}: not valid JSON") from None
        yield text


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


# the verb


def report(tasks: Sequence[BaseTask], path: Path, limit: int | None, out: Path | None) -> None:
    """The verb's --contamination: one line per task; details in OUT/<label>/contamination.json.

    Where OUT/<label>/records.jsonl stands (an evaluation has run), the score on the untouched questions is
    shown too.
    """
    for task in tasks:
        # The very questions that an evaluation with this limit asks.
        questions = list(task.questions(limit))
        shares, looked = find_overlap(questions, training_texts(path))
        hit = {key: round(share, 4) for key, share in shares.items() if share > 0}
        result: Record = {
            "task": task.label,
            "data_hash": task.data_hash(),
            "training": str(path),
            "ngram": NGRAM,
        }
        result |= {"questions": len(questions), "hit": len(hit), "shares": hit, **looked}
        result["mostly_hit"] = sum(share > 0.5 for share in hit.values())
        print(
            f"{task.label}: {result['hit']} of {len(questions)} questions share a {NGRAM}-gram with {path}, "
            f"{result['mostly_hit']} of them more than half of theirs; {result['words_read']:,} words read, "
            f"{result['too_short']} questions too short to judge"
        )
        if out is None:
            continue

        # What an evaluation in the same folder scored without the questions that were seen.
        records = read_records(out / task.label / RECORDS).values()
        clean = [record["score"] for record in records if record["id"] not in hit]
        if clean:
            result["score"] = mean([record["score"] for record in records])
            result["clean_score"] = mean(clean)
            print(f"  score {result['score']:.4f} on all, {result['clean_score']:.4f} on the untouched ones")
        details = write_json(out / task.label / "contamination.json", result)
        print(f"details: {details}", file=sys.stderr)
