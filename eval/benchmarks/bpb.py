"""Bits per byte: how many bits the model needs for each UTF-8 byte of held-out text, beside general
compressors.

    bits per byte = sum over predicted tokens of -log2 p(token | context) / number of UTF-8 bytes of the
    documents

A document is tokenised once and cut into pieces of at most `max_length` tokens; every piece starts again from
[BOS], so no context crosses pieces or documents. Every token of the text is paid for, and so is one [EOS] at
the end of each document (a reader must learn where it ends); [EOS] adds bits but no bytes. The number is
therefore an upper bound and comparable between tokenizers.

Compressors: gzip -9 and xz (preset 9 extreme) on all documents in one stream, each closed by one zero byte
(their [EOS]), and gzip -9 on each document by itself (the fair rival of a model without context across
documents).
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating


@dataclass(frozen=True)
class BpbResult:
    """Bits per byte of the model and of the compressors on the same documents."""

    bits_per_byte: float
    gzip_bits_per_byte: float
    xz_bits_per_byte: float
    gzip_per_document_bits_per_byte: float
    documents: int
    bytes: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For `eval.results.save_result` under the name "bpb"."""
        return asdict(self)


def compressed_bits_per_byte(documents: Sequence[str]) -> dict[str, float]:
    """gzip_, xz_ and gzip_per_document_bits_per_byte of the documents. Raises ValueError when they hold no
    byte."""
    encoded = [document.encode("utf-8") for document in documents]
    total = sum(map(len, encoded))
    if total == 0:
        raise ValueError("the held-out documents hold no text; pass at least one that is not empty")
    stream = b"".join(document + b"\0" for document in encoded)
    xz = len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME))
    alone = sum(len(gzip.compress(document, 9, mtime=0)) for document in encoded)
    return {
        "gzip_bits_per_byte": 8 * len(gzip.compress(stream, 9, mtime=0)) / total,
        "xz_bits_per_byte": 8 * xz / total,
        "gzip_per_document_bits_per_byte": 8 * alone / total,
    }


def text_pieces(ids: Sequence[int], bos: int, eos: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of every piece of a document: the targets of all pieces together are ids + [eos],
    once each."""
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: a piece needs at least one token")
    targets = [*ids, eos]
    cuts = [targets[start : start + max_length] for start in range(0, len(targets), max_length)]
    return [([bos, *cut[:-1]], cut) for cut in cuts]


def bits_per_byte(
    model: NativeFusion,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    max_length: int = 512,
    tokens_per_batch: int = 8192,
) -> BpbResult:
    """Measure `documents` (texts held out of training). max_length: tokens of context a piece may have, [BOS]
    included.

    Raises ValueError when the tokenizer does not give a document back (lost bytes would not be paid for).
    """
    compressors = compressed_bits_per_byte(documents)
    config = model.config.text
    pieces: list[tuple[list[int], list[int]]] = []
    for number, document in enumerate(documents):
        ids = tokenizer.encode(document)
        if tokenizer.decode(ids) != document:
            raise ValueError(
                f"the tokenizer does not give document {number} ({document[:40]!r}...) back; bits per byte"
                " needs a lossless tokenizer such as a byte-level BPE"
            )
        pieces += text_pieces(ids, config.bos_token_id, config.eos_token_id, max_length)
    nats = _nats(model, pieces, tokens_per_batch)
    total = sum(len(document.encode("utf-8")) for document in documents)
    return BpbResult(
        bits_per_byte=nats / math.log(2) / total,
        documents=len(documents),
        bytes=total,
        tokens=sum(len(targets) for _, targets in pieces),
        **compressors,
    )


def _nats(model: NativeFusion, pieces: list[tuple[list[int], list[int]]], tokens_per_batch: int) -> float:
    """Sum of -ln p over all targets; pieces go through packed, longest first so that rows fill well."""
    total, size = 0.0, 0
    row: list[tuple[list[int], list[int]]] = []
    with evaluating(model):
        for piece in sorted(pieces, key=lambda piece: -len(piece[0])):
            if row and size + len(piece[0]) > tokens_per_batch:
                total += _row_nats(model, row)
                row, size = [], 0
            row.append(piece)
            size += len(piece[0])
        return total + (_row_nats(model, row) if row else 0.0)


def _row_nats(model: NativeFusion, pieces: list[tuple[list[int], list[int]]]) -> float:
    weight = model.decoder.head_weight()
    device = weight.device
    ids = torch.tensor([i for inputs, _ in pieces for i in inputs], device=device)
    labels = torch.tensor([i for _, targets in pieces for i in targets], device=device)
    segments = Segments.from_lengths([len(inputs) for inputs, _ in pieces])
    h_TD = model.decoder(model.decoder.embed_tokens(ids), segments)
    _, nll_T = resolve("linear_cross_entropy", device)(
        h_TD, weight, labels, torch.ones_like(labels, dtype=torch.float32)
    )
    return float(nll_T.sum(dtype=torch.float64))
