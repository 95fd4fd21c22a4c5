"""Loss on samples that training never saw, with its image-blind control: how well a model knows data of any
kind.

    loss            mean negative log-likelihood, in nats, of the learned tokens (those whose text has a loss
                    weight above 0, and [EOS] after them)
    seen_loss       the same over the tokens of documents with a picture or video
    blind_loss      those tokens once more, every picture grey: what words and picture sizes alone give away
    text_loss       over the tokens of documents without one
    bits_per_byte   without any picture: bits of all tokens / UTF-8 bytes, over samples that are learned text
                    throughout

A sample is encoded, cut and packed as training does it. One that cannot be read is left out and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import Encoded, PackedBatch, cuts, encode, pack_all, refuse_longer
from earlyfusion.data.loading.order import Permutation
from earlyfusion.data.sample import Sample, Text, one_sample
from earlyfusion.data.sources.base import Source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import evaluating
from earlyfusion.model.fusion import NativeFusion

GREY = 128
"""Level (0 to 255) of every pixel that a blind model sees."""

Getter = Callable[[], Sample]


@dataclass(frozen=True)
class Room:
    """Limits of a packed row, as a training stage has them: positions, patches, and the longest document (in
    tokens), which longer ones are cut to ("split") or left out for ("skip")."""

    tokens: int
    max_patches: int
    length: int
    overlong: str = "split"
    decode: DecodeConfig | None = None


@dataclass
class Loss:
    """Sums over learned tokens: all, those of documents with a picture (and the same blind), those counted in
    bytes."""

    nats: float = 0.0
    tokens: int = 0
    seen_nats: float = 0.0
    blind_nats: float = 0.0
    seen_tokens: int = 0
    byte_nats: float = 0.0
    bytes: int = 0

    def add(self, other: Loss) -> None:
        """Enter the sums of another."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def numbers(self) -> dict[str, float]:
        """The means of the module's docstring that these sums have."""
        found: dict[str, float] = {}
        if self.tokens:
            found |= {"loss": self.nats / self.tokens, "tokens": self.tokens}
        if self.seen_tokens:
            found["seen_loss"] = self.seen_nats / self.seen_tokens
            found["blind_loss"] = self.blind_nats / self.seen_tokens
        if self.seen_tokens < self.tokens:
            found["text_loss"] = (self.nats - self.seen_nats) / (self.tokens - self.seen_tokens)
        # With a picture in it a sample's bytes are not all that was paid for.
        if self.bytes and not self.seen_tokens:
            found["bits_per_byte"] = self.byte_nats / math.log(2) / self.bytes
        return found


def measure(
    model: NativeFusion,
    tokenizer: Tokenizer,
    samples: Iterable[Getter],
    room: Room,
    *,
    most_tokens: int | None = None,
    blind: bool = True,
) -> list[Loss | BadSample]:
    """The sums of every sample in order, or why it is left out. A getter returns a sample or raises
    BadSample.

    most_tokens: stop before the sample (but the first) with which the documents hold more tokens than this.
    """
    results: list[Loss | BadSample] = []
    device = model.decoder.embed_tokens.weight.device
    with evaluating(model):
        for packed in heldout_batches(model, tokenizer, samples, room, results, most_tokens):
            batch = packed.to(device)
            # In double precision: sums over thousands of tokens would lose digits in single.
            nll_T = grey_T = model(batch).nll_T.double().cpu()
            # The same row with grey pictures: what words and picture sizes alone give away.
            if blind and batch.num_patches:
                grey = replace(batch, patches=torch.full_like(batch.patches, GREY))
                grey_T = model(grey).nll_T.double().cpu()
            _enter(packed, nll_T, grey_T if blind else None, results)
    return results


def _enter(
    batch: PackedBatch, nll_T: Tensor, grey_T: Tensor | None, results: Sequence[Loss | BadSample]
) -> None:
    """Add a batch's losses to the sums of its samples."""
    learned_T = (batch.labels >= 0) & (batch.loss_weights > 0)
    # A document's key is the number of its sample; a piece of a long one adds to the same sums.
    for key, (start, stop) in zip(batch.keys, pairwise(batch.segments.offsets)):
        loss = results[int(key.removeprefix(":").partition("[")[0])]
        assert isinstance(loss, Loss)
        mask = learned_T[start:stop]
        nats, tokens = float(nll_T[start:stop][mask].sum()), int(mask.sum())
        loss.nats += nats
        loss.tokens += tokens
        if loss.bytes:
            loss.byte_nats += nats
        if grey_T is not None and batch.has_image[start]:
            loss.seen_nats += nats
            loss.seen_tokens += tokens
            loss.blind_nats += float(grey_T[start:stop][mask].sum())


def heldout_batches(
    model: NativeFusion,
    tokenizer: Tokenizer,
    samples: Iterable[Getter],
    room: Room,
    results: list[Loss | BadSample],
    most_tokens: int | None = None,
) -> Iterator[PackedBatch]:
    """Samples packed in their own order, the number of each as its documents' key; enters a Loss or BadSample
    for each as it is read (see `measure`)."""

    def documents() -> Iterator[Encoded]:
        used = 0
        for number, get in enumerate(samples):
            try:
                with one_sample(f"held-out sample {number}"):
                    sample = get()
                    document = encode(sample, tokenizer, model.config.vision, decode=room.decode)
                if room.overlong == "skip":
                    refuse_longer(document, room.length)
                ranges = cuts(document, room.length, room.max_patches, tokenizer.ends_line)
            except BadSample as error:
                results.append(error)
                continue

            # The first sample is measured whatever its length: a source would have no number else.
            if most_tokens is not None and used and used + len(document) > most_tokens:
                return
            used += len(document)
            loss = Loss()
            # Bytes are counted where all of them are paid for: in text that is learned throughout.
            if all(isinstance(segment, Text) and segment.loss > 0 for segment in sample.segments):
                loss.bytes = len(sample.text.encode("utf-8", "surrogatepass"))
            results.append(loss)
            document = replace(document, source="", key=str(number))
            for start, stop in ranges:
                yield document.piece(start, stop)

    return pack_all(
        documents(),
        tokens=room.tokens,
        max_patches=room.max_patches,
        pad_id=tokenizer.pad_id,
        sources=[""],
        patch_size=model.config.vision.patch_size,
        length=room.length,
    )


def heldout_getters(source: Source, limit: int | None = None) -> Iterator[Getter]:
    """All held-out samples of a source, or `limit` of them, in a fixed order that spreads any number over
    all."""
    # A permutation by the source's name: every evaluation of a run measures the same samples.
    count = source.heldout_len()
    order = Permutation(count, "heldout", source.name) if count else ()
    for position in range(count if limit is None else min(limit, count)):
        yield partial(source.heldout, order[position])


def summary(results: Iterable[Loss | BadSample]) -> dict[str, Any] | None:
    """The numbers of all samples together with how many they are; None where no token was learned."""
    whole, samples, left_out = Loss(), 0, Counter[str]()
    for result in results:
        if isinstance(result, BadSample):
            left_out[result.reason] += 1
        else:
            whole.add(result)
            samples += 1
    if not whole.tokens:
        return None
    return {**whole.numbers(), "samples": samples, **({"left_out": dict(left_out)} if left_out else {})}
