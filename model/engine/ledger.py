"""What has become of the requests: tickets on their way, events of the current step, counters; and how a
sample ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.paused import pause_sample
from earlyfusion.model.engine.prefix import PrefixCache
from earlyfusion.model.engine.request import Event, FinishReason
from earlyfusion.model.engine.runner import Runner
from earlyfusion.model.engine.scheduler import Scheduler
from earlyfusion.model.engine.sequence import Sample, Ticket

NAN = float("nan")


class Ledger:
    """`tickets` by request id; `events` are handed out by `take_events`. version: of the weights that choose
    now."""

    def __init__(self, scheduler: Scheduler, prefix: PrefixCache, runner: Runner, version: int) -> None:
        self.scheduler, self.prefix, self.runner, self.version = scheduler, prefix, runner, version
        self.tickets: dict[str, Ticket] = {}
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
            ticket = sample.ticket
            if not ticket.request.params.logprobs:
                drawn = plain = unknown
            count, reason, text = self._until_the_end(sample, ids)
            sample.extend(ids[:count], drawn[:count], plain[:count], self.version)
            if fed:
                sample.length += count
                self.counts["decoded_tokens"] += count
            if reason is not None:
                self.finish(sample, reason, text)
            elif ticket.request.pieces:
                self.events.append(Event(ticket.request.id, sample.index, sample.untold(), text))

    def _until_the_end(self, sample: Sample, ids: Sequence[int]) -> tuple[int, FinishReason | None, str]:
        """(how many of these tokens belong to the sample, why it ends with them, text that became
        certain)."""
        ticket, stream, text = sample.ticket, sample.stream, ""
        ids, most = ids[: sample.left], len(ids[: sample.left])
        if ticket.stops:
            most = next((place + 1 for place, token in enumerate(ids) if token in ticket.stops), most)
        stopped = bool(most) and ids[most - 1] in ticket.stops
        shown = ids[: most - stopped]
        if not ticket.request.pieces and not stream.stop:
            stream.keep(shown)
        else:
            for place, token in enumerate(shown):
                text += stream.push(token)
                if stream.stopped:
                    return place + 1, "stop", text
        return most, "stop" if stopped else "length" if most == sample.left else None, text

    def finish(self, sample: Sample, reason: FinishReason, text: str = "", error: str = "") -> None:
        """The sample's completion, with slot and pages given back if it was running."""
        ticket = sample.ticket
        text += sample.stream.close()
        if sample.stream.stopped and reason == "length":
            reason = "stop"
        left = None
        if self.scheduler.runs(sample):
            if ticket.request.keep_state and reason == "stop":
                left = pause_sample(
                    sample, self.scheduler.pools.export(sample.slot, sample.pages, sample.length)
                )
            if reason in ("stop", "length"):
                self.prefix.insert(sample.prefix_key(sample.length), sample.length, sample.slot, sample.pages)
            self.scheduler.release(sample)
            self.runner.leave()
        sample.finished = True
        completion = sample.completion(reason, error)
        ticket.handle.completions.append(completion)
        ticket.handle.completions.sort(key=lambda each: each.index)
        self.counts[f"finished_{reason}"] += 1
        told = sample.untold() if ticket.request.pieces else ()
        self.events.append(Event(ticket.request.id, sample.index, told, text, completion, left))
        if not ticket.alive:
            del self.tickets[ticket.request.id]

    def restrict(self, samples: Sequence[Sample]) -> list[Sample]:
        """Ask the grammars what may come next; samples whose grammar leaves nothing end as "error", the
        others are returned."""
        kept = []
        for sample in samples:
            error = self.runner.restrict(sample)
            if error:
                self.finish(sample, "error", error=error)
            else:
                kept.append(sample)
        return kept

    def leave_scheduler(self, ticket: Ticket) -> None:
        """Take a ticket's samples out of line, slots and pages."""
        if ticket in self.scheduler.waiting:
            self.scheduler.waiting.remove(ticket)
        for sample in ticket.alive:
            if sample in self.scheduler.reading or sample in self.scheduler.running:
                self.scheduler.release(sample)
        self.runner.leave()

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
            **{
                name: self.counts[name]
                for name in (
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
                    "finished_error",
                )
            },
        }
