"""Forward passes of the engine: prompts in chunks, and one token for every running sequence.

Per-sequence facts live in device tensors indexed by slot (last token, length, page table, sampling options,
noise key), so a decode step needs from the host only which slots take part. The decoder has two forms: the
modules of model/ over the pools, on any device, and kernels/cpu, compiled (cpu.py). On CUDA a decode step of
the modules is captured as a graph, one for each bucket of rows, key positions and sampling needs.

Rows of a step come in multiples of ROWS where results are to be exact. On a CPU a matrix product of one, two
or three rows sums in another order than one of more, and an elementwise operation treats what is left over
after whole vectors (32 numbers) by other code. With ROWS rows at least, and widths that are multiples of 4
(heads, hidden size, vocabulary), a row's bits do not depend on how many rows there are or where it stands:
the engine gives bit-equal results whatever the batch (tests/model/test_engine_invariance.py). Where
kernels/cpu is compiled, it promises that by itself for any rows and widths.

Shapes: S slots, B rows of a step, N sequences of a prefill, T tokens, D hidden, V vocabulary, L key
positions, W queries per sequence.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, compress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attention.tiles import FIRST_TILE, tiles
from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import CachePlan, KdaSlots, Past, Pools
from earlyfusion.model.engine.cpu import CompiledDecoder, TokenRows, can_compile
from earlyfusion.model.engine.requests import Controls, Needs, choose, likeliest
from earlyfusion.model.engine.scheduler import STOPS, Part, Picture, RequestState, Sample
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import moe_layers
from earlyfusion.vision.patches import num_tokens

TOGETHER = 65_536
"""Patches in one pass of the tower on a GPU, but for a picture that has more."""
NO_STOP = -1
"""An id that no token has."""
ROWS = 8


def exact_rows(device: torch.device) -> bool:
    """Whether a request's bits are kept independent of its neighbours: on a CPU. On a GPU quicker passes
    over several requests are worth more."""
    return device.type == "cpu"


def whole_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of ROWS."""
    return -(-rows // ROWS) * ROWS


def waits_for_counts(model: NativeFusion) -> bool:
    """Whether experts ask for their counts, which no graph may do: the torch form does, except in bfloat16;
    SiTU has no other form."""
    weight = model.decoder.embed_tokens.weight
    kernel = has_kernel("moe_experts", weight) and model.config.text.situ is None
    return bool(moe_layers(model)) and weight.dtype != torch.bfloat16 and not kernel


class Runner:
    """Owns the device side. `banned_ids`: what no row may choose unless it has a mask of its own."""

    def __init__(
        self, model: NativeFusion, pools: Pools, banned_ids: Sequence[int], table_pages: int
    ) -> None:
        self.model, self.pools = model, pools
        self.device = model.device
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
        # Graphs only where no operation waits for the host.
        eager = waits_for_counts(model) or self.device.type != "cuda"
        self.graphs = None if eager else DecodeGraphs(self.graph_step, self.device)
        self.compiled = CompiledDecoder(model.decoder, pools) if can_compile(model.decoder, pools) else None

    @torch.inference_mode()  # what is kept was made in it
    def refresh(self) -> None:
        """Read the model's weights again after they have changed in place."""
        # The compiled form packs its weights anew; the modules read their own anyway.
        if self.compiled is not None:
            self.compiled.refresh()
        layers: Any = self.model.decoder.layers
        for layer, memory in zip(layers, self.pools.layers):
            if isinstance(memory, KdaSlots) and memory.joined:
                # Into the same storage: a captured graph points at it.
                for old, new in zip(memory.joined, layer.self_attn.joined_weights()):
                    old.copy_(new)

    # ---- what the device knows

    def seat(self, samples: Sequence[Sample]) -> None:
        """Tell the device about samples that begin to decode: their last tokens are known and not yet fed."""
        slots, facts, options = [], [], []
        for each in samples:
            state, params = each.parent, each.parent.request.params
            (last,) = each.tokens(each.context - 1, each.context)
            stops = [*sorted(state.stop_ids)[:STOPS], *[NO_STOP] * STOPS][:STOPS]
            slots.append(each.slot)
            facts.append([last, each.length, len(each.ids), each.key, params.max_new_tokens, *stops])
            options.append([params.temperature, params.top_p, params.min_p])
        if slots:
            slots_N = torch.tensor(slots).to(self.device)
            self.facts_SF[slots_N] = torch.tensor(facts).to(self.device)
            self.options_S3[slots_N] = torch.tensor(options, dtype=torch.float32).to(self.device)
            self.ended_S.index_fill_(0, slots_N, False)
            self.page_tables(samples)
            self._batch = None

    def page_tables(self, samples: Sequence[Sample]) -> None:
        """The samples' pages have changed."""
        width = max((len(each.pages) for each in samples), default=0)
        rows = [[each.slot, *each.pages, *[0] * (width - len(each.pages))] for each in samples]
        if rows:
            table = torch.tensor(rows).to(self.device)
            self.table_SP[:, :width].index_copy_(0, table[:, 0], table[:, 1:])

    # ---- decode

    def decode(self, running: Sequence[Sample], steps: int = 1, recording: bool = False) -> Tensor:
        """Feed every sample's last token and choose the next: [steps, 3, len(running)], each as
        `requests.choose` returns it.

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
        """One token for the sequences in these slots, all on the device: [3, B], as `requests.choose` returns
        it. length: key positions that are looked at. live: rows that are real; None: all."""
        x_BD = self.model.decoder.embed_tokens(self.last_S[slots_B])
        last_B, rows = self.length_S[slots_B], len(slots_B)
        if self.compiled is not None:
            starts = range((rows if live is None else live) + 1)
            about = TokenRows(slots_B, last_B, torch.arange(rows), starts, rows)
            hidden_BD = self.compiled.run(x_BD, about, self.table_SP)
        else:
            # Everything on the device: no value of a tensor is looked at. The last tile of keys may reach
            # past the longest sequence there can be.
            size = self.pools.page_size
            pages = tiles(length)[-1][1] // size
            pages_BP = self.table_SP[slots_B, :pages]
            pages_BP = F.pad(pages_BP, (0, pages - pages_BP.shape[1]))
            page_B = pages_BP.gather(1, (last_B // size).unsqueeze(1)).squeeze(1)
            plan = CachePlan(
                fresh=False,
                slots_N=slots_B,
                rows_T=page_B * size + last_B % size,
                pages_NP=pages_BP,
                last_NW=last_B.unsqueeze(1),
                live=live,
            )
            hidden_BD = self.model.decoder(
                x_BD, _singles(rows), [Past(memory, plan) for memory in self.pools.layers]
            )
        head = self.compiled or self.model
        chosen = self._choose(head.logits(hidden_BD), slots_B, needs, banned)
        self.length_S[slots_B] += 1
        self.length_S[:1].zero_()  # padding rows stay at the beginning of page 0
        return chosen

    def decode_drafts(
        self, running: Sequence[Sample], drafts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """Feed every sample's last token and its draft, and choose behind each of them (compiled form only):
        [K, 3, N], of which the first counts [N] of a sample are its next tokens."""
        assert self.compiled is not None
        # A sequence's rows stand together, in the order of its tokens. The host knows all of it, and numpy is
        # the quickest with so little.
        ids, facts, options = list[int](), [], []
        for sample, draft in zip(running, drafts):
            ids += [*sample.tokens(sample.context - 1, sample.context), *draft]
            facts.append((1 + len(draft), sample.slot, sample.length, len(sample.ids), sample.key))
            params = sample.parent.request.params
            options.append((params.temperature, params.top_p, params.min_p))
        rows_N, slots_N, length_N, written_N, keys_N = np.array(facts).T
        starts = [0, *accumulate(rows_N.tolist())]
        ahead_T = np.arange(len(ids)) - np.repeat(starts[:-1], rows_N)
        slots_T, positions_T, drawn_T, keys_T = (
            torch.from_numpy(np.repeat(each, rows_N) + more)
            for each, more in ((slots_N, 0), (length_N, ahead_T), (written_N, ahead_T), (keys_N, 0))
        )
        options_3T = np.repeat(np.array(options, np.float32).T, rows_N, axis=1)

        about = TokenRows(slots_T, positions_T, torch.arange(len(ids)), starts, len(ids))
        x_TD = self.model.decoder.embed_tokens(torch.from_numpy(np.array(ids)))
        hidden_TD = self.compiled.run(x_TD, about, self.table_SP, drafts=True)
        temperature_T, top_p_T, min_p_T = torch.from_numpy(options_3T)
        controls = Controls(keys_T, drawn_T, temperature_T, top_p_T, min_p_T, needs_of(running))
        rows = [sample for sample, draft in zip(running, drafts) for _ in range(1 + len(draft))]
        chosen_3T = self._chosen(self.compiled.logits(hidden_TD), controls, self.banned_for(rows, len(ids)))

        # A draft was right as far as the choices before its tokens say so; the choice after those is new.
        known_3T = chosen_3T.numpy()
        chosen, counts = known_3T[0].tolist(), list[int]()
        for start, draft in zip(starts, drafts):
            right = 0
            while right < len(draft) and chosen[start + right] == draft[right]:
                right += 1
            counts.append(1 + right)
        self.compiled.settle(counts)
        last_N = known_3T[0, np.array(starts[:-1]) + counts - 1]
        now_3N = torch.from_numpy(np.array([last_N, length_N + counts, written_N + counts], dtype=np.int64))
        self.facts_SF[torch.from_numpy(np.ascontiguousarray(slots_N)), :3] = now_3N.T

        out_K3N = np.full((max(counts), len(known_3T), len(running)), np.nan)
        for column, (start, count) in enumerate(zip(starts, counts)):
            out_K3N[:count, :, column] = known_3T[:, start : start + count].T
        return torch.from_numpy(out_K3N), counts

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

    @staticmethod
    def _chosen(logits_BV: Tensor, controls: Controls, banned: Tensor) -> Tensor:
        """The next token of every row: [3, B], with needs.top the rows of `likeliest` below."""
        chosen = choose(logits_BV, controls, banned)
        return torch.cat([chosen, likeliest(logits_BV)]) if controls.needs.top else chosen

    def _choose(self, logits_BV: Tensor, slots_B: Tensor, needs: Needs, banned: Tensor) -> Tensor:
        """The next token of every row as `_chosen`, remembered as the slot's last."""
        temperature_B, top_p_B, min_p_B = self.options_S3[slots_B].T.contiguous()
        keys_B, positions_B = self.key_S[slots_B], self.position_S[slots_B]
        controls = Controls(keys_B, positions_B, temperature_B, top_p_B, min_p_B, needs)
        chosen = self._chosen(logits_BV, controls, banned)
        self.last_S[slots_B] = chosen[0].long()
        self.position_S[slots_B] += 1
        return chosen

    def banned_for(self, samples: Sequence[Sample], total: int) -> Tensor:
        """The common ids, or where a request bans others a mask per row, filled up to `total`."""
        masks = [each.parent.banned_V for each in samples]
        if all(mask is None for mask in masks):
            return self.banned
        common_V = torch.zeros(len(self.model.decoder.head_weight()), dtype=torch.bool)
        common_V[self.banned.cpu()] = True
        masks += [None] * (total - len(masks))
        return torch.stack([common_V if mask is None else mask for mask in masks]).to(self.device)

    # ---- prefill

    def read(self, parts: Sequence[Part], rows: Sequence[int]) -> Tensor:
        """Read the parts (all fresh, or none); hidden states [R, D] of the given rows, counted through the
        parts' tokens."""
        if self.compiled is not None:
            self.page_tables([part.sample for part in parts])
            about = TokenRows.of(parts, rows)
            return self.compiled.run(self.embed(parts, about.starts[-1]), about, self.table_SP)
        segments, plan = prefill_plan(parts, self.pools, self.device)
        hidden_TD = self.model.decoder(
            self.embed(parts, segments.total), segments, [Past(memory, plan) for memory in self.pools.layers]
        )
        return hidden_TD[torch.tensor(rows, dtype=torch.long, device=self.device)]

    def embed(self, parts: Sequence[Part], total: int) -> Tensor:
        """Embeddings of the parts' tokens with image features in their places, filled up to `total` rows."""
        ids: list[int] = []
        places: list[int] = []
        features: list[Tensor] = []
        for part in parts:
            state, offset = part.sample.parent, len(ids) - part.start
            ids += part.sample.tokens(part.start, part.stop)
            inside = [i for i, place in enumerate(state.media_positions) if part.start <= place < part.stop]
            if inside and state.features is not None:
                places += [state.media_positions[i] + offset for i in inside]
                features.append(state.features[inside])
        # Filler tokens stand on slot 0, which nobody reads.
        ids += [0] * (total - len(ids))
        x_TD = self.model.decoder.embed_tokens(torch.tensor(ids).to(self.device))
        if features:
            at = torch.tensor(places).to(self.device)
            x_TD = x_TD.index_copy(0, at, torch.cat(features).to(x_TD.dtype))
        return x_TD

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
        top=any(params.top_logprobs for params in every),
    )


@lru_cache(maxsize=256)
def _singles(rows: int) -> Segments:
    """Segments of one token each, made once per number of rows."""
    return Segments((1,) * rows)


def prefill_plan(parts: Sequence[Part], pools: Pools, device: torch.device) -> tuple[Segments, CachePlan]:
    """Segments and plan of a prefill; a filler document on slot 0 makes the rows a multiple of ROWS."""
    spans = [(part.sample.slot, part.sample.pages, part.start, part.stop) for part in parts]
    total = sum(part.stop - part.start for part in parts)
    missing = whole_rows(total) - total
    if missing:
        first = min(1, parts[0].start)  # all start at 0, or none does
        spans.append((0, [0], first, first + missing))

    # Without a past, attention can run as in training. Where results are exact it takes the cached way, whose
    # bits do not depend on which prompts are read together.
    fresh = not exact_rows(device) and parts[0].start == 0
    lengths = [stop - start for _, _, start, stop in spans]
    # Queries in whole multiples of 32: few different shapes, and whole vectors on a CPU.
    width = -(-max(lengths) // 32) * 32
    pages = tiles(max(stop for *_, stop in spans))[-1][1] // pools.page_size
    rows, places, last, tables, past = [], [], [], [], []
    for row, (_, table, start, stop) in enumerate(spans):
        # Filler may be longer than its one page; it wraps around, since nobody reads it.
        known = pools.rows(table, len(table) * pools.page_size)
        rows.append(known[torch.arange(start, stop) % len(known)])
        past.append(known[torch.arange(stop) % len(known)])
        places.append(row * width + torch.arange(stop - start))
        last.append((torch.arange(width) + start).clamp(max=stop - 1))
        table = table[: pools.pages_for(stop)]
        tables.append(F.pad(torch.tensor(table), (0, pages - len(table))))

    packed = None
    if not fresh and has_kernel("attention_append", device):
        packed = (Segments(tuple(map(len, past))), torch.cat(past).to(device))
    plan = CachePlan(
        fresh=fresh,
        slots_N=torch.tensor([slot for slot, *_ in spans]).to(device),
        rows_T=torch.cat(rows).to(device),
        pages_NP=torch.stack(tables).to(device),
        last_NW=torch.stack(last).to(device),
        places_T=torch.cat(places).to(device),
        past=packed,
    )
    return Segments(tuple(lengths)), plan


# ---- pictures


class ImageMemory:
    """Features [M, D] of at most `limit` pictures by their digest. `encoded` and `hits` count its work.

    together: patches in one pass of the tower. 0 where results are exact: every picture by itself, so that
    its features do not depend on what else is asked at the time; on a GPU, where a tower over small pictures
    is all launches, those of all new requests go together.
    """

    def __init__(self, model: NativeFusion, limit: int) -> None:
        self.model, self.limit = model, limit
        self.together = 0 if exact_rows(model.device) else TOGETHER
        self.encoded = self.hits = 0
        self.features: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.no_grad()
    def attach(self, states: Sequence[RequestState]) -> None:
        """Give features to requests that have pictures still to be read."""
        # A resumed answer has read its pictures; encoding them again would be work for nobody.
        wanted, waiting = [], []
        merge = self.model.config.vision.merge_kernel_size
        for state in states:
            last = max(state.media_positions, default=-1)
            lengths = [sample.length for sample in state.alive if sample.slot]
            if not lengths or min(lengths) > last:
                continue
            # Of a conversation that goes on only the new pictures.
            ends = accumulate(num_tokens(each.grid, merge) for each in state.pictures)
            unread = [state.media_positions[end - 1] >= min(lengths) for end in ends]
            waiting.append((state, unread))
            wanted += list(compress(state.pictures, unread))
        missing = {each.digest: each for each in wanted if each.digest not in self.features}
        self.encoded += len(missing)
        self.hits += len(wanted) - len(missing)

        # A pass that is full goes first; a picture that is larger goes alone.
        passes: list[list[Picture]] = []
        room = 0
        for each in missing.values():
            if not passes or len(each.patches) > room:
                passes.append([])
                room = self.together
            passes[-1].append(each)
            room -= len(each.patches)
        for pictures in passes:
            patches = torch.cat([each.patches for each in pictures])
            grids = [each.grid for each in pictures]
            found = self.model.encode_images(patches.to(self.model.device), grids)
            parts = found.split([num_tokens(grid, merge) for grid in grids])
            self.features |= {each.digest: part for each, part in zip(pictures, parts)}

        # What was just used is kept longest.
        for each in wanted:
            self.features.move_to_end(each.digest)
        for state, unread in waiting:
            new = torch.cat([self.features[each.digest] for each in compress(state.pictures, unread)])
            # Rows of pictures that were read, the first ones, are never looked at again.
            state.features = F.pad(new, (0, 0, len(state.media_positions) - len(new), 0))
        while len(self.features) > self.limit:
            self.features.popitem(last=False)


# ---- CUDA graphs


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
            static_B = torch.zeros(len(slots_B), dtype=torch.long, device=self.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(static_B, *key[1:])
            torch.cuda.current_stream().wait_stream(side)

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                chosen = self.step(static_B, *key[1:])
            self._pool = graph.pool()
            self._captured[key] = graph, static_B, chosen

        graph, static_B, chosen = self._captured[key]
        static_B.copy_(slots_B)
        kept = []
        for _ in range(steps):
            graph.replay()
            kept.append(chosen.clone())  # the next replay writes over it
        return torch.stack(kept)
