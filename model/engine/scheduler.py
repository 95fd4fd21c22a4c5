"""The one table of requests: who waits, who has slots and pages, what is read next, and how a sample ends.

Requests are admitted in order of arrival when all their samples have a slot and all pages they can ever need
are free or can be freed from the prefix cache: an admitted request never has to give way. A prompt is read in
chunks whose borders depend on positions alone (multiples of the chunk, and the prefix cache's borders), so
that what is computed for a request does not depend on its neighbours.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from earlyfusion.model.cache import Pools, PrefixCache
from earlyfusion.model.engine.requests import Completion, Event, FinishReason, RequestError, Token
from earlyfusion.model.engine.state import RequestState, Sample


@dataclass(frozen=True)
class Part:
    """Tokens start .. stop - 1 of a sample, to be read in this step."""

    sample: Sample
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sample.target


class Scheduler:
    """Samples pass from `waiting` (whole requests) to `reading` to `running`.

    states: unfinished requests by id. events: what the next step reports. version: of the weights that choose
    now.
    """

    version = 0

    def __init__(self, pools: Pools, prefix: PrefixCache, max_slots: int, chunk: int) -> None:
        self.pools, self.prefix, self.max_slots, self.chunk = pools, prefix, max_slots, chunk
        self.states: dict[str, RequestState] = {}
        self.waiting: deque[RequestState] = deque()
        self.reading: list[Sample] = []
        self.running: list[Sample] = []
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()

    @property
    def seated(self) -> list[Sample]:
        """Samples that hold a slot, and those that will be forked from them."""
        found: list[Sample] = []
        for sample in [*self.reading, *self.running]:
            found += [sample, *sample.siblings]
        return found

    # ---- admission

    def check(self, state: RequestState) -> None:
        """Raises RequestError if the request could never be admitted."""
        name, samples = f"request {state.request.id!r}", len(state.alive)
        if samples > self.max_slots:
            raise RequestError(f"{name}: {samples} samples, but the engine has {self.max_slots} slots")
        needed = sum(pages for _, pages in self._shares(state, 0))
        if needed > self.pools.num_pages:
            raise RequestError(
                f"{name}: {len(state.ids)} prompt tokens and up to {state.request.params.max_new_tokens}"
                f" new ones in {samples} samples need {needed} pages of {self.pools.page_size} tokens, the"
                f" engine has {self.pools.num_pages}; ask for fewer tokens or samples, or start the engine"
                " with more max_pages"
            )

    def submit(self, state: RequestState) -> None:
        """Take a request that could be admitted one day. Raises RequestError for another."""
        self.check(state)
        self.states[state.request.id] = state
        self.waiting.append(state)

    def _shares(self, state: RequestState, cached: int) -> Iterator[tuple[Sample, int]]:
        """Pages every sample may take when the first `cached` tokens are there already."""
        size, prompt = self.pools.page_size, len(state.ids)
        whole = self.pools.pages_for(state.longest)
        group = [sample for sample in state.alive if sample.saved is None]
        for sample in state.alive:
            if sample.saved is not None:
                yield sample, whole
            elif sample is group[0]:
                # whoever writes first into the shared last page of the prompt takes a copy
                yield sample, whole - cached // size + (len(group) > 1 and prompt % size > 0)
            else:
                yield sample, whole - prompt // size

    def admit(self) -> list[RequestState]:
        """Give slots and pages to as many waiting requests as fit, in order."""
        admitted: list[RequestState] = []
        while self.waiting and len(self.seated) + len(self.waiting[0].alive) <= self.max_slots:
            if not self._admit(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _admit(self, state: RequestState) -> bool:
        # The longest known beginning of its prompt, if any of its samples has to read.
        fresh = [sample for sample in state.alive if sample.saved is None]
        hit, cached = None, 0
        if fresh and state.hits and not state.request.capture_routing:  # routing of cached tokens is unknown
            hit = self.prefix.find(state.key_ids, state.hits)
        if hit is not None:
            cached = hit.length
            self.pools.share(hit.pages)  # pinned before anything is evicted

        # All pages it can ever need: free ones, or such as the prefix cache gives up. The hit itself stays:
        # its pages are in use by now, and its slot is still to be copied.
        shares = list(self._shares(state, cached))
        needed = self.reserved + sum(pages for _, pages in shares)
        while len(self.pools.free_pages) < needed and len(self.prefix.entries) > (hit is not None):
            self.prefix.evict_one()
        if len(self.pools.free_pages) < needed:
            self.pools.release(hit.pages if hit is not None else ())
            return False

        # One sample reads the prompt for all; the others are forked from it. Saved ones go on by themselves.
        for sample, pages in shares:
            sample.reserved = pages
            if sample.saved is None:
                continue
            sample.slot = self.pools.take_slot()
            self.make_room(sample, sample.length)
            self.pools.restore(sample.saved, sample.slot, sample.pages, sample.length)
            sample.saved = None
            if sample.length < sample.context - 1:  # a prompt that goes on where another sample stopped
                self.reading.append(sample)
            else:
                self.run(sample)
        if fresh:
            lead = fresh[0]
            lead.siblings, lead.slot = fresh[1:], self.pools.take_slot()
            if hit is not None:
                self.pools.copy_slot(hit.slot, [lead.slot])
                lead.pages, lead.length, state.cached_tokens = list(hit.pages), cached, cached
                self.counts["prefix_hits"] += 1
                self.counts["prefix_hit_tokens"] += cached
            self.reading.append(lead)
        return True

    @property
    def reserved(self) -> int:
        """Pages promised to admitted samples and not yet taken."""
        return sum(sample.reserved for sample in self.seated)

    # ---- slots and pages

    def make_room(self, sample: Sample, stop: int) -> bool:
        """See to it that positions length .. stop - 1 can be written by this sample alone; True if pages
        changed."""
        before, (last, offset) = sample.reserved, divmod(sample.length, self.pools.page_size)
        # A last page that is partly filled and shared is copied by the first writer.
        if offset and sample.pages:
            page = sample.pages[last]
            sample.pages[last] = self.pools.own_page(page)
            sample.reserved -= sample.pages[last] != page
        while len(sample.pages) < self.pools.pages_for(stop):
            sample.pages.append(self.pools.take_page())
            sample.reserved -= 1
        return sample.reserved != before

    def run(self, sample: Sample) -> None:
        """The sample decodes from now on. In slot order: neighbours in memory are neighbours in the batch."""
        insort(self.running, sample, key=lambda each: each.slot)

    def release(self, sample: Sample) -> None:
        """Take slot, pages and promises back; the sample stands nowhere afterwards. Siblings not forked go
        with it."""
        for line in (self.running, self.reading):
            if sample in line:
                line.remove(sample)
        self.pools.release(sample.pages)
        self.pools.free_slot(sample.slot)
        sample.siblings, sample.pages, sample.slot, sample.length, sample.reserved = [], [], 0, 0, 0

    def withdraw(self, state: RequestState) -> None:
        """Take a request's samples out of line, slots and pages."""
        if state in self.waiting:
            self.waiting.remove(state)
        for sample in state.alive:
            if sample in self.reading or sample in self.running:
                self.release(sample)

    # ---- reading

    def next_parts(self) -> list[Part]:
        """What to read in this step: at most `chunk` tokens (at least one part), all from the start or
        none."""
        parts: list[Part] = []
        budget = self.chunk
        for sample in self.reading:
            start, ends = sample.length, [*sample.parent.borders, len(sample.parent.ids)]
            if parts and (start == 0) != (parts[0].start == 0):
                continue
            next_chunk = (start // self.chunk + 1) * self.chunk
            stop = min(sample.target, next_chunk, *(end for end in ends if end > start))
            if parts and stop - start > budget:
                continue
            parts.append(Part(sample, start, stop))
            budget -= stop - start
        return parts

    def advance(self, part: Part) -> list[Sample]:
        """A part was read: keep it for others, fork at the end of a prompt. Samples that have read all they
        know, which stand nowhere now."""
        sample, state = part.sample, part.sample.parent
        completes, sample.length = part.completes, part.stop
        self.counts["read_tokens"] += part.stop - part.start
        if part.stop in state.borders:
            self.prefix.insert(state.key_ids, part.stop, sample.slot, sample.pages)
        if not completes:
            return []

        # The siblings get copies of the lead's state and shares in its pages.
        self.reading.remove(sample)
        siblings, sample.siblings = sample.siblings, []
        for each in siblings:
            each.slot = self.pools.take_slot()
            self.pools.share(sample.pages)
            each.pages, each.length, each.routing = list(sample.pages), sample.length, list(sample.routing)
        if siblings:
            self.pools.copy_slot(sample.slot, [each.slot for each in siblings])

        group = [sample, *siblings]
        self.reading += [each for each in group if each.length < each.context]
        return [each for each in group if each.length == each.context]

    # ---- what was chosen

    def accept(self, samples: Sequence[Sample], chosen_K3N: np.ndarray, fed: bool) -> None:
        """The next tokens of every sample, what comes after its end left out: ids, log-probabilities as drawn
        and at temperature 1. fed: each token was chosen after feeding the one before it."""
        ids_NK, drawn_NK, plain_NK = (chosen_K3N[:, row].T.tolist() for row in range(3))
        for sample, ids, drawn, plain in zip(samples, ids_NK, drawn_NK, plain_NK):
            request, stream, text = sample.parent.request, sample.stream, ""
            reason: FinishReason | None = None
            # At most the tokens it may still get, up to the first that stops it.
            shown = ids = [int(token) for token in ids[: sample.left]]
            for place, token in enumerate(ids):
                if token in sample.parent.stop_ids:
                    shown, ids, reason = ids[:place], ids[: place + 1], "stop"
                    break
            if reason is None and len(ids) == sample.left:
                reason = "length"

            # A stop string may end it earlier; without one, and without a reader, text can wait.
            if not request.pieces and not stream.stop:
                stream.ids += shown
                shown = []
            for place, token in enumerate(shown):
                text += stream.push([token])
                if stream.stopped:
                    ids, reason = ids[: place + 1], "stop"
                    break
            count = len(ids)
            versions = [self.version] * count
            if not request.params.logprobs:  # others of the batch may have asked for them
                drawn = plain = [float("nan")] * count

            # Written down, and told if somebody listens.
            sample.ids += ids
            sample.logprobs += drawn[:count]
            sample.logprobs1 += plain[:count]
            sample.versions += versions
            if fed:
                sample.length += count
                self.counts["decoded_tokens"] += count
            tokens: tuple[Token, ...] = ()
            if request.pieces:
                tokens = tuple(map(Token, ids, drawn, plain, versions))
            if reason is not None:
                self.finish(sample, reason, text, tokens)
            elif request.pieces:
                self.events.append(Event(request.id, sample.index, tokens, text))

    def finish(
        self, sample: Sample, reason: FinishReason, text: str = "", tokens: tuple[Token, ...] = ()
    ) -> None:
        """The sample's completion, with slot and pages given back if it was running."""
        state, request = sample.parent, sample.parent.request
        text += sample.stream.push([], final=True)
        if sample.stream.stopped and reason == "length":
            reason = "stop"

        # What a running sample leaves behind: its state for who goes on from it, a beginning for the cache.
        left = None
        if sample in self.running:
            if request.keep_state and reason == "stop":
                left = sample.paused(self.pools.export(sample.slot, sample.pages, sample.length))
            if reason != "cancelled":
                known = np.concatenate([state.key_ids, np.array(sample.ids, dtype=np.int64)])
                self.prefix.insert(known, sample.length, sample.slot, sample.pages)
            self.release(sample)

        routing = None
        if request.capture_routing and sample.routing:
            routing = np.concatenate(sample.routing)
        completion = Completion(
            request_id=request.id,
            index=sample.index,
            **sample.written(),
            text=sample.stream.text,
            finish_reason=reason,
            prompt_tokens=len(state.ids),
            cached_tokens=state.cached_tokens,
            routing=routing,
        )
        sample.finished = True
        insort(state.handle.completions, completion, key=lambda each: each.index)
        self.counts[f"finished_{reason}"] += 1
        self.events.append(Event(request.id, sample.index, tokens, text, completion, left))
        if not state.alive:
            del self.states[request.id]

    def stats(self) -> Counter[str]:
        """Counters since the start, and who holds what now."""
        stats = Counter(self.counts)
        stats.update(
            version=self.version,
            waiting=len(self.waiting),
            reading=len(self.reading),
            running=len(self.running),
            slots=self.pools.num_slots,
            free_slots=len(self.pools.free_slots),
            pages=self.pools.num_pages,
            free_pages=len(self.pools.free_pages),
            reserved_pages=self.reserved,
            prefix_checkpoints=len(self.prefix.entries),
            prefix_pages=len(self.prefix.pages),
            prefix_evictions=self.prefix.evictions,
        )
        return stats
