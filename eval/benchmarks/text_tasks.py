"""Text tasks that need only probabilities, where small models move first: bits per byte, BLiMP, PIQA.

    bits_per_byte   --data FILE.txt | FILE.jsonl (field text) | FOLDER of such | SHARDS of texts; without
                    --data the held-out topics of the Python manual that the recipes keep out of training.
                    Data with a picture or video is refused: the task `heldout` measures it
    blimp           --data FILE.jsonl | FOLDER; fields sentence_good, sentence_bad, UID (Warstadt et al. 2020)
    piqa            --data FILE.jsonl | FOLDER with valid.jsonl; fields goal, sol1, sol2 and label, or the
                    labels one a line in <name>-labels.lst beside it (Bisk et al. 2020)

BLiMP and PIQA ask as lm-evaluation-harness' tasks of the same names do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.formats.build import PICTURES, VIDEOS, ending
from earlyfusion.data.prepare.rows import MEDIA_FIELDS
from earlyfusion.data.row_files import read_rows
from earlyfusion.data.sample import Text
from earlyfusion.data.shards.fetch import TAR_ENDS
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.eval.benchmarks.base import (
    BaseTask,
    choice_requests,
    data_files,
    need,
    rows_hash,
    score_choices,
    spread,
    summarize,
)
from earlyfusion.eval.benchmarks.bpb import compressed_bits_per_byte
from earlyfusion.eval.protocol import EvalError, Question, Record, RollingRequest, ScoreRequest, TaskOptions


class BitsPerByte(BaseTask):
    """Sum of -log2 p over the tokens of all documents / number of UTF-8 bytes; score is its negative (higher
    is better).

    A document longer than the model's window is cut; every window starts from the model's beginning token.
    """

    name = "bits_per_byte"
    kind = "rolling"

    def documents(self) -> list[tuple[str, str]]:
        """(id, text) of every document that is not empty."""
        if self.options.data is None:
            config = DataConfig(sources=[SourceConfig(name="pydoc", kind="pydoc")])
            source = build_source(config.sources[0], seed=config.seed, val_fraction=config.val_fraction)
            found = [(f"pydoc/{sample.key}", sample.text) for sample in source.heldout_samples(None)]
        else:
            path = self.data_path()
            if _is_shards(path):
                found = _shard_texts(path)
            else:
                _no_pictures(path)
                found = [
                    pair for file in data_files(path, "*.jsonl", "*.txt", "**/*.txt") for pair in _texts(file)
                ]
        found = [(identity, text) for identity, text in found if text]
        if not found:
            raise EvalError(f"{self.name}: --data {self.options.data} holds no text")
        return found

    def data_hash(self) -> str:
        """sha256 over ids and texts."""
        return rows_hash({"id": identity, "text": text} for identity, text in self.documents())

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """One question per document."""
        documents = self.documents()
        for identity, text in spread(documents, [""] * len(documents), limit):
            yield Question(identity, text, None, meta={"text": text})

    def requests(self, question: Question, repeat: int) -> Sequence[RollingRequest]:
        """The whole document."""
        return [RollingRequest(question.meta["text"])]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Bits of this document, and what the compressors need for it alone."""
        text = question.meta["text"]
        bits, size = -outputs[0].sum / math.log(2), len(text.encode("utf-8"))
        others = compressed_bits_per_byte([text])
        return {
            "extracted": round(bits / size, 6),
            "score": -bits / size,
            "bits": bits,
            "bytes": size,
            "predicted": outputs[0].tokens,
            "gzip": others["gzip_per_document_bits_per_byte"],
        }

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """bits_per_byte over all bytes together (score is its negative), bits_per_token, gzip beside them."""
        total = sum(r["bytes"] for r in records)
        bits = math.fsum(r["bits"] for r in records)
        result = summarize(records) | {"score": -bits / total, "bits_per_byte": bits / total, "bytes": total}
        result["bits_per_token"] = bits / max(sum(r["predicted"] for r in records), 1)
        result["gzip_bits_per_byte"] = math.fsum(r["gzip"] * r["bytes"] for r in records) / total
        return result


def _texts(file: Path) -> list[tuple[str, str]]:
    if file.suffix == ".jsonl":
        rows = list(enumerate(read_rows(file), 1))
        for number, row in rows:
            for key in MEDIA_FIELDS & row.keys():
                named = [str(value) for value in (row[key] if isinstance(row[key], list) else [row[key]])]
                if any(ending(name) in (*PICTURES, *VIDEOS) for name in named):
                    raise _pictured(f"{file}:{number}: its field {key!r} names a picture or video")
        return [(f"{file.name}:{number}", str(need(row, "text", f"{file}:{number}"))) for number, row in rows]
    try:
        return [(file.name, file.read_text(encoding="utf-8"))]
    except UnicodeDecodeError:
        raise EvalError(f"{file}: not UTF-8 text") from None


def _pictured(what: str) -> EvalError:
    return EvalError(
        f"bits_per_byte: {what}, and this task measures text alone; --tasks heldout measures both"
    )


def _is_shards(path: Path) -> bool:
    files = [path] if path.is_file() else path.iterdir()
    return any(file.name.endswith(TAR_ENDS) for file in files)


def _shard_texts(path: Path) -> list[tuple[str, str]]:
    """Every sample of shards, which must be text alone."""
    source = build_source(SourceConfig(name="text", kind="webdataset", path=str(path)), val_fraction=0.0)
    found = []
    for index in range(len(source)):
        sample = source.get(index, 0)
        if not all(isinstance(segment, Text) for segment in sample.segments):
            raise _pictured(f"{path}: sample {sample.key} holds a picture, video or regions")
        found.append((sample.key, sample.text))
    return found


def _no_pictures(path: Path) -> None:
    """Raises EvalError for a folder with pictures or videos among its files."""
    if not path.is_dir():
        return
    media = [file for file in path.rglob("*") if ending(file.name) in (*PICTURES, *VIDEOS)]
    if media:
        raise _pictured(
            f"{path} holds {len(media)} pictures or videos ({min(media).relative_to(path)} is one)"
        )


class Blimp(BaseTask):
    """The grammatical sentence of a minimal pair should be the likelier one."""

    name = "blimp"
    kind = "score"
    version = "1.0"

    def _rows(self) -> list[dict[str, Any]]:
        files = data_files(self.data_path(), "*.jsonl", "data/*.jsonl")
        return [
            {
                "id": f"{row.get('UID') or file.stem}/{row.get('pairID', row.get('pair_id', number))}",
                "category": str(row.get("UID") or file.stem),
                "good": str(need(row, "sentence_good", f"{file}:{number}")),
                "bad": str(need(row, "sentence_bad", f"{file}:{number}")),
            }
            for file in files
            for number, row in enumerate(read_rows(file), 1)
        ]

    def data_hash(self) -> str:
        """sha256 over the pairs."""
        return rows_hash(self._rows())

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """Pairs, the good sentence first."""
        rows = self._rows()
        for row in spread(rows, [row["category"] for row in rows], limit):
            yield Question(row["id"], "", 0, row["category"], (row["good"], row["bad"]))

    def requests(self, question: Question, repeat: int) -> Sequence[ScoreRequest]:
        """ln p of both sentences."""
        return choice_requests("", question.choices)

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """1 if the good sentence has the larger ln p (sums, as published)."""
        record = score_choices(question, outputs, 0, letters=True)
        del record["target"]  # always the first: a majority baseline would be a fiction
        return record


class Piqa(BaseTask):
    """Which of two solutions; score is per character (acc_norm), score_sum the plain comparison (acc)."""

    name = "piqa"
    kind = "score"
    version = "1.0"

    def _rows(self) -> list[dict[str, Any]]:
        (file, *_) = data_files(self.data_path(), "valid.jsonl", "validation*", "*.jsonl")
        rows = read_rows(file)
        beside = file.with_name(f"{file.stem}-labels.lst")
        labels = beside.read_text(encoding="utf-8").split() if beside.is_file() else None
        if labels is not None and len(labels) != len(rows):
            raise EvalError(f"{beside}: {len(labels)} labels for {len(rows)} questions")
        return [
            {
                "id": f"{number:05d}",
                "goal": str(need(row, "goal", f"{file}:{number + 1}")),
                "solutions": [str(need(row, key, f"{file}:{number + 1}")) for key in ("sol1", "sol2")],
                "label": int(labels[number] if labels else need(row, "label", f"{file}:{number + 1}")),
            }
            for number, row in enumerate(rows)
        ]

    def data_hash(self) -> str:
        """sha256 over questions and labels."""
        return rows_hash(self._rows())

    def questions(self, limit: int | None, shots: int | None, seed: int) -> Iterable[Question]:
        """In file order."""
        rows = self._rows()
        for row in spread(rows, [""] * len(rows), limit):
            prompt = f"Question: {row['goal']}\nAnswer:"
            yield Question(row["id"], prompt, row["label"], choices=tuple(row["solutions"]))

    def requests(self, question: Question, repeat: int) -> Sequence[ScoreRequest]:
        """ln p of both solutions."""
        return choice_requests(question.prompt, [f" {choice}" for choice in question.choices])

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Record of a two-way choice."""
        return score_choices(question, outputs, question.target, letters=False)

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """score (acc_norm) and score_sum (acc)."""
        return summarize(records, ("score", "score_sum"))


def bits_per_byte(options: TaskOptions) -> BitsPerByte:
    """Factory for the registry."""
    return BitsPerByte(options)


def blimp(options: TaskOptions) -> Blimp:
    """Factory for the registry."""
    return Blimp(options)


def piqa(options: TaskOptions) -> Piqa:
    """Factory for the registry."""
    return Piqa(options)
