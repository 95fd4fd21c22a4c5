"""The engine: continuous batching over the hybrid model's slots and pages.

A step reads at most one chunk of prompts and advances every running sample by one token, then looks once at
the host what was chosen (the only host sync of a step; captured routing adds its own). See
model/engine/requests.py for how to use it.

Given answers are judged without sampling:

    engine = Engine(model, tokenizer, max_slots=16, prefix_cache=4)
    requests = [ScoreRequest(prompt, [(17,), (18, 4)], shared=640), ...]
    scores = engine.score(requests)              # scores[i][c].logprobs, .likeliest, .greedy
    scores = engine.score(requests, states=True) # scores[i][c].states [tokens, D]; engine.logits(states) [..,
    V]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import FIRST_TILE
from earlyfusion.model.engine import transfer
from earlyfusion.model.engine.batch import Part
from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.images import ImageMemory
from earlyfusion.model.engine.prefix import PrefixCache
from earlyfusion.model.engine.requests import (
    Completion,
    EngineFull,
    Event,
    Handle,
    PausedSample,
    Request,
    RequestError,
    Score,
    ScoreRequest,
)
from earlyfusion.model.engine.runner import Runner
from earlyfusion.model.engine.scheduler import Scheduler
from earlyfusion.model.engine.score import Scorer
from earlyfusion.model.engine.state import Decodes, RequestState, Sample, new_state, token_rules
from earlyfusion.model.engine.table import RequestTable
from earlyfusion.model.engine.transfer import PausedRequest
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.moe import moe_layers, recording_routing

TakeRouting = Callable[[], Tensor]
"""Of `recording_routing`: experts [T, L, J] chosen since the last call."""
RUN_AHEAD = 16
"""Tokens that a sample may get on the device before the host looks at them."""


class Engine:
    """Serves requests from one model on one device.

    max_slots: samples at a time. page_size: tokens of a latent page (a power of two from 4 to 128),
    max_pages: how many (default: 1024 tokens per slot). prefill_chunk: prompt tokens read per step.
    max_waiting: requests that may wait for a slot. prefix_cache: checkpoints of beginnings that are kept (0:
    off; each takes a slot's memory), one every checkpoint_every tokens of a prompt. image_cache: pictures
    whose features are kept. tokenizer: for texts, stop strings and the ids that may not be chosen (None:
    texts stay empty, only the image placeholder is banned). version: of the weights. run_ahead: with CUDA
    graphs, the most tokens a sample gets before the host looks at them (see `_steps_ahead`); events then hold
    several.

    Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Decodes | None = None,
        *,
        max_slots: int = 16,
        max_pages: int | None = None,
        page_size: int = 64,
        prefill_chunk: int = 512,
        max_waiting: int = 1024,
        prefix_cache: int = 0,
        checkpoint_every: int = 512,
        image_cache: int = 256,
        version: int = 0,
        run_ahead: int = RUN_AHEAD,
    ) -> None:
        for name, value, least in (
            ("max_slots", max_slots, 1),
            ("page_size", page_size, 4),
            ("prefill_chunk", prefill_chunk, 4),
            ("max_waiting", max_waiting, 1),
            ("prefix_cache", prefix_cache, 0),
            ("image_cache", image_cache, 1),
            ("run_ahead", run_ahead, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if page_size & (page_size - 1) or page_size > FIRST_TILE:
            raise ValueError(f"page_size={page_size}: must be a power of two, at most {FIRST_TILE}")

        self.model, self.tokenizer = model, tokenizer
        self.max_waiting, self.run_ahead = max_waiting, run_ahead
        self.rules, self.has_moe = token_rules(model, tokenizer), bool(moe_layers(model))
        pages = max_slots * -(-1024 // page_size) if max_pages is None else max_pages
        text = model.config.text
        like = model.decoder.norm.weight
        self.pools = Pools.allocate(text, max_slots + prefix_cache, pages, page_size, like)
        self.prefix = PrefixCache(self.pools, prefix_cache, checkpoint_every)
        self.scheduler = Scheduler(self.pools, self.prefix, max_slots, prefill_chunk)
        self.runner = Runner(model, self.pools, sorted(self.rules.banned_ids), pages)
        self.images = ImageMemory(model, image_cache)
        self.table = RequestTable(self.scheduler, self.prefix, self.runner, version)

    @property
    def version(self) -> int:
        """Of the weights that choose now."""
        return self.table.version

    # ---- requests

    def submit(self, request: Request, after: PausedSample | None = None) -> Handle:
        """Take a request. after: what a sample left behind (`Event.left`) whose prompt and tokens the prompt
        begins with: only what follows them is read. Raises RequestError (it can never be served) or
        EngineFull (not now)."""
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        state = self._new_state(request)
        if after is not None:
            transfer.go_on(self.pools, state, after)
        self.scheduler.check(state)
        self.table.states[request.id] = state
        if request.params.max_new_tokens == 0:
            for sample in state.samples:
                self.table.finish(sample, "length")
        else:
            self.scheduler.waiting.append(state)
        return state.handle

    def _new_state(self, request: Request) -> RequestState:
        if request.id in self.table.states:
            raise RequestError(f"request id {request.id!r} is in use; give every unfinished request its own")
        if request.capture_routing and not self.has_moe:
            raise RequestError(f"request {request.id!r}: capture_routing, but the model has no MoE layer")
        return new_state(request, self.rules)

    def cancel(self, request_id: str) -> bool:
        """End a request now; its unfinished samples complete as "cancelled" (in the next step's events).
        False: unknown."""
        state = self.table.states.get(request_id)
        if state is None:
            return False
        self.table.leave_scheduler(state)
        for sample in state.alive:
            self.table.finish(sample, "cancelled")
        return True

    def end_sample(self, request_id: str, index: int) -> bool:
        """End one sample that is being written; it completes as "cancelled" with what it has (in the next
        step's events). False: there is none such."""
        state = self.table.states.get(request_id)
        for sample in state.alive if state is not None else ():
            if sample.index == index and sample in self.scheduler.running:
                self.table.finish(sample, "cancelled")
                return True
        return False

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self.table.states or self.table.events)

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
        scorer = Scorer(self.table, self.rules, states, banned_ids)
        with self._inference():
            return scorer.score(requests, self._begin)

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states [R, D], a row's bits independent of the others."""
        with self._inference():
            return self.runner.logits(states)

    # ---- one step

    def step(self) -> list[Event]:
        """Advance everything by one forward pass of each kind; what became known, in no particular order."""
        with self._inference():
            self._begin(self.scheduler.admit())
            samples = self.scheduler.running + self.scheduler.reading
            capture = any(sample.parent.request.capture_routing for sample in samples)
            with recording_routing(self.model) if capture else nullcontext() as take:
                # Each entry: samples, what was chosen for them, whether their last token was fed for it.
                chosen: list[tuple[list[Sample], Tensor, bool]] = []
                running = list(self.scheduler.running)
                if running:
                    chosen.append((running, self._decode(running, take), True))
                parts = self.scheduler.next_parts()
                if parts:
                    starting, chosen_13N = self._read(parts, take)
                    if chosen_13N is not None:
                        chosen.append((starting, chosen_13N, False))

            if chosen:
                self.table.counts["host_syncs"] += 1
                self.table.counts["steps"] += 1
                known = torch.cat([chosen_K3N.reshape(-1) for _, chosen_K3N, _ in chosen]).cpu().numpy()
                for samples, chosen_K3N, fed in chosen:
                    own, known = known[: chosen_K3N.numel()], known[chosen_K3N.numel() :]
                    self.table.accept(samples, own.reshape(chosen_K3N.shape), fed)
        return self.table.take_events()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            # inference_mode is the quicker one, but the modules cache
            # tensors that a later training step may meet.
            with torch.inference_mode() if self.runner.compiled is not None else torch.no_grad():
                yield
        finally:
            if was_training:
                self.model.train()

    def _begin(self, states: list[RequestState]) -> None:
        """Requests have slots now: encode their pictures, seat the samples whose state was put back."""
        self.images.attach(states, self.scheduler.reading)
        for state in states:
            self.runner.seat([sample for sample in state.alive if self.scheduler.runs(sample)])

    def _decode(self, running: list[Sample], take: TakeRouting | None) -> Tensor:
        """One token for every running sample (with graphs, several): [steps, 3, N]."""
        steps = 1 if take is not None or self.runner.graphs is None else self._steps_ahead(running)
        moved = []
        for sample in running:
            if self.scheduler.make_room(sample, sample.length + min(steps, sample.left)):
                moved.append(sample)
        self.runner.page_tables(moved)

        chosen_K3N = self.runner.decode(running, steps, recording=take is not None)
        if take is not None:
            for sample, row in zip(running, transfer.narrow(take().cpu().numpy())):
                sample.routing.append(row[None])
        return chosen_K3N

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

    def _read(self, parts: Sequence[Part], take: TakeRouting | None) -> tuple[list[Sample], Tensor | None]:
        """Read parts of prompts: the samples that start to decode, and their first tokens [1, 3, N]."""
        ends, total = [], 0
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
            total += part.stop - part.start
            if part.completes:
                ends.append(total - 1)
        hidden_ND = self.runner.read(parts, ends)
        self.table.counts["read_tokens"] += total
        if take is not None:
            routing, start = transfer.narrow(take().cpu().numpy()), 0
            for part in parts:
                part.sample.routing.append(routing[start : start + part.stop - part.start])
                start += part.stop - part.start

        # Keep what was read for others, and let those begin that have read to their end.
        starting: list[Sample] = []
        rows: list[int] = []
        completed = 0
        for part in parts:
            sample, completes = part.sample, part.completes
            sample.length = part.stop
            if self.prefix.worth_keeping(part.stop, len(sample.parent.ids)):
                self.prefix.insert(sample.parent.key_ids, part.stop, sample.slot, sample.pages)
            if completes:
                group = self._read_to_the_end(sample)
                starting += group
                rows += [completed] * len(group)
                completed += 1
        self.runner.seat(starting)
        if not starting:
            return starting, None
        return starting, self.runner.choose_first(hidden_ND, starting, rows).unsqueeze(0)

    def _read_to_the_end(self, lead: Sample) -> list[Sample]:
        """Fork the lead; samples that go on reading what they had generated before stay behind, the rest
        start."""
        self.scheduler.reading.remove(lead)
        starting = []
        for sample in self.scheduler.fork(lead):
            if sample.length < sample.context:
                self.scheduler.reading.append(sample)
            else:
                self.scheduler.run(sample)
                starting.append(sample)
        return starting

    # ---- pause, resume, new weights

    def pause(self, request_id: str) -> PausedRequest:
        """Take an unfinished request out, with the state of its samples that have begun to decode.

        Raises RequestError for an id that is not unfinished here.
        """
        return transfer.pause(self.table, self.pools, request_id)

    def resume(self, paused: PausedRequest, keep_state: bool = True) -> Handle:
        """Go on with a paused request, here or elsewhere.

        keep_state: put the exported state back (after a weight swap: a continuation of mixed versions);
        False: read prompt and generated tokens again with the weights of today. Samples without state read
        again in any case. What was chosen stands in `Completion.resumes` and `stats()`. Raises RequestError
        or EngineFull as `submit`, and RequestError for a state of another model.
        """
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        return transfer.resume(self.table, self.pools, paused, keep_state, self._new_state)

    def load_weights(
        self, state_dict: Mapping[str, Tensor], version: int, paused: transfer.Policy = "keep"
    ) -> None:
        """Copy new weights into the model between two steps; tokens from here on carry `version`.

        paused: what becomes of unfinished requests, as in `resume`: "keep" goes on from states of the old
        weights, "reprefill" reads everything again. Prefix cache and image features are forgotten. Raises
        ValueError, with nothing changed, for names or shapes that are not the model's.
        """
        transfer.load_weights(self.table, self.model, state_dict, version, paused)
        self.images.clear()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and who holds what now."""
        return {
            **self.table.stats(self.pools),
            "images_encoded": self.images.encoded,
            "image_hits": self.images.hits,
        }
