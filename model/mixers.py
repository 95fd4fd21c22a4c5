"""The token mixers of a decoder layer: Kimi Delta Attention, whose state has a fixed size, and multi-head
latent attention, which looks back at all tokens.

Kimi Delta Attention: the linear-attention layer of Kimi Linear and Kimi K3.

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

Multi-head latent attention without positions (NoPE), as in Kimi Linear and, with an output gate, in Kimi
K3.

    q = W_q x, or W_qb RMSNorm(W_qa x)          [H, nope + rope]
    (c, k_r) = W_kva x ;  c := RMSNorm(c)       [R] | [rope], k_r shared by all heads, never rotated
    k_h = [W_kb_h c ; k_r],  v_h = W_vb_h c     (kv_b_proj holds W_kb and W_vb, interleaved by head)
    y = W_o [ softmax(q k^T (nope + rope)^-1/2) v  (* sigmoid(W_g x)) ]

Only (c, k_r) is cached. Cached tokens are attended in the absorbed form, which never expands keys and values:
q_h . k_h = (W_kb_h^T q_h) . c + q_r . k_r, and o_h = W_vb_h (sum_j p_j c_j). For many new tokens at once that
is more work than expanding, (2 R + rope) instead of (nope + rope + v) products a pair: where there is a
kernel for it, a chunk of a prompt expands the keys and values of its past, some heads at a time. Sources:
DeepSeek-V2 (arXiv 2405.04434) section 2.1; Kimi Linear (arXiv 2510.26692).

Shapes: T tokens (packed), D hidden, H heads, R latent rank.
"""

import math

import torch
from torch import Tensor, nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.products import linear
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import CachePlan, KdaSlots, MlaPages, Past
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.layers import Fp32State, Linear, RMSNorm


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


EXPANDED_BYTES = 1 << 29
"""Expanded keys and values that may stand in memory at once; one head at least."""


class MultiHeadLatentAttention(Fp32State):
    """Full attention inside each packed document.

    In training it tracks `max_logit` [H] fp32, the largest scaled logit per head since the last reset (start
    -inf), for QK-Clip: exact where it exceeds `qk_clip_tau`, otherwise some upper bound that does not.
    """

    max_logit: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, std, heads = config.hidden_size, config.initializer_range, config.num_attention_heads
        self.num_heads = heads
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = config.qk_head_dim, config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scale = self.qk_head_dim**-0.5

        # For QK-Clip.
        self.track_max_logit = True
        self.qk_clip_tau = 100.0

        # Queries: one projection, or two with a norm between them.
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * self.qk_head_dim, std)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, std)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.kv_norm_eps)
            self.q_b_proj = Linear(config.q_lora_rank, heads * self.qk_head_dim, std)
        self.low_rank_query = config.q_lora_rank is not None

        # Keys and values come from one latent per token, which is all that is cached.
        self.kv_a_proj_with_mqa = Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, std)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, config.kv_norm_eps)
        self.kv_b_proj = Linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), std)
        self.g_proj = Linear(hidden, heads * self.v_head_dim, std) if config.mla_output_gate else None
        self.o_proj = Linear(heads * self.v_head_dim, hidden, std)
        self.register_buffer("max_logit", torch.empty(heads, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.reset_max_logit()

    def reset_max_logit(self) -> None:
        """Start a new measurement; the optimizer calls this after it has clipped."""
        self.max_logit.fill_(float("-inf"))

    def forward(
        self,
        x_TD: Tensor,
        segments: Segments,
        past: Past[MlaPages] | None = None,
        counted_T: Tensor | None = None,
    ) -> Tensor:
        """x_TD normed input -> y_TD. With a past the latents are appended and all of them attended.

        counted_T: bool, tokens whose logits enter `max_logit` (None: all); filler must not make QK-Clip
        shrink a head.
        """
        q_THQ, c_TR, rope_T1 = self.project(x_TD)
        if past is not None:
            # Before attention: a token sees itself.
            past.memory.append(torch.cat([c_TR, rope_T1.to(c_TR.dtype)], dim=-1), past.plan)
        if past is None or past.plan.fresh:
            o_THV = self.attend(q_THQ, c_TR, rope_T1, segments, counted_T)
        elif past.plan.past is not None:
            key_segments, rows_L = past.plan.past
            o_THV = self._attend_expanded(q_THQ, past.memory.latents_XR[rows_L], segments, key_segments)
        else:
            o_THV = self._attend_cached(q_THQ, past.memory, past.plan)
        return self.output(x_TD, o_THV)

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, nope + rope], latents [T, R] and the keys that all heads share [T, rope]."""
        if self.low_rank_query:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        else:
            query = self.q_proj(x_TD)
        c_TR, rope_T1 = self.kv_a_proj_with_mqa(x_TD).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        return query.view(-1, self.num_heads, self.qk_head_dim), self.kv_a_layernorm(c_TR), rope_T1

    def output(self, x_TD: Tensor, o_THV: Tensor) -> Tensor:
        """y_TD of the heads' outputs, gated by the token itself where the model has a gate."""
        y = o_THV.flatten(1)
        if self.g_proj is not None:
            y = y * self.g_proj(x_TD).sigmoid()
        return self.o_proj(y)

    def attend(
        self,
        q_THQ: Tensor,
        c_TR: Tensor,
        rope_T1: Tensor,
        segments: Segments,
        counted_T: Tensor | None = None,
        heads: slice = slice(None),
    ) -> Tensor:
        """Attention of queries of these heads over the same tokens."""
        rows = self.qk_nope_head_dim + self.v_head_dim
        weight = self.kv_b_proj.weight.view(self.num_heads, rows, -1)[heads].flatten(0, 1)
        kv = linear(c_TR, weight).unflatten(1, (-1, rows))
        k_nope, v_THV = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        shared = rope_T1.unsqueeze(1).expand(-1, kv.shape[1], -1).to(k_nope.dtype)
        k_THQ = torch.cat([k_nope, shared], dim=-1)

        # Only training measures the largest logit.
        track = self.track_max_logit and self.training and torch.is_grad_enabled()
        o_THV, lse_TH = resolve("attention", q_THQ)(
            q_THQ, k_THQ, v_THV, segments, causal=True, scale=self.scale
        )
        if track:
            with torch.no_grad():
                if counted_T is not None:
                    # A row without a normaliser holds no maximum (kernels/attention/varlen.py).
                    lse_TH = lse_TH.masked_fill(~counted_T[:, None], float("-inf"))
                largest = resolve("max_logit", q_THQ)(
                    q_THQ, k_THQ, lse_TH, segments, causal=True, scale=self.scale, tau=self.qk_clip_tau
                )
                known_H = self.max_logit[heads]
                torch.maximum(known_H, largest, out=known_H)
        return o_THV

    def _attend_expanded(
        self, q_THQ: Tensor, latents_LR: Tensor, segments: Segments, key_segments: Segments
    ) -> Tensor:
        """Attention of every sequence's new tokens over all its latents, in the form of training: no
        gradient."""
        nope, rank = self.qk_nope_head_dim, self.kv_lora_rank
        latents_LR = latents_LR.to(q_THQ.dtype)
        c_LR, rope_L1 = latents_LR[:, :rank], latents_LR[:, None, rank:]
        weight_HYR = self.kv_b_proj.weight.view(self.num_heads, nope + self.v_head_dim, rank).to(q_THQ.dtype)
        one_head = latents_LR.shape[0] * (self.qk_head_dim + self.v_head_dim) * latents_LR.element_size()
        step = max(1, EXPANDED_BYTES // one_head)

        # Some heads at a time, so that expanded keys and values of a long past fit.
        outputs = []
        for q_ThQ, weight_hYR in zip(q_THQ.split(step, dim=1), weight_HYR.split(step)):
            kv = torch.nn.functional.linear(c_LR, weight_hYR.flatten(0, 1)).unflatten(1, weight_hYR.shape[:2])
            k_nope, v_LhV = kv.split([nope, self.v_head_dim], dim=-1)
            k_LhQ = torch.cat([k_nope, rope_L1.expand(-1, kv.shape[1], -1).to(k_nope.dtype)], dim=-1)
            attend = resolve("attention_append", q_THQ)
            outputs.append(attend(q_ThQ, k_LhQ, v_LhV, segments, key_segments, scale=self.scale))
        return torch.cat(outputs, dim=1)

    def _attend_cached(self, q_THQ: Tensor, memory: MlaPages, plan: CachePlan) -> Tensor:
        """Absorbed attention of every sequence's new tokens over all its latents."""
        nope, rank = self.qk_nope_head_dim, self.kv_lora_rank
        weight = self.kv_b_proj.weight.view(self.num_heads, nope + self.v_head_dim, rank).to(q_THQ.dtype)
        k_up_HQR, v_up_HVR = weight.split([nope, self.v_head_dim], dim=1)
        # The keys' up-projection goes to the query, once per new token in place of once per old one.
        absorbed = torch.einsum("thq,hqr->thr", q_THQ[..., :nope], k_up_HQR)
        query_THR = torch.cat([absorbed, q_THQ[..., nope:].to(absorbed.dtype)], dim=-1)
        mixed_THR = memory.attend(query_THR, plan, rank, self.scale)
        return torch.einsum("thr,hvr->thv", mixed_THR, v_up_HVR)
