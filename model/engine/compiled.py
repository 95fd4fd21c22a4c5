"""Forward passes by kernels/cpu/decode.cpp: the same function as `LeanDecoder` from the same joined weights,
in one call.

A token's bits depend on its sequence alone: not on the batch, and not on how the sequence is cut into prompts
and steps.

Shapes: T rows (tokens), R results, B rows of a decode step, D hidden, S slots, P pages, L MoE layers, J
chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from earlyfusion.kernels.cpu import program as cpp
from earlyfusion.kernels.cpu.build import library
from earlyfusion.kernels.kda.naive import L2_EPS
from earlyfusion.model.engine.lean import LeanDecoder
from earlyfusion.model.engine.lean_feed import LeanMlp, LeanMoe
from earlyfusion.model.engine.lean_parts import LeanKda, LeanMla
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.stores import KdaSlots

MOST_BYTES = 1 << 30
"""Weights of at most so many bytes are copied into the layout of decode.cpp."""


def can_compile(lean: LeanDecoder) -> bool:
    """float32, a model of moderate size, states by slot, and a library."""
    weights = list(lean.decoder.parameters())
    if (
        any(weight.dtype != torch.float32 for weight in weights)
        or 4 * sum(w.numel() for w in weights) > MOST_BYTES
    ):
        return False
    stored = all(type(part.memory) is KdaSlots for part in lean.mixers if isinstance(part, LeanKda))
    return stored and library() is not None


class CompiledDecoder:
    """See the head of the file. Holds copies of the lean decoder's weights: call `refresh` after its own
    `refresh`."""

    def __init__(self, lean: LeanDecoder, pools: Pools) -> None:
        self.lean, self.pools = lean, pools
        self.refresh()

    def refresh(self) -> None:
        """Lay out the weights again."""
        lean = self.lean
        blocks = lean.queries[:-1]
        self.program = cpp.Program(lean.final_D.shape[0], len(blocks) + 1)
        self.routers = [part.layer.gate for part in lean.feeds if isinstance(part, LeanMoe)]
        parts = (part for pair in zip(lean.mixers, lean.feeds) for part in pair)
        if blocks:
            last = self._attention_residuals(blocks, parts)
        else:
            last = 0
            for part in parts:
                self._sublayer(part, cpp.Place(0, 0, 0, part is lean.mixers[-1]))
        norm = lean.decoder.norm
        self.program.add(cpp.Finish(last, norm.eps, self.program.keep(lean.final_D.contiguous())))
        self.program.build()
        self.head = self.program.matrix(lean.decoder.head_weight().T)

    def _attention_residuals(self, blocks: list[Tensor], parts: Iterator[object]) -> int:
        """As `LeanDecoder._attention_residuals`; returns what the final norm reads."""
        for done, query_SD in enumerate(blocks, start=1):
            self._measure(done - 1)
            for index in range(query_SD.shape[0]):
                self._mix(query_SD[index], done if index == 0 else done + 1)
                part = next(parts)
                self._sublayer(part, cpp.Place(-1, done, index == 0, part is self.lean.mixers[-1]))
                if index + 1 < query_SD.shape[0]:
                    self._measure(done)
        self._measure(len(blocks))
        self._mix(self.lean.queries[-1][0], len(blocks) + 1)
        return -1

    def _measure(self, source: int) -> None:
        self.program.add(cpp.Measure(source, self.lean.eps))

    def _mix(self, query_D: Tensor, sources: int) -> None:
        self.program.add(cpp.Mix(sources, self.program.keep(query_D.contiguous())))

    def _sublayer(self, part: object, place: cpp.Place) -> None:
        if isinstance(part, LeanKda):
            self._kda(part, place)
        elif isinstance(part, LeanMla):
            self._mla(part, place)
        elif isinstance(part, LeanMoe):
            self._moe(part, place)
        elif isinstance(part, LeanMlp):
            matrices = (self.program.matrix(part.gate_up), self.program.matrix(part.down))
            self.program.add(cpp.Mlp(place, part.norm.eps, *matrices))

    def _kda(self, part: LeanKda, place: cpp.Place) -> None:
        layer, matrix, keep = part.layer, self.program.matrix, self.program.keep
        # the head norm sees an output that still lacks the factor dim^-1/2
        eps = (part.norm.eps, L2_EPS, layer.o_norm.eps * layer.head_dim, layer.lower_bound or 0.0)
        self.program.add(
            cpp.Kda(
                place,
                *eps,
                layer.num_heads,
                layer.head_dim,
                part.conv_WC.shape[0] - 1,
                matrix(part.joint),
                matrix(part.f_up),
                matrix(part.gate_up),
                matrix(part.out),
                keep(part.conv_WC),
                keep(part.bias_C),
                keep(part.rate_C),
                keep(part.memory.state_SHKV),
                keep(part.memory.taps_SWC),
            )
        )

    def _mla(self, part: LeanMla, place: cpp.Place) -> None:
        layer, matrix, keep = part.layer, self.program.matrix, self.program.keep
        low = layer.q_a_layernorm if layer.low_rank_query else None
        self.program.add(
            cpp.Mla(
                place,
                part.norm.eps,
                low.eps if low is not None else 0.0,
                layer.kv_a_layernorm.eps,
                layer.num_heads,
                layer.kv_lora_rank,
                layer.qk_rope_head_dim,
                0 if part.absorbed else layer.qk_nope_head_dim,
                layer.v_head_dim,
                0 if low is None else low.weight.shape[0],
                layer.g_proj is not None,
                matrix(part.joint),
                matrix(part.store),
                matrix(part.query_low),
                matrix(None if part.absorbed else part.k_up),
                matrix(None if part.out_absorbed else part.v_up.transpose(1, 2)),
                matrix(part.out),
                keep(part.latent_R.contiguous()),
                keep(part.memory.latents_XR),
            )
        )

    def _moe(self, part: LeanMoe, place: cpp.Place) -> None:
        gate, experts = part.layer.gate, part.layer.experts
        matrix, keep = self.program.matrix, self.program.keep
        self.program.add(
            cpp.Moe(
                place,
                part.norm.eps,
                gate.scaling,
                gate.num_experts,
                gate.top_k,
                gate.renormalize,
                self.routers.index(gate),
                keep(part.norm_D.contiguous()),
                keep(gate.e_score_correction_bias),
                matrix(part.joint),
                matrix(experts.gate_up_proj.transpose(1, 2)),
                matrix(experts.down_proj.transpose(1, 2)),
                matrix(part.shared_down),
            )
        )

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states."""
        return self.program.logits(self.head, hidden_RD.contiguous(), torch.get_num_threads())

    def run(
        self,
        x_TD: Tensor,
        slots_T: Tensor,
        positions_T: Tensor,
        places_T: Tensor,
        starts: Sequence[int],
        table_SP: Tensor,
        results: int,
    ) -> Tensor:
        """Hidden states [results, D] after the final norm, those that no row has a place for zero.

        The rows of a sequence stand together in the order of its tokens. int64: slots_T; positions_T, tokens
        before each in its sequence; places_T, rows of the result (-1: not asked for). starts: first row of
        every sequence and the number of rows. table_SP: pages by slot.
        """
        arguments = (table_SP, self.pools.page_size, x_TD)
        if not any(router.recorded is not None for router in self.routers):
            step, out_RD = cpp.step_of(slots_T, positions_T, places_T, *arguments, results)
            self.program.run(step, starts, torch.get_num_threads())
            return out_RD
        rows = x_TD.shape[0]  # all of them go through all layers
        chosen_LTJ = torch.zeros(len(self.routers), rows, self.routers[0].top_k, dtype=torch.long)
        step, out_TD = cpp.step_of(slots_T, positions_T, torch.arange(rows), *arguments, rows, chosen_LTJ)
        self.program.run(step, starts, torch.get_num_threads())
        for router, chosen_TJ in zip(self.routers, chosen_LTJ):
            if router.recorded is not None:
                router.recorded.append(chosen_TJ)
        asked = places_T >= 0
        return out_TD.new_zeros(results, out_TD.shape[1]).index_copy_(0, places_T[asked], out_TD[asked])
