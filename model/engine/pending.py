"""Rows of memory to be copied or cleared, done together.

Forking sixteen samples, or writing into pages they share, asks for many small copies: on a GPU each would be
launches of its own in every layer. Noted here, they become one gather and one scatter per tensor. What is
noted happens as if it had been done at once, in order, as long as `settle` comes before anything else reads
or writes the rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Pending:
    """Copies (target -> source) and rows to be cleared."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.cleared: set[int] = set()

    def clear(self, row: int) -> None:
        """The row will hold zeros."""
        self.copies.pop(row, None)
        self.cleared.add(row)

    def copy(self, source: int, target: int) -> None:
        """The target will hold what the source holds now, that is with everything noted before."""
        if source in self.cleared:
            self.clear(target)
        else:
            self.cleared.discard(target)
            self.copies[target] = self.copies.get(source, source)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Do it in every tensor, whose first axis are the rows, and forget it."""
        if not self.copies and not self.cleared:
            return
        every = list(tensors)
        if every:
            device = every[0].device
            rows = torch.tensor([*self.copies, *self.copies.values(), *self.cleared], dtype=torch.long).to(
                device
            )
            targets, sources, cleared = rows.split([len(self.copies), len(self.copies), len(self.cleared)])
            for tensor in every:
                if self.copies:
                    tensor.index_copy_(0, targets, tensor.index_select(0, sources))
                if self.cleared:
                    tensor.index_fill_(0, cleared, 0)
        self.copies.clear()
        self.cleared.clear()
