"""Rollouts: groups of samples from the engine, and what a trainer needs to know about them.

    groups = rollout(engine, prompts, group_size=8, params=SamplingParams(256, logprobs=True))
    row, places = pack(model, flat(groups))           # one packed row; places of the generated tokens in it
    trained = trained_logprobs(model, row, places)    # by the training forward, with the experts that were used
    mismatch(flat(groups), trained)                   # how far engine and trainer are apart

A prompt is read once for all samples of its group. `chunk_tokens` serves a request in pieces (divided rollout): after
each piece it leaves the engine and queues again, so long answers do not keep short ones waiting; the counter-based noise
makes the tokens the same as in one piece.

Shapes: T tokens of a packed row, M generated tokens in it, L MoE layers, J experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.request import Completion, Handle, Prompt, Request, SamplingParams
from earlyfusion.model.engine.swap import Policy
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import Row, pack_prompts
from earlyfusion.model.moe import replaying_routing

UNKNOWN = -1
"""Routing entry of a token that the engine never fed: the trainer chooses for itself."""


@dataclass(frozen=True)
class Inserted:
    """Tokens that somebody else put into an answer, such as what a tool said, behind the first `at` generated ones."""

    at: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trajectory:
    """One sample of a group, with the prompt it answers.

    The completion holds generated tokens alone, so lengths, log-probabilities, entropies and losses are theirs.
    inserted: what stands between them, in order; it is read and never trained. shown: the whole answer as people read
    it, "" where that is the completion's text.
    """

    prompt: Prompt
    completion: Completion
    inserted: tuple[Inserted, ...] = ()
    shown: str = ""

    @property
    def ids(self) -> list[int]:
        """The generated tokens."""
        return self.completion.ids

    @property
    def text(self) -> str:
        """The whole answer as people read it; what a reward sees is `answer`."""
        return self.shown or self.completion.text

    @property
    def ended(self) -> bool:
        """Whether the policy ended its answer itself: no limit cut it off, and it was not stopped for running in circles."""
        return self.completion.finish_reason == "stop"

    @property
    def answer(self) -> str:
        """What a reward reads: the completion's text, and "" where it did not end. Paying for the beginning of an answer
        that a limit cut off would reward not stopping."""
        return self.completion.text if self.ended else ""

    @property
    def tail(self) -> list[int]:
        """All tokens behind the prompt, in order."""
        out, start = [], 0
        for part in self.inserted:
            out += [*self.ids[start : part.at], *part.ids]
            start = part.at
        return [*out, *self.ids[start:]]

    @property
    def trained(self) -> Tensor:
        """bool [tail]: which tokens behind the prompt were generated."""
        mask, start = [], 0
        for part in self.inserted:
            mask += [True] * (part.at - start) + [False] * len(part.ids)
            start = part.at
        return torch.tensor(mask + [True] * (len(self.ids) - start), dtype=torch.bool)

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return int(self.prompt.ids.shape[0]) + len(self.ids) + sum(len(part.ids) for part in self.inserted)


def rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    params: SamplingParams,
    capture_routing: bool = False,
    name: str = "rollout",
    chunk_tokens: int | None = None,
    policy: Policy = "keep",
) -> list[list[Trajectory]]:
    """`group_size` samples of every prompt, grouped by prompt, in order.

    params: `n` is overruled by group_size and log-probabilities are always kept. name: part of the request ids and so of
    the random numbers; give every training step its own. chunk_tokens: new tokens after which a request is paused and
    queues again behind the others (None: never); policy: how it comes back (see `Engine.resume`).
    Raises ValueError for chunk_tokens below 1, RuntimeError while the engine has other work.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1, or None")
    if engine.has_work:
        raise RuntimeError("rollout() needs an idle engine: other requests are unfinished")
    params = replace(params, n=group_size, logprobs=True)
    requests = [Request(f"{name}/{i}", prompt, params, capture_routing) for i, prompt in enumerate(prompts)]
    if chunk_tokens is None:
        done = engine.generate(requests)
    else:
        done = _in_chunks(engine, requests, chunk_tokens, policy)
    groups: list[list[Trajectory]] = []
    for index, prompt in enumerate(prompts):
        part = done[index * group_size : (index + 1) * group_size]
        groups.append([Trajectory(prompt, completion) for completion in part])
    return groups


def _in_chunks(engine: Engine, requests: Sequence[Request], chunk: int, policy: Policy) -> list[Completion]:
    """Serve all requests, pausing each whenever it has `chunk` new tokens per unfinished sample since it came in."""
    waiting = list(requests)
    handles: dict[str, Handle] = {}
    made = dict.fromkeys((request.id for request in requests), 0)
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.waiting) < engine.max_waiting:
            request = waiting.pop(0)
            handles[request.id] = engine.submit(request)
        for event in engine.step():
            if event.index == _first_alive(handles[event.request_id]):
                made[event.request_id] += len(event.tokens)
        for name in [name for name, count in made.items() if count >= chunk and not handles[name].done]:
            made[name] = 0
            handles[name] = engine.resume(engine.pause(name), keep_state=policy == "keep")
    return [completion for request in requests for completion in handles[request.id].completions]


def _first_alive(handle: Handle) -> int:
    """The lowest sample that has not finished; it counts the request's tokens."""
    done = {completion.index for completion in handle.completions}
    return next((index for index in range(handle.samples) if index not in done), -1)


@dataclass(frozen=True)
class Places:
    """Where the generated tokens stand (inserted ones have no place). positions_M: row positions whose logits choose them; ids_M: the tokens.
    routing_TLJ: int16 experts of the row's tokens (UNKNOWN where the engine fed none), or None if not captured."""

    positions_M: Tensor
    ids_M: Tensor
    routing_TLJ: Tensor | None


@dataclass(frozen=True)
class _Whole:
    """Prompt and answer as one document."""

    ids: Tensor
    patches: Tensor | None
    grids: Sequence[tuple[int, int, int]]
    media_positions: Tensor


def pack(model: NativeFusion, trajectories: Sequence[Trajectory]) -> tuple[Row, Places]:
    """Trajectories as the documents of one packed row. Raises ValueError for none."""
    documents, positions, routing, start = [], [], [], 0
    for trajectory in trajectories:
        prompt = trajectory.prompt
        answer = torch.tensor(trajectory.tail, dtype=torch.long)
        places = torch.as_tensor(prompt.media_positions).long()
        ids = torch.cat([torch.as_tensor(prompt.ids).long().cpu(), answer])
        documents.append(_Whole(ids, prompt.patches, prompt.grids, places))
        first = start + int(prompt.ids.shape[0]) - 1
        positions.append(first + trajectory.trained.nonzero().flatten())
        routing.append(_document_routing(trajectory))
        start += trajectory.total
    row = pack_prompts(model, documents)
    known = [part for part in routing if part is not None]
    experts = torch.from_numpy(np.concatenate(known)) if known and len(known) == len(routing) else None
    ids_M = torch.tensor([i for trajectory in trajectories for i in trajectory.ids], dtype=torch.long)
    device = row.ids.device
    return row, Places(torch.cat(positions).to(device), ids_M.to(device), experts)


def _document_routing(trajectory: Trajectory) -> np.ndarray | None:
    routing = trajectory.completion.routing
    if routing is None:
        return None
    missing = trajectory.total - len(routing)
    return np.pad(routing.astype(np.int16), ((0, missing), (0, 0), (0, 0)), constant_values=UNKNOWN)


@contextmanager
def used_experts(model: NativeFusion, places: Places) -> Iterator[None]:
    """Replay the captured routing while open; nothing if none was captured."""
    if places.routing_TLJ is None:
        yield
    else:
        with replaying_routing(model, places.routing_TLJ):
            yield


def trained_logprobs(model: NativeFusion, row: Row, places: Places, replay: bool = True) -> Tensor:
    """fp32 log-probabilities [M] of the generated tokens at temperature 1 by the training forward; differentiable.

    replay: use the experts the engine used, where they were captured.
    """
    if replay:
        with used_experts(model, places):
            hidden_TD = model.hidden(row)
    else:
        hidden_TD = model.hidden(row)
    logits_MV = model.logits(hidden_TD.index_select(0, places.positions_M)).float()
    return logits_MV.log_softmax(-1).gather(1, places.ids_M.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Mismatch:
    """Engine against trainer, over generated tokens. With d = trained - engine log-probability: kl = mean(e^d - 1 - d),
    the estimator that is never negative (in nats per token); max_abs = max |d|. tokens: how many."""

    kl: float
    max_abs: float
    tokens: int


@torch.no_grad()
def mismatch(trajectories: Sequence[Trajectory], trained_M: Tensor) -> Mismatch:
    """How far the trainer's log-probabilities (of `trained_logprobs`) are from the engine's, same weights assumed."""
    engine_M = torch.tensor([p for t in trajectories for p in t.completion.logprobs1], dtype=torch.float64)
    if engine_M.shape != trained_M.shape:
        raise ValueError(f"{engine_M.shape[0]} engine log-probabilities against {trained_M.shape[0]} of the trainer")
    if not engine_M.numel():
        return Mismatch(0.0, 0.0, 0)
    difference_M = trained_M.double().cpu() - engine_M
    kl = (torch.expm1(difference_M) - difference_M).mean()
    return Mismatch(float(kl), float(difference_M.abs().max()), engine_M.numel())


def flat(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """All trajectories of all groups in order."""
    return [trajectory for group in groups for trajectory in group]


def length_report(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Lengths of the answers: mean, longest, share cut by max_new_tokens; for the log of every step."""
    every = flat(groups)
    lengths = [len(trajectory.ids) for trajectory in every] or [0]
    cut = sum(trajectory.completion.finish_reason == "length" for trajectory in every)
    return {"mean": float(np.mean(lengths)), "longest": float(max(lengths)), "cut": cut / max(1, len(every))}
