"""Loader: the data of one rank, step by step, resumed exactly.

    loader = Loader(config, tokenizer, vision, length=1024, tokens=4096, max_patches=4096, lanes=8, rank=r, world_size=W)
    for step in range(steps):
        batches = loader.next_step()          # lanes r, r + W, ...: one PackedBatch each
        ...
        state = loader.state_dict()           # after exactly this step, however far the prefetch has run

A stage with another length, batch size or number of lanes is a new Loader with the next `stage` number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.encode import Encoded, cuts, encode
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.lane import Geometry, Lane, Spec, build_lanes, geometry_identity
from earlyfusion.data.mixture import Mixture
from earlyfusion.data.pack import PackedBatch, pack_all
from earlyfusion.data.prefetch import DirectFeed, Feed, ProcessFeed, ThreadFeed
from earlyfusion.data.sources import find_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig

_VERSION = 1


class Loader:
    """Packed micro-batches of the lanes that `rank` of `world_size` owns.

    Args:
        data, tokenizer, vision: what is read, and how it becomes tokens and patches.
        length: longest document in tokens; longer ones are split.
        tokens: positions of one micro-batch.
        max_patches: most image patches of one micro-batch.
        lanes: micro-batches of one optimizer step over all ranks; a multiple of `world_size`.
        weights: mixture weights by source, in place of those of the config.
        stage: number of the training stage; gives the stage an order of its own.

    Raises:
        DataError: missing data, lanes that the ranks cannot share evenly, unknown names in `weights`.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        *,
        length: int,
        tokens: int,
        max_patches: int,
        lanes: int = 1,
        rank: int = 0,
        world_size: int = 1,
        weights: Mapping[str, float] | None = None,
        stage: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size")
        if lanes % world_size:
            raise DataError(
                f"lanes = {lanes} cannot be shared by {world_size} processes: give a multiple of {world_size} "
                f"(nearest: {max(1, round(lanes / world_size)) * world_size})"
            )
        self.spec = Spec(data, tokenizer, vision, Geometry(length, tokens, max_patches, lanes, stage))
        self.sources = self.spec.build_sources()
        self.owned = list(range(rank, lanes, world_size))
        self._identity = geometry_identity(self.spec, self.sources)
        start = build_lanes(self.spec, self.sources, dict.fromkeys(self.owned))
        self._states: dict[int, dict[str, Any]] = {lane.index: lane.state_dict() for lane in start}
        self._feed: Feed | None = None
        if weights:
            self.set_weights(weights)

    def next_step(self) -> list[PackedBatch]:
        """The micro-batches of this rank's lanes for the next optimizer step.

        Raises BadSample (on_bad_sample = "raise") or DataExhausted at the step that meets it.
        """
        if self._feed is None:
            self._feed = self._open()
        batches, self._states = self._feed.get()
        return batches

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        while True:
            yield self.next_step()

    def _open(self) -> Feed:
        data = self.spec.data
        states: dict[int, dict[str, Any] | None] = {lane: self._states[lane] for lane in self.owned}
        if data.prefetch == "process":
            return ProcessFeed(self.spec, states, data.prefetch_steps, data.workers)
        lanes: list[Lane] = build_lanes(self.spec, self.sources, states)
        return ThreadFeed(lanes, data.prefetch_steps) if data.prefetch == "thread" else DirectFeed(lanes)

    def close(self) -> None:
        """Stop the prefetch. The loader can go on afterwards: the next step starts it again."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """New mixture weights from the next step on; sources not named get 0.

        Documents already waiting to be packed (about `lookahead` micro-batches) still come. Deterministic: steps that
        were prepared in advance are dropped and made again.
        """
        self.close()
        for state in self._states.values():
            mixture = Mixture(dict.fromkeys(self.sources, 1.0))
            mixture.set_weights(weights)
            state["mixture"] = mixture.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last `next_step`, as JSON types; a few kB for each lane."""
        return {
            "version": _VERSION,
            "identity": self._identity,
            "lanes": {str(lane): deepcopy(state) for lane, state in sorted(self._states.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit for bit.

        On another number of ranks, give the merged states of all (`merge_states`). Raises DataError, naming each
        difference, when sources, seed, lanes, tokenizer or shapes are not those of the state.
        """
        if state.get("version") != _VERSION:
            raise DataError(f"data state of version {state.get('version')!r}, expected {_VERSION}; start a new run")
        changes = _differences(state["identity"], self._identity)
        if changes:
            raise DataError(
                f"the data is not that of the checkpoint: {'; '.join(changes)}. Undo the change, or start a new run"
            )
        missing = [lane for lane in self.owned if str(lane) not in state["lanes"]]
        if missing:
            raise DataError(
                f"data state holds lanes {', '.join(state['lanes'])} but this rank also owns {missing}; "
                "merge the states of all ranks first (merge_states)"
            )
        self.close()
        self._states = {lane: deepcopy(state["lanes"][str(lane)]) for lane in self.owned}

    def stats(self) -> dict[str, Any]:
        """What was delivered so far by this rank: tokens and shares by source, fill rate, skipped samples."""
        delivered = {name: sum(s["delivered"][name] for s in self._states.values()) for name in self.sources}
        streams = [(name, s["streams"][name]) for s in self._states.values() for name in self.sources]
        positions = sum(state["positions"] for state in self._states.values())
        total = sum(delivered.values())
        return {
            "tokens": delivered,
            "shares": {name: count / max(1, total) for name, count in delivered.items()},
            "fill": total / max(1, positions),
            "skipped": {name: sum(s["num_skipped"] for n, s in streams if n == name) for name in self.sources},
            "skip_reasons": [reason for _, stream in streams for reason in stream["skipped"]],
        }

    def heldout_batches(self, source: str, n: int | None = None) -> Iterator[PackedBatch]:
        """The first `n` micro-batches (None: all) of what `source` holds out: every document once, always the same.

        Raises DataError for an unknown source or one that holds nothing out.
        """
        chosen = find_source(self.sources, source)
        if chosen.heldout_len() == 0:
            raise DataError(f"source {source!r} holds no sample out; raise data.val_fraction or add data")
        geometry = self.spec.geometry
        packed = pack_all(
            self._heldout_pieces(source),
            tokens=geometry.tokens,
            max_patches=geometry.max_patches,
            pad_id=self.spec.tokenizer.pad_id,
            sources=list(self.sources),
            patch_size=self.spec.vision.patch_size,
            length=geometry.length,
        )
        return islice(packed, n)

    def _heldout_pieces(self, source: str) -> Iterator[Encoded]:
        chosen, geometry = self.sources[source], self.spec.geometry
        newline = self.spec.tokenizer.ends_line
        for index in range(chosen.heldout_len()):
            try:
                document = encode(chosen.heldout(index), self.spec.tokenizer, self.spec.vision)
                pieces = cuts(document, geometry.length, geometry.max_patches, newline)
            except BadSample:
                if self.spec.data.on_bad_sample == "raise":
                    raise
                continue
            yield from (document.piece(start, stop) for start, stop in pieces)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, which any number of ranks can load."""
    first = states[0]
    for other in states[1:]:
        changes = _differences(first["identity"], other["identity"])
        if changes:
            raise DataError(f"data states of different runs cannot be merged: {'; '.join(changes)}")
    lanes = {lane: value for state in states for lane, value in state["lanes"].items()}
    return {**first, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if key == "sources" and isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += [f"source {name!r} is new" for name in new if name not in old]
            changes += [f"source {name!r} is gone" for name in old if name not in new]
            changes += [
                f"source {name!r} has other options or files" for name in old if name in new and old[name] != new[name]
            ]
        elif key == "order":
            if old != new and sorted(old or []) == sorted(new or []):
                changes.append("the sources are in another order")
        elif key == "max_epochs" and isinstance(old, Mapping) and isinstance(new, Mapping):
            both = [name for name in new if name in old and old[name] != new[name]]
            changes += [f"max_epochs of {name!r} was {old[name]} and is {new[name]}" for name in both]
        elif old != new:
            changes.append(f"{key} was {old!r} and is {new!r}")
    return changes
