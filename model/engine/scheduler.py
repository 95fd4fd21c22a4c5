"""Who gets slots and pages, and what is read next.

Requests are admitted in order of arrival when all their samples have a slot and all pages they can ever need
are free or can be freed from the prefix cache: an admitted request never has to give way. A prompt is read in
chunks whose borders depend on positions alone (multiples of the chunk, and the prefix cache's boundaries), so
that what is computed for a request does not depend on its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from earlyfusion.model.engine.batch import Part
from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.prefix import PrefixCache
from earlyfusion.model.engine.requests import RequestError
from earlyfusion.model.engine.state import RequestState, Sample


class Scheduler:
    """Samples pass from `waiting` (whole requests) to `reading` to `running`; `active` counts slots in
    use."""

    def __init__(self, pools: Pools, prefix: PrefixCache, max_slots: int, chunk: int) -> None:
        self.pools, self.prefix, self.max_slots, self.chunk = pools, prefix, max_slots, chunk
        self.waiting: deque[RequestState] = deque()
        self.reading: list[Sample] = []
        self.running: list[Sample] = []
        self.active = 0

    # ---- admission

    def check(self, state: RequestState) -> None:
        """Raises RequestError if the request could never be admitted."""
        name = f"request {state.request.id!r}"
        if len(state.alive) > self.max_slots:
            raise RequestError(
                f"{name}: {len(state.alive)} samples, but the engine has {self.max_slots} slots"
            )
        needed = sum(pages for _, pages in self._shares(state, 0))
        if needed > self.pools.num_pages:
            size = self.pools.page_size
            raise RequestError(
                f"{name}: {len(state.ids)} prompt tokens and up to {state.request.params.max_new_tokens}"
                f" new ones in {len(state.alive)} samples need {needed} pages of {size} tokens, the engine"
                f" has {self.pools.num_pages}; ask for fewer tokens or samples, or start the engine with more"
                " max_pages"
            )

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
                yield sample, whole - cached // size + (1 if len(group) > 1 and prompt % size else 0)
            else:
                yield sample, whole - prompt // size

    def admit(self) -> list[RequestState]:
        """Give slots and pages to as many waiting requests as fit, in order."""
        admitted: list[RequestState] = []
        while self.waiting and self.active + len(self.waiting[0].alive) <= self.max_slots:
            if not self._admit(self.waiting[0]):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _admit(self, state: RequestState) -> bool:
        # The longest known beginning of its prompt, if any of its samples has to read.
        fresh = [sample for sample in state.alive if sample.saved is None]
        hit = None
        if fresh and not state.request.capture_routing:  # routing of cached tokens is not known
            if state.shared is None:
                hit = self.prefix.find(state.key_ids, len(state.ids) - 1)
            elif state.shared:
                hit = self.prefix.find(state.key_ids, state.shared, least=state.shared)
        if hit is not None:
            self.pools.share(hit.pages)  # pinned before anything is evicted

        # All pages it can ever need: free ones, or such as the prefix cache gives up. The hit itself stays:
        # its pages are in use by now, and its slot is still to be copied.
        shares = list(self._shares(state, hit.length if hit is not None else 0))
        needed = sum(pages for _, pages in shares)
        while self.pools.unreserved_pages < needed and len(self.prefix) > (hit is not None):
            self.prefix.evict_one()
        if self.pools.unreserved_pages < needed:
            if hit is not None:
                self.pools.release(hit.pages)
            return False

        self.pools.reserved += needed
        for sample, pages in shares:
            sample.reserved = pages
        self.active += len(shares)
        for sample in state.alive:
            if sample.saved is not None:
                self._put_back(sample)

        # One sample reads the prompt for all; the others are forked from it.
        if fresh:
            lead = fresh[0]
            lead.siblings, lead.slot = fresh[1:], self.pools.take_slot()
            if hit is not None:
                self.pools.copy_slot(hit.slot, [lead.slot])
                lead.pages, lead.length = list(hit.pages), hit.length
                self.prefix.hits += 1
                self.prefix.hit_tokens += hit.length
                state.cached_tokens = hit.length
            self.reading.append(lead)
        return True

    def _put_back(self, sample: Sample) -> None:
        """Restore the exported state of a resumed sample."""
        assert sample.saved is not None
        sample.slot = self.pools.take_slot()
        for _ in range(self.pools.pages_for(sample.length)):
            self.take_page(sample)
        self.pools.restore(sample.saved, sample.slot, sample.pages, sample.length)
        sample.saved = None
        if sample.length < sample.context - 1:  # a prompt that goes on where another sample stopped
            self.reading.append(sample)
        else:
            self.run(sample)

    # ---- pages

    def take_page(self, sample: Sample) -> None:
        sample.pages.append(self.pools.take_page())
        sample.reserved -= 1

    def make_room(self, sample: Sample, stop: int) -> bool:
        """See to it that positions length .. stop - 1 can be written by this sample alone; True if pages
        changed."""
        # A last page that is partly filled and shared is copied by the first writer.
        changed = False
        if sample.length % self.pools.page_size and sample.pages:
            last = sample.pages[sample.length // self.pools.page_size]
            own = self.pools.own_page(last)
            if own != last:
                sample.pages[sample.length // self.pools.page_size] = own
                sample.reserved -= 1
                changed = True
        while len(sample.pages) < self.pools.pages_for(stop):
            self.take_page(sample)
            changed = True
        return changed

    def release(self, sample: Sample) -> None:
        """Take slot, pages and promises back; the sample stands nowhere afterwards. Siblings not forked go
        with it."""
        if self.runs(sample):
            del self.running[self._place(sample)]
        elif sample in self.reading:
            self.reading.remove(sample)
        for each in [sample, *sample.siblings]:
            self.pools.reserved -= each.reserved
            each.reserved = 0
            self.active -= 1
        self.pools.release(sample.pages)
        self.pools.free_slot(sample.slot)
        sample.siblings, sample.pages, sample.slot, sample.length = [], [], 0, 0

    # ---- reading

    def run(self, sample: Sample) -> None:
        """The sample decodes from now on. Kept in slot order, so that neighbours in memory are neighbours in
        the batch."""
        insort(self.running, sample, key=lambda each: each.slot)

    def runs(self, sample: Sample) -> bool:
        """Whether the sample decodes."""
        place = self._place(sample)
        return place < len(self.running) and self.running[place] is sample

    def _place(self, sample: Sample) -> int:
        return bisect_left(self.running, sample.slot, key=lambda each: each.slot)

    def next_parts(self) -> list[Part]:
        """What to read in this step: at most `chunk` tokens (at least one part), all from the start or
        none."""
        parts: list[Part] = []
        room = self.chunk
        for sample in self.reading:
            start = sample.length
            if parts and (start == 0) != (parts[0].start == 0):
                continue
            stop = min(sample.target, (start // self.chunk + 1) * self.chunk)
            if start < len(sample.parent.ids):
                stop = min(stop, self._border(sample.parent, start))
            if parts and stop - start > room:
                continue
            parts.append(Part(sample, start, stop))
            room -= stop - start
        return parts

    def _border(self, state: RequestState, start: int) -> int:
        """Where reading a prompt pauses after `start`: at a checkpoint to be kept, or at its end."""
        if state.shared is None:
            return self.prefix.boundary(start, len(state.ids))
        return state.shared if start < state.shared else len(state.ids)

    def fork(self, lead: Sample) -> list[Sample]:
        """Give the lead's siblings copies of its state and shares in its pages; all of them, lead first."""
        siblings, lead.siblings = lead.siblings, []
        for sample in siblings:
            sample.slot = self.pools.take_slot()
            self.pools.share(lead.pages)
            sample.pages, sample.length = list(lead.pages), lead.length
            sample.routing = list(lead.routing)
        if siblings:
            self.pools.copy_slot(lead.slot, [sample.slot for sample in siblings])
        return [lead, *siblings]
