"""One optimizer step's forward and backward passes, with losses kept apart by modality and by source.

The loss is the weighted mean over the whole global step: sum(w * nll) / sum(w), both sums over every micro-batch of
every rank. So it does not matter how the micro-batches are dealt out: two processes with one lane each take the same
step as one process with two lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]


@dataclass
class StepLoss:
    """Sums of one global step: `loss` is the weighted mean, the dictionaries hold [sum of nll, tokens]."""

    loss: float
    tokens: int
    patches: int
    documents: int
    fill: float


@dataclass
class LossBook:
    """Unweighted negative log-likelihood by source and modality since the last log line, in nats."""

    sources: Sequence[str]
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything written so far. Row: source; column: [with image, text only] x [nll, tokens]."""
        self.sums = torch.zeros(len(self.sources), 2, 2, dtype=torch.float64)

    def add(self, batch: Any, nll_T: Tensor) -> None:
        """Add one micro-batch; only tokens that carry loss count (and are finite: the guard tells of the others)."""
        valid = (batch.labels >= 0) & (batch.loss_weights > 0) & nll_T.isfinite()
        row = batch.source_ids[valid].long() * 2 + (~batch.has_image[valid]).long()
        flat = torch.zeros(len(self.sources) * 2, 2, dtype=torch.float64, device=nll_T.device)
        values = nll_T[valid].double()
        flat.index_add_(0, row, torch.stack([values, torch.ones_like(values)], dim=1))
        self.sums += flat.view(-1, 2, 2).to(self.sums.device)

    def means(self, reduce: Reduce) -> dict[str, float]:
        """Mean nll per token: `loss/source/<name>`, `loss/image` (documents with an image), `loss/text`."""
        sums = reduce(self.sums.clone())
        out: dict[str, float] = {}
        for name, (nll, count) in zip(self.sources, sums.sum(dim=1).tolist(), strict=True):
            if count:
                out[f"loss/source/{name}"] = nll / count
        for name, (nll, count) in zip(("image", "text"), sums.sum(dim=0).tolist(), strict=True):
            if count:
                out[f"loss/{name}"] = nll / count
        return out


def weigh(batch: Any, weight_of_source: Tensor, text_weight: float) -> None:
    """Scale a batch's loss weights in place: by source, and documents without an image by `text_weight`."""
    batch.loss_weights = batch.loss_weights * weight_of_source.to(batch.loss_weights.device)[batch.source_ids.long()]
    if text_weight != 1.0:
        batch.loss_weights = torch.where(batch.has_image, batch.loss_weights, batch.loss_weights * text_weight)


def forward_backward(
    accelerator: Any,
    model: nn.Module,
    batches: Sequence[Any],
    book: LossBook,
    reduce: Reduce,
    routes: Sequence[Any] = (),
) -> StepLoss:
    """Accumulate the gradients of one global step into `.grad`; returns its sums.

    model: the prepared (possibly DDP-wrapped) NativeFusion. batches: this rank's micro-batches on its device.
    reduce: sum over ranks. Gradients are averaged by DDP, hence the factor world size. routes: of `PictureExchange`, one
    (or None) a micro-batch; empty: every rank encodes its own pictures.
    """
    local = torch.tensor(
        [
            [float(b.loss_weights[b.labels >= 0].sum()), b.num_tokens, b.num_patches, b.segments.num, b.ids.numel()]
            for b in batches
        ],
        dtype=torch.float64,
    ).sum(dim=0)
    weight, tokens, patches, documents, positions = reduce(local).tolist()
    scale = accelerator.num_processes / max(weight, 1e-12)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with _sync(accelerator, model, last):
            with accelerator.autocast():
                out = model(batch, routes[index]) if routes and routes[index] is not None else model(batch)
            accelerator.backward(out.loss_sum * scale)
        loss_sum += out.loss_sum.detach().double().cpu()
        book.add(batch, out.nll_T)
    loss = float(reduce(loss_sum)) / max(weight, 1e-12)
    return StepLoss(loss, int(tokens), int(patches), int(documents), tokens / max(positions, 1))


def _sync(accelerator: Any, model: nn.Module, last: bool) -> Any:
    """DDP exchanges gradients in the last micro-batch of a step only."""
    return nullcontext() if last else accelerator.no_sync(model)


def drop_frozen_gradients(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    """Set the gradients of frozen parameters to None: no update, no weight decay, momentum untouched."""
    for name, parameter in model.named_parameters():
        if frozen(name):
            parameter.grad = None
