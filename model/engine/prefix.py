"""Prefix cache: what a beginning of text left in the memory, kept for the next request that begins the same
way.

A KDA state cannot be cut back to an earlier position, so it is only known where it was copied: at sparse
boundaries of a prompt (every `every` tokens and the last page boundary) and where an answer ended, the next
turn's beginning. Such a checkpoint is a slot that nobody writes plus shared references to the MLA pages up to
there; a hit *copies* the slot and shares the pages (a partly filled last page is copied by whoever writes
into it). A checkpoint is whole or gone: its slot and pages are dropped together, least recently used first.
Text is recognised by a digest over token ids in which the placeholders of pictures are replaced by the
pictures' content. Cf. Kimi K3 (arXiv 2607.24653) section 5.4.1.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from earlyfusion.model.engine.cache import Pools


@dataclass(frozen=True)
class Checkpoint:
    """State after `length` tokens. `pages` hold them, the last one perhaps in part."""

    length: int
    slot: int
    pages: tuple[int, ...]


class PrefixCache:
    """At most `limit` checkpoints in slots of the pools. limit 0 switches it off.

    Raises ValueError if `every` is not a multiple of the page size: only whole pages are shared while they
    are filled.
    """

    def __init__(self, pools: Pools, limit: int, every: int) -> None:
        if limit and (every < 1 or every % pools.page_size):
            raise ValueError(f"checkpoint_every={every} must be a multiple of page_size={pools.page_size}")
        self.pools, self.limit, self.every = pools, limit, every
        self.hits = self.hit_tokens = self.misses = self.evictions = 0
        self._entries: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pages(self) -> set[int]:
        """Pages that some checkpoint refers to."""
        return {page for entry in self._entries.values() for page in entry.pages}

    def boundary(self, start: int, prompt: int) -> int:
        """First position after `start` at which the prefill of a prompt should stop for a checkpoint, else
        `prompt`."""
        if not self.limit:
            return prompt
        last = (prompt - 1) // self.pools.page_size * self.pools.page_size
        stops = [
            position
            for position in ((start // self.every + 1) * self.every, last)
            if start < position < prompt
        ]
        return min(stops, default=prompt)

    def worth_keeping(self, position: int, prompt: int) -> bool:
        last = (prompt - 1) // self.pools.page_size * self.pools.page_size
        return bool(self.limit) and 0 < position < prompt and (position % self.every == 0 or position == last)

    def find(self, key_ids: np.ndarray, most: int, least: int = 1) -> Checkpoint | None:
        """The longest known beginning of `least` to `most` tokens, now the most recently used."""
        if not self.limit:
            return None
        # One digest is fed on from length to length, so a long prompt is hashed once.
        state, done, best = hashlib.blake2b(digest_size=16), 0, None
        for length in sorted(length for length in self._lengths if length <= most):
            state.update(key_ids[done:length].tobytes())
            done = length
            digest = state.digest()
            if digest in self._entries and length >= least:
                best = digest
        if best is None:
            self.misses += 1
            return None
        self._entries.move_to_end(best)
        return self._entries[best]

    def insert(self, key_ids: np.ndarray, length: int, slot: int, pages: list[int]) -> bool:
        """Remember the state in `slot` as that of the first `length` ids. False if it was known already."""
        if not self.limit or length == 0:
            return False
        digest = hashlib.blake2b(key_ids[:length].tobytes(), digest_size=16).digest()
        if digest in self._entries:
            self._entries.move_to_end(digest)
            return False
        if len(self._entries) >= self.limit:
            self.evict_one()

        # The slot is copied, the pages are shared.
        own = self.pools.take_slot(far=True)
        self.pools.copy_slot(slot, [own])
        kept = tuple(pages[: self.pools.pages_for(length)])
        self.pools.share(kept)
        self._entries[digest] = Checkpoint(length, own, kept)
        self._lengths[length] += 1
        return True

    def evict_one(self) -> bool:
        """Drop the least recently used checkpoint; False if there is none."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        self._lengths[entry.length] -= 1
        if not self._lengths[entry.length]:
            del self._lengths[entry.length]
        self.pools.release(entry.pages)
        self.pools.free_slot(entry.slot)
        self.evictions += 1
        return True

    def clear(self) -> None:
        """Drop everything; the weights have changed."""
        while self.evict_one():
            pass
