"""The text decoder: KDA and MLA layers 3:1, dense or MoE feed-forward, plain residual stream or Attention
Residuals.

    plain        x += mixer(norm(x));  x += feed_forward(norm(x))
    attn_res     each sub-layer chooses, per token, which earlier outputs it reads

It takes embeddings, not ids: text and image features have been put together before (model/fusion.py). Packed
rows: T tokens of several documents, which never see each other.

Attention Residuals. With sources v_0 (the embedding), v_1, ... and one learned pseudo-query w and key-norm
weight g per sub-layer,

    h = sum_i p_i v_i,    p = softmax_i( <w * g, v_i / rms(v_i)> )        (values are not normalised)

replaces the residual stream. In block form the sub-layer outputs inside a block are summed, and the sources
of a sub-layer are b_0 = embedding, the finished block sums b_1 .. b_{n-1}, and the partial sum of its own
block (absent for the block's first sub-layer). After the last block one more (w, g) mixes all block sums.
Full AttnRes is blocks of one sub-layer. The very first sub-layer has a single source, so its mix is the
identity (and its w and g get gradients that are exactly zero, not missing ones).

How a block is computed (phase 1 for all its sub-layers, then merges) stands in kernels/attnres/naive.py.
Source: Attention Residuals (arXiv 2603.15031) section 3, algorithm 1; Kimi K3 (arXiv 2607.24653) section 2.2.

Shapes: T tokens, D hidden, V vocabulary, S sub-layers of a block, n sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from earlyfusion.kernels.attnres.two_phase import SubLayer
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import Past
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.layers import Embedding, Linear, MixtureOfExperts, RMSNorm, SwiGLU, at_least_fp32
from earlyfusion.model.mixers import KimiDeltaAttention, MultiHeadLatentAttention


@dataclass(frozen=True)
class Mix:
    """One place where sources are mixed: the pseudo-query w [D], the key norm that holds g [D], a name for
    reports."""

    name: str
    query_D: nn.Parameter
    norm: RMSNorm

    def folded(self) -> Tensor:
        """w * g [D] in fp32: only the product matters to the weights."""
        # Folded once per block: the kernels then read one vector where the paper has two.
        return at_least_fp32(self.query_D) * at_least_fp32(self.norm.weight)


@dataclass
class MixRecorder:
    """Mean mixing weights of every mix, split by token masks; for reports, never during training.

    masks: name -> bool [T]. After a decoder pass `rows[i]` is (name of the mix, {mask name: weights [n]
    fp32}), where source 0 is the embedding, the next ones the finished blocks; `has_partial[i]` tells that
    the last source is the running sum of the mix's own block. A mask without tokens yields NaN.
    """

    masks: dict[str, Tensor]
    rows: list[tuple[str, dict[str, Tensor]]] = field(default_factory=list)
    has_partial: list[bool] = field(default_factory=list)

    @torch.no_grad()
    def note(self, mix: Mix, sources: Sequence[Tensor], partial_TD: Tensor | None) -> None:
        # The running sum comes last, as the kernels see it; reports tell it apart by `has_partial`.
        every = list(sources) if partial_TD is None else [*sources, partial_TD]
        # Apart from the kernels on purpose: a report must not depend on what it reports about.
        logits = []
        for source_TD in every:
            fp = at_least_fp32(source_TD)
            logits.append((fp @ mix.folded()) * torch.rsqrt(fp.pow(2).mean(-1) + mix.norm.eps))
        weights_nT = torch.stack(logits).softmax(0)
        means = {name: weights_nT[:, mask].mean(dim=1) for name, mask in self.masks.items()}
        self.rows.append((mix.name, means))
        self.has_partial.append(partial_TD is not None)


def run_block(
    sources: Sequence[Tensor], sublayers: Sequence[tuple[Mix, SubLayer]], recorder: MixRecorder | None = None
) -> tuple[Tensor, ...]:
    """Run one block's sub-layers; returns the sources of the next block: the given ones and the block's sum
    [T, D].

    Go on with the returned sources (see kernels/attnres/naive.py). The sum is kept in the dtype of the
    embedding (source 0). Nothing but `sources` is alive at the block's start, so recomputing whole blocks in
    the backward pass needs no saved activation besides the block sums themselves.
    """
    mixes, bodies = zip(*sublayers)
    qw_SD = torch.stack([mix.folded() for mix in mixes])

    # A report looks at the sources before they are mixed, where the kernel hands them over.
    def watch(index: int, before: Sequence[Tensor], partial_TD: Tensor | None) -> None:
        assert recorder is not None
        recorder.note(mixes[index], before, partial_TD)

    block = resolve("attnres_block", qw_SD)
    watched = watch if recorder is not None else None
    sources, summed_TD = block(sources, bodies, qw_SD, mixes[0].norm.eps, watched)
    return *sources, summed_TD


class DecoderLayer(nn.Module):
    """One transformer layer. Its two sub-layers, each behind its pre-norm, are `attend` and `feed_forward`.

    With Attention Residuals the decoder calls both by themselves, so a
    sharding wrapper must know both as forward methods. It must leave the pseudo-queries, their norms and the
    two pre-norms in the root group: a block reads the queries of all its layers at its start, and the kernel
    in front of a sub-layer takes its pre-norm with it.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, eps, std = config.hidden_size, config.rms_norm_eps, config.initializer_range
        self.index, self.kind = index, config.plan()[index]

        # Token mixer: most layers keep a state of fixed size, every fourth looks back at all tokens.
        mixer = KimiDeltaAttention if self.kind == "kda" else MultiHeadLatentAttention
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn: KimiDeltaAttention | MultiHeadLatentAttention = mixer(config)

        # Feed-forward: the first layers are dense, the others mix experts.
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.sparse = config.is_moe(index)
        if self.sparse:
            self.block_sparse_moe = MixtureOfExperts(config)
        else:
            self.mlp = SwiGLU(hidden, config.intermediate_size, std, config.situ)

        # In place of the residual stream: what each of the two sub-layers reads of earlier outputs.
        self.attn_res = config.attn_res != "none"
        if self.attn_res:
            # 1-D on purpose: optimizers route matrices to Muon, and a
            # query must not take fixed-norm steps from zero.
            self.self_attention_res_query = nn.Parameter(torch.empty(hidden))
            self.self_attention_res_norm = RMSNorm(hidden, eps)
            self.mlp_res_query = nn.Parameter(torch.empty(hidden))
            self.mlp_res_norm = RMSNorm(hidden, eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.attn_res:
            nn.init.zeros_(self.self_attention_res_query)
            nn.init.zeros_(self.mlp_res_query)

    def attend(
        self,
        x_TD: Tensor,
        segments: Segments,
        past: Past[Any] | None = None,
        counted_T: Tensor | None = None,
    ) -> Tensor:
        return self.self_attn(x_TD, segments, past, counted_T)

    def feed_forward(self, x_TD: Tensor, counted_T: Tensor | None = None) -> Tensor:
        if self.sparse:
            return self.block_sparse_moe(x_TD, counted_T)
        return self.mlp(x_TD)

    def forward(
        self,
        x_TD: Tensor,
        segments: Segments,
        past: Past[Any] | None = None,
        counted_T: Tensor | None = None,
    ) -> Tensor:
        """The plain residual form. x keeps its dtype (fp32 embeddings make an fp32 stream under autocast)."""
        # Pre-norm: the stream itself is never normed, so gradients reach the embedding unscaled.
        x_TD = x_TD + self.attend(self.input_layernorm(x_TD), segments, past, counted_T)
        return x_TD + self.feed_forward(self.post_attention_layernorm(x_TD), counted_T)

    def mixes(self) -> tuple[Mix, Mix]:
        """The AttnRes mixes in front of the two sub-layers."""
        name, feed = f"layers.{self.index}", "moe" if self.sparse else "mlp"
        return (
            Mix(f"{name}.{self.kind}", self.self_attention_res_query, self.self_attention_res_norm),
            Mix(f"{name}.{feed}", self.mlp_res_query, self.mlp_res_norm),
        )


Recompute = Literal["no", "block", "layer"]


class Decoder(nn.Module):
    """embed_tokens, layers, final norm and (untied) lm_head; see the file's head.

    recompute: when "block", training keeps no activations inside a layer (inside an AttnRes block) and
    computes them again in the backward pass; "layer": none inside a sub-layer, also where blocks are large.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.sublayers_per_block = config.sublayers_per_block()
        self.recompute: Recompute = "no"
        hidden, std = config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, hidden, std)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(hidden, config.vocab_size, std)
        if config.attn_res != "none":
            self.output_attn_res_query = nn.Parameter(torch.empty(hidden))
            self.output_attn_res_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.config.attn_res != "none":
            nn.init.zeros_(self.output_attn_res_query)

    def head_weight(self) -> Tensor:
        """Output projection [V, D]; the embedding itself when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        x_TD: Tensor,
        segments: Segments,
        past: Sequence[Past[Any]] | None = None,
        *,
        counted_T: Tensor | None = None,
        recorder: MixRecorder | None = None,
    ) -> Tensor:
        """Embeddings x_TD -> hidden states h_TD after the final norm.

        segments: the packed documents, or with a past (of every layer) the new tokens of each of its
        sequences, in order.
        counted_T: bool, tokens that count for expert load and QK-Clip's maximum (None: all).
        recorder: collects AttnRes weights.
        Raises ValueError when x and segments disagree.
        """
        if x_TD.shape[0] != segments.total:
            raise ValueError(
                f"got {x_TD.shape[0]} token embeddings but segments that add up to {segments.total}; "
                "build Segments from the same packed row"
            )

        sources = self.run((x_TD,), range(self.num_blocks), segments, past, counted_T, recorder)
        return self.finish(sources, recorder)

    @property
    def num_blocks(self) -> int:
        """Blocks of Attention Residuals; without them every layer is one."""
        if self.config.attn_res == "none":
            return len(self.layers)
        return -(-2 * len(self.layers) // self.sublayers_per_block)

    def run(
        self,
        sources: tuple[Tensor, ...],
        blocks: range,
        segments: Segments,
        past: Sequence[Past[Any]] | None = None,
        counted_T: Tensor | None = None,
        recorder: MixRecorder | None = None,
    ) -> tuple[Tensor, ...]:
        """Sources [T, D] of these blocks (the embedding, and the sums of the blocks before) -> those behind
        them. Without Attention Residuals there is one: the stream itself. The rest as in `forward`."""
        pasts: Sequence[Past[Any] | None] = [None] * len(self.layers) if past is None else past
        if self.config.attn_res == "none":
            (x_TD,) = sources
            for index in blocks:
                layer = self.layers[index]
                at: Recompute = "block" if self.recompute == "block" else "layer"
                x_TD = self._maybe_recompute(at, layer, x_TD, segments, pasts[index], counted_T)
            return (x_TD,)

        # Every block reads the sources before it and leaves one more: the sum of its sub-layers' outputs.
        size = self.sublayers_per_block
        for block in blocks:
            sublayers: list[tuple[Mix, SubLayer]] = []
            # A block may end in the middle of a layer: full AttnRes is blocks of one sub-layer.
            for place in range(block * size, min((block + 1) * size, 2 * len(self.layers))):
                layer, own = self.layers[place // 2], pasts[place // 2]
                assert isinstance(layer, DecoderLayer)
                mix = layer.mixes()[place % 2]
                # Norm and body of a sub-layer go apart: a kernel may take the norm together with the mix.
                if place % 2 == 0:
                    norm, run = layer.input_layernorm, bind(layer.attend, past=own, segments=segments)
                else:
                    norm, run = layer.post_attention_layernorm, bind(layer.feed_forward)
                body = bind(self._maybe_recompute, "layer", bind(run, counted_T=counted_T))
                sublayers.append((mix, SubLayer(norm, body)))
            sources = self._maybe_recompute("block", run_block, sources, sublayers, recorder)
        return sources

    def finish(self, sources: tuple[Tensor, ...], recorder: MixRecorder | None = None) -> Tensor:
        """Hidden states [T, D] after the final norm, of the sources that all blocks have left."""
        if self.config.attn_res == "none":
            return self.norm(sources[0])
        # The final norm reads a mix of its own of all of them.
        final = Mix("output", self.output_attn_res_query, self.output_attn_res_norm)
        if recorder is not None:
            recorder.note(final, sources, None)
        # One query over finished sources is phase 1 of a block with a single sub-layer.
        qw_1D = final.folded().unsqueeze(0)
        (h_TD,), *_ = resolve("attnres_phase1", qw_1D)(list(sources), qw_1D, final.norm.eps)
        return self.norm(h_TD)

    def attnres_weights(self, x_TD: Tensor, segments: Segments, masks: dict[str, Tensor]) -> MixRecorder:
        """Mean AttnRes weights per mix and source over the tokens of each mask (for example image and text).

        Raises ValueError for a model without Attention Residuals.
        """
        if self.config.attn_res == "none":
            raise ValueError(
                "attn_res='none' has no mixing weights; ask a model with attn_res 'full' or 'block'"
            )
        recorder = MixRecorder(masks)
        with torch.no_grad():
            self.forward(x_TD, segments, recorder=recorder)
        return recorder

    def _maybe_recompute(self, at: Recompute, function, *arguments):
        if self.recompute == at and torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)
