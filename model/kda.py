"""Kimi Delta Attention: the linear-attention layer of Kimi Linear and Kimi K3.

    q, k, v = silu(conv4(W_q x)), silu(conv4(W_k x)), silu(conv4(W_v x))
    g = -exp(A_log) softplus(W_fb W_fa x + dt_bias)          (softplus gate), or
    g = L sigmoid(exp(A_log) (W_fb W_fa x + dt_bias))        (bounded gate, L = gate_lower_bound)
    beta = sigmoid(W_b x)
    o = kda(q, k, v, g, beta)                                (gated delta rule, kernels/kda)
    y = W_o [ RMSNorm_head(o) * sigmoid(gate(x)) ],          gate = W_gb W_ga x, or W_g x (full rank)

Source: Kimi Linear technical report (arXiv 2510.26692); parameter names and shapes of the released
checkpoint, except A_log, which is kept [H] here and [1, 1, H, 1] in the checkpoint.

Shapes: T tokens (packed), D hidden, H heads, K head dim, C = H * K channels, N sequences, W convolution
width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.products import linear
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import KdaSlots, Past
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.layers import Linear, RMSNorm


class ShortConv(nn.Module):
    """Holder of one depthwise causal kernel, weight [C, 1, W]; KimiDeltaAttention runs the three as one
    op."""

    def __init__(self, channels: int, width: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class KimiDeltaAttention(nn.Module):
    """Token mixer with a fixed-size state. A_log [H] and dt_bias [H*K] are meant to stay fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        linear, std, hidden = config.linear_attn_config, config.initializer_range, config.hidden_size
        self.num_heads, self.head_dim = linear.num_heads, linear.head_dim
        self.lower_bound = linear.gate_lower_bound
        self.full_rank_gate = linear.full_rank_output_gate
        channels = self.num_heads * self.head_dim

        # Queries, keys and values, each through a convolution over the last few tokens.
        self.q_proj = Linear(hidden, channels, std)
        self.k_proj = Linear(hidden, channels, std)
        self.v_proj = Linear(hidden, channels, std)
        self.q_conv1d = ShortConv(channels, linear.short_conv_kernel_size, std)
        self.k_conv1d = ShortConv(channels, linear.short_conv_kernel_size, std)
        self.v_conv1d = ShortConv(channels, linear.short_conv_kernel_size, std)

        # How fast each channel forgets (low rank), and how much of a new value is written.
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(channels, dtype=torch.float32))
        self.f_a_proj = Linear(hidden, self.head_dim, std)
        self.f_b_proj = Linear(self.head_dim, channels, std)
        self.b_proj = Linear(hidden, self.num_heads, std)

        # Output gate, head norm, output.
        if self.full_rank_gate:
            self.g_proj = Linear(hidden, channels, std)
        else:
            self.g_a_proj = Linear(hidden, self.head_dim, std)
            self.g_b_proj = Linear(self.head_dim, channels, std)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(channels, hidden, std)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Heads forget at different speeds; the bounded gate starts at rate 1, its lower bound sets the scale.
        if self.lower_bound is None:
            self.A_log.uniform_(1.0, 16.0).log_()
        else:
            self.A_log.zero_()
        # Log-uniform time steps over two decades; softplus^-1 in the stable form dt + log(1 - exp(-dt)).
        step = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
        step.add_(torch.log(-torch.expm1(-step)))

    def joined_weights(self) -> tuple[Tensor, Tensor]:
        """(all projections of the layer's input stacked, [.., D]; the three convolution kernels stacked, [3C,
        W])."""
        out_gate = self.g_proj if self.full_rank_gate else self.g_a_proj
        layers = (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, out_gate, self.b_proj)
        joint = torch.cat([layer.weight for layer in layers])
        return joint, torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)

    def project(self, x_TD: Tensor, joint: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [T, 3C] before the convolution, gate pre-activation [T, C], output gate [T, C], beta logits [T,
        H]."""
        channels = self.num_heads * self.head_dim
        gate_width = channels if self.full_rank_gate else self.head_dim
        # one matmul over the shared input: fewer passes over x, and in the backward one sum instead of six
        qkv, f_low, gate, beta = linear(x_TD, joint).split(
            [3 * channels, self.head_dim, gate_width, self.num_heads], dim=-1
        )
        return qkv, self.f_b_proj(f_low), gate if self.full_rank_gate else self.g_b_proj(gate), beta

    def forward(
        self,
        x_TD: Tensor,
        segments: Segments,
        past: Past[KdaSlots] | None = None,
        counted_T: Tensor | None = None,
    ) -> Tensor:
        """x_TD normed input -> y_TD. With a past the state is read, advanced and kept. counted_T: as for MLA,
        unused here."""
        heads = (self.num_heads, self.head_dim)
        if past is None:
            joint, weight = self.joined_weights()
        else:
            # In a decode step joining six weights would cost more than the product with them.
            past.memory.joined = past.memory.joined or self.joined_weights()
            joint, weight = past.memory.joined
        qkv, f, gate, beta = self.project(x_TD, joint)

        if past is not None and past.plan.places_T is None:
            o_THV = past.memory.step(self, past.plan, qkv, f, beta, weight)
        else:
            # Documents from their beginnings, or new tokens of sequences after the state they left.
            state, taps, keep = None, None, past is not None
            if past is not None and not past.plan.fresh:
                state, taps = past.memory.load(past.plan.slots_N, past.plan.last_NW[:, 0])
                taps = taps.contiguous()  # kernels take rows as they lie in memory
            qkv, taps = resolve("short_conv", x_TD)(
                qkv, weight, segments, initial_taps_NCW1=taps, output_taps=keep
            )
            q, k, v = (part.unflatten(1, heads) for part in qkv.chunk(3, dim=-1))
            o_THV, state = resolve("kda", x_TD)(
                q,
                k,
                v,
                *self.gate(f, beta),
                segments,
                lower_bound=self.lower_bound,
                initial_state_NGKV=state,
                output_final_state=keep,
            )
            if past is not None:
                past.memory.write(past.plan, state, taps)

        # Each head's output is normed and gated by the token itself.
        return self.o_proj(self.o_norm(o_THV, gate.unflatten(1, heads)).flatten(1))

    def gate(self, f: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the operations make decays and step sizes of."""
        heads = (self.num_heads, self.head_dim)
        return f.unflatten(1, heads), beta, self.A_log, self.dt_bias.view(heads)
