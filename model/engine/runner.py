"""Forward passes of the engine: prompts in chunks, and one token for every running sequence.

Per-sequence facts live in device tensors indexed by slot (last token, length, page table, sampling options,
noise key), so a decode step needs from the host only which slots take part. The decoder has two forms: the
modules of model/ over the pools, on any device, and kernels/cpu, compiled (cpu.py). On CUDA a decode step of
the modules is captured as a graph, one for each bucket of rows, key positions and sampling needs.

Shapes: S slots, B rows of a step, N sequences of a prefill, T tokens, V vocabulary, L key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attention.tiles import FIRST_TILE, tiles
from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import CachePlan, KdaSlots, Past
from earlyfusion.model.engine.batch import ROWS, TokenRows, embed, exact_rows, prefill_plan, whole_rows
from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.cpu import CompiledDecoder, can_compile
from earlyfusion.model.engine.sampler import Controls, Needs, choose
from earlyfusion.model.engine.scheduler import Part
from earlyfusion.model.engine.state import STOPS, Sample
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.moe import moe_layers

NO_STOP = -1
"""An id that no token has."""


class Runner:
    """Owns the device side. `banned_ids`: what no row may choose unless it has a mask of its own."""

    def __init__(
        self, model: NativeFusion, pools: Pools, banned_ids: Sequence[int], table_pages: int
    ) -> None:
        self.model, self.pools = model, pools
        self.device = model.decoder.embed_tokens.weight.device
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=self.device)

        # What the device knows of the sequence in each slot; columns, so that one copy tells all of it.
        slots = pools.num_slots + 1
        self.facts_SF = torch.zeros(slots, 5 + STOPS, dtype=torch.long, device=self.device)
        self.last_S, self.length_S, self.position_S, self.key_S, self.end_S = self.facts_SF.T[:5]
        self.stops_SK = self.facts_SF[:, 5:]
        self.options_S3 = torch.zeros(slots, 3, device=self.device)
        self.ended_S = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.table_SP = torch.zeros(slots, table_pages, dtype=torch.long, device=self.device)

        self._batch: tuple[list[Sample], Tensor, Needs] | None = None
        self.graphs = DecodeGraphs(self.graph_step, self.device) if can_capture(model) else None
        self.compiled = CompiledDecoder(model.decoder, pools) if can_compile(model.decoder, pools) else None

    @torch.inference_mode()  # what is kept was made in it
    def refresh(self) -> None:
        """Read the model's weights again after they have changed in place."""
        # The compiled form packs its weights anew; the modules read their own anyway.
        if self.compiled is not None:
            self.compiled.refresh()
        for layer, memory in zip(self.model.decoder.layers, self.pools.layers):
            mixer = layer.self_attn
            if isinstance(memory, KdaSlots) and isinstance(mixer, KimiDeltaAttention) and memory.joined:
                # Into the same storage: a captured graph points at it.
                for old, new in zip(memory.joined, mixer.joined_weights()):
                    old.copy_(new)

    # ---- what the device knows

    def seat(self, samples: Sequence[Sample]) -> None:
        """Tell the device about samples that begin to decode: their last tokens are known and not yet fed."""
        if not samples:
            return
        slots, facts, options = [], [], []
        for each in samples:
            state, params = each.parent, each.parent.request.params
            (last,) = each.tokens(each.context - 1, each.context)
            stops = [*sorted(state.stop_ids)[:STOPS], *[NO_STOP] * STOPS][:STOPS]
            slots.append(each.slot)
            facts.append([last, each.length, len(each.ids), each.key, params.max_new_tokens, *stops])
            options.append([params.temperature, params.top_p, params.min_p])
        slots_N = torch.tensor(slots).to(self.device)
        self.facts_SF.index_copy_(0, slots_N, torch.tensor(facts).to(self.device))
        self.options_S3.index_copy_(0, slots_N, torch.tensor(options, dtype=torch.float32).to(self.device))
        self.ended_S.index_fill_(0, slots_N, False)
        self.page_tables(samples)
        self._batch = None

    def page_tables(self, samples: Sequence[Sample]) -> None:
        """The samples' pages have changed."""
        if not samples:
            return
        width = max(len(each.pages) for each in samples)
        rows = [[each.slot, *each.pages, *[0] * (width - len(each.pages))] for each in samples]
        table = torch.tensor(rows).to(self.device)
        self.table_SP[:, :width].index_copy_(0, table[:, 0], table[:, 1:])

    # ---- decode

    def decode(self, running: Sequence[Sample], steps: int = 1, recording: bool = False) -> Tensor:
        """Feed every sample's last token and choose the next: [steps, 3, len(running)], each as
        `sampler.choose` returns it.

        steps: more than one only with graphs; rows of a sample that has ended are of no meaning. recording:
        something in the model listens (routing is captured), which a replayed graph would not run.
        """
        # Slots are looked up again only when the samples are others.
        if self._batch is None or self._batch[0] != running:
            filled = [sample.slot for sample in running]
            filled += [0] * (self.bucket(len(running)) - len(running))
            self._batch = (list(running), torch.tensor(filled).to(self.device), needs_of(running))
        _, slots_B, needs = self._batch

        # Known on the host: the number of key tiles is part of a graph's shape.
        longest = max(sample.length for sample in running)
        banned = self.banned_for(running, len(slots_B))
        if self.graphs is not None and banned.dtype != torch.bool and not recording:
            chosen_K3B = self.graphs.run(slots_B, longest + steps, needs, steps)
        else:
            chosen_K3B = self.decode_step(slots_B, longest + 1, needs, banned, len(running))[None]
        return chosen_K3B[..., : len(running)]

    def decode_step(
        self, slots_B: Tensor, length: int, needs: Needs, banned: Tensor, live: int | None = None
    ) -> Tensor:
        """One token for the sequences in these slots, all on the device: [3, B], as `sampler.choose` returns
        it. length, live: see `decode_logits`."""
        logits_BV = self.decode_logits(slots_B, length, live)
        chosen = self._choose(logits_BV, slots_B, needs, banned)
        self.length_S[slots_B] += 1
        self.length_S[:1].zero_()  # padding rows stay at the beginning of page 0
        return chosen

    def decode_logits(self, slots_B: Tensor, length: int, live: int | None = None) -> Tensor:
        """Logits [B, V] after each slot's last token, of which the first `live` are real; keys up to `length`
        positions are looked at."""
        x_BD = self.model.decoder.embed_tokens(self.last_S[slots_B])
        last_B, rows = self.length_S[slots_B], len(slots_B)
        if self.compiled is not None:
            count = rows if live is None else live
            about = TokenRows(slots_B, last_B, torch.arange(rows), range(count + 1), rows)
            return self.compiled.logits(self.compiled.run(x_BD, about, self.table_SP))

        # Everything on the device: no value of a tensor is looked at. The last tile of keys may reach past
        # the longest sequence there can be.
        size = self.pools.page_size
        pages = tiles(length)[-1][1] // size
        pages_BP = self.table_SP[slots_B, :pages]
        pages_BP = F.pad(pages_BP, (0, pages - pages_BP.shape[1]))
        page_B = pages_BP.gather(1, (last_B // size).unsqueeze(1)).squeeze(1)
        plan = CachePlan(
            False, slots_B, page_B * size + last_B % size, pages_BP, last_B.unsqueeze(1), live=live
        )
        return self.model.logits(self.model.decoder(x_BD, _singles(rows), self._past(plan)))

    def _past(self, plan: CachePlan) -> list[Past[Any]]:
        return [Past(memory, plan) for memory in self.pools.layers]

    def graph_step(self, slots_B: Tensor, length: int, needs: Needs) -> Tensor:
        """A step as a graph holds it, all on the device: samples that have ended stand still, on padding
        rows."""
        slots_B = slots_B.masked_fill(self.ended_S[slots_B], 0)
        chosen = self.decode_step(slots_B, length, needs, self.banned)
        stopped_B = (chosen[:1].long().T == self.stops_SK[slots_B]).any(1)
        self.ended_S[slots_B] = stopped_B | (self.position_S[slots_B] >= self.end_S[slots_B])
        return chosen

    def bucket(self, rows: int) -> int:
        """Rows of the step that carries `rows` sequences; few different ones where each is a graph."""
        if exact_rows(self.device):
            return whole_rows(rows)
        size = ROWS
        while size < rows:
            size *= 2
        return size

    # ---- sampling

    def _choose(self, logits_BV: Tensor, slots_B: Tensor, needs: Needs, banned: Tensor) -> Tensor:
        """The next token of every row, remembered as the slot's last: [3, B]."""
        temperature_B, top_p_B, min_p_B = self.options_S3[slots_B].T.contiguous()
        keys_B, positions_B = self.key_S[slots_B], self.position_S[slots_B]
        controls = Controls(keys_B, positions_B, temperature_B, top_p_B, min_p_B, needs)
        chosen = choose(logits_BV, controls, banned)
        self.last_S[slots_B] = chosen[0].long()
        self.position_S[slots_B] += 1
        return chosen

    def banned_for(self, samples: Sequence[Sample], total: int) -> Tensor:
        """The common ids, or where a request bans others a mask per row, filled up to `total`."""
        if all(sample.parent.banned_V is None for sample in samples):
            return self.banned
        common_V = torch.zeros(len(self.model.decoder.head_weight()), dtype=torch.bool)
        common_V[self.banned.cpu()] = True
        masks = [common_V if each.parent.banned_V is None else each.parent.banned_V for each in samples]
        return torch.stack(masks + [common_V] * (total - len(masks))).to(self.device)

    # ---- prefill

    def read(self, parts: Sequence[Part], rows: Sequence[int]) -> Tensor:
        """Read the parts (all fresh, or none); hidden states [R, D] of the given rows, counted through the
        parts' tokens."""
        if self.compiled is not None:
            self.page_tables([part.sample for part in parts])
            about = TokenRows.of(parts, rows)
            return self.compiled.run(embed(parts, about.starts[-1], self.model), about, self.table_SP)
        segments, plan = prefill_plan(parts, self.pools, self.device)
        x_TD = embed(parts, segments.total, self.model)
        hidden_TD = self.model.decoder(x_TD, segments, self._past(plan))
        return hidden_TD[torch.tensor(rows, dtype=torch.long, device=self.device)]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Next-token logits [R, V], a row's bits independent of the others."""
        if self.compiled is not None:
            return self.compiled.logits(hidden_RD)
        rows = len(hidden_RD)
        return self.model.logits(F.pad(hidden_RD, (0, 0, 0, whole_rows(rows) - rows)))[:rows]

    def choose_first(self, hidden_ND: Tensor, samples: Sequence[Sample], rows: Sequence[int]) -> Tensor:
        """Choose the next token of the samples, which are seated; sample i continues hidden row rows[i]. [3,
        N]."""
        # Filled up with rows that are thrown away, so that bits do not depend on how many begin.
        missing = whole_rows(len(rows)) - len(rows)
        places_B = torch.tensor([*rows, *[rows[0]] * missing]).to(self.device)
        slots_B = torch.tensor([sample.slot for sample in samples] + [0] * missing).to(self.device)
        banned = self.banned_for(samples, len(slots_B))
        chosen = self._choose(self.logits(hidden_ND[places_B]), slots_B, needs_of(samples), banned)
        return chosen[:, : len(samples)]


def needs_of(samples: Sequence[Sample]) -> Needs:
    every = [sample.parent.request.params for sample in samples]
    return Needs(
        drawn=any(params.temperature > 0 for params in every),
        top_p=any(params.top_p < 1 for params in every),
        min_p=any(params.min_p > 0 for params in every),
        logprobs=any(params.logprobs for params in every),
    )


@lru_cache(maxsize=256)
def _singles(rows: int) -> Segments:
    """Segments of one token each, made once per number of rows."""
    return Segments((1,) * rows)


# ---- CUDA graphs


def can_capture(model: NativeFusion) -> bool:
    """On CUDA, and no operation waits for the host: the torch form of the experts does, except in
    bfloat16."""
    weight = model.decoder.embed_tokens.weight
    if weight.device.type != "cuda":
        return False
    return not moe_layers(model) or weight.dtype == torch.bfloat16 or has_kernel("moe_experts", weight)


class DecodeGraphs:
    """Captured steps: one per bucket of (rows, key positions, sampling needs), captured when first met.

    A step of a small model is bound by kernel launches; a graph replays all of them, sampling included, with
    one call. The captured step reads its slot indices from a static tensor and everything else from the
    runner's per-slot tensors, which keep their addresses for life. Warming up and capturing run on padding
    rows (slot 0), so no sequence advances.
    """

    def __init__(self, step: Callable[[Tensor, int, Needs], Tensor], device: torch.device) -> None:
        self.step, self.device = step, device
        self._captured: dict[tuple[int, int, Needs], tuple[Any, Tensor, Tensor]] = {}
        self._pool: Any = None

    def run(self, slots_B: Tensor, longest: int, needs: Needs, steps: int = 1) -> Tensor:
        """So many steps without a look at what they chose: [steps, 3, B]. longest: positions of the longest
        sequence after the last step."""
        length = FIRST_TILE
        while length < longest:
            length *= 2
        key = (len(slots_B), tiles(length)[-1][1], needs)
        if key not in self._captured:
            self._captured[key] = self._capture(*key)

        graph, static_B, chosen = self._captured[key]
        static_B.copy_(slots_B)
        kept = []
        for _ in range(steps):
            graph.replay()
            kept.append(chosen.clone())  # the next replay writes over it
        return torch.stack(kept)

    def _capture(self, rows: int, length: int, needs: Needs) -> tuple[Any, Tensor, Tensor]:
        static_B = torch.zeros(rows, dtype=torch.long, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(static_B, length, needs)
        torch.cuda.current_stream().wait_stream(side)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            chosen = self.step(static_B, length, needs)
        self._pool = graph.pool()
        return graph, static_B, chosen
