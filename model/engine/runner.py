"""Forward passes of the engine: prompts in chunks, and one token for every running sequence.

Per-sequence facts live in device tensors indexed by slot (last token, length, page table, sampling options,
noise key), so a decode step needs from the host only which slots take part, and that only when it changes.
The decoder has two forms: the modules of model/ over the pools, on any device, and kernels/cpu, compiled
(cpu.py). On CUDA a decode step of the modules is captured as a graph, one for each bucket of rows, key
positions and sampling needs.

Shapes: S slots, B rows of a step, N sequences of a prefill, T tokens, V vocabulary, L key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import FIRST_TILE, tiles
from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.batch import (
    ROWS,
    Batch,
    Part,
    TokenRows,
    embed,
    exact_rows,
    needs_of,
    prefill_plan,
    whole_rows,
)
from earlyfusion.model.engine.cache import KdaSlots, PooledCache, PooledPlan, Pools
from earlyfusion.model.engine.cpu import CompiledDecoder, can_compile
from earlyfusion.model.engine.sampler import Controls, Needs, choose
from earlyfusion.model.engine.state import STOPS, Sample
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.kda import KimiDeltaAttention
from earlyfusion.model.moe import moe_layers

NEVER = 1 << 62
"""A position that no sample reaches."""


class Runner:
    """Owns the device side. `banned_ids`: int64, what no row may choose unless it has a mask of its own."""

    def __init__(
        self, model: NativeFusion, pools: Pools, banned_ids: Sequence[int], table_pages: int
    ) -> None:
        self.model, self.pools = model, pools
        self.device = model.decoder.embed_tokens.weight.device
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=self.device)

        # What the device knows of the sequence in each slot.
        slots = len(pools.free_slots) + 1
        zeros = lambda dtype: torch.zeros(slots, dtype=dtype, device=self.device)
        self.last_S, self.length_S, self.position_S, self.key_S = (zeros(torch.long) for _ in range(4))
        self.temperature_S, self.top_p_S, self.min_p_S = (zeros(torch.float32) for _ in range(3))
        self.end_S, self.ended_S = zeros(torch.long).fill_(NEVER), zeros(torch.bool)
        self.stops_SK = torch.full((slots, STOPS), -1, device=self.device)
        self.table_SP = torch.zeros(slots, table_pages, dtype=torch.long, device=self.device)

        self._batch: Batch | None = None
        self._masks: tuple[tuple[Sample, ...], Tensor] | None = None
        self.graphs = DecodeGraphs(self.graph_step, self.device) if can_capture(model) else None
        self.compiled = CompiledDecoder(model.decoder, pools) if can_compile(model.decoder, pools) else None

    @torch.inference_mode()  # what is kept was made in it
    def refresh(self) -> None:
        """Read the model's weights again after they have changed in place."""
        self._batch = None
        if self.compiled is not None:
            self.compiled.refresh()
        for layer, memory in zip(self.model.decoder.layers, self.pools.layers):
            mixer = layer.self_attn
            if isinstance(memory, KdaSlots) and isinstance(mixer, KimiDeltaAttention):
                memory.refresh(mixer)

    # ---- what the device knows

    def seat(self, samples: Sequence[Sample]) -> None:
        """Tell the device about samples that begin to decode: their last tokens are known and not yet fed."""
        if not samples:
            return
        numbers = []
        for each in samples:
            (last,) = each.tokens(each.context - 1, each.context)
            numbers.append((each.slot, last, each.length, len(each.ids), each.key))
        slots_N, *known = torch.tensor(numbers, dtype=torch.long).T.contiguous().to(self.device)
        for tensor_S, value_N in zip((self.last_S, self.length_S, self.position_S, self.key_S), known):
            tensor_S.index_copy_(0, slots_N, value_N)

        every = [each.parent.request.params for each in samples]
        options = [(params.temperature, params.top_p, params.min_p) for params in every]
        values = torch.tensor(options, dtype=torch.float32).T.contiguous().to(self.device)
        for option_S, value_N in zip((self.temperature_S, self.top_p_S, self.min_p_S), values):
            option_S.index_copy_(0, slots_N, value_N)

        if self.graphs is not None:
            self._set_ends(samples, slots_N)
        self.page_tables(samples)
        self._batch = None

    def _set_ends(self, samples: Sequence[Sample], slots_N: Tensor) -> None:
        """Where the samples end, as far as the device can know (see `RequestState.foreseen`)."""
        rows = []
        for sample in samples:
            stops = sorted(sample.parent.stop_ids)[:STOPS]
            rows.append([sample.parent.request.params.max_new_tokens, *stops, *[-1] * (STOPS - len(stops))])
        ends_NK = torch.tensor(rows, dtype=torch.long).to(self.device)
        self.end_S.index_copy_(0, slots_N, ends_NK[:, 0])
        self.stops_SK.index_copy_(0, slots_N, ends_NK[:, 1:])
        self.ended_S.index_fill_(0, slots_N, False)

    def page_tables(self, samples: Sequence[Sample]) -> None:
        """The samples' pages have changed."""
        if not samples:
            return
        width = max(len(each.pages) for each in samples)
        rows = [[each.slot, *each.pages, *[0] * (width - len(each.pages))] for each in samples]
        table = torch.tensor(rows, dtype=torch.long).to(self.device)
        self.table_SP[:, :width].index_copy_(0, table[:, 0], table[:, 1:])

    def forget_batch(self) -> None:
        """Some sample has left the running ones."""
        self._batch = None

    # ---- decode

    def decode(self, running: Sequence[Sample], steps: int = 1, recording: bool = False) -> Tensor:
        """Feed every sample's last token and choose the next: [steps, 3, len(running)], each as
        `sampler.choose` returns it.

        steps: more than one only with graphs; rows of a sample that has ended are of no meaning. recording:
        something in the model listens (routing is captured), which a replayed graph would not run.
        """
        self.pools.settle()
        batch = self._make_batch(running)
        longest = max(sample.length for sample in running)
        banned = self.banned_for(running, batch.slots_B.shape[0])
        if self.graphs is not None and banned.dtype != torch.bool and not recording:
            chosen_K3B = self.graphs.run(batch.slots_B, longest + steps, batch.needs, steps)
        else:
            assert steps == 1
            chosen_3B = self.decode_step(batch.slots_B, longest + 1, batch.needs, banned, len(running))
            chosen_K3B = chosen_3B.unsqueeze(0)
        return chosen_K3B[..., : len(running)]

    def decode_step(
        self, slots_B: Tensor, length: int, needs: Needs, banned: Tensor, live: int | None = None
    ) -> Tensor:
        """One token for the sequences in these slots, all on the device: [3, B], as `sampler.choose` returns
        it. length, live: see `decode_logits`."""
        logits_BV = self.decode_logits(slots_B, length, live)
        chosen = choose(logits_BV, self._controls(slots_B, needs), banned)
        self.last_S[slots_B] = chosen[0].long()
        self.length_S[slots_B] += 1
        self.position_S[slots_B] += 1
        self.length_S[:1].zero_()  # padding rows stay at the beginning of page 0
        return chosen

    def decode_logits(self, slots_B: Tensor, length: int, live: int | None = None) -> Tensor:
        """Logits [B, V] after each slot's last token, of which the first `live` are real; keys up to `length`
        positions are looked at."""
        x_BD = self.model.decoder.embed_tokens(self.last_S[slots_B])
        rows = slots_B.shape[0]
        if self.compiled is None:
            cache = PooledCache(self.pools.layers, self.decode_plan(slots_B, length, live))
            return self.model.logits(self.model.decoder(x_BD, _singles(rows), cache))
        starts = range((rows if live is None else live) + 1)
        where = (slots_B, self.length_S[slots_B], torch.arange(rows), starts)
        return self.compiled.logits(self.compiled.run(x_BD, *where, self.table_SP, rows))

    def decode_plan(self, slots_B: Tensor, length: int, live: int | None) -> PooledPlan:
        """Everything on the device: no value of a tensor is looked at."""
        size = self.pools.page_size
        pages = tiles(length)[-1][1] // size
        pages_BP = self.table_SP[slots_B, :pages]
        # The last tile may reach past the longest sequence there can be.
        pages_BP = torch.nn.functional.pad(pages_BP, (0, pages - pages_BP.shape[1]))
        last_B = self.length_S[slots_B]
        page_B = pages_BP.gather(1, (last_B // size).unsqueeze(1)).squeeze(1)
        rows_B = page_B * size + last_B % size
        return PooledPlan(True, False, slots_B, rows_B, pages_BP, last_B.unsqueeze(1), live=live)

    def graph_step(self, slots_B: Tensor, length: int, needs: Needs) -> Tensor:
        """A step as a graph holds it, all on the device: samples that have ended stand still, on padding
        rows."""
        slots_B = slots_B.masked_fill(self.ended_S[slots_B], 0)
        chosen = self.decode_step(slots_B, length, needs, self.banned)
        stopped_B = (chosen[:1].long().T == self.stops_SK[slots_B]).any(1)
        self.ended_S[slots_B] = stopped_B | (self.position_S[slots_B] >= self.end_S[slots_B])
        return chosen

    def _make_batch(self, running: Sequence[Sample]) -> Batch:
        """Made anew when the samples are others."""
        samples = tuple(running)
        if self._batch is None or self._batch.samples != samples:
            slots = [sample.slot for sample in running]
            filled = slots + [0] * (self.bucket(len(slots)) - len(slots))
            slots_B = torch.tensor(filled, dtype=torch.long).to(self.device)
            self._batch = Batch(samples, slots_B, needs_of(running))
        return self._batch

    def bucket(self, rows: int) -> int:
        """Rows of the step that carries `rows` sequences; few different ones where each is a graph."""
        if exact_rows(self.device):
            return whole_rows(rows)
        size = ROWS
        while size < rows:
            size *= 2
        return size

    # ---- sampling

    def _controls(self, slots_B: Tensor, needs: Needs) -> Controls:
        return Controls(
            keys_B=self.key_S[slots_B],
            positions_B=self.position_S[slots_B],
            temperature_B=self.temperature_S[slots_B],
            top_p_B=self.top_p_S[slots_B],
            min_p_B=self.min_p_S[slots_B],
            needs=needs,
        )

    def banned_for(self, samples: Sequence[Sample], total: int) -> Tensor:
        """The common ids, or where a request bans others a mask per row, filled up to `total`."""
        if all(sample.parent.banned_V is None for sample in samples):
            return self.banned
        rows = tuple(samples)
        if self._masks is not None and self._masks[0] == rows and self._masks[1].shape[0] == total:
            return self._masks[1]

        common_V = torch.zeros(self.model.decoder.head_weight().shape[0], dtype=torch.bool)
        common_V[self.banned.cpu()] = True
        masks = [common_V if each.parent.banned_V is None else each.parent.banned_V for each in samples]
        mask_BV = torch.stack(masks + [common_V] * (total - len(masks))).to(self.device)
        self._masks = (rows, mask_BV)
        return mask_BV

    # ---- prefill

    def read(self, parts: Sequence[Part], rows: Sequence[int]) -> Tensor:
        """Read the parts (all fresh, or none); hidden states [R, D] of the given rows, counted through the
        parts' tokens."""
        self.pools.settle()
        if self.compiled is not None:
            self.page_tables([part.sample for part in parts])
            about = TokenRows.of(parts, rows)
            x_TD = embed(parts, about.starts[-1], self.model)
            where = (about.slots_T, about.positions_T, about.places_T, about.starts)
            return self.compiled.run(x_TD, *where, self.table_SP, len(rows))
        segments, plan = prefill_plan(parts, self.pools, self.device)
        x_TD = embed(parts, segments.total, self.model)
        hidden_TD = self.model.decoder(x_TD, segments, PooledCache(self.pools.layers, plan))
        return hidden_TD[torch.tensor(rows, dtype=torch.long, device=self.device)]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Next-token logits [R, V], a row's bits independent of the others."""
        if self.compiled is not None:
            return self.compiled.logits(hidden_RD)
        rows = hidden_RD.shape[0]
        return self.model.logits(torch.nn.functional.pad(hidden_RD, (0, 0, 0, whole_rows(rows) - rows)))[
            :rows
        ]

    def choose_first(self, hidden_ND: Tensor, samples: Sequence[Sample], rows: Sequence[int]) -> Tensor:
        """Choose the next token of the samples, which are seated; sample i continues hidden row rows[i]. [3,
        N]."""
        missing = whole_rows(len(rows)) - len(rows)
        places_B = torch.tensor([*rows, *[rows[0]] * missing]).to(self.device)
        slots_B = torch.tensor([sample.slot for sample in samples] + [0] * missing).to(self.device)
        logits_BV = self.logits(hidden_ND[places_B])
        controls = self._controls(slots_B, needs_of(samples))
        chosen = choose(logits_BV, controls, self.banned_for(samples, slots_B.shape[0]))
        self.last_S[slots_B] = chosen[0].long()
        self.position_S[slots_B] += 1
        return chosen[:, : len(samples)]


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
        length = tiles(length)[-1][1]
        key = (slots_B.shape[0], length, needs)
        if key not in self._captured:
            self._captured[key] = self._capture(*key)

        graph, static_B, chosen = self._captured[key]
        static_B.copy_(slots_B)
        kept_K3B = torch.empty((steps, *chosen.shape), dtype=chosen.dtype, device=chosen.device)
        for k in range(steps):
            graph.replay()
            kept_K3B[k].copy_(chosen)
        return kept_K3B

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
