"""One optimizer step's forward and backward passes, with losses kept apart by modality and by source.

The loss is the weighted mean over the whole global step: sum(w * nll) / sum(w), both sums over every
micro-batch of every rank. So it does not matter how the micro-batches are dealt out: two processes with one
lane each take the same step as one process with two lanes.
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
    """Unweighted negative log-likelihood by source and modality since the last log line, in nats.

    Kept where the batches are: nothing waits for the device before `means`.
    """

    sources: Sequence[str]
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything written so far. Row: source; column: [with image, text only] x [nll, tokens]."""
        self.sums = torch.zeros(len(self.sources), 2, 2, dtype=torch.float64)

    def add(self, batch: Any, nll_T: Tensor) -> None:
        """Add one micro-batch; only tokens that carry loss count (and are finite: the guard tells of the
        others)."""
        valid_T = (batch.labels >= 0) & (batch.loss_weights > 0) & nll_T.isfinite()
        row_T = batch.source_ids.long() * 2 + (~batch.has_image).long()
        rows_R = torch.arange(2 * len(self.sources), device=nll_T.device)
        values_T2 = torch.stack([torch.where(valid_T, nll_T, 0.0), valid_T.to(nll_T.dtype)], dim=1).double()
        sums_R2 = (
            rows_R[:, None] == row_T
        ).double() @ values_T2  # not index_add_, whose order a GPU leaves open
        self.sums = self.sums.to(nll_T.device) + sums_R2.view(-1, 2, 2)

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
    batch.loss_weights = (
        batch.loss_weights * weight_of_source.to(batch.loss_weights.device)[batch.source_ids.long()]
    )
    if text_weight != 1.0:
        batch.loss_weights = torch.where(
            batch.has_image, batch.loss_weights, batch.loss_weights * text_weight
        )


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
    reduce: sum over ranks. Gradients are averaged by DDP, hence the factor world size. routes: of
    `PictureExchange`, one (or None) a micro-batch; empty: every rank encodes its own pictures.
    """
    counts = [(b.num_tokens, b.num_patches, b.segments.num, b.ids.numel()) for b in batches]
    weights = [torch.where(b.labels >= 0, b.loss_weights, 0.0).sum().double() for b in batches]
    totals = reduce(torch.stack([torch.stack(weights).sum(), *weights[0].new_tensor(counts).sum(dim=0)]))
    scale = accelerator.num_processes / totals[0].clamp_min(1e-12)
    losses = []
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with _sync(accelerator, model, last):
            with accelerator.autocast():
                out = model(batch, routes[index]) if routes and routes[index] is not None else model(batch)
            accelerator.backward(out.loss_sum * scale.to(out.loss_sum.dtype))
        losses.append(out.loss_sum.detach().double())
        book.add(batch, out.nll_T)
    # the step's one host sync: everything before it is only queued on a GPU
    *counted, loss_sum = torch.cat([totals, reduce(torch.stack(losses).sum())[None]]).tolist()
    weight, tokens, patches, documents, positions = counted
    loss = loss_sum / max(weight, 1e-12)
    return StepLoss(loss, int(tokens), int(patches), int(documents), tokens / max(positions, 1))


def _sync(accelerator: Any, model: nn.Module, last: bool) -> Any:
    """DDP exchanges gradients in the last micro-batch of a step only."""
    return nullcontext() if last else accelerator.no_sync(model)


def drop_frozen_gradients(model: nn.Module, frozen: Callable[[str], bool]) -> None:
    """Set the gradients of frozen parameters to None: no update, no weight decay, momentum untouched."""
    for name, parameter in model.named_parameters():
        if frozen(name):
            parameter.grad = None
