"""MuonClip: Muon for matrices, AdamW for the rest, QK-Clip for attention logits, as one torch optimizer.

For every block of a Muon parameter (blocks.py) with gradient G,

    M := mu M + (1 - mu) G,      U = (1 - mu) G + mu M  (Nesterov)  or  M
    O  = NewtonSchulz(U),        W := W (1 - lr wd) - lr rms sqrt(max(rows, columns)) O

M is an average, as in torch.optim.Muon, whose momentum buffers fit; Keller Jordan's sums are 1 / (1 - mu)
times larger, which Newton-Schulz does not see. An update has root mean square `rms` as far as Newton-Schulz
reaches 1, so one learning rate serves both families. Sources: Jordan et al. 2024; Moonlight (arXiv
2502.16982); Kimi K2 (2507.20534).

A parameter without a gradient is left alone entirely: no decay, no momentum decay, no state. Which those are
must be the same on every rank (with DDP or FSDP it is: gradients are reduced). Under DDP all ranks take the
same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.muon.naive import coefficients
from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.adamw import adamw_step, fresh_state, state_dtype, update_rms
from earlyfusion.pipeline.optim.blocks import RoutingError, block_scale, sections
from earlyfusion.pipeline.optim.groups import FAMILIES, build_param_groups
from earlyfusion.pipeline.optim.plan import (
    Bucket,
    Entry,
    Plan,
    TableRow,
    build_plan,
    local_part,
    routing_rows,
)
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.registry import optimizer, param_groups

__all__ = ["MuonClip", "QKClip", "RoutingError", "build_param_groups"]

_STRUCTURE = ("name", "family", "fqns", "blocks")


class MuonClip(torch.optim.Optimizer):
    """One optimizer over the groups of `build_param_groups`.

    groups: dicts with family "muon" | "adamw", params, fqns, blocks, lr, weight_decay; a group may also set
    its own momentum, nesterov, ns, rms, betas, eps. model: where names are looked up, needed for qk_clip and
    recommended always: the optimizer then follows parameters that sharding replaces. ns: Newton-Schulz
    preset; ns_dtype: its precision (None: bf16 where the hardware has it, see kernels/muon). qk_clip: tau, or
    None for no clipping.

    Raises:
        RoutingError: nothing is left for Muon, or it was given what it cannot train (also at the first step).
        ValueError: unknown preset, qk_clip without a model, or options out of range.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns: str = "polar_express",
        ns_dtype: torch.dtype | None = None,
        rms: float = 0.2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        qk_clip: float | None = None,
    ) -> None:
        # What the groups must say, told before the first step.
        groups = [dict(group) for group in groups]
        for group in groups:
            if (
                group.get("family") not in FAMILIES
                or not {"fqns", "blocks", "lr", "weight_decay"} <= group.keys()
            ):
                raise RoutingError(
                    f"a group needs family ({' or '.join(FAMILIES)}), fqns, blocks, lr and weight_decay, as"
                    f" made by build_param_groups; got the keys {sorted(group)}"
                )
            group.setdefault("name", group["family"])
            coefficients(group.get("ns", ns))
        if not any(group["family"] == "muon" and group["params"] for group in groups):
            raise RoutingError("no Muon parameter in any group: use torch.optim.AdamW if that is meant")
        if not 0 <= momentum < 1 or not rms > 0:
            raise ValueError(f"momentum must be in [0, 1) and rms positive, got {momentum} and {rms}")
        if qk_clip is not None and model is None:
            raise ValueError(
                "qk_clip needs the model to find attention layers in: MuonClip(groups, model=model, ...)"
            )
        # A group may overrule each of these.
        defaults = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns": ns,
            "rms": rms,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(groups, defaults)
        self.ns_dtype = ns_dtype
        self.qk_clip = QKClip(model, qk_clip) if qk_clip is not None and model is not None else None
        self._model = model
        self._plan: Plan | None = None
        self._squares: dict[str, Tensor] = {}
        self._elements: dict[str, int] = {}
        self._matrices = 0
        self._without_grad: list[str] = []
        self._stepped: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, then QK-Clip. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        self._squares, self._elements, self._matrices, self._without_grad, self._stepped = {}, {}, 0, [], {}
        for group, entries, buckets in zip(self.param_groups, plan.entries, plan.buckets, strict=True):
            active = [entry for entry in entries if entry.param.grad is not None]
            self._without_grad += [e.fqn for e in entries if e.param.grad is None and e.param.requires_grad]
            if not active:
                continue
            if group["family"] == "muon":
                self._muon_step(group, active, buckets)
            else:
                self._adamw_step(group, active)
        if self.qk_clip is not None:
            self.qk_clip.apply()
        return loss

    def _current_plan(self) -> Plan:
        if self._plan is None or not self._plan.current(self.param_groups):
            self._plan = build_plan(self.param_groups, self.state, self._model)
        return self._plan

    def _adamw_step(self, group: dict[str, Any], entries: list[Entry]) -> None:
        states = []
        self._stepped[group["name"]] = [entry.param for entry in entries]
        for entry in entries:
            if not self.state[entry.param]:
                self.state[entry.param].update(fresh_state(entry.param))
            states.append({key: local_part(value) for key, value in self.state[entry.param].items()})
        adamw_step(
            [entry.local for entry in entries],
            [local_part(_grad(entry)) for entry in entries],
            states,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
        )

    def _muon_step(self, group: dict[str, Any], entries: list[Entry], buckets: list[Bucket]) -> None:
        # Blocks of gradient and momentum, as views: nothing is copied.
        views = {}
        for entry in entries:
            state = self.state[entry.param]
            if "momentum_buffer" not in state:
                dtype = state_dtype(entry.param.dtype)
                state["momentum_buffer"] = torch.zeros_like(
                    entry.param, dtype=dtype, memory_format=torch.contiguous_format
                )
            momentum = local_part(state["momentum_buffer"])
            grad = local_part(_grad(entry)).to(momentum.dtype).contiguous()
            views[entry.fqn] = (sections(grad, entry.spec), sections(momentum, entry.spec))
        for bucket in buckets:
            self._update_bucket(group, bucket, views)

    def _update_bucket(self, group: dict[str, Any], bucket: Bucket, views: Mapping[str, Any]) -> None:
        """All passes over one bucket in a row, while it is in cache."""
        pieces = [piece for piece in bucket.pieces if piece.entry.fqn in views]
        if not pieces:
            return
        # Everything of one block size in one stack, so that Newton-Schulz is one batched product.
        lr, mu = float(group["lr"]), group["momentum"]
        grads = [views[p.entry.fqn][0][p.section][p.low : p.high] for p in pieces]
        momenta = [views[p.entry.fqn][1][p.section][p.low : p.high] for p in pieces]
        weights = [piece.weight for piece in pieces]
        counts = [piece.high - piece.low for piece in pieces]
        stacked_Brc = momenta[0].new_empty(sum(counts), bucket.rows, bucket.columns)
        slots = [slot.view(w.shape) for slot, w in zip(stacked_Brc.split(counts), weights, strict=True)]
        # M := mu M + (1 - mu) G, and U of the Nesterov form straight into the stack.
        torch._foreach_lerp_(momenta, grads, 1 - mu)
        for slot, grad, momentum in zip(slots, grads, momenta, strict=True):
            torch.lerp(grad, momentum, mu if group["nesterov"] else 1.0, out=slot)
        ortho_Brc = resolve("newton_schulz", stacked_Brc.device)(
            stacked_Brc, preset=group["ns"], dtype=self.ns_dtype
        )
        # W := W (1 - lr wd) - lr scale O, in one pass over the weights.
        scale = block_scale(bucket.rows, bucket.columns, group["rms"])
        updates = [o.reshape(w.shape) for o, w in zip(ortho_Brc.split(counts), weights, strict=True)]
        self._note(group["name"], ortho_Brc, scale)
        if group["weight_decay"]:  # joined with the update, so that 16-bit weights are rounded once
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"] / scale)
        torch._foreach_add_(weights, updates, alpha=-lr * scale)

    def _note(self, name: str, ortho_Brc: Tensor, scale: float) -> None:
        """Add to the sums behind `metrics`, on the device."""
        square = torch.linalg.vector_norm(ortho_Brc).square() * scale**2
        if name in self._squares:
            square = square + self._squares[name].to(square.device)
        self._squares[name] = square
        self._elements[name] = self._elements.get(name, 0) + ortho_Brc.numel()
        self._matrices += ortho_Brc.shape[0]

    def routing_table(self) -> list[TableRow]:
        """(fqn, shape, family, blocks, scale) of every parameter; checks the routing as the first step
        would."""
        self._current_plan()
        return routing_rows(self.param_groups)

    def metrics(self) -> dict[str, Any]:
        """Of the last step, with a host sync: call it when logging, not every step.

        update_rms: {group: root mean square of this rank's updates before lr and decay};
        ns_matrices_per_step: blocks orthogonalised; params_without_grad: trainable parameters that were
        skipped; and `QKClip.metrics`.
        """
        # Muon's from the sums of the step, AdamW's from its moments.
        rms = {name: (float(square) / self._elements[name]) ** 0.5 for name, square in self._squares.items()}
        for group in self.param_groups:
            states = [self.state[param] for param in self._stepped.get(group["name"], ())]
            if states:
                local = [{key: local_part(value) for key, value in state.items()} for state in states]
                rms[group["name"]] = update_rms(local, tuple(group["betas"]), group["eps"])
        counts = {"ns_matrices_per_step": self._matrices, "params_without_grad": len(self._without_grad)}
        return {"update_rms": rms, **counts, **(self.qk_clip.metrics() if self.qk_clip is not None else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`. Names, families and blocks stay this optimizer's own; state keeps its fp32
        precision.

        Raises:
            RoutingError: the loaded groups name other parameters, or in another order.
        """
        # Names, families and blocks are this model's, whatever the file says.
        own = [{key: group[key] for key in _STRUCTURE} for group in self.param_groups]
        for mine, theirs in zip(own, state_dict["param_groups"], strict=False):
            loaded = theirs.get("fqns", mine["fqns"])
            if list(loaded) != mine["fqns"]:
                other = next(
                    (f"{b!r} for {a!r}" for a, b in zip(mine["fqns"], loaded) if a != b), "a different number"
                )
                raise RoutingError(
                    f"the loaded optimizer state is of another model: group {mine['name']!r} has {other}"
                )
        super().load_state_dict(state_dict)
        for group, structure in zip(self.param_groups, own, strict=True):
            group.update(structure)
        self._repair_state(state_dict)
        self._plan = None

    def _repair_state(self, state_dict: dict[str, Any]) -> None:
        """Undo what torch does to loaded state: it casts moments to 16-bit parameters' dtype and leaves steps
        where they were."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    dtype = torch.float32 if name == "step" else state_dtype(param.dtype)
                    kept = self.state[param][name]
                    if kept.dtype != dtype or kept.device != param.device:
                        self.state[param][name] = value.detach().to(device=param.device, dtype=dtype)


@optimizer("muonclip", matrices="muon")
def muonclip(options: OptimSection, model: nn.Module) -> MuonClip:
    """MuonClip as the recipe sets it."""
    return MuonClip(
        param_groups(options, model),
        model=model,
        momentum=options.momentum,
        ns=options.ns,
        rms=options.rms,
        betas=options.betas,
        eps=options.eps,
        qk_clip=options.qk_clip,
    )


def _grad(entry: Entry) -> Tensor:
    grad = entry.param.grad
    assert grad is not None
    if grad.is_sparse:
        raise RoutingError(f"{entry.fqn} has a sparse gradient; build its embedding with sparse=False")
    return grad
