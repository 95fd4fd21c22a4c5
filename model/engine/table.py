"""What has become of the requests: those on their way, events of the current step, counters; and how a sample
ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.prefix import PrefixCache
from earlyfusion.model.engine.requests import Event, FinishReason
from earlyfusion.model.engine.runner import Runner
from earlyfusion.model.engine.scheduler import Scheduler
from earlyfusion.model.engine.state import RequestState, Sample

NAN = float("nan")


COUNTERS = (
    "steps",
    "host_syncs",
    "read_tokens",
    "decoded_tokens",
    "paused",
    "resumed_keep",
    "resumed_reprefill",
    "finished_stop",
    "finished_length",
    "finished_cancelled",
)


class RequestTable:
    """`states` by request id; `events` are handed out by `take_events`. version: of the weights that choose
    now."""

    def __init__(self, scheduler: Scheduler, prefix: PrefixCache, runner: Runner, version: int) -> None:
        self.scheduler, self.prefix, self.runner, self.version = scheduler, prefix, runner, version
        self.states: dict[str, RequestState] = {}
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def accept(self, samples: Sequence[Sample], chosen_K3N: np.ndarray, fed: bool) -> None:
        """The next tokens of every sample, what comes after its end left out: ids, log-probabilities as drawn
        and at temperature 1. fed: each token was chosen after feeding the one before it."""
        ids_NK = chosen_K3N[:, 0].astype(np.int64).T.tolist()
        drawn_NK, plain_NK = (chosen_K3N[:, row].T.tolist() for row in (1, 2))
        unknown = [NAN] * len(chosen_K3N)
        for sample, ids, drawn, plain in zip(samples, ids_NK, drawn_NK, plain_NK):
            parent = sample.parent
            if not parent.request.params.logprobs:
                drawn = plain = unknown
            count, reason, text = self._until_the_end(sample, ids)
            sample.extend(ids[:count], drawn[:count], plain[:count], self.version)
            if fed:
                sample.length += count
                self.counts["decoded_tokens"] += count
            if reason is not None:
                self.finish(sample, reason, text)
            elif parent.request.pieces:
                self.events.append(Event(parent.request.id, sample.index, sample.new_tokens(), text))

    def _until_the_end(self, sample: Sample, ids: Sequence[int]) -> tuple[int, FinishReason | None, str]:
        """(how many of these tokens belong to the sample, why it ends with them, text that became
        certain)."""
        # At most the tokens it may still get, up to the first that stops it.
        parent, stream, text = sample.parent, sample.stream, ""
        ids, most = ids[: sample.left], len(ids[: sample.left])
        if parent.stop_ids:
            most = next((place + 1 for place, token in enumerate(ids) if token in parent.stop_ids), most)
        stopped = bool(most) and ids[most - 1] in parent.stop_ids

        # A stop string may end it earlier; without one, and without a reader, text can wait.
        shown = ids[: most - stopped]
        if not parent.request.pieces and not stream.stop:
            stream.keep(shown)
        else:
            for place, token in enumerate(shown):
                text += stream.push(token)
                if stream.stopped:
                    return place + 1, "stop", text
        if stopped:
            return most, "stop", text
        return most, "length" if most == sample.left else None, text

    def finish(self, sample: Sample, reason: FinishReason, text: str = "") -> None:
        """The sample's completion, with slot and pages given back if it was running."""
        parent = sample.parent
        text += sample.stream.close()
        if sample.stream.stopped and reason == "length":
            reason = "stop"
        # What a running sample leaves behind: its state for who goes on from it, a beginning for the cache.
        left = None
        if self.scheduler.runs(sample):
            if parent.request.keep_state and reason == "stop":
                left = sample.paused(self.scheduler.pools.export(sample.slot, sample.pages, sample.length))
            if reason in ("stop", "length"):
                self.prefix.insert(sample.prefix_key(sample.length), sample.length, sample.slot, sample.pages)
            self.scheduler.release(sample)
            self.runner.forget_batch()

        sample.finished = True
        completion = sample.completion(reason)
        parent.handle.completions.append(completion)
        parent.handle.completions.sort(key=lambda each: each.index)
        self.counts[f"finished_{reason}"] += 1
        tokens = sample.new_tokens() if parent.request.pieces else ()
        self.events.append(Event(parent.request.id, sample.index, tokens, text, completion, left))
        if not parent.alive:
            del self.states[parent.request.id]

    def leave_scheduler(self, parent: RequestState) -> None:
        """Take a request's samples out of line, slots and pages."""
        if parent in self.scheduler.waiting:
            self.scheduler.waiting.remove(parent)
        for sample in parent.alive:
            if sample in self.scheduler.reading or sample in self.scheduler.running:
                self.scheduler.release(sample)
        self.runner.forget_batch()

    def stats(self, pools: Pools) -> dict[str, Any]:
        """Counters since the start, and who holds what now."""
        scheduler = self.scheduler
        return {
            "version": self.version,
            "waiting": len(scheduler.waiting),
            "reading": len(scheduler.reading),
            "running": len(scheduler.running),
            "slots": pools.num_slots,
            "free_slots": len(pools.free_slots),
            "pages": pools.num_pages,
            "free_pages": len(pools.free_pages),
            "reserved_pages": pools.reserved,
            "prefix_checkpoints": len(self.prefix),
            "prefix_pages": len(self.prefix.pages),
            "prefix_hits": self.prefix.hits,
            "prefix_hit_tokens": self.prefix.hit_tokens,
            "prefix_evictions": self.prefix.evictions,
            **{name: self.counts[name] for name in COUNTERS},
        }
