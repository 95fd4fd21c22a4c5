"""Mixers of the decoder for inference on a CPU in full precision: few operations, joined weights, states in
place.

The modules in model/ are written for training. Generation calls each sub-layer once per token with a few
dozen rows, where the number of operations and of passes over the states decides. So here

* projections of one input are one product; the weights of the norms in front of them are multiplied in, and a
  norm is its `unit` alone: x / sqrt(sum(x^2) + size eps), with sqrt(size) in the weights, too;
* a sub-layer adds its result to the residual stream by its last product (`into`);
* KDA states and convolution taps are updated where they lie when the running slots follow one another;
* absorbed MLA multiplies its up-projections into the projections around them where that costs little.

The joined weights are copies: call `refresh` when the model's have changed. Equality with the modules is
tested in tests/model/test_engine_lean.py, equality of bits whatever the batch in
tests/model/test_engine_invariance.py.

Shapes: B rows, T tokens, N live rows, D hidden, H heads, K = V head dim, C = H K, W width of the convolution,
R latent width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.kda.naive import L2_EPS
from earlyfusion.kernels.kda.step import conv_step_, kda_step_
from earlyfusion.kernels.products import product
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.lean_weights import Scratch, add_product, joined, norm_weight, unit
from earlyfusion.model.engine.stores import KdaSlots, MlaPages, PooledPlan
from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.mla import MultiHeadLatentAttention
from earlyfusion.model.norm import RMSNorm

ABSORB_UP_TO = 1.5
"""Up-projections are multiplied in while the products get no more than this factor larger."""


class LeanKda:
    """KimiDeltaAttention and its pre-norm."""

    def __init__(self, norm: RMSNorm, layer: KimiDeltaAttention, memory: KdaSlots, scratch: Scratch) -> None:
        self.norm, self.layer, self.memory, self.scratch = norm, layer, memory, scratch
        self.refresh()

    def refresh(self) -> None:
        layer = self.layer
        joint, self.conv_CW = layer.joined_weights()
        self.conv_CW = self.conv_CW.detach()
        self.conv_WC = self.conv_CW.T.contiguous()
        self.joint = joined(norm_weight(self.norm), joint)
        self.f_up = layer.f_b_proj.weight.detach().T
        self.gate_up = None if layer.full_rank_gate else layer.g_b_proj.weight.detach().T
        self.bias_C = layer.dt_bias.detach().to(joint.dtype)
        rate_H = layer.A_log.detach().exp().to(joint.dtype)
        self.rate_C = rate_H.repeat_interleave(layer.head_dim)
        self.minus_rate_C = -self.rate_C
        self.out = joined(norm_weight(layer.o_norm).repeat(layer.num_heads), layer.o_proj.weight)
        channels = layer.num_heads * layer.head_dim
        gate = channels if layer.full_rank_gate else layer.head_dim
        self.widths = [3 * channels, layer.head_dim, gate, layer.num_heads]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv before the convolution, low-rank gate input, output gate (low-rank unless it is full), beta
        logits."""
        qkv, f_low, gate, b = self.scratch.product(unit(x, self.norm.eps), self.joint).split(
            self.widths, dim=-1
        )
        return qkv, f_low, gate, b

    def _finish(self, o_THV: Tensor, gate: Tensor, scale: float, into: Tensor | None) -> Tensor:
        """Gated head norm and output projection; o still lacks the factor `scale`."""
        if self.gate_up is not None:
            gate = product(gate, self.gate_up)
        o = unit(o_THV, self.layer.o_norm.eps / scale**2).flatten(1).mul_(gate.sigmoid())
        return add_product(o, self.out, into)

    def step(self, x_BD: Tensor, plan: PooledPlan, into: Tensor | None) -> Tensor:
        """One token of each sequence."""
        layer, heads, dim = self.layer, self.layer.num_heads, self.layer.head_dim
        qkv_BX, f_low, gate, b_BH = self._project(x_BD)
        rows = qkv_BX.shape[0]
        state_NHKV, taps_NWC = self.memory.open(plan)
        y_BX = conv_step_(qkv_BX, self.conv_WC, taps_NWC)
        pair = y_BX.view(rows, 3, heads, dim)
        f_BC = torch.addmm(self.bias_C, f_low, self.f_up)
        if layer.lower_bound is None:
            f_BC = F.softplus(f_BC).mul_(self.minus_rate_C)
        else:
            f_BC = f_BC.mul_(self.rate_C).sigmoid_().mul_(layer.lower_bound)
        o_BHV = kda_step_(pair, f_BC.exp_().view(rows, heads, dim), b_BH.sigmoid(), state_NHKV, L2_EPS)
        self.memory.close(plan, state_NHKV, taps_NWC)
        return self._finish(o_BHV, gate, dim**-0.5, into)

    def read(
        self,
        x_TD: Tensor,
        segments: Segments,
        plan: PooledPlan,
        into: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Tokens of prompts; with `rows`, results of these alone (`into` holds as many)."""
        layer = self.layer
        heads = (x_TD.shape[0], layer.num_heads, layer.head_dim)
        qkv, f_low, gate, b_TH = self._project(x_TD)
        state, taps = self.memory.read(plan)
        qkv, taps = resolve("short_conv", "cpu")(
            qkv, self.conv_CW, segments, initial_taps_NCW1=taps, output_taps=True
        )
        q, k, v = (part.view(heads) for part in qkv.chunk(3, dim=-1))
        o_THV, state = resolve("kda", "cpu")(
            q,
            k,
            v,
            product(f_low, self.f_up).view(heads),
            b_TH,
            layer.A_log,
            layer.dt_bias.view(heads[1:]),
            segments,
            lower_bound=layer.lower_bound,
            initial_state_NGKV=state,
            output_final_state=True,
        )
        self.memory.write(plan, state, taps)
        if rows is not None:
            if not len(rows):
                return x_TD[:0]
            o_THV, gate = o_THV[rows], gate[rows]
        return self._finish(o_THV, gate, 1.0, into)


class LeanMla:
    """MultiHeadLatentAttention over its latents and its pre-norm."""

    def __init__(
        self, norm: RMSNorm, layer: MultiHeadLatentAttention, memory: MlaPages, scratch: Scratch
    ) -> None:
        self.norm, self.layer, self.memory, self.scratch = norm, layer, memory, scratch
        self.refresh()

    def refresh(self) -> None:
        layer, heads, nope, rank = (
            self.layer,
            self.layer.num_heads,
            self.layer.qk_nope_head_dim,
            self.layer.kv_lora_rank,
        )
        norm_D = norm_weight(self.norm)
        up = layer.kv_b_proj.weight.detach().view(heads, nope + layer.v_head_dim, rank)
        self.k_up, self.v_up = up.split([nope, layer.v_head_dim], dim=1)
        query = layer.q_b_proj.weight if layer.low_rank_query else layer.q_proj.weight
        query_HQD = query.detach().view(heads, layer.qk_head_dim, -1) * layer.scale
        inner, width = query_HQD.shape[2], rank + layer.qk_rope_head_dim
        self.absorbed = heads * width * inner <= ABSORB_UP_TO * heads * (
            layer.qk_head_dim * inner + nope * rank
        )
        if self.absorbed:
            absorbed = torch.bmm(self.k_up.transpose(1, 2), query_HQD[:, :nope])
            query_HQD = torch.cat([absorbed, query_HQD[:, nope:]], dim=1)
        query = query_HQD.flatten(0, 1)
        self.query_low = None
        weights, self.widths = [query], [query.shape[0]]
        if layer.low_rank_query:
            weights, self.widths = [layer.q_a_proj.weight], [layer.q_a_proj.weight.shape[0]]
            self.query_low = joined(norm_weight(layer.q_a_layernorm), query)
        weights.append(layer.kv_a_proj_with_mqa.weight)
        self.widths.append(width)
        if layer.g_proj is not None:
            weights.append(layer.g_proj.weight)
            self.widths.append(layer.g_proj.weight.shape[0])
        self.joint = joined(norm_D, *weights)
        self.store = joined(norm_D, layer.kv_a_proj_with_mqa.weight)
        self.latent_R = norm_weight(layer.kv_a_layernorm)
        out_DHV = layer.o_proj.weight.detach().view(-1, heads, layer.v_head_dim)
        hidden, value = out_DHV.shape[0], layer.v_head_dim
        short = rank * hidden <= ABSORB_UP_TO * (value * hidden + rank * value)
        self.out_absorbed = layer.g_proj is None and short
        if self.out_absorbed:
            self.out = (
                torch.bmm(out_DHV.transpose(0, 1), self.v_up).transpose(1, 2).reshape(heads * rank, hidden)
            )
        else:
            self.out = layer.o_proj.weight.detach().T

    def _latents(self, kv_TR: Tensor) -> Tensor:
        """Norm the latent part of (latent, shared key part), in place."""
        latent = kv_TR[:, : self.layer.kv_lora_rank]
        scale_T1 = (
            torch.linalg.vecdot(latent, latent).add_(latent.shape[1] * self.layer.kv_a_layernorm.eps).rsqrt_()
        )
        latent.mul_(scale_T1.unsqueeze(-1)).mul_(self.latent_R)
        return kv_TR

    def _query(self, query: Tensor) -> Tensor:
        """Absorbed and scaled queries [T, H, R]."""
        layer = self.layer
        if self.query_low is not None:
            query = product(unit(query, layer.q_a_layernorm.eps), self.query_low)
        query = query.view(query.shape[0], layer.num_heads, -1)
        if self.absorbed:
            return query
        nope = layer.qk_nope_head_dim
        absorbed = torch.einsum("thq,hqr->thr", query[..., :nope], self.k_up)
        return torch.cat([absorbed, query[..., nope:]], dim=-1)

    def _finish(self, mixed_THR: Tensor, gate: Tensor | None, into: Tensor | None) -> Tensor:
        if self.out_absorbed:
            return add_product(mixed_THR.flatten(1), self.out, into)
        y = torch.einsum("thr,hvr->thv", mixed_THR, self.v_up).flatten(1)
        return add_product(y if gate is None else y.mul_(gate.sigmoid()), self.out, into)

    def step(self, x_BD: Tensor, plan: PooledPlan, into: Tensor | None) -> Tensor:
        """One token of each sequence."""
        query, kv, *gate = self.scratch.product(unit(x_BD, self.norm.eps), self.joint).split(
            self.widths, dim=-1
        )
        self.memory.append(self._latents(kv), plan)
        mixed = self.memory.attend(self._query(query), plan, self.layer.kv_lora_rank, 1.0)
        return self._finish(mixed, gate[0] if gate else None, into)

    def read(
        self,
        x_TD: Tensor,
        segments: Segments,
        plan: PooledPlan,
        into: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Tokens of prompts; with `rows`, results of these alone: `plan.ends` tells what they see."""
        if rows is None:
            return self.step(x_TD, plan, into)
        x = unit(x_TD, self.norm.eps)
        self.memory.append(self._latents(product(x, self.store)), plan)
        if not len(rows):
            return x_TD[:0]
        assert plan.ends is not None
        query, _, *gate = product(x[rows], self.joint).split(self.widths, dim=-1)
        mixed = self.memory.attend(self._query(query), plan.ends, self.layer.kv_lora_rank, 1.0)
        return self._finish(mixed, gate[0] if gate else None, into)
