"""Bits per byte: how many bits a model needs for each UTF-8 byte of held-out text, beside general
compressors.

    bits per byte = sum over tokens of -log2 p(token | context) / number of UTF-8 bytes of the documents

Every token of a document is paid for once; a document longer than the model's window starts again from the
model's beginning token there, so no context crosses windows or documents. The number is comparable between
tokenizers.

    --data a file of text, or anything that `earlyfusion prepare` reads (.jsonl, a folder of texts, shards,
    ...); without --data the held-out topics of the Python manual that the recipes keep out of training. A
    sample with a picture or video is refused: the task `heldout` measures it.

Compressors: gzip -9 and xz (preset 9 extreme) on all documents in one stream, each closed by one zero byte,
and gzip -9 on each document by itself (the fair rival of a model without context across documents).
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.prepare.inputs import InputOptions
from earlyfusion.data.sample import Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.eval.benchmarks.base import BaseTask, rows_hash, spread, summarize
from earlyfusion.eval.benchmarks.heldout import All
from earlyfusion.eval.protocol import EvalError, Question, Record, RollingRequest, TaskOptions
from earlyfusion.eval.registry import benchmark

Document = tuple[str, str]
"""(id, text)"""
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".tar")
"""Endings of files that hold samples; any other file is one document."""


def compressed_bits_per_byte(documents: Sequence[str]) -> dict[str, float]:
    """gzip_, xz_ and gzip_per_document_bits_per_byte of the documents. Raises EvalError when they hold no
    byte."""
    encoded = [document.encode("utf-8") for document in documents]
    total = sum(map(len, encoded))
    if total == 0:
        raise EvalError("bits_per_byte: the documents hold no text; give at least one that is not empty")

    stream = b"".join(document + b"\0" for document in encoded)
    xz = len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME))
    alone = sum(len(gzip.compress(document, 9, mtime=0)) for document in encoded)
    return {
        "gzip_bits_per_byte": 8 * len(gzip.compress(stream, 9, mtime=0)) / total,
        "xz_bits_per_byte": 8 * xz / total,
        "gzip_per_document_bits_per_byte": 8 * alone / total,
    }


@benchmark("bits_per_byte", "bits per byte of a text file, folder or jsonl")
class BitsPerByte(BaseTask):
    """See the file's head; score is the negative of bits per byte (higher is better).

    documents: (id, text) pairs in place of --data, as the training loop gives its own held-out texts.
    """

    name = "bits_per_byte"
    kind = "rolling"
    version = "2"  # 1 gave gzip of every document alone as gzip_bits_per_byte

    def __init__(self, options: TaskOptions, documents: Sequence[Document] | None = None) -> None:
        super().__init__(options)
        self._documents = None if documents is None else list(documents)

    def documents(self) -> list[Document]:
        """(id, text) of every document that is not empty."""
        if self._documents is None:
            found = self._read()
            self._documents = [(identity, text) for identity, text in found if text]
        if not self._documents:
            raise EvalError(f"{self.name}: --data {self.options.data} holds no text")
        return self._documents

    def _read(self) -> list[Document]:
        if self.options.data is None:
            config = DataConfig(sources=[SourceConfig(name="pydoc", kind="pydoc")])
            source = build_source(config.sources[0], seed=config.seed, val_fraction=config.val_fraction)
            return [(f"pydoc/{sample.key}", sample.text) for sample in source.heldout_samples()]
        path = self.data_path()
        if path.is_file() and not path.name.endswith(ROWS):
            return [(path.name, _plain(path))]

        # Whatever `prepare` reads, as long as every sample is text alone.
        samples = All(str(path), "auto", InputOptions())
        found = []
        for number in range(len(samples)):
            key = samples.key(number)
            try:
                sample = samples.read(number)
            except DataError as error:  # a number that leaves documents out would be another measure
                raise EvalError(f"{self.name}: {path.name}, sample {key}: {error}") from None
            if not all(isinstance(segment, Text) for segment in sample.segments):
                raise EvalError(
                    f"{self.name}: {path}: sample {key} holds a picture, video or regions, and this task"
                    " measures text alone; --tasks heldout measures both"
                )
            found.append((key, sample.text))
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
        """Bits of this document."""
        bits, size = -outputs[0].sum / math.log(2), len(question.meta["text"].encode("utf-8"))
        return {
            "extracted": round(bits / size, 6),
            "score": -bits / size,
            "bits": bits,
            "bytes": size,
            "predicted": outputs[0].tokens,
        }

    def aggregate(self, records: Sequence[Record]) -> dict[str, Any]:
        """bits_per_byte over all bytes together (score is its negative), bits_per_token, the compressors."""
        total = sum(r["bytes"] for r in records)
        bits = math.fsum(r["bits"] for r in records)
        predicted = sum(r["predicted"] for r in records)
        texts = dict(self.documents())
        return {
            **summarize(records),
            "score": -bits / total,
            "bits_per_byte": bits / total,
            "bits_per_token": bits / max(predicted, 1),
            "documents": len(records),
            "bytes": total,
            **compressed_bits_per_byte([texts[str(r["id"])] for r in records]),
        }


def _plain(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise EvalError(f"{file}: not UTF-8 text") from None
