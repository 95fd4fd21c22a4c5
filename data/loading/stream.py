"""One source as one lane reads it: in the epoch's order, long documents piece by piece, bad samples raised or
left out."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, one_sample
from earlyfusion.data.loading.encode import Encoded, encode, next_cut, refuse_longer
from earlyfusion.data.loading.mixture import Schedule
from earlyfusion.data.loading.order import Permutation
from earlyfusion.data.sources.base import Source, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.balance import VisionCost
from earlyfusion.vision.config import VisionConfig

Reference: TypeAlias = tuple[str, int, int, int, int]
"""(source, epoch, index, first token, end) of a piece."""
_MARGIN = 1.1
"""Documents passed over for a skip, relative to the mean."""
_MOST_IN_A_ROW = 100_000
"""Bad samples after which a source is given up, however many more its index claims to hold."""


@dataclass(frozen=True)
class Geometry:
    """Shape of the micro-batches and of the job."""

    length: int
    """Longest document in tokens."""
    tokens: int
    """Positions of one micro-batch: rows x length, laid end to end."""
    max_patches: int
    """Most patches of one micro-batch."""
    max_vision_flops: float | None = None
    """Most forward FLOPs of the vision tower in one micro-batch; None for no limit."""
    lanes: int = 1
    """Micro-batches of one optimizer step, over all ranks."""
    stage: int = 0
    """Number of the training stage; each stage has an order of its own."""

    @property
    def max_cost(self) -> float:
        """`max_vision_flops`, infinity for no limit."""
        return math.inf if self.max_vision_flops is None else self.max_vision_flops


@dataclass(frozen=True)
class Spec:
    """Everything that makes the data of a stage; crosses process boundaries, and builds the same lanes
    there."""

    data: DataConfig
    tokenizer: Tokenizer
    vision: VisionConfig
    geometry: Geometry
    weights: Mapping[str, float]
    """Source -> mixture weight."""
    schedule: Schedule | None = None
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Source -> factor of the loss weights of its documents; 1 where not named."""

    @cached_property
    def cost(self) -> VisionCost:
        """What a picture costs the tower."""
        return VisionCost.from_config(self.vision)

    def build_sources(self) -> dict[str, Source]:
        """Name -> source, in the order of the config."""
        sources = {}
        for config in self.data.sources:
            source = build_source(config, seed=self.data.seed, val_fraction=self.data.val_fraction)
            sources[config.name] = source
        return sources

    def identity(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        """What a saved cursor belongs to; a resume with another identity is refused, naming the
        differences."""
        vision, decode = self.vision, self.data.decode
        facts: dict[str, Any] = {
            "seed": self.data.seed,
            "lookahead": self.data.lookahead,
            **asdict(self.geometry),
            "order of the sources": list(sources),
            "tokenizer": self.tokenizer.hash,
            "patches": [vision.patch_size, *vision.merge_kernel_size, vision.in_patch_limit],
            "patches a side": vision.max_patches_per_side,
            "frames": [vision.pos_emb_time, vision.in_patch_limit_each_frame],
            "decode": [decode.fast, decode.video_backend],
        }
        for name, source in sources.items():
            facts[f"options or files of source {name!r}"] = source.fingerprint()
            facts[f"max_epochs of {name!r}"] = source.config.max_epochs
        return facts


class Watch(ctypes.Structure):
    """What a data worker is reading right now, legible to another process, also after the worker has died.

    A line in fixed memory: ordinary, or shared (`multiprocessing.RawValue(Watch)`).
    """

    _fields_ = (("count", ctypes.c_uint64), ("line", ctypes.c_char * 512))

    def note(self, text: str) -> None:
        """Replace the line (cut at 512 bytes) and count the change: a worker whose count stands still is
        stuck, or has nothing to do."""
        self.line = text.encode("utf-8", "replace")[:512]
        self.count += 1

    @property
    def text(self) -> str:
        """The line; "starting" before the first note."""
        return bytes(self.line).decode("utf-8", "replace") or "starting"


@lru_cache(maxsize=64)
def _order(size: int, seed: int, stage: int, name: str, epoch: int) -> Permutation:
    return Permutation(size, seed, stage, name, epoch)


class Stream:
    """The documents of one source that one lane reads, piece by piece."""

    def __init__(self, source: Source, spec: Spec, lane: int, watch: Watch) -> None:
        self.source, self.spec, self.lane, self.watch = source, spec, lane, watch
        self.cursor = self.start = 0
        """Documents of this lane already finished; first token of the next piece inside the current one."""
        self.documents = self.tokens = 0
        """Documents read and their tokens, those left out not counted."""
        self.skipped: list[dict[str, Any]] = []
        """Samples left out and not yet taken for the log."""
        self._document: Encoded | None = None

    def _number(self) -> int:
        return self.lane + self.spec.geometry.lanes * self.cursor

    def where(self) -> tuple[int, int]:
        """(epoch, index) of the current document."""
        size = len(self.source)
        epoch, position = divmod(self._number(), size)
        order = _order(size, self.spec.data.seed, self.spec.geometry.stage, self.source.name, epoch)
        return epoch, order[position]

    @property
    def exhausted(self) -> bool:
        """Whether the source has reached its `max_epochs` for this lane."""
        limit = self.source.config.max_epochs
        return limit is not None and self._number() >= limit * len(self.source)

    def _described(self, index: int) -> str:
        return " ".join(["source", repr(self.source.name), *self.source.locate(index)])

    def encoded(self, epoch: int, index: int) -> Encoded:
        """The whole document; raises BadSample."""
        self.watch.note(f"reading {self._described(index)}, sample {index} of epoch {epoch}")
        sample = self.source.get(index, epoch)
        self.watch.note(
            f"encoding source {self.source.name!r}, sample {index} of epoch {epoch}, {sample.key}"
        )
        return encode(sample, self.spec.tokenizer, self.spec.vision, decode=self.spec.data.decode)

    def next_piece(self) -> tuple[Reference, Encoded] | None:
        """(reference, piece) and step on; None when exhausted. Bad samples raise or are skipped, as
        configured."""
        failures = 0
        while not self.exhausted:
            epoch, index = self.where()
            try:
                with one_sample(partial(self._described, index)):
                    document = self._document or self.encoded(epoch, index)
                    stop = self._cut(document)
            except BadSample as error:
                if self.spec.data.on_bad_sample == "raise":
                    raise
                failures += 1
                self._skip(error, epoch, index, failures)
                continue

            # The mean length of documents tells how many to pass over for a skip.
            start = self.start
            if start == 0:
                self.documents += 1
                self.tokens += len(document)
            if stop == len(document):
                self._move(1)
            else:
                self.start, self._document = stop, document
            return (self.source.name, epoch, index, start, stop), document.piece(start, stop)
        return None

    def _cut(self, document: Encoded) -> int:
        geometry = self.spec.geometry
        if self.spec.data.overlong == "skip":
            refuse_longer(document, geometry.length)
        ends_line, cost = self.spec.tokenizer.ends_line, self.spec.cost
        limits = (geometry.length, geometry.max_patches)
        return next_cut(document, self.start, *limits, ends_line, cost, geometry.max_cost)

    def _move(self, documents: int) -> None:
        self.cursor, self.start, self._document = self.cursor + documents, 0, None

    def _skip(self, error: BadSample, epoch: int, index: int, failures: int) -> None:
        shard, key = self.source.locate(index)
        entry = {"source": self.source.name, "shard": shard, "key": key, "epoch": epoch, "index": index}
        self.skipped.append({**entry, "reason": error.reason, "message": str(error)})
        self._move(1)
        if failures > max(100, min(len(self.source), _MOST_IN_A_ROW)):
            raise DataError(
                f"source {self.source.name!r}: {failures} samples in a row cannot be used; last: {error}"
            )

    def pass_over(self, tokens: float) -> None:
        """Move on, unread, by as many documents as hold `tokens` by the mean of those read, and a tenth more,
        since lengths differ; the current one goes first."""
        if self.documents and tokens > 0:
            mean = self.tokens / self.documents
            self._move(max(1, math.ceil(_MARGIN * tokens / mean)))

    def state_dict(self) -> dict[str, int]:
        """Cursor and counters as JSON types."""
        return {name: getattr(self, name) for name in ("cursor", "start", "documents", "tokens")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken; the current document is encoded again when it is needed."""
        for name, value in state.items():
            setattr(self, name, value)
        self.skipped, self._document = [], None
