"""Expert parallelism: the experts of every layer are shared out among `ep` ranks, and rows travel to them.

    (token, expert) pairs, by owner --all-to-all--> the owner's experts --all-to-all--> summed at the token

Dropless: every pair is computed, however many go to one rank. How many rows come from where is known to the
devices alone, so that every layer waits for the host once (the sizes of its all-to-all); nothing else here
does. Rows travel as they are and come back weighted, so gradients of weights and rows need nothing of their
own. Counts of the balance rules are taken before, where the tokens are.

Shapes: T tokens, D hidden, J experts a token, E experts, N = T J pairs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.model.layers import Experts, moe_layers
from earlyfusion.pipeline.parallel.mesh import Layout
from earlyfusion.vision.balance import all_to_all


def share_out(model: nn.Module, layout: Layout) -> None:
    """Give each rank its part of every layer's experts, in place; the model is on the meta device."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = layout.expert_mesh["ep"]
    for layer in moe_layers(model):
        for name, parameter in [*layer.experts.named_parameters()]:
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(layer.experts, name, nn.Parameter(part))
        # The module's own forward takes all experts; its hooks (FSDP's) stay.
        exchange: Any = Exchange(layer.experts, mesh.get_group())
        layer.experts.forward = exchange  # type: ignore[method-assign]


class Exchange:
    """In place of `Experts.forward`: the same numbers from experts on all ranks of `group`, which all call
    it."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        self.experts, self.group, self.ranks = experts, group, group.size()

    def __call__(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> Tensor:
        # Sharded by FSDP as well they are whole here, but for the cut between ranks.
        gate_up, down = (
            parameter.to_local() if hasattr(parameter, "to_local") else parameter
            for parameter in (self.experts.gate_up_proj, self.experts.down_proj)
        )
        own, slots = gate_up.shape[0], ids_TJ.shape[1]

        # Pairs in the order of their experts: those of one owner stand together.
        ids_N, order_N = ids_TJ.flatten().sort(stable=True)
        leaving, arriving = self.counts(ids_N, own)
        token_N = order_N // slots
        rows = all_to_all(x_TD.index_select(0, token_N), leaving, arriving, self.group)
        ids = all_to_all((ids_N % own)[:, None], leaving, arriving, self.group)
        weights = all_to_all(weights_TJ.flatten()[order_N, None], leaving, arriving, self.group)

        done = resolve("moe_experts", rows)(rows, ids, weights, gate_up, down, self.experts.situ)
        home_ND = all_to_all(done, arriving, leaving, self.group)
        return torch.zeros_like(x_TD, dtype=home_ND.dtype).index_add(0, token_N, home_ND)

    def counts(self, ids_N: Tensor, own: int) -> tuple[list[int], list[int]]:
        """Rows that go to every rank, and that come from each; own: experts of a rank. The host waits."""
        leaving_E = torch.bincount(ids_N // own, minlength=self.ranks)
        arriving_E = torch.empty_like(leaving_E)
        dist.all_to_all_single(arriving_E, leaving_E, group=self.group)
        leaving, arriving = torch.stack([leaving_E, arriving_E]).tolist()
        return leaving, arriving
