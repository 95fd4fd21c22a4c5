"""Which samples of many files are held out: spread evenly over every file, told by arithmetic alone.

Nothing is read for it, so a million samples are as quick as ten. A file's choice depends on its own name and
length only: files added later do not move samples of the old ones between the sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from earlyfusion.data.loading.order import digest64


class Split:
    """Training and held-out numbers -> (file, position) for files of the given `counts` of samples.

    Of a file with m samples, floor(m * fraction + u) are held out, u in [0, 1) from the hash of its name:
    right on average also for many small files.
    """

    def __init__(self, names: Sequence[str], counts: Sequence[int], fraction: float) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self._shift = [digest64("held-out", name) / 2.0**64 for name in names]
        held = [min(m, int(m * fraction + u)) if fraction > 0 else 0 for m, u in zip(counts, self._shift)]
        self._held = np.asarray(held, dtype=np.int64)
        self._held_ends = np.cumsum(self._held)
        self._train_ends = np.cumsum(self.counts - self._held)

    @property
    def train_len(self) -> int:
        """Training samples of all files."""
        return int(self._train_ends[-1]) if len(self._train_ends) else 0

    @property
    def heldout_len(self) -> int:
        """Held-out samples of all files."""
        return int(self._held_ends[-1]) if len(self._held_ends) else 0

    def _positions(self, file: int) -> np.ndarray:
        """Held-out positions of one file, ascending."""
        held = int(self._held[file])
        steps = np.arange(held, dtype=np.float64) + self._shift[file]
        return np.minimum(
            (steps * (float(self.counts[file]) / max(1, held))).astype(np.int64), self.counts[file] - 1
        )

    def train(self, index: int) -> tuple[int, int]:
        """(file, position) of training sample `index`."""
        file, rank = _locate(self._train_ends, index)
        held = self._positions(file)
        # The k-th sample that stays has as many held-out ones before it as have position - their own rank <=
        # k.
        return file, rank + int(np.searchsorted(held - np.arange(len(held)), rank, side="right"))

    def heldout(self, index: int) -> tuple[int, int]:
        """(file, position) of held-out sample `index`."""
        file, rank = _locate(self._held_ends, index)
        return file, int(self._positions(file)[rank])


def _locate(ends: np.ndarray, index: int) -> tuple[int, int]:
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= index < total:
        raise IndexError(f"sample {index} of {total}")
    file = int(np.searchsorted(ends, index, side="right"))
    return file, index - (int(ends[file - 1]) if file else 0)
