"""The engine: continuous batching over the hybrid model's slots and pages.

A step reads at most one chunk of prompts and advances every running sample by one token, then looks once at
the host what was chosen (the only host sync of a step; a grammar, captured routing and recorded features add
theirs). See model/engine/request.py for how to use it.

Given answers are judged without sampling:

    engine = Engine(model, tokenizer, max_slots=16, prefix_cache=4)
    requests = [ScoreRequest(prompt, [(17,), (18, 4)], shared=640), ...]
    scores = engine.score(requests)              # scores[i][c].logprobs, .likeliest, .greedy
    scores = engine.score(requests, states=True) # scores[i][c].states [tokens, D]; engine.logits(states) [.., V]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from earlyfusion.model.cache import FIRST_TILE
from earlyfusion.model.engine import swap
from earlyfusion.model.engine.images import ImageMemory
from earlyfusion.model.engine.ledger import Ledger
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.paused import PausedRequest, PausedSample, narrow
from earlyfusion.model.engine.prefill import Part
from earlyfusion.model.engine.prefix import PrefixCache
from earlyfusion.model.engine.request import (
    Completion,
    EngineFull,
    Event,
    Handle,
    Request,
    RequestError,
    Score,
    ScoreRequest,
)
from earlyfusion.model.engine.runner import Runner
from earlyfusion.model.engine.scheduler import Scheduler
from earlyfusion.model.engine.score import Scorer
from earlyfusion.model.engine.sequence import Decodes, Sample, Ticket, house_of, make_ticket
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.moe import moe_layers, recording_routing

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
        pages = max_slots * -(-1024 // page_size) if max_pages is None else max_pages
        text = model.config.text
        self.model, self.tokenizer, self.max_waiting, self.run_ahead = (
            model,
            tokenizer,
            max_waiting,
            run_ahead,
        )
        self.house, self.routes = house_of(model, tokenizer), bool(moe_layers(model))
        like = model.decoder.norm.weight
        self.pools = Pools.allocate(text, max_slots + prefix_cache, pages, page_size, like)
        self.prefix = PrefixCache(self.pools, prefix_cache, checkpoint_every)
        self.scheduler = Scheduler(self.pools, self.prefix, max_slots, prefill_chunk)
        self.runner = Runner(model, self.pools, sorted(self.house.silent), pages)
        self.images = ImageMemory(model, image_cache)
        self.ledger = Ledger(self.scheduler, self.prefix, self.runner, version)

    @property
    def version(self) -> int:
        """Of the weights that choose now."""
        return self.ledger.version

    # ---- requests
    # -----------------------------------------------------------------------------------------------

    def submit(self, request: Request, after: PausedSample | None = None) -> Handle:
        """Take a request. after: what a sample left behind (`Event.left`) whose prompt and tokens the prompt
        begins with: only what follows them is read. Raises RequestError (it can never be served) or
        EngineFull (not now)."""
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        ticket = self._new_ticket(request)
        if after is not None:
            swap.go_on(self.pools, ticket, after)
        self.scheduler.check(ticket)
        self.ledger.tickets[request.id] = ticket
        if request.params.max_new_tokens == 0:
            for sample in ticket.samples:
                self.ledger.finish(sample, "length")
        else:
            self.scheduler.waiting.append(ticket)
        return ticket.handle

    def _new_ticket(self, request: Request) -> Ticket:
        if request.id in self.ledger.tickets:
            raise RequestError(f"request id {request.id!r} is in use; give every unfinished request its own")
        if request.capture_routing and not self.routes:
            raise RequestError(f"request {request.id!r}: capture_routing, but the model has no MoE layer")
        return make_ticket(request, self.house)

    def cancel(self, request_id: str) -> bool:
        """End a request now; its unfinished samples complete as "cancelled" (in the next step's events).
        False: unknown."""
        ticket = self.ledger.tickets.get(request_id)
        if ticket is None:
            return False
        self.ledger.leave_scheduler(ticket)
        for sample in ticket.alive:
            self.ledger.finish(sample, "cancelled")
        return True

    def end_sample(self, request_id: str, index: int) -> bool:
        """End one sample that is being written; it completes as "cancelled" with what it has (in the next
        step's events). False: there is none such."""
        ticket = self.ledger.tickets.get(request_id)
        for sample in ticket.alive if ticket is not None else ():
            if sample.index == index and sample in self.scheduler.running:
                self.ledger.finish(sample, "cancelled")
                return True
        return False

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self.ledger.tickets or self.ledger.events)

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
        scorer = Scorer(self.ledger, self.house, states, banned_ids)
        with self._inference():
            return scorer.score(requests, self._begin)

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states [R, D], a row's bits independent of the others."""
        with self._inference():
            return self.runner.logits(states)

    # ---- one step
    # -----------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Advance everything by one forward pass of each kind; what became known, in no particular order."""
        with self._inference(), ExitStack() as stack:
            self._begin(self.scheduler.admit())
            capture = any(
                s.ticket.request.capture_routing for s in self.scheduler.running + self.scheduler.reading
            )
            take = stack.enter_context(recording_routing(self.model)) if capture else None
            chosen: list[tuple[list[Sample], Tensor, bool]] = []
            self._make_dense()
            running = self.ledger.restrict(list(self.scheduler.running))
            if running:
                chosen.append(self._decode(running, take))
            parts = self.scheduler.next_parts()
            if parts:
                chosen += self._read(parts, take)
            if chosen:
                self.ledger.counts["host_syncs"] += 1
                self.ledger.counts["steps"] += 1
                known = torch.cat([chosen_K3N.reshape(-1) for _, chosen_K3N, _ in chosen]).cpu().numpy()
                for samples, chosen_K3N, fed in chosen:
                    mine, known = known[: chosen_K3N.numel()], known[chosen_K3N.numel() :]
                    self.ledger.accept(samples, mine.reshape(chosen_K3N.shape), fed)
        return self.ledger.take_events()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            # inference_mode is the quicker one; the modules cache tensors that a later training step may meet
            with torch.inference_mode() if self.runner.lean is not None else torch.no_grad():
                yield
        finally:
            if was_training:
                self.model.train()

    def _begin(self, tickets: list[Ticket]) -> None:
        last = lambda ticket: ticket.media_positions[-1] if ticket.media_positions else -1
        reading = {s.ticket.request.id for s in self.scheduler.reading if s.length <= last(s.ticket)}
        new = [ticket for ticket in tickets if ticket.request.id in reading]
        for ticket, features in zip(
            new, self.images.features([(each.request.prompt, each.digests) for each in new])
        ):
            ticket.features = features
        for ticket in tickets:
            self.runner.seat(
                [sample for sample in ticket.alive if self.scheduler.runs(sample)]
            )  # state put back

    def _make_dense(self) -> None:
        """On a CPU running samples are kept in neighbouring slots, where their states can be worked on in
        place."""
        if self.runner.lean is not None:
            self.runner.seat(self.scheduler.close_gaps())

    def _decode(self, running: list[Sample], take: Any) -> tuple[list[Sample], Tensor, bool]:
        steps = 1 if take is not None or self.runner.graphs is None else self._steps_ahead(running)
        moved = [
            each for each in running if self.scheduler.make_room(each, each.length + min(steps, each.left))
        ]
        self.runner.page_tables(moved)
        chosen_K3N = self.runner.decode(running, steps, recording=take is not None)
        if take is not None:
            for sample, row in zip(running, narrow(take().cpu().numpy())):
                sample.routing.append(row[None])
        return running, chosen_K3N, True

    def _steps_ahead(self, running: Sequence[Sample]) -> int:
        """Steps that the device takes before the host looks at what was chosen.

        A sample that ends among them stands still for the rest of them, so it is as many as certainly end
        none, or a quarter of what has been written on average: what was long so far goes on for long. One
        while prompts are read.
        """
        if self.run_ahead == 1 or self.scheduler.reading or not all(each.ticket.foreseen for each in running):
            return 1
        left = [each.left for each in running]
        certain = min(0 if each.ticket.stops else more for each, more in zip(running, left))
        written = sum(len(each.ids) for each in running) // (4 * len(running))
        return max(1, min(self.run_ahead, max(left), max(certain, written)))

    def _read(self, parts: Sequence[Part], take: Any) -> list[tuple[list[Sample], Tensor, bool]]:
        for part in parts:
            self.scheduler.make_room(part.sample, part.stop)
        hidden_ND = self.runner.prefill(parts, recording=take is not None)
        if take is not None:
            routing, start = narrow(take().cpu().numpy()), 0
            for part in parts:
                part.sample.routing.append(routing[start : start + part.stop - part.start])
                start += part.stop - part.start
        starting: list[Sample] = []
        rows: list[int] = []
        ends = 0
        for part in parts:
            sample, prompt = part.sample, len(part.sample.ticket.ids)
            completes = part.completes
            sample.length = part.stop
            self.ledger.counts["read_tokens"] += part.stop - part.start
            if self.prefix.worth_keeping(part.stop, prompt):
                self.prefix.insert(sample.ticket.key_ids, part.stop, sample.slot, sample.pages)
            if completes:
                group = self.ledger.restrict(self._read_to_the_end(sample))
                starting += group
                rows += [ends] * len(group)
                ends += 1
        self.runner.seat(starting)
        if not starting or hidden_ND is None:
            return []
        return [(starting, self.runner.choose_first(hidden_ND, starting, rows).unsqueeze(0), False)]

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
    # -----------------------------------------------------------------------------

    def pause(self, request_id: str) -> PausedRequest:
        """Take an unfinished request out, with the state of its samples that have begun to decode.

        Raises RequestError for an id that is not unfinished here.
        """
        return swap.pause(self.ledger, self.pools, request_id)

    def resume(self, paused: PausedRequest, keep_state: bool = True) -> Handle:
        """Go on with a paused request, here or elsewhere.

        keep_state: put the exported state back (after a weight swap: a continuation of mixed versions);
        False: read prompt and generated tokens again with the weights of today. Samples without state read
        again in any case. What was chosen stands in `Completion.resumes` and `stats()`. Raises RequestError
        or EngineFull as `submit`, and RequestError for a state of another model.
        """
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(self.max_waiting)
        return swap.resume(self.ledger, self.pools, paused, keep_state, self._new_ticket)

    def load_weights(
        self, state_dict: Mapping[str, Tensor], version: int, paused: swap.Policy = "keep"
    ) -> None:
        """Copy new weights into the model between two steps; tokens from here on carry `version`.

        paused: what becomes of unfinished requests, as in `resume`: "keep" goes on from states of the old
        weights, "reprefill" reads everything again. Prefix cache and image features are forgotten. Raises
        ValueError, with nothing changed, for names or shapes that are not the model's.
        """
        swap.load_weights(self.ledger, self.model, state_dict, version, paused)
        self.images.clear()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and who holds what now."""
        return {
            **self.ledger.stats(self.pools),
            "images_encoded": self.images.encoded,
            "image_hits": self.images.hits,
        }
