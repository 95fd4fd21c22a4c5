"""How a model is spread over ranks and how their gradients meet: the one place that knows.

Today every rank holds the whole model. Two ways bring the gradients together:

    replicate            DDP: every rank runs the same number of micro-batches, and the exchange of one bucket
                         overlaps with the backward pass of the next (pretraining, fine-tuning)
    exchange_gradients   once, after the backward passes: a rank may run any number of rows, none too, and a
                         parameter that no rank has a gradient for keeps none (RL, DPO). DDP has neither: its
                         reducer waits for every rank's forward pass and makes zeros of missing gradients, and
                         a step on zeros goes along the optimizer's old momentum.

Sharded parameters would replace both here; nothing else knows about ranks' gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from earlyfusion.pipeline.runtime import Runtime


def replicate(model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model on its device, with autocast and (several processes) DDP around it."""
    return runtime.accelerator.prepare_model(model)


def gradient_sync(model: nn.Module, runtime: Runtime, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch of a replicated model: gradients are exchanged in the last one of a step only."""
    return nullcontext() if last else runtime.accelerator.no_sync(model)


def exchange_gradients(model: nn.Module, runtime: Runtime) -> None:
    """Sum the gradients over ranks, for losses that were divided by the totals of all ranks."""
    if runtime.world == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # All ranks send the same shapes; who has no gradient sends zeros and says so.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    known_P = grads[0].new_tensor([float(p.grad is not None) for p in trained])

    # One message: two hundred small ones cost more than the sum.
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), known_P])
    torch.distributed.all_reduce(flat)

    *sums, known_P = flat.split([*(grad.numel() for grad in grads), len(trained)])
    for parameter, grad, known in zip(trained, sums, known_P.tolist()):
        parameter.grad = grad.view_as(parameter) if known else None
