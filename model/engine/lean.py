"""The decoder for inference on a CPU in full precision, over slots and pages: one token each, or chunks of
prompts.

The same function as `Decoder.forward`, from the parts of lean_parts.py. When a prompt is read, the last layer
does only what is kept: it stores its state or latents for every token, and computes results where a prompt
ends.

With Attention Residuals the finished sources and the running sum of a block lie in one buffer [T, sources,
D]; their scores are taken when they are finished, and a mix is one softmax and one product (see
model/attnres.py).

Shapes: T tokens, B rows of a step, R rows that are asked for, D hidden, n sources, S sub-layers of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import pick
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.decoder import Decoder, DecoderLayer
from earlyfusion.model.engine.lean_feed import LeanMlp, LeanMoe
from earlyfusion.model.engine.lean_parts import LeanKda, LeanMla
from earlyfusion.model.engine.lean_weights import Scratch, norm_weight, unit
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.stores import KdaSlots, MlaPages, PooledPlan
from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.mla import MultiHeadLatentAttention

OPERATIONS = ("kda", "kda_step", "short_conv", "attnres_merge", "moe_experts")


class Mixer(Protocol):
    """LeanKda or LeanMla."""

    def refresh(self) -> None: ...
    def step(self, x_BD: Tensor, plan: PooledPlan, into: Tensor | None) -> Tensor: ...
    def read(
        self,
        x_TD: Tensor,
        segments: Segments,
        plan: PooledPlan,
        into: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor: ...


def is_lean(decoder: Decoder) -> bool:
    """On a CPU, all weights in one full precision, and no other kernels asked for by EF_KERNELS."""
    dtypes = {parameter.dtype for parameter in decoder.parameters()}
    full = dtypes in ({torch.float32}, {torch.float64})
    on_cpu = decoder.embed_tokens.weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return full and on_cpu and all(pick(op, "cpu") == "torch" for op in OPERATIONS)


class LeanDecoder:
    """See the head of the file. Holds joined copies of the weights: call `refresh` when the decoder's have
    changed."""

    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self.decoder = decoder
        self.mixers: list[Mixer] = []
        self.feeds: list[LeanMlp | LeanMoe] = []
        scratch = Scratch()
        for layer, memory in zip(decoder.layers, pools.layers):
            assert isinstance(layer, DecoderLayer)
            mixer = layer.self_attn
            if isinstance(mixer, KimiDeltaAttention) and isinstance(memory, KdaSlots):
                self.mixers.append(LeanKda(layer.input_layernorm, mixer, memory, scratch))
            elif isinstance(mixer, MultiHeadLatentAttention) and isinstance(memory, MlaPages):
                self.mixers.append(LeanMla(layer.input_layernorm, mixer, memory, scratch))
            norm = layer.post_attention_layernorm
            self.feeds.append(
                LeanMoe(norm, layer.block_sparse_moe, scratch)
                if layer.sparse
                else LeanMlp(norm, layer.mlp, scratch)
            )
        self.refresh()

    def refresh(self) -> None:
        """Join the weights again."""
        for part in (*self.mixers, *self.feeds):
            part.refresh()
        self.final_D = norm_weight(self.decoder.norm)
        self.queries: list[Tensor] = []
        if self.decoder.config.attn_res != "none":
            mixes = [mix for layer in self.decoder.layers for mix in layer.mixes()]  # type: ignore[operator]
            self.eps = mixes[0].norm.eps
            output = self.decoder.output_attn_res_query * self.decoder.output_attn_res_norm.weight
            size = self.decoder.config.sublayers_per_block()
            folded = [mix.folded().detach() for mix in mixes]
            blocks = [folded[i : i + size] for i in range(0, len(folded), size)] + [[output.detach()]]
            # with sqrt(D), so that a score is <query, x> / sqrt(sum(x^2) + D eps)
            self.queries = [torch.stack(block) * output.shape[0] ** 0.5 for block in blocks]

    def step(self, x_BD: Tensor, plan: PooledPlan) -> Tensor:
        """Hidden states after the final norm for one new token of every row. x is overwritten."""
        mix = [lambda x, into, rows, m=m: m.step(x, plan, into) for m in self.mixers]
        return self._run(x_BD, mix, None)

    def read(self, x_TD: Tensor, segments: Segments, plan: PooledPlan, rows: Tensor | None) -> Tensor:
        """Hidden states [R, D] of the rows asked for (None: of all tokens) after reading chunks. x is
        overwritten."""
        mix = [lambda x, into, rows, m=m: m.read(x, segments, plan, into, rows) for m in self.mixers]
        return self._run(x_TD, mix, rows)

    def _run(self, x: Tensor, mix: list[Callable[..., Tensor]], rows: Tensor | None) -> Tensor:
        if self.queries:
            x = self._attention_residuals(x, mix, rows)
        else:
            for index, (mixer, feed) in enumerate(zip(mix, self.feeds)):
                if rows is not None and index == len(mix) - 1:
                    x = mixer(x, x[rows], rows)
                    if not len(rows):
                        return x
                else:
                    x = mixer(x, x, None)
                x = feed(x, x)
        return unit(x, self.decoder.norm.eps).mul_(self.final_D)

    def _attention_residuals(
        self, x: Tensor, mix: list[Callable[..., Tensor]], rows: Tensor | None
    ) -> Tensor:
        (tokens, width), blocks = x.shape, self.queries[:-1]
        v_TnD = x.new_empty(tokens, len(blocks) + 1, width)
        v_TnD[:, 0] = x
        r_Tn = x.new_empty(tokens, len(blocks) + 1)
        sublayer, last = 0, 2 * (len(mix) - 1)
        for done, query_SD in enumerate(blocks, start=1):
            self._measure(v_TnD, r_Tn, done - 1)
            for index in range(query_SD.shape[0]):
                h_TD = self._mix(v_TnD, r_Tn, query_SD[index], done if index == 0 else done + 1)
                into = v_TnD[:, done]
                if index == 0:
                    into.zero_()
                if sublayer % 2:
                    self.feeds[sublayer // 2](h_TD, into)
                elif rows is not None and sublayer == last:
                    v_TnD, r_Tn = v_TnD[rows], r_Tn[rows]
                    into = v_TnD[:, done]
                    mix[-1](h_TD, into, rows)
                    if not len(rows):
                        return h_TD[:0]
                else:
                    mix[sublayer // 2](h_TD, into, None)
                if index + 1 < query_SD.shape[0]:
                    self._measure(v_TnD, r_Tn, done)
                sublayer += 1
        self._measure(v_TnD, r_Tn, len(blocks))
        return self._mix(v_TnD, r_Tn, self.queries[-1][0], len(blocks) + 1)

    def _measure(self, v_TnD: Tensor, r_Tn: Tensor, source: int) -> None:
        """1 / sqrt(sum(v^2) + D eps) of a source."""
        v_TD = v_TnD[:, source]
        r_Tn[:, source] = torch.linalg.vecdot(v_TD, v_TD).add_(v_TD.shape[1] * self.eps).rsqrt_()

    def _mix(self, v_TnD: Tensor, r_Tn: Tensor, query_D: Tensor, sources: int) -> Tensor:
        """The first `sources` sources, weighted by the softmax of their scores; every token is a small
        product of its own."""
        if sources == 1:
            return v_TnD[:, 0].clone()
        v_TnD = v_TnD[:, :sources]
        s_Tn1 = torch.bmm(v_TnD, query_D.expand(v_TnD.shape[0], -1).unsqueeze(-1))
        p_T1n = s_Tn1.squeeze(-1).mul_(r_Tn[:, :sources]).softmax(-1).unsqueeze(1)
        return torch.bmm(p_T1n, v_TnD).squeeze(1)
