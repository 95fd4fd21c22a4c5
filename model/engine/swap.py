"""Requests that leave an engine and come back, and weights that change under those that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from earlyfusion.model.engine.ledger import Ledger
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.paused import PausedRequest, PausedSample, pause_sample
from earlyfusion.model.engine.request import Handle, Request, RequestError
from earlyfusion.model.engine.sequence import Sample, Ticket
from earlyfusion.model.fusion import NativeFusion

Policy = Literal["keep", "reprefill"]


def pause(ledger: Ledger, pools: Pools, request_id: str) -> PausedRequest:
    """See `Engine.pause`."""
    ticket = ledger.tickets.get(request_id)
    if ticket is None:
        raise RequestError(f"request {request_id!r} is not unfinished here")
    samples: list[PausedSample] = []
    for sample in ticket.alive:
        begun = sample in ledger.scheduler.running
        state = pools.export(sample.slot, sample.pages, sample.length) if begun else (sample.saved or {})
        samples.append(pause_sample(sample, state))
    ledger.leave_scheduler(ticket)
    del ledger.tickets[request_id]
    ledger.counts["paused"] += 1
    return PausedRequest(
        ticket.request, samples, list(ticket.handle.completions), ledger.version, ticket.cached_tokens
    )


def resume(
    ledger: Ledger,
    pools: Pools,
    paused: PausedRequest,
    keep_state: bool,
    new_ticket: Callable[[Request], Ticket],
) -> Handle:
    """See `Engine.resume`."""
    ticket = new_ticket(paused.request)
    ticket.handle.completions = list(paused.finished)
    done = {completion.index for completion in paused.finished}
    ticket.cached_tokens = paused.cached_tokens
    by_index = {sample.index: sample for sample in paused.samples}
    if done | set(by_index) != set(range(len(ticket.samples))):
        raise RequestError(
            f"paused request {paused.request.id!r} lacks some of its {len(ticket.samples)} samples"
        )
    for sample in ticket.samples:
        sample.finished = sample.index in done
        if not sample.finished:
            _recall(ledger, pools, sample, by_index[sample.index], keep_state)
    ledger.scheduler.check(ticket)
    ledger.tickets[paused.request.id] = ticket
    ledger.scheduler.waiting.append(ticket)
    return ticket.handle


def go_on(pools: Pools, ticket: Ticket, after: PausedSample) -> None:
    """See `Engine.submit`."""
    request = ticket.request
    if len(ticket.samples) != 1 or not 0 < after.length < len(ticket.ids):
        raise RequestError(
            f"request {request.id!r} goes on after {after.length} tokens: expected one sample (has"
            f" {len(ticket.samples)}) and a longer prompt (has {len(ticket.ids)})"
        )
    if request.capture_routing and after.routing is None:
        raise RequestError(
            f"request {request.id!r}: capture_routing, but the state it goes on from knows no routing"
        )
    try:
        pools.check(after.state, after.length)
    except ValueError as error:
        raise RequestError(str(error)) from None
    (sample,) = ticket.samples
    sample.saved, sample.length, ticket.cached_tokens = after.state, after.length, after.length
    sample.routing = [] if after.routing is None else [after.routing]


def _recall(ledger: Ledger, pools: Pools, sample: Sample, paused: PausedSample, keep_state: bool) -> None:
    for name in ("ids", "logprobs", "logprobs1", "versions", "resumes"):
        setattr(sample, name, list(getattr(paused, name)))
    for token in sample.ids:
        sample.stream.push(token)
    sample.told = len(sample.ids)
    keep = keep_state and bool(paused.state)
    if keep:
        try:
            pools.check(paused.state, paused.length)
        except ValueError as error:
            raise RequestError(str(error)) from None
        sample.saved, sample.length = paused.state, paused.length
        sample.routing = [] if paused.routing is None else [paused.routing]
    _note(ledger, sample, "keep" if keep else "reprefill")


def _note(ledger: Ledger, sample: Sample, policy: Policy) -> None:
    sample.resumes.append(f"{policy}@{ledger.version}")
    ledger.counts[f"resumed_{policy}"] += 1


@torch.no_grad()
def load_weights(
    ledger: Ledger, model: NativeFusion, state_dict: Mapping[str, Tensor], version: int, paused: Policy
) -> None:
    """See `Engine.load_weights`; image features are the caller's."""
    if paused not in ("keep", "reprefill"):
        raise ValueError(f"paused={paused!r}: give 'keep' or 'reprefill'")
    own = model.state_dict()
    wrong = sorted(set(own) ^ set(state_dict)) + [
        name for name in own if name in state_dict and own[name].shape != state_dict[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors are missing, unknown or of another shape: {', '.join(wrong[:8])}"
        )
    for name, tensor in own.items():
        tensor.copy_(state_dict[name])
    ledger.version = version
    ledger.runner.refresh()
    ledger.prefix.clear()
    scheduler = ledger.scheduler
    for ticket in reversed(list(ledger.tickets.values())):
        begun = [s for s in ticket.alive if s.length or s in scheduler.reading or s in scheduler.running]
        for sample in begun:
            _note(ledger, sample, paused)
        if paused == "reprefill" and begun:
            ledger.leave_scheduler(ticket)
            for sample in ticket.alive:
                sample.saved, sample.length, sample.routing = None, 0, []
            ticket.cached_tokens = 0
            scheduler.waiting.appendleft(ticket)
