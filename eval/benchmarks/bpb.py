"""Bits per byte: how many bits a model needs for each UTF-8 byte of held-out text, beside a general
compressor.

    bits per byte = sum over tokens of -log2 p(token | context) / number of UTF-8 bytes of the documents

Every token of a document is paid for once; a document longer than the model's window starts again from the
model's beginning token there, so no context crosses windows or documents. The number is comparable between
tokenizers.

    --data a file of text, or anything that `earlyfusion prepare` reads (.jsonl, a folder of texts, shards,
    ...); without --data the held-out topics of the Python manual that the recipes keep out of training. A
    sample with a picture or video is refused: the task `heldout` measures it.

The compressor: gzip -9 on all documents in one stream, each closed by one zero byte.
"""

import gzip
import math
from collections.abc import Iterable, Sequence
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.eval.benchmarks.base import BaseTask, benchmark, rows_hash, summarize
from earlyfusion.eval.benchmarks.heldout import Samples
from earlyfusion.eval.protocol import EvalError, Question, RollingRequest, TaskOptions
from earlyfusion.kernels.files import Record

Document = tuple[str, str]
"""(id, text)"""
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".tar")
"""Endings of files that hold samples; any other file is one document."""


def gzip_bits_per_byte(documents: Sequence[str]) -> float:
    """Of the documents, of which one at least is not empty."""
    encoded = [document.encode("utf-8") for document in documents]
    stream = b"".join(document + b"\0" for document in encoded)
    # The closing zero bytes are packed with the rest but are no text.
    return 8 * len(gzip.compress(stream, 9, mtime=0)) / sum(map(len, encoded))


@benchmark("bits_per_byte", "bits per byte of a text file, folder or jsonl")
class BitsPerByte(BaseTask):
    """See the file's head; score is the negative of bits per byte (higher is better).

    documents: (id, text) pairs in place of --data, as the training loop gives its own held-out texts.
    """

    name = "bits_per_byte"
    kind = "rolling"
    version = "2"  # 1 gave gzip of every document alone as gzip_bits_per_byte

    def __init__(self, options: TaskOptions, documents: Sequence[Document] = ()) -> None:
        super().__init__(options)
        self._documents = list(documents)

    def documents(self) -> list[Document]:
        """(id, text) of every document that is not empty; read once."""
        if not self._documents:
            self._documents = [(key, text) for key, text in self._read() if text]
        if not self._documents:
            raise EvalError(f"{self.name}: --data {self.options.data} holds no text")
        return self._documents

    def _read(self) -> Iterable[Document]:
        if self.options.data is None:
            # The recipes' own split, so that what is measured was never trained on.
            config = DataConfig(sources=[SourceConfig(name="pydoc", kind="pydoc")])
            source = build_source(config.sources[0], seed=config.seed, val_fraction=config.val_fraction)
            yield from ((f"pydoc/{sample.key}", sample.text) for sample in source.heldout_samples())
            return
        path = self.data_path()
        if path.is_file() and not path.name.endswith(ROWS):
            try:
                yield path.name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise EvalError(f"{path}: not UTF-8 text") from None
            return

        # Whatever `prepare` reads, as long as every sample is text alone.
        samples = Samples(str(path))
        for number in range(samples.given.count):
            try:
                sample = samples.read(number)
            except DataError as error:  # a number that leaves documents out would be another measure
                raise EvalError(f"{self.name}: {path.name}, sample {samples.key(number)}: {error}") from None
            if not all(isinstance(segment, Text) for segment in sample.segments):
                raise EvalError(
                    f"{self.name}: {path}: sample {sample.key} holds a picture, video or regions, and this"
                    " task measures text alone; --tasks heldout measures both"
                )
            yield sample.key, sample.text

    def data_hash(self) -> str:
        """sha256 over ids and texts."""
        return rows_hash({"id": key, "text": text} for key, text in self.documents())

    def questions(self, limit: int | None = None) -> Iterable[Question]:
        """One question per document."""
        for key, text in self.documents()[:limit]:
            yield Question(key, text, None)

    def requests(self, question: Question, repeat: int) -> Sequence[RollingRequest]:
        """The whole document."""
        return [RollingRequest(f"{question.prompt}")]

    def score(self, question: Question, repeat: int, outputs: Sequence[Any]) -> Record:
        """Bits of this document."""
        (output,) = outputs
        # Nats to bits; bytes and not tokens below, so that tokenizers can be compared.
        bits = -output.sum / math.log(2)
        size = len(f"{question.prompt}".encode())
        return {"extracted": round(bits / size, 6), "score": -bits / size, "bits": bits, "bytes": size}

    def aggregate(self, records: Sequence[Record]) -> Record:
        """bits_per_byte over all bytes together (score is its negative), and the compressor's."""
        # One long document counts by its bytes, not as one of many.
        texts = dict(self.documents())
        bits, size = (sum(record[fact] for record in records) for fact in ("bits", "bytes"))
        return {
            **summarize(records),
            "score": -bits / size,
            "bits_per_byte": bits / size,
            "documents": len(records),
            "bytes": size,
            "gzip_bits_per_byte": gzip_bits_per_byte([texts[record["id"]] for record in records]),
        }
