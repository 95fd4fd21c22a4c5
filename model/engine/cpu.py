"""Forward passes by kernels/cpu/decode.cpp, on a CPU in float32: the same function as `Decoder.forward` in
one call, from joined weights.

* Projections of one input are one product. The weight of the norm in front of them is multiplied in, and
  sqrt(size) with it: the norm is then x / sqrt(sum(x^2) + size eps) alone.
* Absorbed MLA multiplies its up-projections into the projections around them where that costs little.
* The last layer of a prompt does only what is kept; results are computed where they are asked for.

A token's bits depend on its sequence alone: not on the batch, and not on how the sequence is cut into prompts
and steps. Equality with the modules is tested in tests/model/test_engine_compiled.py.

Shapes: T rows (tokens), R results, D hidden, H heads, K key dim, V value dim, Q query dim, C channels, W
width of the convolution, S slots (of queries: sub-layers of a block), P pages, L MoE layers, J chosen
experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.cpu import program as cpp
from earlyfusion.kernels.cpu.program import library
from earlyfusion.kernels.kda.naive import L2_EPS
from earlyfusion.model.cache import KdaSlots, MlaPages, Pools, RingSlots
from earlyfusion.model.decoder import Decoder, Mix
from earlyfusion.model.engine.scheduler import Part
from earlyfusion.model.layers import MixtureOfExperts, RMSNorm, SwiGLU, moe_layers
from earlyfusion.model.mixers import KimiDeltaAttention, MultiHeadLatentAttention

ABSORB_UP_TO = 1.5
"""Up-projections are multiplied in while the products get no more than this factor larger."""
SHARE_OF_MEMORY = 0.5
"""The joined weights are copies: they may take so much of the memory that is free."""


def can_compile(decoder: Decoder, pools: Pools) -> bool:
    """float32 on a CPU, states by slot, SwiGLU on the whole width, a library, and memory for a copy of the
    weights."""
    if decoder.config.situ is not None or decoder.config.routed_expert_hidden_size is not None:
        return False
    # The joined weights are copies in another layout: both stand in memory.
    needed = 0
    for weight in decoder.parameters():
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            return False
        needed += weight.nbytes
    # Rings are for the decode kernel: their states are transposed.
    in_rings = any(isinstance(memory, RingSlots) for memory in pools.layers)
    return not in_rings and library() is not None and needed <= SHARE_OF_MEMORY * free_memory()


def free_memory() -> int:
    """Bytes that a process may take without pushing others out; all of the machine's where it does not
    say."""
    try:
        told = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        told = None
    if told is not None:
        return int(told[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _norm_weight(norm: RMSNorm) -> Tensor:
    return norm.weight * norm.weight.shape[0] ** 0.5


def _joined(norm_D: Tensor, *weights: Tensor) -> Tensor:
    """[D, sum of rows]: projections of one normed input, stacked and transposed, the norm multiplied in."""
    return torch.cat(weights).mul_(norm_D).T


@dataclass(frozen=True)
class TokenRows:
    """Tokens as rows, as `CompiledDecoder.run` wants them: those of a sequence together, in order.

    int64: slots_T; positions_T, tokens before each in its sequence; places_T, the row of the result that is
    to hold what comes of it (-1: nobody asks). starts: first row of every sequence, and the number of rows.
    """

    slots_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    starts: Sequence[int]
    results: int

    @classmethod
    def of(cls, parts: Sequence[Part], rows: Sequence[int]) -> TokenRows:
        """rows: those that are asked for, in the order of the result."""
        lengths = [part.stop - part.start for part in parts]
        starts = [0, *accumulate(lengths)]
        slots = torch.tensor([part.sample.slot for part in parts])
        positions = [torch.arange(part.start, part.stop) for part in parts]
        # Results are computed only where somebody asks: the last layer skips the other rows.
        places_T = torch.full((starts[-1],), -1)
        places_T[list(rows)] = torch.arange(len(rows))
        slots_T = slots.repeat_interleave(torch.tensor(lengths))
        return cls(slots_T, torch.cat(positions), places_T, starts, len(rows))


class CompiledDecoder:
    """See the head of the file. Holds copies of the decoder's weights: call `refresh` when they change."""

    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self.decoder, self.pools = decoder, pools
        # Recording of routing goes around the modules, so the routers' lists are filled from here.
        self.routers = [layer.gate for layer in moe_layers(decoder)]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Lay out the weights again."""
        decoder = self.decoder
        layers: list[Any] = list(decoder.layers)
        # Of the residual stream there is one block, whose sub-layers read and add to source 0. With Attention
        # Residuals source 0 is the embedding, source i the sum of block i, and each sub-layer reads a mix.
        mixes: list[Mix] = []
        size = count = 2 * len(layers)
        if decoder.config.attn_res != "none":
            size = decoder.sublayers_per_block
            for layer in layers:
                mixes += layer.mixes()
        blocks = -(-len(mixes) // size)
        self.program = program = cpp.Program(decoder.config.hidden_size, 1 + blocks)

        # A folded query carries sqrt(D), so that a score is <query, x> / sqrt(sum(x^2) + D eps).
        def mix(sources: int, query_D: Tensor) -> None:
            scaled_D = (query_D * query_D.shape[0] ** 0.5).contiguous()
            program.add(cpp.Measure(sources - 1, mixes[0].norm.eps))
            program.add(cpp.Mix(sources, program.keep(scaled_D)))

        for index in range(count):
            block, inside = divmod(index, size)
            place = cpp.Place(0, 0, 0, index == count - 2)
            if mixes:
                mix(1 + block + (inside > 0), mixes[index].folded())
                place = cpp.Place(-1, block + 1, inside == 0, index == count - 2)
            self._sublayer(layers[index // 2], self.pools.layers[index // 2], index % 2 == 0, place)
        if mixes:
            mix(1 + blocks, decoder.output_attn_res_query * decoder.output_attn_res_norm.weight)
        final = program.keep(_norm_weight(decoder.norm).contiguous())
        program.add(cpp.Finish(-1 if mixes else 0, decoder.norm.eps, final))
        program.build()
        self.head = program.matrix(decoder.head_weight().T)

    def _sublayer(self, layer: Any, memory: Any, mixes: bool, place: cpp.Place) -> None:
        """The token mixer of a layer, or its feed-forward."""
        norm = layer.input_layernorm if mixes else layer.post_attention_layernorm
        if mixes and layer.kind == "kda":
            self._kda(norm, layer.self_attn, memory, place)
        elif mixes:
            self._mla(norm, layer.self_attn, memory, place)
        elif layer.sparse:
            self._moe(norm, layer.block_sparse_moe, place)
        else:
            self._mlp(norm, layer.mlp, place)

    # ---- the weights of a sub-layer

    def _kda(self, norm: RMSNorm, layer: KimiDeltaAttention, memory: KdaSlots, place: cpp.Place) -> None:
        matrix, keep = self.program.matrix, self.program.keep
        joint, conv_CW = layer.joined_weights()
        # One rate per channel, so that the C++ needs no head index in its inner loop.
        rate_C = layer.A_log.exp().repeat_interleave(layer.head_dim)
        # The head norm's weight goes into the output projection, repeated for every head.
        head_norm_C = _norm_weight(layer.o_norm).repeat(layer.num_heads)
        self.program.add(
            cpp.Kda(
                place=place,
                eps=norm.eps,
                qk_eps=L2_EPS,
                # the head norm sees an output that still lacks the factor dim^-1/2
                out_eps=layer.o_norm.eps * layer.head_dim,
                lower_bound=layer.lower_bound or 0.0,
                heads=layer.num_heads,
                dim=layer.head_dim,
                taps=conv_CW.shape[1] - 1,
                index=sum(isinstance(each, cpp.Kda) for each in self.program.operations),
                joint=matrix(_joined(_norm_weight(norm), joint)),
                f_up=matrix(layer.f_b_proj.weight.T),
                gate_up=matrix(None if layer.full_rank_gate else layer.g_b_proj.weight.T),
                out=matrix(_joined(head_norm_C, layer.o_proj.weight)),
                conv=keep(conv_CW.T.contiguous()),
                bias=keep(layer.dt_bias),
                rate=keep(rate_C),
                state=keep(memory.state_SHKV),
                past=keep(memory.taps_SRC),
            )
        )

    def _mla(
        self, norm: RMSNorm, layer: MultiHeadLatentAttention, memory: MlaPages, place: cpp.Place
    ) -> None:
        heads, nope, rank = layer.num_heads, layer.qk_nope_head_dim, layer.kv_lora_rank
        norm_D = _norm_weight(norm)
        # Views of one weight: keys' and values' up-projections of every head.
        up = layer.kv_b_proj.weight.view(heads, nope + layer.v_head_dim, rank)
        k_up_HQR, v_up_HVR = up.split([nope, layer.v_head_dim], dim=1)
        latents = layer.kv_a_proj_with_mqa.weight

        # Queries carry the softmax's scale, and the keys' up-projection where that is cheap.
        query = layer.q_b_proj.weight if layer.low_rank_query else layer.q_proj.weight
        query_HQD = query.view(heads, layer.qk_head_dim, -1) * layer.scale
        inner, width = query_HQD.shape[2], latents.shape[0]
        absorbed = width * inner <= ABSORB_UP_TO * (layer.qk_head_dim * inner + nope * rank)
        if absorbed:
            in_latents = torch.bmm(k_up_HQR.transpose(1, 2), query_HQD[:, :nope])
            query_HQD = torch.cat([in_latents, query_HQD[:, nope:]], dim=1)
        query, query_low = query_HQD.flatten(0, 1), None
        low_eps, low_width = 0.0, 0
        if layer.low_rank_query:
            low_eps, low_width = layer.q_a_layernorm.eps, layer.q_a_layernorm.weight.shape[0]
            query_low = _joined(_norm_weight(layer.q_a_layernorm), query)
            query = layer.q_a_proj.weight
        gate = [] if layer.g_proj is None else [layer.g_proj.weight]

        # So does the output projection with the values' up-projection, unless a gate stands between them.
        out_DHV = layer.o_proj.weight.view(-1, heads, layer.v_head_dim)
        hidden, value = out_DHV.shape[0], layer.v_head_dim
        out_absorbed = not gate and rank * hidden <= ABSORB_UP_TO * (value * hidden + rank * value)
        out = layer.o_proj.weight.T
        if out_absorbed:
            out = torch.bmm(out_DHV.transpose(0, 1), v_up_HVR).transpose(1, 2).reshape(heads * rank, hidden)

        matrix, keep = self.program.matrix, self.program.keep
        self.program.add(
            cpp.Mla(
                place=place,
                eps=norm.eps,
                query_eps=low_eps,
                latent_eps=layer.kv_a_layernorm.eps,
                heads=heads,
                rank=rank,
                shared=layer.qk_rope_head_dim,
                nope=0 if absorbed else nope,
                value=value,
                low=low_width,
                gated=bool(gate),
                joint=matrix(_joined(norm_D, query, latents, *gate)),
                store=matrix(_joined(norm_D, latents)),
                query=matrix(query_low),
                k_up=matrix(None if absorbed else k_up_HQR),
                v_up=matrix(None if out_absorbed else v_up_HVR.transpose(1, 2)),
                out=matrix(out),
                latent_norm=keep(_norm_weight(layer.kv_a_layernorm).contiguous()),
                latents=keep(memory.latents_XR),
            )
        )

    def _mlp(self, norm: RMSNorm, layer: SwiGLU, place: cpp.Place) -> None:
        gate_up = _joined(_norm_weight(norm), layer.gate_proj.weight, layer.up_proj.weight)
        matrices = (self.program.matrix(gate_up), self.program.matrix(layer.down_proj.weight.T))
        self.program.add(cpp.Mlp(place, norm.eps, *matrices))

    def _moe(self, norm: RMSNorm, layer: MixtureOfExperts, place: cpp.Place) -> None:
        gate, experts, shared = layer.gate, layer.experts, layer.shared_experts
        shared_down = None
        # Router and shared experts read the same input: one product for both.
        joint: list[Tensor] = [gate.weight]
        if shared is not None:
            joint += [shared.gate_proj.weight, shared.up_proj.weight]
            shared_down = shared.down_proj.weight.T
        matrix, keep = self.program.matrix, self.program.keep
        self.program.add(
            cpp.Moe(
                place=place,
                eps=norm.eps,
                scaling=gate.scaling,
                experts=gate.num_experts,
                choices=gate.top_k,
                renormalize=gate.renormalize,
                index=self.routers.index(gate),
                norm=keep(_norm_weight(norm).contiguous()),
                bias=keep(gate.e_score_correction_bias),
                joint=matrix(torch.cat(joint).T),
                up=matrix(experts.gate_up_proj.transpose(1, 2)),
                down=matrix(experts.down_proj.transpose(1, 2)),
                shared_down=matrix(shared_down),
            )
        )

    # ---- running it

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states."""
        return self.program.logits(self.head, hidden_RD.contiguous(), torch.get_num_threads())

    def run(self, x_TD: Tensor, rows: TokenRows, table_SP: Tensor, drafts: bool = False) -> Tensor:
        """Hidden states [results, D] after the final norm, those that no row has a place for zero.

        table_SP: pages by slot. drafts: `settle` will say how many tokens of each sequence there have been.
        """
        # While routing is recorded, all rows go through all layers.
        recording = any(router.recorded is not None for router in self.routers)
        places_T, results, chosen_LTJ = rows.places_T, rows.results, None
        if recording:
            results = len(x_TD)
            places_T = torch.arange(results)
            chosen_LTJ = torch.zeros(len(self.routers), results, self.routers[0].top_k, dtype=torch.long)
        step, out_RD = cpp.step_of(
            rows.slots_T,
            rows.positions_T,
            places_T,
            table_SP,
            self.pools.page_size,
            x_TD,
            results,
            chosen_LTJ,
        )
        if drafts:
            self.program.keep_drafts(step, rows.starts)
            self._drafted = step, rows.starts
        self.program.run(step, rows.starts, torch.get_num_threads())
        if chosen_LTJ is None:
            return out_RD

        for router, chosen_TJ in zip(self.routers, chosen_LTJ):
            if router.recorded is not None:
                router.recorded.append(chosen_TJ)
        wanted = rows.places_T >= 0
        kept_RD = out_RD.new_zeros(rows.results, out_RD.shape[1])
        return kept_RD.index_copy_(0, rows.places_T[wanted], out_RD[wanted])

    def settle(self, counts: Sequence[int]) -> None:
        """Of the last `run` with drafts: so many tokens of each sequence have been, the first ones. Latents
        of the others are written over, or behind the end of what anybody reads."""
        step, starts = self._drafted
        short = []
        for (first, end), count in zip(pairwise(starts), counts):
            if count < end - first:
                short.append((first, count))
        if short:
            first_N, counts_N = torch.tensor(short).T.contiguous()
            self.program.rewind(step, first_N, counts_N, torch.get_num_threads())
