"""One optimizer step's forward and backward passes, with losses kept apart by modality and by source.

The loss is the weighted mean over the whole global step: sum(w * nll) / sum(w), both sums over every
micro-batch of every rank. So it does not matter how the micro-batches are dealt out: two processes with one
lane each take the same step as one process with two lanes.

Legend: T tokens, S sources, R = 2 S rows (source x [with a picture, text only]).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.pipeline.parallel import gradient_sync
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.vision.balance import Route


class LossMeter:
    """Unweighted negative log-likelihood by source and modality since the last log line, in nats.

    Kept where the batches are: nothing waits for the device before `means`. sums_S22 float64: source x [with
    a picture, text only] x [nll, tokens], of this rank.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = list(sources)
        self.clear()

    def clear(self) -> None:
        """Forget everything added so far."""
        self.sums_S22 = torch.zeros(len(self.sources), 2, 2, dtype=torch.float64)

    def add(self, batch: PackedBatch, nll_T: Tensor) -> None:
        """Add one micro-batch; only tokens that carry loss count (and are finite: the guard tells of the
        others)."""
        # Plain nats a token, whatever a source weighs: so the curves of two recipes compare.
        valid_T = (batch.labels >= 0) & (batch.loss_weights > 0) & nll_T.isfinite()
        row_T = batch.source_ids.long() * 2 + (~batch.has_image).long()
        rows_R = torch.arange(2 * len(self.sources), device=nll_T.device)
        values_T2 = torch.stack([torch.where(valid_T, nll_T, 0.0), valid_T.to(nll_T.dtype)], dim=1).double()

        # A product, not index_add_, whose order a GPU leaves open.
        sums_R2 = (rows_R[:, None] == row_T).double() @ values_T2
        self.sums_S22 = self.sums_S22.to(nll_T.device) + sums_R2.view(-1, 2, 2)

    def means(self, runtime: Runtime) -> dict[str, float]:
        """Mean nll per token over all ranks: `loss/source/<name>`, `loss/image` (documents with an image),
        `loss/text`; absent where there was no token."""
        sums_S22 = runtime.sum(self.sums_S22)
        by_name = dict(zip([f"source/{name}" for name in self.sources], sums_S22.sum(dim=1).tolist()))
        by_name |= dict(zip(["image", "text"], sums_S22.sum(dim=0).tolist()))
        return {f"loss/{name}": nll / tokens for name, (nll, tokens) in by_name.items() if tokens}


def forward_backward(
    runtime: Runtime,
    model: nn.Module,
    batches: Sequence[PackedBatch],
    meter: LossMeter,
    routes: Sequence[Route | None] = (),
) -> float:
    """Accumulate the gradients of one global step into `.grad`; returns its weighted mean loss in nats.

    model: NativeFusion, replicated or bare. batches: this rank's micro-batches on its device. routes: of
    `PictureExchange`, one (or None) a micro-batch; empty: every rank encodes its own pictures.
    """
    # What the loss is divided by: the weights of all ranks. DDP averages gradients, hence the world size.
    weights = [torch.where(b.labels >= 0, b.loss_weights, 0.0).sum().double() for b in batches]
    weight = runtime.sum(torch.stack(weights).sum()).clamp_min(1e-12)
    scale = runtime.world / weight

    losses = []
    for index, batch in enumerate(batches):
        with gradient_sync(model, runtime, last=index == len(batches) - 1):
            route = routes[index] if routes else None
            with runtime.accelerator.autocast():
                out = model(batch) if route is None else model(batch, route)
            runtime.accelerator.backward(out.loss_sum * scale.to(out.loss_sum.dtype))
        losses.append(out.loss_sum.detach().double())
        meter.add(batch, out.nll_T)

    # The step's one host sync: everything before it is only queued on a GPU.
    return float(runtime.sum(torch.stack(losses).sum()) / weight)
