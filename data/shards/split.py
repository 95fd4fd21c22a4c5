"""Samples of many files numbered through, and which of them are held out: told by arithmetic alone.

Nothing is read for it, so a million samples are as quick as ten. A file's choice depends on its own name and
length only: files added later do not move samples of the old ones between the sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from earlyfusion.data.loading.order import digest64


class Numbered:
    """Numbers from 0 over files of the given `counts` of samples."""

    def __init__(self, counts: Iterable[int]) -> None:
        # With a zero in front, so that the first file needs no case of its own.
        self._ends = np.cumsum(np.asarray([0, *counts], dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, number: int) -> tuple[int, int]:
        """(file, position in it) of a number; raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        file = int(np.searchsorted(self._ends, number, side="right")) - 1
        return file, number - int(self._ends[file])


class Split:
    """Training and held-out numbers -> (file, position) for files of the given `counts` of samples.

    Of a file with m samples, floor(m * fraction + u) are held out, u in [0, 1) from the hash of its name:
    right on average also for many small files.
    """

    def __init__(self, names: Sequence[str], counts: Sequence[int], fraction: float) -> None:
        # By its name: files added later move no sample of this one.
        self._counts, self._shift = counts, [digest64("held-out", name) / 2.0**64 for name in names]
        held = [min(m, int(m * fraction + u)) if fraction > 0 else 0 for m, u in zip(counts, self._shift)]
        self._held = held
        self._heldout, self._train = Numbered(held), Numbered(m - h for m, h in zip(counts, held))

    @property
    def train_len(self) -> int:
        """Training samples of all files."""
        return len(self._train)

    @property
    def heldout_len(self) -> int:
        """Held-out samples of all files."""
        return len(self._heldout)

    def _positions(self, file: int) -> np.ndarray:
        """Held-out positions of one file, ascending and evenly spread."""
        count, held = self._counts[file], self._held[file]
        steps = np.arange(held, dtype=np.float64) + self._shift[file]
        return np.minimum((steps * (count / max(1, held))).astype(np.int64), count - 1)

    def train(self, index: int) -> tuple[int, int]:
        """(file, position) of training sample `index`."""
        file, rank = self._train.locate(index)
        held = self._positions(file)
        # The k-th sample that stays has as many held-out ones before it as have position - own rank <= k.
        return file, rank + int(np.searchsorted(held - np.arange(len(held)), rank, side="right"))

    def heldout(self, index: int) -> tuple[int, int]:
        """(file, position) of held-out sample `index`."""
        file, rank = self._heldout.locate(index)
        return file, int(self._positions(file)[rank])
