"""The engine: continuous batching over the hybrid model's slots and pages.

A step reads at most one chunk of prompts and advances every running sample by one token, then looks once at
the host what was chosen (the only host sync of a step; captured routing adds its own). See
model/engine/requests.py for how to use it.

Given answers are judged without sampling:

    engine = Engine(model, tokenizer, max_slots=16, prefix_cache=4)
    requests = [ScoreRequest(prompt, [(17,), (18, 4)], shared=640), ...]
    scores = engine.score(requests)              # scores[i][c].logprobs, .likeliest, .greedy
    scores = engine.score(requests, states=True) # scores[i][c].states [tokens, D]
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earlyfusion.kernels.attention.tiles import FIRST_TILE
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import Pools, PrefixCache
from earlyfusion.model.engine.drafts import Drafts
from earlyfusion.model.engine.requests import (
    Completion,
    EngineFull,
    Event,
    Handle,
    PausedRequest,
    PausedSample,
    Prompt,
    Request,
    RequestError,
    SamplingParams,
    Score,
    ScoreRequest,
)
from earlyfusion.model.engine.runner import ImageMemory, Runner
from earlyfusion.model.engine.scheduler import (
    WRITTEN,
    Part,
    RequestState,
    Sample,
    Scheduler,
    new_state,
    token_rules,
)
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import moe_layers, recording_routing
from earlyfusion.vision.patches import Grid

TakeRouting = Callable[[], Tensor]
"""Of `recording_routing`: experts [T, L, J] chosen since the last call."""
RUN_AHEAD = 16
"""Tokens that a sample may get on the device before the host looks at them."""

ROWS_AT_ONCE = 1024
"""Rows whose logits over the vocabulary are held at once."""
Judged = tuple[Score, list[int]]
"""A continuation and what becomes known of it."""


class Engine:
    """Serves requests from one model on one device.

    max_slots: samples at once. max_pages: pages of `page_size` tokens (None: 1,024 tokens a slot).
    prefill_chunk: most prompt tokens read in one step. max_waiting: length of the waiting line. prefix_cache:
    checkpoints kept (0: none), every `checkpoint_every` tokens of a prompt. image_cache: pictures whose
    features are kept. run_ahead: see `_steps_ahead`. speculate: drafts of siblings where they pay
    (drafts.py); what is written is the same to the bit. Only in the compiled form, on a CPU.
    """

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Any = None,
        *,
        max_slots: int = 16,
        max_pages: int | None = None,
        page_size: int = 64,
        prefill_chunk: int = 512,
        max_waiting: int = 1024,
        prefix_cache: int = 0,
        checkpoint_every: int = 512,
        image_cache: int = 256,
        run_ahead: int = RUN_AHEAD,
        speculate: bool = False,
    ) -> None:
        if max_slots < 1 or prefill_chunk < 4:
            raise ValueError(f"max_slots={max_slots}, prefill_chunk={prefill_chunk}: at least 1 and 4")
        if page_size & (page_size - 1) or not 4 <= page_size <= FIRST_TILE:
            raise ValueError(f"page_size={page_size}: must be a power of two in 4..{FIRST_TILE}")

        self.model, self.tokenizer = model, tokenizer
        self.max_waiting, self.run_ahead = max_waiting, run_ahead
        self.rules = token_rules(model, tokenizer)
        pages = max_slots * -(-1024 // page_size) if max_pages is None else max_pages
        # Checkpoints of the prefix cache live in slots of their own, beside those of samples.
        slots, like = max_slots + prefix_cache, model.decoder.norm.weight
        self.pools = Pools.allocate(model.config.text, slots, pages, page_size, like)
        self.prefix = PrefixCache(self.pools, prefix_cache, checkpoint_every)
        self.scheduler = Scheduler(self.pools, self.prefix, max_slots, prefill_chunk)
        self.runner = Runner(model, self.pools, sorted(self.rules.banned_ids), pages)
        self.drafts = Drafts() if speculate and self.runner.compiled is not None else None
        self.images = ImageMemory(model, image_cache)
        self.has_experts = bool(moe_layers(model))

    # ---- requests

    def submit(self, request: Request, after: PausedSample | None = None) -> Handle:
        """Take a request. after: what a sample left behind (`Event.left`) whose prompt and tokens the prompt
        begins with: only what follows them is read. Raises RequestError (it can never be served) or
        EngineFull (not now)."""
        state = self._new_state(request)
        if after is not None:
            if request.params.n > 1 or not 0 < after.length < len(state.ids):
                raise RequestError(
                    f"request {request.id!r} goes on after {after.length} tokens: expected one sample (has"
                    f" {request.params.n}) and a longer prompt (has {len(state.ids)})"
                )
            if request.capture_routing and after.routing is None:
                raise RequestError(
                    f"request {request.id!r}: capture_routing, but the state it goes on from knows no routing"
                )
            # Checked before anything is queued: a refused request leaves no trace.
            self._keep_state(state.samples[0], after)
            state.cached_tokens = after.length
        self.scheduler.submit(state)
        # Nothing to write: it ends here, without a slot.
        if request.params.max_new_tokens == 0:
            self.scheduler.waiting.remove(state)
            for sample in state.samples:
                self.scheduler.finish(sample, "length")
        return state.handle

    def _new_state(self, request: Request) -> RequestState:
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        if request.id in self.scheduler.states:
            raise RequestError(f"request id {request.id!r} is in use; give every unfinished request its own")
        if request.capture_routing and not self.has_experts:
            raise RequestError(f"request {request.id!r}: capture_routing, but the model has no MoE layer")
        state = new_state(request, self.rules)
        state.borders = self.prefix.borders(len(state.ids))
        return state

    def _keep_state(self, sample: Sample, paused: PausedSample) -> None:
        """The sample's exported state is put back when it is admitted. Raises RequestError for another
        model's."""
        try:
            self.pools.check(paused.state, paused.length)
        except ValueError as error:
            raise RequestError(str(error)) from None
        sample.saved, sample.length = paused.state, paused.length
        sample.routing = [] if paused.routing is None else [paused.routing]

    def cancel(self, request_id: str) -> bool:
        """End a request now; its unfinished samples complete as "cancelled" (in the next step's events).
        False: unknown."""
        state = self.scheduler.states.get(request_id)
        if state is None:
            return False
        # Slots first: a finished sample must hold nothing.
        self.scheduler.withdraw(state)
        for sample in state.alive:
            self.scheduler.finish(sample, "cancelled")
        return True

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample that is being written, if there is such; it completes as "cancelled" with what it
        has (in the next step's events)."""
        for sample in list(self.scheduler.running):
            if sample.parent.request.id == request_id and sample.index == index:
                self.scheduler.finish(sample, "cancelled")

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self.scheduler.states or self.scheduler.events)

    @property
    def waiting(self) -> int:
        """Requests in the waiting line."""
        return len(self.scheduler.waiting)

    def close(self) -> None:
        """Nothing to do: it lives in this process."""

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve these requests and return their completions: in the given order, samples of a request in
        theirs.

        Raises RuntimeError while other requests are unfinished (their events would be lost), RequestError as
        `submit`.
        """
        if self.has_work:
            raise RuntimeError(
                "generate() needs an idle engine: other requests are unfinished; use submit() and step()"
            )
        handles: list[Handle] = []
        for request in requests:
            while len(self.scheduler.waiting) >= self.max_waiting:
                self.step()
            # Nobody listens to pieces here, so their text is decoded once, at the end.
            handles.append(self.submit(replace(request, pieces=False)))
        while self.has_work:
            self.step()
        return [completion for handle in handles for completion in handle.completions]

    def score(
        self,
        requests: Sequence[ScoreRequest],
        *,
        states: bool = False,
        banned_ids: Sequence[int] = (),
    ) -> list[list[Score]]:
        """Judge given continuations: result[i][c] is that of continuation c of request i.

        What a request gets does not depend, bit for bit, on the others of the call. A prompt is read once for
        all its continuations, and what requests share (`ScoreRequest.shared`) once for all of them. states:
        keep hidden states, too. banned_ids: do not compete in `Score.likeliest`; they keep their share of the
        probability.

        Raises RuntimeError while requests are unfinished, RequestError for a prompt that is empty, does not
        fit its pictures or needs more pages than there are, and for ids outside the vocabulary.
        """
        if self.has_work:
            raise RuntimeError("score() needs an idle engine: other requests are unfinished")
        with self._inference():
            return Scorer(self, states, banned_ids).score(requests)

    # ---- one step

    def step(self) -> list[Event]:
        """Advance everything by one forward pass of each kind; what became known, in no particular order."""
        scheduler = self.scheduler
        with self._inference():
            self.begin()
            samples = scheduler.running + scheduler.reading
            capture = any(sample.parent.request.capture_routing for sample in samples)
            with recording_routing(self.model) if capture else nullcontext() as take:
                # Each entry: samples, what was chosen for them, whether their last token was fed for it.
                chosen: list[tuple[list[Sample], Tensor, bool]] = []
                counts: list[int] | None = None
                running = list(scheduler.running)
                if running:
                    decoded, counts = self._decode(running, take)
                    chosen.append((running, decoded, True))
                parts = scheduler.next_parts()
                if parts:
                    starting, chosen_13N = self._read(parts, take)
                    if starting:
                        chosen.append((starting, chosen_13N, False))

            # The only wait for the device in a step: one copy of everything that was chosen.
            if chosen:
                scheduler.counts["host_syncs"] += 1
                known = torch.cat([chosen_K3N.flatten() for _, chosen_K3N, _ in chosen]).cpu()
                sizes = [chosen_K3N.numel() for _, chosen_K3N, _ in chosen]
                for (samples, chosen_K3N, fed), part in zip(chosen, known.split(sizes)):
                    found = part.view(chosen_K3N.shape).numpy()
                    scheduler.accept(samples, found, fed, counts if fed else None)
        events, scheduler.events = scheduler.events, []
        return events

    @contextmanager
    def _inference(self) -> Iterator[None]:
        # A walk through all modules takes a third as long as a step of the C++ form.
        if was_training := self.model.training:
            self.model.eval()
        try:
            # inference_mode is the quicker one, but the modules cache
            # tensors that a later training step may meet.
            with torch.inference_mode() if self.runner.compiled is not None else torch.no_grad():
                yield
        finally:
            if was_training:
                self.model.train()

    def begin(self) -> None:
        """Give slots to what waits: encode pictures, seat the samples whose state was put back."""
        states = self.scheduler.admit()
        self.images.attach(states)
        self.runner.seat([each for each in self.scheduler.running if each.parent in states])

    def _decode(self, running: list[Sample], take: TakeRouting | None) -> tuple[Tensor, list[int] | None]:
        """The next tokens of every running sample, [steps, 3, N]: one, with graphs several, with drafts as
        many as the counts [N] say."""
        start = time.perf_counter()
        drafts = self.drafts.propose(running) if self.drafts is not None else None
        steps = 1
        if take is None and self.runner.graphs is not None:
            steps = self._steps_ahead(running)
        # Only samples whose pages changed send a new row of the page table.
        moved = []
        for place, sample in enumerate(running):
            more = 1 + len(drafts[place]) if drafts is not None else min(steps, sample.left)
            if self.scheduler.make_room(sample, sample.length + more):
                moved.append(sample)
        self.runner.page_tables(moved)

        if drafts is not None:
            chosen_K3N, counts = self.runner.decode_drafts(running, drafts)
            rows = [1 + len(draft) for draft in drafts]
        else:
            chosen_K3N = self.runner.decode(running, steps, recording=take is not None)
            counts, rows = None, [1] * len(running)
        if take is not None:
            # Of drafts the rows that were accepted.
            routing = np.split(self._experts(take)[: sum(rows)], np.cumsum(rows)[:-1])
            for sample, part, count in zip(running, routing, counts or rows):
                sample.routing.append(part[:count])
        if self.drafts is not None:
            if counts is not None and drafts is not None:
                self.drafts.learn(drafts, [count - 1 for count in counts])
            spent = time.perf_counter() - start
            self.drafts.account(len(running), sum(rows), sum(counts or rows), spent)
        return chosen_K3N, counts

    def _experts(self, take: TakeRouting) -> np.ndarray:
        """What was chosen since the last call, in the smallest type that holds the ids of all experts."""
        kind = torch.uint8 if self.model.config.text.num_experts <= 256 else torch.uint16
        return take().to(kind).cpu().numpy()

    def _steps_ahead(self, running: Sequence[Sample]) -> int:
        """Steps that the device takes before the host looks at what was chosen.

        A sample that ends among them stands still for the rest of them, so it is as many as certainly end
        none, or a quarter of what has been written on average: what was long so far goes on for long. One
        while prompts are read.
        """
        if self.run_ahead == 1 or self.scheduler.reading or not all(each.parent.foreseen for each in running):
            return 1
        left = [each.left for each in running]
        certain = min(0 if each.parent.stop_ids else more for each, more in zip(running, left))
        written = sum(len(each.ids) for each in running) // (4 * len(running))
        return max(1, min(self.run_ahead, max(left), max(certain, written)))

    def _read(self, parts: Sequence[Part], take: TakeRouting | None) -> tuple[list[Sample], Tensor]:
        """Read parts of prompts: the samples that start to decode, and their first tokens [1, 3, N]."""
        # A prompt's last token is the only one whose hidden state chooses anything.
        ends, lengths = [], []
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
            lengths.append(part.stop - part.start)
            if part.completes:
                ends.append(sum(lengths) - 1)
        hidden_ND = self.runner.read(parts, ends)
        if take is not None:
            for part, routing in zip(parts, np.split(self._experts(take), np.cumsum(lengths))):
                part.sample.routing.append(routing)

        # Those begin that have read to their end; a group starts from one hidden state.
        starting: list[Sample] = []
        rows: list[int] = []
        completed = 0
        for part in parts:
            completes = part.completes
            for sample in self.scheduler.advance(part):
                self.scheduler.run(sample)
                starting.append(sample)
                rows.append(completed)
            completed += completes
        self.runner.seat(starting)
        if not starting:
            return starting, hidden_ND
        return starting, self.runner.choose_first(hidden_ND, starting, rows).unsqueeze(0)

    # ---- pause, resume, new weights

    def pause(self, request_id: str) -> PausedRequest:
        """Take an unfinished request out, with the state of its samples that have begun to decode.

        Raises RequestError for an id that is not unfinished here.
        """
        scheduler = self.scheduler
        state = scheduler.states.pop(request_id, None)
        if state is None:
            raise RequestError(f"request {request_id!r} is not unfinished here")
        samples: list[PausedSample] = []
        for sample in state.alive:
            saved = sample.saved or {}
            if sample in scheduler.running:
                saved = self.pools.export(sample.slot, sample.pages, sample.length)
            samples.append(sample.paused(saved))
        scheduler.withdraw(state)
        scheduler.counts["paused"] += 1
        finished = list(state.handle.completions)
        return PausedRequest(state.request, samples, finished, scheduler.version, state.cached_tokens)

    def resume(self, paused: PausedRequest) -> Handle:
        """Go on with a paused request, here or elsewhere; after a weight swap the continuation is of mixed
        versions. Samples that had not begun to decode read their prompt again.

        Raises RequestError or EngineFull as `submit`, and RequestError for a state of another model.
        """
        state = self._new_state(paused.request)
        by_index = {sample.index: sample for sample in paused.samples}
        done = {completion.index for completion in paused.finished}
        if done | set(by_index) != set(range(len(state.samples))):
            raise RequestError(
                f"paused request {paused.request.id!r} lacks some of its {len(state.samples)} samples"
            )
        state.handle.completions, state.cached_tokens = list(paused.finished), paused.cached_tokens
        for sample in state.samples:
            sample.finished = sample.index in done
            if sample.finished:
                continue
            before = by_index[sample.index]
            for name in WRITTEN:
                setattr(sample, name, list(getattr(before, name)))
            # Token by token only where a string may end the text between two of them.
            for piece in [[one] for one in sample.ids] if sample.stream.stop else [sample.ids]:
                sample.stream.push(piece)
            if before.state:
                self._keep_state(sample, before)
        self.scheduler.submit(state)
        return state.handle

    @torch.no_grad()
    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights into the model between two steps; tokens from here on carry `version`.

        Unfinished requests go on from the states of the old weights. Prefix cache and image features are
        forgotten. Raises ValueError, with nothing changed, for names or shapes that are not the model's.
        """
        own = self.model.state_dict()
        wrong = sorted(set(own) ^ set(state_dict))
        wrong += [name for name in own if name not in wrong and own[name].shape != state_dict[name].shape]
        if wrong:
            raise ValueError(
                f"{len(wrong)} tensors are missing, unknown or of another shape: {', '.join(wrong[:8])}"
            )
        # In place: captured graphs and the optimizer hold these very tensors. A sharded tensor is put
        # together here, one at a time, which all of its ranks do.
        for name, tensor in own.items():
            given: Any = state_dict[name]
            tensor.copy_(given.full_tensor() if hasattr(given, "full_tensor") else given)
        self.scheduler.version = version
        self.runner.refresh()
        self.prefix.clear()
        self.images.features.clear()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and who holds what now."""
        stats = self.scheduler.stats()
        stats.update(images_encoded=self.images.encoded, image_hits=self.images.hits)
        if self.drafts is not None:
            stats.update(drafted_tokens=self.drafts.drafted, accepted_drafts=self.drafts.accepted)
        return stats


# ---- given continuations


class Scorer:
    """One call of `Engine.score`; see there.

    It takes the ways of generation: a prompt is read in chunks into a slot and pages, and forked for each of
    its continuations, which are read in turn, like a sample that comes back with tokens it had already. Only
    where a token is to be judged are hidden states turned into logits. A beginning that requests share is
    left in the prefix cache by the first of them; chunk borders depend on the request alone, and so do its
    results.

    Shapes: R judged rows, D hidden, V vocabulary, K judged tokens.
    """

    def __init__(self, engine: Engine, keep_states: bool, banned_ids: Sequence[int]) -> None:
        self.engine, self.keep_states, self.scheduler = engine, keep_states, engine.scheduler
        self.banned = torch.tensor(sorted(banned_ids), dtype=torch.long, device=engine.model.device)
        # Of every request on its way: what it judges, those first that its samples read on with.
        self.judged: dict[RequestState, list[Judged]] = {}

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[Score]]:
        scores: list[list[Score]] = []
        groups: dict[bytes, list[RequestState]] = defaultdict(list)
        for number, request in enumerate(requests):
            scores.append([Score() for _ in request.continuations])
            for state in self._states(f"score {number}", request, scores[-1]):
                self.scheduler.check(state)
                # By the beginning they share; "" where there is none.
                groups[state.key_ids[: sum(state.borders)].tobytes()].append(state)

        # The first of a group leaves the common beginning behind; as many groups at once as can be kept.
        self._run(groups.pop(b"", []))
        sharing, most = list(groups.values()), max(1, self.scheduler.prefix.limit)
        for start in range(0, len(sharing), most):
            some = sharing[start : start + most]
            self._run([group[0] for group in some])
            self._run([state for group in some for state in group[1:]])
        return scores

    def _states(self, name: str, request: ScoreRequest, scores: list[Score]) -> Iterator[RequestState]:
        """The request as states: several where more continuations are to be read than there are slots."""
        judged = [(score, [int(id) for id in ids]) for score, ids in zip(scores, request.continuations)]
        known = self.engine.model.config.text.vocab_size
        for _, ids in judged:
            if ids and not 0 <= min(ids) <= max(ids) < known:
                raise RequestError(
                    f"{name}: continuation ids must lie in 0..{known - 1}, got {min(ids)}..{max(ids)}"
                )

        # A continuation of one token needs nothing but the state at the prompt's end.
        longer = [(score, ids) for score, ids in judged if len(ids) > 1]
        single = [(score, ids) for score, ids in judged if len(ids) == 1]
        most, size = self.scheduler.max_slots, self.scheduler.pools.page_size
        for start in range(0, max(1, len(longer)), most):
            read = longer[start : start + most]
            # Pages are promised for the longest of them; the prompt's are shared.
            longest = max((len(ids) - 1 for _, ids in read), default=0)
            params = SamplingParams(longest, n=max(1, len(read)))
            state = new_state(Request(f"{name}, {start}", request.prompt, params), self.engine.rules)
            for sample, (_, ids) in zip(state.samples, read):
                sample.ids = ids[:-1]  # the last token is judged, never read
            self.judged[state], single = read + single, []

            # A hit of any other length would move the chunk borders, and with them the last bits.
            shared = min(request.shared, len(state.ids) - 1) // size * size
            state.hits = range(0)
            if shared > 0 and self.scheduler.prefix.limit:
                state.borders, state.hits = [shared], range(shared, shared + 1)
            yield state

    def _run(self, states: list[RequestState]) -> None:
        """Read all of them; longest first, so that those of a pass have about the same length."""
        scheduler = self.scheduler
        scheduler.waiting.extend(sorted(states, key=lambda each: sum(each.borders) - each.longest))
        try:
            while scheduler.waiting or scheduler.reading:
                self.engine.begin()
                self._read(scheduler.next_parts())
        finally:  # an interrupt leaves an idle engine behind
            for state in states:
                scheduler.withdraw(state)

    def _read(self, parts: list[Part]) -> None:
        """One pass: read the parts, judge what they choose, release the samples they complete."""
        # Rows of other positions are computed for the state alone and never projected to the vocabulary.
        rows: list[int] = []
        tokens: list[tuple[int, Score, int]] = []  # place in `rows`, whose token, the token
        offset = 0
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
            state = part.sample.parent
            last = len(state.ids) - 1
            for position in range(max(part.start, last), part.stop):
                # The prompt's end chooses first tokens for all; later ones belong to the sample's own.
                judged, at = self.judged[state], position - last
                for score, ids in judged if at == 0 else [judged[part.sample.index]]:
                    tokens.append((len(rows), score, ids[at]))
                rows.append(offset + position - part.start)
            offset += part.stop - part.start

        self._judge(self.engine.runner.read(parts, rows), tokens)
        for part in parts:
            for sample in self.scheduler.advance(part):
                self.scheduler.release(sample)

    def _judge(self, hidden_RD: Tensor, tokens: list[tuple[int, Score, int]]) -> None:
        """Log-probability of every token under the logits of its row, some rows at a time."""
        numbers = torch.tensor([(row, token) for row, _, token in tokens], device=hidden_RD.device)
        rows_K, ids_K = numbers.view(-1, 2).long().T
        logprobs, likeliest = [], []
        for first in range(0, len(hidden_RD), ROWS_AT_ONCE):
            logits_RV = self.engine.runner.logits(hidden_RD[first : first + ROWS_AT_ONCE]).float()
            here = (rows_K >= first) & (rows_K < first + ROWS_AT_ONCE)
            at, ids = rows_K[here] - first, ids_K[here]
            logprobs += logits_RV.log_softmax(-1)[at, ids].tolist()
            best_R = logits_RV.index_fill(1, self.banned, float("-inf")).argmax(-1)
            likeliest += (best_R[at] == ids).tolist()

        # Of every continuation the rows of this pass, joined once.
        rows: dict[Score, list[int]] = defaultdict(list)
        for (row, score, _), logprob, best in zip(tokens, logprobs, likeliest):
            score.logprobs.append(logprob)
            score.likeliest.append(best)
            rows[score].append(row)
        for score, places in rows.items() if self.keep_states else ():
            before = hidden_RD[:0] if score.states is None else score.states
            score.states = torch.cat([before, hidden_RD[places]])


# ---- a batch of prompts in one call

MOST_SLOTS = 64
PAGE = 16


@dataclass
class Row:
    """Prompts packed into one row: the part of a PackedBatch that the embedding needs."""

    ids: Tensor
    segments: Segments
    patches: Tensor
    grids: list[Grid]
    media_positions: Tensor


def pack_prompts(model: NativeFusion, prompts: Sequence[Prompt]) -> Row:
    """One packed row on the model's device. Raises ValueError for an empty prompt, or no prompt at all."""
    vision, device = model.config.vision, model.device
    lengths = [len(prompt.ids) for prompt in prompts]
    if not min(lengths, default=0):
        raise ValueError(f"{len(prompts)} prompts of {lengths} tokens; give at least one, each with [BOS]")
    segments = Segments.from_lengths(lengths)
    # The empty beginning gives a row without pictures the right shape and dtype.
    patches = [torch.empty(0, vision.in_channels, vision.patch_size, vision.patch_size, dtype=torch.uint8)]
    places, grids = [], list[Grid]()
    for prompt, start in zip(prompts, segments.offsets):
        # Positions count through the packed row, not through the prompt.
        places.append(torch.as_tensor(prompt.media_positions).long() + start)
        grids += prompt.grids
        if prompt.patches is not None:
            patches.append(prompt.patches)
    return Row(
        ids=torch.cat([prompt.ids.long() for prompt in prompts]).to(device),
        segments=segments,
        patches=torch.cat(patches).to(device),
        grids=grids,
        media_positions=torch.cat(places).to(device),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, the mode restored after.

    Not inference_mode: plans cached on Segments and grids may be used by a training step later on.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def generate(
    model: NativeFusion, tokenizer: Any, prompts: Sequence[Prompt], *, max_new_tokens: int = 64
) -> list[str]:
    """Continue every prompt greedily until [EOS], <|end_of_msg|> or `max_new_tokens`; -> texts.

    Image placeholders and other tokens that only stand in inputs are never produced. Special tokens are left
    out of the texts. tokenizer: `data.tokenizer.Tokenizer` or anything with `special_ids` (name -> id),
    `vocab_size` and `decode(ids, skip_special=...)`. Raises ValueError for no prompt or an empty one.
    """
    params = SamplingParams(max_new_tokens, temperature=0.0)
    engine = engine_for(model, tokenizer, prompts, max_new_tokens)
    requests = [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    return [done.text for done in engine.generate(requests)]


def engine_for(
    model: NativeFusion,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    most_slots: int = MOST_SLOTS,
) -> Engine:
    """An engine just large enough for these prompts, at most `most_slots` at a time. Raises ValueError for no
    prompt."""
    if not prompts:
        raise ValueError("no prompts given; pass at least one")
    # Memory for the longest ones that can run together: no prompt waits for pages.
    slots = min(len(prompts), most_slots)
    longest = sorted(len(prompt.ids) + max(0, max_new_tokens) for prompt in prompts)[-slots:]
    return Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        # Whole pages for each; a forked group may hold one page more than its samples apart.
        max_pages=sum(-(-tokens // PAGE) + 1 for tokens in longest),
        # Whole prompts at once: nobody waits for the first token here.
        prefill_chunk=2048,
        max_waiting=len(prompts),
    )
