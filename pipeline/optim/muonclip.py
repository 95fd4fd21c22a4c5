"""MuonClip: Muon for matrices, AdamW for the rest, QK-Clip for attention logits, as one torch optimizer.

For every block of a Muon parameter (routing.py) with gradient G,

    M := mu M + (1 - mu) G,      U = (1 - mu) G + mu M  (Nesterov)
    O  = NewtonSchulz(U),        W := W (1 - lr wd) - lr rms sqrt(max(rows, columns)) O

M is an average, as in torch.optim.Muon, whose momentum buffers fit; Keller Jordan's sums are 1 / (1 - mu)
times larger, which Newton-Schulz does not see. An update has root mean square `rms` as far as Newton-Schulz
reaches 1, so one learning rate serves both families. Sources: Jordan et al. 2024; Moonlight (arXiv
2502.16982); Kimi K2 (2507.20534).

A parameter without a gradient is left alone entirely: no decay, no momentum decay, no state. Under DDP all
ranks take the same step, and who has no gradient must be the same on all (it is: gradients are reduced). Of
sharded parameters whole heads and whole experts are updated where their rows are; a matrix that is cut goes
to one rank for Newton-Schulz (owners.py), and a gradient that some of its ranks lack counts as zeros there.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.files import Record
from earlyfusion.kernels.muon.naive import coefficients
from earlyfusion.kernels.muon.newton_schulz import default_dtype
from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.owners import Cut, agreed, exchanged, is_cut
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.registry import BETAS, optimizer, param_groups
from earlyfusion.pipeline.optim.routing import (
    BlockSpec,
    RoutingError,
    block_scale,
    check_groups,
    local_part,
    sections,
)

CHUNK_ELEMENTS = {"cpu": 2**19}
"""Most elements in one stacked Newton-Schulz call by device type: on a CPU what a core's cache holds."""
CHUNK_ELEMENTS_ELSEWHERE = 2**26  # 256 MiB of fp32


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of optimizer state for a parameter: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Blocks(NamedTuple):
    """Some blocks of one section of a weight: views [N, G, R, C] of it, its gradient and its momentum."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class MuonClip(torch.optim.Optimizer):
    """One optimizer over the groups of `build_param_groups`.

    model: where QK-Clip finds the attention layers. ns: Newton-Schulz preset; ns_dtype: its precision (None:
    bf16 where the hardware has it, see kernels/muon). qk_clip: tau, or None for no clipping. Raises
    ValueError for an unknown preset.
    """

    def __init__(
        self,
        groups: Iterable[Record],
        model: nn.Module,
        *,
        momentum: float = 0.95,
        ns: str = "polar_express",
        ns_dtype: torch.dtype | None = None,
        eps: float = 1e-8,
        qk_clip: float | None = None,
    ) -> None:
        coefficients(ns)
        groups = list(groups)
        check_groups(groups)
        super().__init__(groups, {})
        self.momentum, self.ns, self.ns_dtype, self.eps = momentum, ns, ns_dtype, eps
        self.qk_clip = None if qk_clip is None else QKClip(model, qk_clip)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, then QK-Clip."""
        for group in self.param_groups:
            if group["family"] == "muon":
                self._muon_step(group)
            else:
                self._adamw_step(group)
        if self.qk_clip is not None:
            self.qk_clip.apply()

    def _adamw_step(self, group: Record) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        operands = []
        for param in params:
            state, dtype = self.state[param], state_dtype(param.dtype)
            # At the first gradient and not before: a frozen parameter costs no memory.
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
            # 16-bit weights are updated in fp32 and rounded once, at the end.
            wide = [local_part(value).to(dtype) for value in (param, param.grad)]
            moments = [local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")]
            operands.append([*wide, *moments, state["step"]])
        if not params:
            return

        # Every parameter counts its own steps: one that was frozen begins its bias correction late.
        weights, grads, averages, squares, steps = map(list, zip(*operands))
        adamw(
            weights,
            grads,
            averages,
            squares,
            [],
            steps,
            fused=True,
            lr=float(group["lr"]),
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=group["weight_decay"],
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        for param, weight in zip(params, weights):
            if weight.dtype != param.dtype:
                local_part(param).copy_(weight)

    def _muon_step(self, group: Record) -> None:
        # Blocks of one size of all weights in one stack, so that one Newton-Schulz call serves many weights;
        # a full stack is worked off at once, which bounds memory and keeps its passes in cache.
        waiting: dict[Any, list[Blocks]] = {}
        here: list[tuple[str, Any, BlockSpec]] = []
        cut: list[tuple[str, Any, BlockSpec]] = []
        for name, param, spec in zip(group["fqns"], group["params"], group["blocks"], strict=True):
            (cut if is_cut(param, spec) else here).append((name, param, spec))
        for _, param, spec in here:
            if param.grad is None:
                continue
            # A rank without rows has the (empty) state all the same: every rank saves and loads alike.
            weight, grad, momentum = self._operands(param)
            if not weight.numel():
                continue

            # Views: nothing is copied.
            for parts in zip(sections(weight, spec), sections(grad, spec), sections(momentum, spec)):
                count, together, rows, columns = parts[0].shape
                key = (together * rows, columns, weight.device, weight.dtype)
                elements = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS_ELSEWHERE)
                limit = max(1, elements // (together * rows * columns))
                low = 0
                while low < count:
                    stack = waiting.setdefault(key, [])
                    filled = sum(blocks.weight.shape[0] for blocks in stack)
                    high = min(count, low + limit - filled)
                    stack.append(Blocks(*(part[low:high] for part in parts)))
                    if filled + high - low == limit:
                        self._update(group, waiting.pop(key))
                    low = high
        for stack in waiting.values():
            self._update(group, stack)
        if cut:
            self._update_cut(group, cut)

    def _operands(self, param: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of a weight, of its gradient and of its momentum, which begins at zero."""
        state, dtype = self.state[param], state_dtype(param.dtype)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                param, dtype=dtype, memory_format=torch.contiguous_format
            )
        weight, momentum = local_part(param), local_part(state["momentum_buffer"])
        grad = torch.zeros_like(weight) if param.grad is None else local_part(param.grad)
        return weight, grad.to(dtype).contiguous(), momentum

    def _update_cut(self, group: Record, cut: list[tuple[str, Any, BlockSpec]]) -> None:
        """One Muon update of matrices whose rows lie on several ranks, in place."""
        known = agreed([param for _, param, _ in cut])
        waiting = []
        for name, param, spec in (one for one, has in zip(cut, known, strict=True) if has):
            _, grad, momentum = self._operands(param)
            momentum.lerp_(grad, 1 - self.momentum)
            update = torch.lerp(grad, momentum, self.momentum)
            # What Newton-Schulz rounds to anyway is rounded before it travels.
            wide = update.dtype == torch.float64
            dtype = update.dtype if wide else self.ns_dtype or default_dtype(update.device)
            waiting.append(Cut(name, param, spec, update.to(dtype)))
        for one, ortho in exchanged(waiting, self._orthogonal):
            weight, lr = local_part(one.param), float(group["lr"])
            update = ortho.to(state_dtype(weight.dtype))
            weight.sub_(update.add_(weight, alpha=group["weight_decay"]), alpha=lr)

    def _orthogonal(self, update_RC: Tensor, spec: BlockSpec) -> Tensor:
        """The whole update of a matrix, block by block, scaled: the same shape."""
        out_RC = torch.empty_like(update_RC)
        for given, out in zip(sections(update_RC, spec), sections(out_RC, spec)):
            count, together, rows, columns = given.shape
            blocks_Brc = given.reshape(count, together * rows, columns)
            newton_schulz = resolve("newton_schulz", blocks_Brc)
            ortho = newton_schulz(blocks_Brc, preset=self.ns, dtype=self.ns_dtype)
            out.copy_((ortho * block_scale(together * rows, columns)).view_as(out))
        return out_RC

    def _update(self, group: Record, stack: list[Blocks]) -> None:
        """One Muon update of blocks of one size, in place."""
        weights, mu = [blocks.weight for blocks in stack], self.momentum
        _, together, rows, columns = weights[0].shape
        counts = [weight.shape[0] for weight in weights]
        momenta = [blocks.momentum for blocks in stack]

        # M := mu M + (1 - mu) G, and U straight into the stack.
        torch._foreach_lerp_(momenta, [blocks.grad for blocks in stack], 1 - mu)
        stacked_Brc = momenta[0].new_empty(sum(counts), together * rows, columns)
        for slot, blocks in zip(stacked_Brc.split(counts), stack, strict=True):
            torch.lerp(blocks.grad, blocks.momentum, mu, out=slot.view(blocks.grad.shape))
        newton_schulz = resolve("newton_schulz", stacked_Brc)
        ortho_Brc = newton_schulz(stacked_Brc, preset=self.ns, dtype=self.ns_dtype)

        # W := W (1 - lr wd) - lr scale O in one pass, so that 16-bit weights are rounded once.
        scale = block_scale(together * rows, columns)
        updates = [part.reshape(w.shape) for part, w in zip(ortho_Brc.split(counts), weights, strict=True)]
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"] / scale)
        torch._foreach_add_(weights, updates, alpha=-float(group["lr"]) * scale)

    def load_state_dict(self, state_dict: Record) -> None:
        """Load a `state_dict()`; state keeps its fp32 precision. Raises RoutingError for that of another
        model."""
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for mine, theirs in groups:
            if (mine["fqns"], mine["blocks"]) != (theirs["fqns"], theirs["blocks"]):
                raise RoutingError(
                    f"the loaded optimizer state is of another model: other weights in {mine['name']!r}"
                )
        super().load_state_dict(state_dict)

        # torch casts moments to the dtype of 16-bit parameters and leaves steps where they were.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    dtype = torch.float32 if name == "step" else state_dtype(param.dtype)
                    self.state[param][name] = value.detach().to(device=param.device, dtype=dtype)


@optimizer("muonclip", matrices="muon")
def muonclip(options: OptimSection, model: nn.Module) -> MuonClip:
    """MuonClip as the recipe sets it."""
    return MuonClip(
        param_groups(options, model),
        model,
        momentum=options.momentum,
        ns=options.ns,
        eps=options.eps,
        qk_clip=options.qk_clip,
    )
