"""Rollouts of one iteration, whole or partial.

An iteration keeps N prompts with K answers each in the engine. Without partial rollout it ends when all are
finished. With `rollout.token_cap` a prompt whose unfinished answers, which are written side by side, have all
written that many tokens in this iteration is put aside (k1.5); with `rollout.fraction` all are put aside as
soon as that share is finished (K3). What is put aside goes on first in the next iteration, from its state or
by reading its text again; a prompt is trained when its K answers are complete, and every token knows the
version of the weights that made it. Prompts with tools are answered in several turns (rl/rollouts/tools.py),
in the same batches as the others.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from earlyfusion.data.errors import BadSample
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Handle, Request, SamplingParams
from earlyfusion.model.engine.transfer import PausedRequest
from earlyfusion.model.moe import moe_layers
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.objectives.length import repeat_period
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.packing import Trajectory
from earlyfusion.rl.rollouts.prompts import Ask, PromptBook
from earlyfusion.rl.rollouts.tool_desk import NAMES, ToolDesk
from earlyfusion.rl.rollouts.tool_prompts import tool_files
from earlyfusion.rl.rollouts.tools import ToolRollouts, Turn

LOOK_EVERY = 8
"""Tokens between two looks for an answer that runs in circles."""


class Interrupted(Exception):
    """A signal asked some process to stop while answers were collected."""


@dataclass(frozen=True)
class Asked:
    """A prompt with its K finished answers."""

    ask: Ask
    problem: Problem
    trajectories: list[Trajectory]


@dataclass
class Collected:
    """What an iteration brought: complete groups, and how its time went. working_s: inside the engine;
    seconds: in all."""

    groups: list[Asked]
    seconds: float = 0.0
    working_s: float = 0.0
    tokens: int = 0
    carried: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of all answers in work, finished or not: partial rollout favours short ones, so both are logged.
    """

    def add_cost(self, more: Collected) -> None:
        """Count what a further round took; its groups are not taken over."""
        self.seconds += more.seconds
        self.working_s += more.working_s
        self.tokens += more.tokens
        self.lengths += more.lengths


class Collector:
    """Asks the engine; keeps what is unfinished between iterations."""

    def __init__(self, config: RLConfig, book: PromptBook, engine: Engine, runtime: Runtime) -> None:
        self.config, self.book, self.engine, self.runtime = config, book, engine, runtime
        self.carried: list[tuple[Ask, PausedRequest]] = []
        self._replay = config.rollout.replay_routing and bool(moe_layers(engine.model))
        self.counts: Counter[str] = Counter()
        self.desk: ToolDesk | None = (
            ToolDesk(config.rollout, config.sandbox.allow_weaker) if config.has_tools else None
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: Future[None] | None = None

    def close(self) -> None:
        """Stop what programs still run, and the thread."""
        self._thread.shutdown()
        if self.desk is not None:
            self.desk.close()

    def tool_metrics(self) -> dict[str, Any]:
        """What programs did since the last call, over all processes (every process calls it): "tools/..." by
        the names of tool_desk.NAMES, those that are not 0; tools/valid as the share of answers with a valid
        call; tools/sandbox, where walls are missing, in words. {} without tools."""
        if self.desk is None:
            return {}
        counts = torch.tensor([float(self.desk.counts[name]) for name in NAMES], dtype=torch.float64)
        self.desk.counts.clear()
        found = dict(zip(NAMES, self.runtime.sum(counts).tolist()))
        found["valid"] /= max(1.0, found["answers"])
        shown = {
            f"tools/{name}": value
            for name, value in found.items()
            if value or name in ("answers", "valid", "calls")
        }
        return shown | ({"tools/sandbox": self.desk.weaker} if self.desk.weaker else {})

    def prefetch(self, update: int) -> None:
        """Make this process's prompts of a coming iteration in a thread: `collect` finds them in the book's
        memory."""
        rollout = self.config.rollout
        if not rollout.prefetch or rollout.token_cap is not None or rollout.fraction < 1:
            return
        shares = [self.due(rollout.prompts, rank) for rank in range(self.runtime.world)]
        first = sum(shares[: self.runtime.rank])
        asks = self.book.coming(rollout.prompts, update)[first : first + shares[self.runtime.rank]]
        self._ahead = self._thread.submit(self._make, asks)

    def _make(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            with suppress(BadSample):  # `draw` meets it again, counts it and takes another
                self.book.prompt(ask)

    def due(self, count: int, rank: int) -> int:
        """How many of `count` prompts are a process's."""
        world = self.runtime.world
        return count // world + (rank < count % world)

    def collect(self, update: int, temperature: float, count: int, round_: int = 0) -> Collected:
        """Keep `count` prompts (of all processes) in work; every process calls it. round_: which of several
        calls in one update, for the names of the requests.

        Raises Interrupted on every process when any was asked to stop meanwhile; the prompts are drawn and
        what was carried is gone then, so the caller goes back to what was before.
        """
        start = time.perf_counter()
        asks, first = self._new_asks(update, count)
        names: dict[str, Ask] = {}
        handles: dict[str, Handle] = {}
        before = 0
        for ask, paused in self.carried:
            name = paused.request.id
            names[name] = ask
            before += len(paused.finished)
            # What is still to be written is drawn at today's temperature, as the new prompts are.
            today = replace(paused.request, params=replace(paused.request.params, temperature=temperature))
            paused = replace(paused, request=today)
            handles[name] = self.engine.resume(paused, keep_state=self.config.rollout.resume == "keep")
        self.carried = []
        waiting = [(f"{update}.{round_}/{first + i}", ask) for i, ask in enumerate(asks)]
        params = self._params(temperature)
        unfinished = sum(handle.samples for handle in handles.values()) - before
        unfinished += params.n * len(waiting)
        collected = Collected([])
        book, rollout = self.book, self.config.rollout
        tools = None
        if self.desk is not None:
            tools = ToolRollouts(rollout, self.desk, book.tokenizer, book.vision, params, self._replay)
        self._serve(
            collected, waiting, names, handles, params, math.ceil(rollout.fraction * unfinished), tools
        )
        if self.runtime.should_stop():
            raise Interrupted
        for name, ask in names.items():
            if handles[name].done:
                problem, prompt = self.book.prompt(ask)
                answers = tools.answers(name) if tools is not None else None
                if answers is None:
                    answers = [Trajectory(prompt, completion) for completion in handles[name].completions]
                collected.groups.append(Asked(ask, problem, answers))
                collected.lengths += [len(answer.ids) for answer in answers]
        for _, paused in self.carried:
            collected.lengths += [len(sample.ids) for sample in paused.samples]
            collected.lengths += [len(completion.ids) for completion in paused.finished]
        collected.carried = len(self.carried)
        collected.seconds = time.perf_counter() - start
        return collected

    def _new_asks(self, update: int, count: int) -> tuple[list[Ask], int]:
        """(this process's new prompts, number of the first of them): what is carried is topped up to its
        share."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        world, rank = self.runtime.world, self.runtime.rank
        needs = torch.zeros(world, dtype=torch.float64)
        needs[rank] = max(0, self.due(count, rank) - len(self.carried))
        needs = self.runtime.sum(needs)
        total, first = int(needs.sum()), int(needs[:rank].sum())
        share = slice(first, first + int(needs[rank]))
        asks = self.book.draw(total, update, share, self.runtime.sum) if total else []
        return asks[share], first

    def _params(self, temperature: float) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            rollout.max_new_tokens,
            temperature,
            rollout.top_p,
            rollout.min_p,
            seed=self.config.run.seed,
            logprobs=True,
            n=rollout.group_size,
        )

    def _serve(
        self,
        out: Collected,
        waiting: list[tuple[str, Ask]],
        names: dict[str, Ask],
        handles: dict[str, Handle],
        params: SamplingParams,
        goal: int,
        tools: ToolRollouts | None = None,
    ) -> None:
        """Run the engine until `goal` answers are finished or nothing is left; what is unfinished is put
        aside."""
        cap, repeat = self.config.rollout.token_cap, self.config.repeat
        watched = self.config.watched or tools is not None
        written: dict[tuple[str, int], list[int]] = {}
        made: Counter[tuple[str, int]] = Counter()
        finished = 0
        turns: list[Turn] = []
        while (waiting or self.engine.has_work or (tools is not None and tools.waits)) and finished < goal:
            if self.runtime.stop.received is not None:
                return
            if tools is not None:
                more, ended = tools.due(idle=not (waiting or self.engine.has_work))
                turns += more
                finished += ended
            while (turns or waiting) and len(self.engine.scheduler.waiting) < self.engine.max_waiting:
                if turns:
                    self.engine.submit(*turns.pop(0))
                    continue
                name, ask = waiting.pop(0)
                names[name] = ask
                problem, prompt = self.book.prompt(ask)
                entry = self.config.tasks[ask.entry]
                if tools is not None and entry.tools:
                    tools.open(name, prompt, tool_files(problem, entry.form))
                request = Request(name, prompt, params, self._replay, pieces=watched, keep_state=entry.tools)
                handles[name] = self.engine.submit(request)
            begun = time.perf_counter()
            events = self.engine.step()
            out.working_s += time.perf_counter() - begun
            for event in events:
                key = (event.request_id, event.index)
                new = len(event.tokens) if watched or event.completion is None else len(event.completion.ids)
                made[key] += new
                out.tokens += new
                if event.completion is not None:
                    finished += tools is None or tools.take(event.completion, event.left)
                if repeat is not None and event.completion is None:
                    ids = written.setdefault(key, [])
                    ids += [one.id for one in event.tokens]
                    if len(ids) % LOOK_EVERY == 0 and repeat_period(repeat, ids) is not None:
                        self.engine.end_sample(*key)
                        self.counts["ended_in_circles"] += 1
            if cap is not None:
                self._put_aside(names, handles, self._over(cap, handles, made))
        self._put_aside(names, handles, [name for name, handle in handles.items() if not handle.done])

    @staticmethod
    def _over(cap: int, handles: dict[str, Handle], made: Counter[tuple[str, int]]) -> list[str]:
        """Requests whose unfinished answers have all written `cap` tokens in this iteration."""
        over = []
        for name, handle in handles.items():
            done = {completion.index for completion in handle.completions}
            alive = [index for index in range(handle.samples) if index not in done]
            if alive and all(made[name, index] >= cap for index in alive):
                over.append(name)
        return over

    def _put_aside(self, names: dict[str, Ask], handles: dict[str, Handle], over: Sequence[str]) -> None:
        for name in over:
            self.carried.append((names.pop(name), self.engine.pause(name)))
            del handles[name]

    def state_dict(self) -> list[Any]:
        """The unfinished requests of this process, with their states, for the checkpoint."""
        packed = []
        for ask, paused in self.carried:
            facts, tensors = paused.to_bytes()
            packed.append([list(ask), _as_tensor(facts), _as_tensor(tensors)])
        return packed

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """What `state_dict` gave."""
        self.carried = [
            (Ask(*ask), PausedRequest.from_bytes(facts.numpy().tobytes(), tensors.numpy().tobytes()))
            for ask, facts, tensors in state
        ]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
