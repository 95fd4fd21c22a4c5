"""The draw of one token, the same for every backend and whatever else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from earlyfusion.eval.protocol import EvalError


class Draw:
    """Greedy for temperature 0; otherwise softmax(logits / temperature) restricted to the smallest set of
    likeliest tokens with mass >= top_p, by inverting its distribution function at uniform numbers from the
    answer's own seed.

    Raises EvalError unless temperature >= 0 and 0 < top_p <= 1.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        if not temperature >= 0:
            raise EvalError(f"temperature {temperature}: must be at least 0 (0 is greedy)")
        if not 0 < top_p <= 1:
            raise EvalError(f"top-p {top_p}: must lie in (0, 1]")
        self.temperature, self.top_p = temperature, top_p
        self._uniform = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The next token's id."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        ordered_V, ids_V = (logits_V / self.temperature).sort(descending=True, stable=True)
        p_V = ordered_V.double().softmax(-1)
        before_V = p_V.cumsum(-1) - p_V  # mass of the likelier tokens; 0 for the first, so it always stays
        mass_V = p_V.masked_fill(before_V >= self.top_p, 0.0).cumsum(-1)
        uniform = torch.rand((), generator=self._uniform, dtype=torch.float64).to(mass_V.device)
        rank = int(torch.searchsorted(mass_V, uniform * mass_V[-1], right=True))
        last = (
            int((before_V < self.top_p).sum()) - 1
        )  # rounding may point past the last token that may be drawn
        return int(ids_V[min(rank, last)])
