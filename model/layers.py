"""The layers that everything else is made of: projections, embedding, RMS norms, the dense feed-forward, the
mixture of experts, and state that stays fp32; with the one table of initial values.

| parameter | initial value |
|---|---|
| every projection, expert, router, embedding, head | N(0, initializer_range) |
| short convolutions | N(0, initializer_range) |
| norm weights (RMSNorm, o_norm, AttnRes key norms) | 1 |
| AttnRes pseudo-queries | 0 (uniform average of the sources at step 0) |
| router selection bias | 0 |
| KDA A_log, softplus gate | log U(1, 16) |
| KDA A_log, bounded gate | 0 |
| KDA dt_bias, both gates | softplus^-1(dt), dt = max(exp U(log 1e-3, log 1e-1), 1e-4) |

Sources: the released Kimi-Linear code as ported in transformers (`_init_weights`); Attention Residuals
(arXiv 2603.15031) for the zero queries. A module's `reset_parameters` sets only the parameters it holds
itself (the torch convention); children come before their parents, so that a parent that has a different wish
for a stock torch layer has the last word.

Mixture of experts. Sigmoid router with a selection bias, dropless SwiGLU experts, always-on shared
experts.

    s = sigmoid(W_r x)                       fp32
    chosen = top-k of s + b                  b balances the load and never enters the weights
    w = s[chosen] / (sum s[chosen] + 1e-20) * routed_scaling_factor      (k = 1: w = s[chosen] * that factor)
    y = sum_chosen w_e expert_e(x) + shared(x)

Two rules move b, once per optimizer step, without an auxiliary loss:

* sign (DeepSeek-V3, arXiv 2412.19437): b += gamma * sign(mean load - load).
* quantile (Quantile Balancing, Kimi K3): with alpha_i the (k+1)-th largest of s_i + b and r_ij = alpha_i -
  s_ij, expert j is chosen by token i exactly when b_j > r_ij; so b_j := the k/E quantile of r_:j over the
  step's tokens makes a share k/E of them choose j. Then the mean is subtracted. The quantiles come from a
  histogram per expert over [min b - 1, max b + 1], which holds every r; it adds up over micro-batches and
  ranks.

Routing replay (R3, arXiv 2510.11370): `recording_routing` notes which experts every token chose,
`replaying_routing` makes a later forward pass choose the same ones. Only the choice is replayed: weights are
computed afresh from the scores, so the router still gets its gradient.

Shapes: T tokens, D hidden, E experts, J = k chosen experts, F expert width, B histogram bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.moe.grouped import activated
from earlyfusion.kernels.moe.naive import Situ
from earlyfusion.kernels.products import linear, without_autocast
from earlyfusion.model.config import ModelConfig


class Linear(nn.Linear):
    """nn.Linear without bias, drawn from N(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        # Before the base class, whose constructor already calls reset_parameters.
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class Embedding(nn.Embedding):
    """nn.Embedding drawn from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or unchanged when it is fp64 (so that reference runs in double precision stay double)."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, times sigmoid(gate) where one is given
    (KDA's norm over each head's channels); statistics in fp32 (fp64 for fp64 inputs).

    The result is in the dtype the following matmuls compute in (bf16 under autocast), so that several
    projections of one normed input share a single cast.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # With weight one a norm starts as the plain division by the root mean square.
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        # One operation for norm and gate: head outputs are read once.
        return resolve("rms_norm", x)(x, self.weight, gate, self.eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x), or SiTU of both: feed-forward of the first, dense layers and the
    shared experts of a MoE layer."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, std: float, situ: Situ | None = None
    ) -> None:
        super().__init__()
        self.situ = situ
        self.gate_proj = Linear(hidden_size, intermediate_size, std)
        self.up_proj = Linear(hidden_size, intermediate_size, std)
        self.down_proj = Linear(intermediate_size, hidden_size, std)

    def forward(self, x_TD: Tensor) -> Tensor:
        # Two matrices and not one joined: the names and shapes of public checkpoints.
        return self.down_proj(activated(self.gate_proj(x_TD), self.up_proj(x_TD), self.situ))


class Fp32State(nn.Module):
    """Base of modules whose own floating buffers are counters, biases or maxima that must stay fp32.

    `.to(torch.bfloat16)` casts every buffer it meets; a selection bias or a token count rounded to 8 bits is
    wrong. Here such a cast moves the buffers to the new device and leaves their values alone.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp32State:
        # The base class casts; what it cast is put back from here, on the new device.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


# ---- mixture of experts

BINS = 1000


class Router(Fp32State):
    """Scores and choice of experts. `e_score_correction_bias` [E] fp32 is state, not a parameter."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_token, config.num_experts
        # One weight divided by itself is 1 whatever the score: the router would get no gradient.
        self.renormalize = config.moe_renormalize and config.num_experts_per_token > 1
        self.scaling = config.routed_scaling_factor
        self.std = config.initializer_range
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.empty(self.num_experts, dtype=torch.float32))
        # Set from outside for a while (see recording_routing, replaying_routing); never part of a
        # checkpoint.
        self.recorded: list[Tensor] | None = None
        self.replayed_TJ: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        self.e_score_correction_bias.zero_()

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> expert ids [T, J] int64, weights [T, J], scores [T, E]; fp32 even under autocast."""
        with without_autocast(x_TD):
            fp = at_least_fp32(x_TD)
            scores_TE = F.linear(fp, self.weight.to(fp.dtype)).sigmoid()

            # The bias moves the choice and never the weights: balancing is no part of the function.
            with torch.no_grad():
                biased_TE = scores_TE + self.e_score_correction_bias
                ids_TJ = torch.topk(biased_TE, self.top_k, dim=-1, sorted=False)[1]
                if self.replayed_TJ is not None:
                    if self.replayed_TJ.shape != ids_TJ.shape:
                        raise ValueError(
                            f"routing to replay is {tuple(self.replayed_TJ.shape)} for a layer that routes"
                            f" {tuple(ids_TJ.shape)} [tokens, experts per token]; give the routing of exactly"
                            " this packed row"
                        )
                    ids_TJ = torch.where(self.replayed_TJ < 0, ids_TJ, self.replayed_TJ)
                if self.recorded is not None:
                    self.recorded.append(ids_TJ)

            weights_TJ = scores_TE.gather(1, ids_TJ)
            if self.renormalize:
                weights_TJ = weights_TJ / (weights_TJ.sum(-1, keepdim=True) + 1e-20)
            return ids_TJ, weights_TJ * self.scaling, scores_TE


class Experts(nn.Module):
    """Fused routed experts: gate_up_proj [E, 2F, D] (gate rows first), down_proj [E, D, F]; D is the width of
    the latent where there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        hidden = config.routed_expert_hidden_size or config.hidden_size
        self.situ = config.situ
        self.std = config.initializer_range
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.std)

    def forward(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> Tensor:
        experts = resolve("moe_experts", x_TD)
        return experts(x_TD, ids_TJ, weights_TJ, self.gate_up_proj, self.down_proj, self.situ)


class MixtureOfExperts(Fp32State):
    """Feed-forward of a MoE layer. While training it counts: `load` [E] and, for the quantile rule,
    `histogram` [E, B].

    Counts are non-persistent fp32 buffers that start at zero after every `update_router_biases`.
    (A layer recomputed by activation checkpointing counts every token twice, which neither rule notices.)
    """

    load: Tensor
    histogram: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.balance, self.update_rate = config.router_balance, config.router_bias_update_rate
        self.gate = Router(config)
        self.experts = Experts(config)
        hidden, latent, std = config.hidden_size, config.routed_expert_hidden_size, config.initializer_range
        self.latent = latent is not None
        if latent is not None:
            self.routed_expert_down_proj = Linear(hidden, latent, std)
            self.routed_expert_up_proj = Linear(latent, hidden, std)
            normed = config.latent_moe_use_norm
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if normed else None
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = SwiGLU(hidden, shared, std, config.situ) if shared else None

        # Since the last optimizer step: tokens per expert, and what the quantile rule looks at.
        self.register_buffer("load", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)
        histogram = torch.empty(config.num_experts, BINS, dtype=torch.float32)
        kept = histogram if config.router_balance == "quantile" else None
        self.register_buffer("histogram", kept, persistent=False)
        self.reset_parameters()

    def reset_counts(self) -> None:
        self.load.zero_()
        if self.histogram is not None:
            self.histogram.zero_()

    # It holds no parameters of its own; the counts start anew, as after every update of the biases.
    reset_parameters = reset_counts

    def forward(self, x_TD: Tensor, counted_T: Tensor | None = None) -> Tensor:
        """x_TD normed input -> y_TD. counted_T: bool, tokens that count for the load (None: all); all are
        computed."""
        # Dropless: every token goes to all of its experts, however full they are.
        ids_TJ, weights_TJ, scores_TE = self.gate(x_TD)
        if self.training and torch.is_grad_enabled():
            self._count(ids_TJ, scores_TE.detach(), counted_T)
        if self.latent:
            # Latent MoE (Kimi K3): the router and the shared experts see the whole width.
            y_TD = self.experts(self.routed_expert_down_proj(x_TD), ids_TJ, weights_TJ)
            y_TD = y_TD if self.routed_expert_norm is None else self.routed_expert_norm(y_TD)
            y_TD = self.routed_expert_up_proj(y_TD)
        else:
            y_TD = self.experts(x_TD, ids_TJ, weights_TJ)
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD)

    @torch.no_grad()
    def _count(self, ids_TJ: Tensor, scores_TE: Tensor, counted_T: Tensor | None) -> None:
        # Counts stay on the device; the host sees them once a step, after all micro-batches.
        weight_T1 = torch.ones_like(scores_TE[:, :1], dtype=torch.float32)
        if counted_T is not None:
            weight_T1 = weight_T1 * counted_T[:, None]
        self.load.scatter_add_(0, ids_TJ.flatten(), weight_T1.expand(-1, ids_TJ.shape[1]).flatten())
        if self.histogram is None:
            return

        # r_ij = alpha_i - s_ij, one count in expert j's histogram per token (see the file's head).
        bias, experts = self.gate.e_score_correction_bias, self.load.shape[0]
        alpha_T1 = torch.topk(scores_TE + bias, self.gate.top_k + 1, dim=-1)[0][:, -1:]
        low, step = _bin_edges(bias)
        bin_TE = ((alpha_T1 - scores_TE - low) / step).long().clamp_(0, BINS - 1)
        flat = bin_TE + torch.arange(experts, device=bin_TE.device) * BINS
        self.histogram.view(-1).scatter_add_(0, flat.flatten(), weight_T1.expand(-1, experts).flatten())

    @torch.no_grad()
    def apply_rule(self) -> None:
        bias = self.gate.e_score_correction_bias
        if self.balance == "sign":
            # no tokens: load equals its mean, sign(0) = 0
            bias.add_(torch.sign(self.load.mean() - self.load), alpha=self.update_rate)
        elif self.histogram is not None:
            # The value below which a share k / E of each row's counts lie, linear inside its bin. In float64:
            # cumulated counts of a step go beyond what float32 holds exactly.
            low, step = _bin_edges(bias)
            total_EB = self.histogram.double().cumsum(1)
            rank_E1 = self.gate.top_k / self.gate.num_experts * total_EB[:, -1:]
            bin_E1 = torch.searchsorted(total_EB, rank_E1).clamp_(max=BINS - 1)
            inside_E1 = self.histogram.gather(1, bin_E1).double()
            below_E1 = total_EB.gather(1, bin_E1) - inside_E1
            fraction_E1 = (rank_E1 - below_E1) / inside_E1.clamp(min=1.0)
            target = (low + (bin_E1 + fraction_E1) * step).squeeze(1).to(low.dtype)
            target = target - target.mean()
            bias.copy_(torch.where(self.histogram.sum() > 0, target, bias))


def _bin_edges(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """(lower edge, bin width) of the histograms; depends on b only, which stands still between two
    updates."""
    # Scores lie in 0..1, so every r lies within one of the biases.
    low, high = bias_E.min() - 1.0, bias_E.max() + 1.0
    return low, (high - low) / BINS


def moe_layers(module: nn.Module) -> list[MixtureOfExperts]:
    """Every MoE layer inside `module`, in order."""
    return [layer for layer in module.modules() if isinstance(layer, MixtureOfExperts)]


@contextmanager
def recording_routing(module: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """While open, note the experts chosen in forward passes; the yielded function returns them as [T, L, J]
    int64, for the T tokens and L MoE layers of what ran since it was last called. Not for recomputed
    (checkpointed) layers."""
    gates = [layer.gate for layer in moe_layers(module)]
    for gate in gates:
        gate.recorded = []

    def take() -> Tensor:
        chosen = [torch.cat(gate.recorded or []) for gate in gates]
        for gate in gates:
            gate.recorded = []
        return torch.stack(chosen, dim=1)

    try:
        yield take
    finally:
        for gate in gates:
            gate.recorded = None


@contextmanager
def replaying_routing(module: nn.Module, ids_TLJ: Tensor) -> Iterator[None]:
    """While open, every MoE layer of `module` chooses the given experts (int [T, L, J], any integer dtype)
    for the T tokens of the row; a token whose ids are negative chooses for itself. Recomputed layers replay
    the same.

    Raises ValueError when L is not the number of MoE layers, or (in the forward pass) T or J do not fit.
    """
    gates = [layer.gate for layer in moe_layers(module)]
    if ids_TLJ.dim() != 3 or ids_TLJ.shape[1] != len(gates):
        raise ValueError(
            f"routing {tuple(ids_TLJ.shape)}: expected [tokens, {len(gates)} MoE layers, experts per token]"
        )
    for gate, ids_TJ in zip(gates, ids_TLJ.long().unbind(1)):
        gate.replayed_TJ = ids_TJ.to(gate.weight.device)
    try:
        yield
    finally:
        for gate in gates:
            gate.replayed_TJ = None


@torch.no_grad()
def update_router_biases(
    module: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Balance all MoE layers of `module`; call once per optimizer step, after the last micro-batch.

    reduce: sums a flat fp32 tensor over ranks and returns it (None: one rank). It is called once for all
    layers. Returns, as device tensors (no sync): load_share [layers, E] (rows sum to 1) and max_violation
    [layers] = max over experts of |load / mean load - 1|; an empty dict without MoE layers. Counts start
    again from zero.
    """
    layers = moe_layers(module)
    if not layers:
        return {}
    buffers = [b for layer in layers for b in (layer.load, layer.histogram) if b is not None]

    # One collective for all layers.
    if reduce is not None:
        packed = reduce(torch.cat([b.flatten() for b in buffers]))
        for buffer, total in zip(buffers, packed.split([b.numel() for b in buffers])):
            buffer.copy_(total.view_as(buffer))

    # Move every bias, and tell what it had to mend.
    shares = []
    for layer in layers:
        layer.apply_rule()
        shares.append(layer.load / layer.load.sum().clamp(min=1.0))
        layer.reset_counts()
    share_LE = torch.stack(shares)
    violation_LE = (share_LE * share_LE.shape[1] - 1.0).abs()
    return {"load_share": share_LE, "max_violation": violation_LE.amax(1)}
