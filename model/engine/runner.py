"""Forward passes of the engine: prompts in chunks, and one token for every running sequence.

Per-sequence facts live in device tensors indexed by slot (last token, length, page table, sampling options,
noise key), so a decode step needs from the host only which slots take part, and that only when it changes.
The shapes of a decode step come in buckets: on CUDA, powers of two for rows and pages, each captured once as
a CUDA graph (graphs.py); on a CPU, multiples of ROWS.

Why multiples, on a CPU: a matrix product of one, two or three rows sums in another order than one of more,
and an elementwise operation treats what is left over after whole vectors (32 numbers) by other code. With
ROWS rows at least, and widths that are multiples of 4 (heads, hidden size, vocabulary), a row's bits do not
depend on how many rows there are or where it stands: the engine gives bit-equal results whatever the batch
(tests/model/test_engine_invariance.py). Where kernels/cpu is compiled, it promises that by itself for any
rows and widths.

Shapes: S slots, B rows of a step, N sequences of a prefill, T tokens, V vocabulary, L key positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import tiles
from earlyfusion.model.engine.compiled import CompiledDecoder, can_compile
from earlyfusion.model.engine.graphs import DecodeGraphs, can_capture
from earlyfusion.model.engine.lean import LeanDecoder, is_lean
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.prefill import ROWS, Part, Reading, embed, ends_plan, prefill_plan, whole_rows
from earlyfusion.model.engine.sampler import Controls, Needs, choose
from earlyfusion.model.engine.sequence import STOPS, Sample
from earlyfusion.model.engine.stores import KdaSlots, PooledCache, PooledPlan, Windows
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.kda import KimiDeltaAttention

NEVER = 1 << 62
"""A position that no sample reaches."""


@dataclass(frozen=True)
class Batch:
    """The running samples and what follows from who they are. span: see `PooledPlan.slot_range`."""

    who: tuple[Sample, ...]
    slots_B: Tensor
    span: tuple[int, int] | None
    needs: Needs
    windows: Windows


class Runner:
    """Owns the device side. `banned_ids`: int64, what no row may choose unless it has a mask of its own."""

    def __init__(
        self, model: NativeFusion, pools: Pools, banned_ids: Sequence[int], table_pages: int
    ) -> None:
        self.model, self.pools = model, pools
        self.device = model.decoder.embed_tokens.weight.device
        slots = len(pools.free_slots) + 1
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=self.device)
        zeros = lambda dtype: torch.zeros(slots, dtype=dtype, device=self.device)
        self.last_S, self.length_S, self.position_S, self.key_S = (zeros(torch.long) for _ in range(4))
        self.temperature_S, self.top_p_S, self.min_p_S = (zeros(torch.float32) for _ in range(3))
        self.end_S, self.ended_S = zeros(torch.long).fill_(NEVER), zeros(torch.bool)
        self.stops_SK = torch.full((slots, STOPS), -1, device=self.device)
        self.table_SP = torch.zeros(slots, table_pages, dtype=torch.long, device=self.device)
        self._batch: Batch | None = None
        self._masks: tuple[tuple[Sample, ...], int, Tensor] | None = None
        self.graphs = DecodeGraphs(self) if can_capture(model) else None
        self.lean = LeanDecoder(model.decoder, pools) if is_lean(model.decoder) else None
        self.compiled = (
            CompiledDecoder(self.lean, pools) if self.lean is not None and can_compile(self.lean) else None
        )

    @torch.inference_mode()  # what is kept was made in it
    def refresh(self) -> None:
        """Read the model's weights again after they have changed in place."""
        self._batch = None
        if self.lean is not None:
            self.lean.refresh()
        if self.compiled is not None:
            self.compiled.refresh()
        for layer, memory in zip(self.model.decoder.layers, self.pools.layers):
            mixer = layer.self_attn
            if isinstance(memory, KdaSlots) and isinstance(mixer, KimiDeltaAttention):
                memory.refresh(mixer)

    def seat(self, samples: Sequence[Sample]) -> None:
        """Tell the device about samples that begin to decode: their last tokens are known and not yet fed."""
        if not samples:
            return
        last = [each.tokens(each.context - 1, each.context)[0] for each in samples]
        numbers = [
            (each.slot, token, each.length, len(each.ids), each.key) for each, token in zip(samples, last)
        ]
        slots_N, *known = torch.tensor(numbers, dtype=torch.long).T.contiguous().to(self.device)
        for tensor_S, value_N in zip((self.last_S, self.length_S, self.position_S, self.key_S), known):
            tensor_S.index_copy_(0, slots_N, value_N)
        every = [each.ticket.request.params for each in samples]
        options = [(params.temperature, params.top_p, params.min_p) for params in every]
        wanted = torch.tensor(options, dtype=torch.float32).T.contiguous().to(self.device)
        for option_S, value_N in zip((self.temperature_S, self.top_p_S, self.min_p_S), wanted):
            option_S.index_copy_(0, slots_N, value_N)
        if self.graphs is not None:
            self._tell_ends(samples, slots_N)
        self.page_tables(samples)
        self._batch = None

    def _tell_ends(self, samples: Sequence[Sample], slots_N: Tensor) -> None:
        """Tell the device where the samples end, as far as it can know (see `Ticket.foreseen`)."""
        rows = []
        for sample in samples:
            stops = sorted(sample.ticket.stops)[:STOPS]
            rows.append([sample.ticket.request.params.max_new_tokens, *stops, *[-1] * (STOPS - len(stops))])
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

    def leave(self) -> None:
        """Some sample has left the running ones."""
        self._batch = None

    # ---- decode
    # -------------------------------------------------------------------------------------------------

    def decode(self, running: Sequence[Sample], steps: int = 1, recording: bool = False) -> Tensor:
        """Feed every sample's last token and choose the next: [steps, 3, len(running)], each as
        `sampler.choose` returns it.

        steps: more than one only with graphs; rows of a sample that has ended are of no meaning. recording:
        something in the model listens (routing is captured), which a replayed graph would not run.
        """
        self.pools.settle()
        batch = self._make_batch(running)
        slots_B, lengths = batch.slots_B, [sample.length for sample in running]
        banned = self._banned(running, slots_B.shape[0])
        if self.graphs is not None and banned.dtype != torch.bool and not recording:
            chosen_K3B = self.graphs.run(slots_B, max(lengths) + steps, batch.needs, steps)
        elif self.compiled is not None:
            assert steps == 1
            logits_BV = self._compiled_logits(slots_B, len(running))
            chosen_K3B = self._advance(logits_BV, slots_B, batch.needs, banned).unsqueeze(0)
        else:
            assert steps == 1
            plan = self.decode_plan(slots_B, tiles(max(lengths) + 1)[-1][1], batch.span, len(running))
            if self.lean is not None:
                plan = replace(plan, windows=batch.windows, seen=min(lengths) + 1, reach=max(lengths) + 1)
            chosen_K3B = self._advance(self._logits(slots_B, plan), slots_B, batch.needs, banned).unsqueeze(0)
        return chosen_K3B[..., : len(running)]

    def decode_step(
        self,
        slots_B: Tensor,
        length: int,
        span: tuple[int, int] | None,
        needs: Needs,
        banned: Tensor,
        live: int | None = None,
    ) -> Tensor:
        """One token for the sequences in `slots_B` (the first `live` of them are real), all on the device:
        [3, B].

        Keys up to `length` are looked at.
        """
        return self._advance(self.decode_logits(slots_B, length, span, live), slots_B, needs, banned)

    def _advance(self, logits_BV: Tensor, slots_B: Tensor, needs: Needs, banned: Tensor) -> Tensor:
        chosen = choose(logits_BV, self._controls(slots_B, needs), banned)
        self.last_S[slots_B] = chosen[0].long()
        self.length_S[slots_B] += 1
        self.position_S[slots_B] += 1
        self.length_S[:1].zero_()  # padding rows stay at the beginning of page 0
        return chosen

    def graph_step(self, slots_B: Tensor, length: int, needs: Needs) -> Tensor:
        """`decode_step` as a graph holds it: samples that have ended stand still, on padding rows."""
        slots_B = slots_B.masked_fill(self.ended_S[slots_B], 0)
        chosen = self.decode_step(slots_B, length, None, needs, self.banned)
        stopped_B = (chosen[:1].long().T == self.stops_SK[slots_B]).any(1)
        self.ended_S[slots_B] = stopped_B | (self.position_S[slots_B] >= self.end_S[slots_B])
        return chosen

    def decode_logits(
        self, slots_B: Tensor, length: int, span: tuple[int, int] | None = None, live: int | None = None
    ) -> Tensor:
        """Logits [B, V] after each slot's last token; keys up to `length` positions are looked at."""
        if self.compiled is not None:
            return self._compiled_logits(slots_B, slots_B.shape[0] if live is None else live)
        return self._logits(slots_B, self.decode_plan(slots_B, length, span, live))

    def _compiled_logits(self, slots_B: Tensor, live: int) -> Tensor:
        assert self.compiled is not None
        x_BD = self.model.decoder.embed_tokens(self.last_S[slots_B])
        positions_B, places_B = self.length_S[slots_B], torch.arange(slots_B.shape[0])
        starts = range(live + 1)
        return self.compiled.logits(
            self.compiled.run(x_BD, slots_B, positions_B, places_B, starts, self.table_SP, slots_B.shape[0])
        )

    def _logits(self, slots_B: Tensor, plan: PooledPlan) -> Tensor:
        decoder = self.model.decoder
        x_BD = decoder.embed_tokens(self.last_S[slots_B])
        if self.lean is not None:
            return self.model.logits(self.lean.step(x_BD, plan))
        return self.model.logits(
            decoder(x_BD, _singles(slots_B.shape[0]), PooledCache(self.pools.layers, plan))
        )

    def decode_plan(
        self, slots_B: Tensor, length: int, span: tuple[int, int] | None, live: int | None
    ) -> PooledPlan:
        """Everything on the device: no value of a tensor is looked at."""
        size = self.pools.page_size
        pages_BP = self.table_SP[slots_B, : length // size]
        if (
            pages_BP.shape[1] < length // size
        ):  # the last tile may reach past the longest sequence there can be
            pages_BP = torch.nn.functional.pad(pages_BP, (0, length // size - pages_BP.shape[1]))
        last_B = self.length_S[slots_B]
        page_B = pages_BP.gather(1, (last_B // size).unsqueeze(1)).squeeze(1)
        rows_B = page_B * size + last_B % size
        return PooledPlan(True, False, slots_B, rows_B, pages_BP, last_B.unsqueeze(1), None, span, live)

    def _make_batch(self, running: Sequence[Sample]) -> Batch:
        """Slots of the samples, filled up with slot 0, made anew when the samples are others."""
        who = tuple(running)
        if self._batch is not None and self._batch.who == who:
            return self._batch
        slots = [sample.slot for sample in running]
        filled = slots + [0] * (self.bucket(len(slots)) - len(slots))
        span = (
            (slots[0], slots[0] + len(slots))
            if slots == list(range(slots[0], slots[0] + len(slots)))
            else None
        )
        slots_B = torch.tensor(filled, dtype=torch.long).to(self.device)
        self._batch = Batch(who, slots_B, span, _needs(running), Windows())
        return self._batch

    def bucket(self, rows: int) -> int:
        """Rows of the step that carries `rows` sequences."""
        if self.device.type == "cpu":
            return whole_rows(rows)
        size = ROWS
        while size < rows:
            size *= 2
        return size

    # ---- sampling
    # -----------------------------------------------------------------------------------------------

    def _controls(self, slots_B: Tensor, needs: Needs) -> Controls:
        return Controls(
            keys_B=self.key_S[slots_B],
            positions_B=self.position_S[slots_B],
            temperature_B=self.temperature_S[slots_B],
            top_p_B=self.top_p_S[slots_B],
            min_p_B=self.min_p_S[slots_B],
            needs=needs,
        )

    def _banned(self, samples: Sequence[Sample], total: int) -> Tensor:
        """The common ids, or a mask per row where a request bans others or brings a grammar, filled up to
        `total`."""
        grammars = any(sample.ticket.request.params.grammar is not None for sample in samples)
        if not grammars and all(sample.ticket.banned_V is None for sample in samples):
            return self.banned
        who = tuple(samples)
        if not grammars and self._masks is not None and self._masks[:2] == (who, total):
            return self._masks[2]
        common_V = self._common()
        rows = []
        for sample in samples:
            own_V = sample.ticket.banned_V if sample.banned_V is None else sample.banned_V
            rows.append(common_V if own_V is None else own_V)
        rows += [common_V] * (total - len(rows))
        mask_BV = torch.stack(rows).to(self.device)
        self._masks = (who, total, mask_BV)
        return mask_BV

    def _common(self) -> Tensor:
        common_V = torch.zeros(self.model.decoder.head_weight().shape[0], dtype=torch.bool)
        common_V[self.banned.cpu()] = True
        return common_V

    def restrict(self, sample: Sample) -> str:
        """Ask the sample's grammar, if it has one, what may come next; what is wrong with the answer, or
        ""."""
        grammar = sample.ticket.request.params.grammar
        if grammar is None:
            return ""
        banned_V = self._common() if sample.ticket.banned_V is None else sample.ticket.banned_V
        try:
            allowed_V = torch.as_tensor(grammar.allowed(sample.ids), dtype=torch.bool).cpu()
        except Exception as error:  # whatever a caller's code raises ends that caller's request alone
            return f"the grammar raised {type(error).__name__}: {error}"
        if allowed_V.shape != banned_V.shape:
            return (
                f"the grammar returned a mask of shape {tuple(allowed_V.shape)}, expected"
                f" {tuple(banned_V.shape)}"
            )
        sample.banned_V = banned_V | ~allowed_V
        if bool(sample.banned_V.all()):
            return f"the grammar allows no token after {sample.ids[-8:]}, or only banned ones"
        return ""

    # ---- prefill
    # ------------------------------------------------------------------------------------------------

    def prefill(self, parts: Sequence[Part], recording: bool = False) -> Tensor | None:
        """Read the parts (all fresh, or none); hidden states [N, D] of the last token of every part that
        completes its sample, None if none does. recording: see `decode`."""
        self.pools.settle()
        if self.compiled is not None:
            self.page_tables([part.sample for part in parts])
            rows = Reading.of(parts)
            x_TD = embed(parts, rows.starts[-1], self.model)
            where = (rows.slots_T, rows.positions_T, rows.places_T, rows.starts)
            hidden_RD = self.compiled.run(x_TD, *where, self.table_SP, rows.ends)
            return hidden_RD if rows.ends else None
        segments, plan = prefill_plan(parts, self.pools, self.device)
        x_TD = embed(parts, segments.total, self.model)
        ends = [end - 1 for end, part in zip(segments.offsets[1:], parts) if part.completes]
        if self.lean is None or recording:
            hidden_TD = self.model.decoder(x_TD, segments, PooledCache(self.pools.layers, plan))
            return hidden_TD[torch.tensor(ends, device=self.device)] if ends else None
        plan = replace(plan, ends=ends_plan(parts, self.pools))
        filled = torch.tensor(
            ends + [segments.total - 1] * (whole_rows(len(ends)) - len(ends)), dtype=torch.long
        )
        hidden_RD = self.lean.read(x_TD, segments, plan, filled)
        return hidden_RD[: len(ends)] if ends else None

    def read(self, parts: Sequence[Part], rows: Sequence[int]) -> Tensor:
        """Read the parts (all fresh, or none); hidden states [R, D] of the given rows, counted through the
        parts' tokens."""
        self.pools.settle()
        rows_R = torch.tensor(rows, dtype=torch.long, device=self.device)
        if self.compiled is None:
            segments, plan = prefill_plan(parts, self.pools, self.device)
            x_TD = embed(parts, segments.total, self.model)
            return self.model.decoder(x_TD, segments, PooledCache(self.pools.layers, plan))[rows_R]
        self.page_tables([part.sample for part in parts])
        about = Reading.of(parts)
        places_T = torch.full_like(about.places_T, -1)
        places_T[rows_R] = torch.arange(len(rows))
        where = (about.slots_T, about.positions_T, places_T, about.starts)
        x_TD = embed(parts, about.starts[-1], self.model)
        return self.compiled.run(x_TD, *where, self.table_SP, len(rows))

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
        places = torch.tensor(list(rows) + [rows[0]] * missing).to(self.device)
        slots_B = torch.tensor([sample.slot for sample in samples] + [0] * missing).to(self.device)
        logits_BV = (self.model if self.compiled is None else self.compiled).logits(hidden_ND[places])
        controls = self._controls(slots_B, _needs(samples))
        chosen = choose(logits_BV, controls, self._banned(samples, slots_B.shape[0]))
        self.last_S[slots_B] = chosen[0].long()
        self.position_S[slots_B] += 1
        return chosen[:, : len(samples)]


def _needs(samples: Sequence[Sample]) -> Needs:
    every = [sample.ticket.request.params for sample in samples]
    return Needs(
        drawn=any(params.temperature > 0 for params in every),
        top_p=any(params.top_p < 1 for params in every),
        min_p=any(params.min_p > 0 for params in every),
        logprobs=any(params.logprobs for params in every),
    )


_SINGLES: dict[int, Segments] = {}


def _singles(rows: int) -> Segments:
    """Segments of one token each, made once per number of rows."""
    if rows not in _SINGLES:
        _SINGLES[rows] = Segments((1,) * rows)
    return _SINGLES[rows]
