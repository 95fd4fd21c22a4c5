"""Rollouts of one iteration, whole or partial, and from answers to advantages: scores of the task, shaping by
length, and what the group makes of it.

An iteration keeps N prompts with K answers each in the engine. Without partial rollout it ends when all are
finished. With `rollout.token_cap` a prompt whose unfinished answers, which are written side by side, have all
written that many tokens in this iteration is paused (k1.5); with `rollout.fraction` all are paused as soon as
that share is finished (K3). What is paused goes on first in the next iteration, from its state; a prompt is
trained when its K answers are complete, and every token knows the version of the weights that made it.
Prompts with tools or environments are answered in several turns (rl/rollouts/episodes.py), in the same
batches as the others. With `roles.ahead` nothing is paused: engines in other processes go on while there is
training, and an iteration takes the first N prompts whose answers are complete. Where rewards have workers
they are asked as soon as a prompt's answers are complete, while others are still written.

Legend: N answers of all groups, one after the other.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import parse_assistant
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.eval.measure import answer_text_of
from earlyfusion.eval.protocol import Interrupted
from earlyfusion.eval.rewards import (
    OnTop,
    Range,
    Response,
    RewardError,
    Rewards,
    Scored,
    Weighed,
    make_reward,
)
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.requests import (
    Event,
    Handle,
    PausedRequest,
    PausedSample,
    Request,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.judge import Judge, RewardModel
from earlyfusion.rl.objectives.length import (
    length_rewards,
    overlong_penalty,
    repeat_period,
    toggle_rewards,
)
from earlyfusion.rl.objectives.losses import advantages, informative
from earlyfusion.rl.recipe import RewardSection, RLConfig
from earlyfusion.rl.rollouts.episodes import Episodes, Turn, counted
from earlyfusion.rl.rollouts.packing import Trajectory
from earlyfusion.rl.rollouts.prompts import Prompt, PromptPool

CHECK_EVERY = 8
"""Tokens between two checks for a repetition."""


class Sampler(Protocol):
    """Who writes answers: `model.engine.engine.Engine` in this process, or `rl.fleet.fleet.Fleet` in
    others."""

    tokenizer: Any
    max_waiting: int

    @property
    def has_work(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def submit(self, request: Request, after: PausedSample | None = None) -> Handle: ...

    def step(self) -> list[Event]: ...

    def pause(self, request_id: str) -> PausedRequest: ...

    def resume(self, paused: PausedRequest) -> Handle: ...

    def end_sample(self, request_id: str, index: int) -> None: ...

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Group:
    """A prompt with its K finished answers. earned: what those that ended by themselves will have earned,
    where workers have been asked."""

    prompt: Prompt
    trajectories: list[Trajectory]
    earned: Future[list[Scored]] | None = None

    @property
    def problem(self) -> Problem:
        """What the prompt asks."""
        return self.prompt.problem


class Collector:
    """Asks the engine; keeps what is unfinished between iterations (`carried`), and counts what it spent
    since the counter was cleared: seconds, those inside the engine (engine_s), tokens. rewards: whose workers
    are asked meanwhile."""

    def __init__(
        self,
        config: RLConfig,
        pool: PromptPool,
        engine: Sampler,
        runtime: Runtime,
        has_experts: bool,
        rewards: Rewards | None = None,
    ) -> None:
        self.config, self.pool, self.engine, self.runtime = config, pool, engine, runtime
        self.carried: list[tuple[Prompt, PausedRequest]] = []
        self.flying: dict[str, tuple[Prompt, Handle]] = {}
        self.spent: dict[str, float] = defaultdict(float)
        self.replay = config.rollout.replay_routing and has_experts
        self.rewards, self.judges = rewards, None
        if rewards is not None and rewards.workers:
            self.judges = ThreadPoolExecutor(len(rewards.workers))
        self.ready: dict[str, Group] = {}
        self.ahead: _Batch | None = None

    def close(self) -> None:
        """Stop what programs and environments still run."""
        if self.judges is not None:
            self.judges.shutdown(cancel_futures=True)
        if self.pool.environments is not None:
            self.pool.environments.close()
        self.engine.close()

    def tool_metrics(self) -> Record:
        """What programs did since the last call, over all processes (every process calls it): "tools/..." by
        the names of episodes.COUNTED, those that are not 0; tools/valid as the share of answers with a valid
        call; tools/sandbox, where walls are missing, in words. {} without tools."""
        environments = self.pool.environments
        if environments is None:
            return {}
        # Every process names the same counters, also those that are 0 here.
        counts = self.runtime.sum_dict(counted(environments))
        counts["valid"] /= max(1.0, counts["answers"])
        metrics: Record = {}
        for name, count in counts.items():
            if count or name in ("answers", "valid", "calls"):
                metrics[f"tools/{name}"] = count
        if environments.weaker:
            metrics["tools/sandbox"] = environments.weaker
        return metrics

    def due(self, count: int, rank: int) -> int:
        """How many of `count` prompts are a process's."""
        world = self.runtime.world
        return count // world + (rank < count % world)

    def collect(self, update: int, temperature: float, count: int, round_: int = 0) -> list[Group]:
        """Keep `count` prompts (of all processes) in work; returns the complete groups. Every process calls
        it. round_: which of several calls in one update, for the names of the requests.

        Raises Interrupted on every process when any was asked to stop meanwhile; the prompts are drawn and
        what was carried is gone then, so the caller goes back to what was before.
        """
        start, rank = time.perf_counter(), self.runtime.rank
        ahead = self.config.roles.ahead

        # What is carried is topped up to every process's share; the numbers of its prompts follow from that.
        needs = torch.zeros(self.runtime.world, dtype=torch.float64)
        wanted = self.due(count, rank) * (1 + ahead)
        needs[rank] = max(0, wanted - len(self.carried) - len(self.flying))
        needs = self.runtime.sum(needs)
        first, total = int(needs[:rank].sum()), int(needs.sum())
        share = slice(first, first + int(needs[rank]))
        prompts = self.pool.draw(total, update, share, self.runtime.sum)[share] if total else []

        batch = _Batch(self, temperature)
        for prompt, paused in self.carried:
            batch.resume(prompt, paused)
        self.carried = []
        for name, (prompt, handle) in self.flying.items():
            batch.prompts[name], batch.handles[name] = prompt, handle
        before = list(batch.handles)
        batch.queue.extend((f"{update}.{round_}/{first + i}", prompt) for i, prompt in enumerate(prompts))
        # A signal on one process is one for all: they meet here, whoever was asked.
        batch.run(self.due(count, rank) if ahead else None)
        if self.runtime.should_stop():
            # What this call drew is drawn again; what was there before is kept.
            kept = before if ahead else []
            self.carried = [
                (batch.prompts[name], taken_out(self.engine, name, batch.handles[name])) for name in kept
            ]
            self.flying, self.ready, self.ahead = {}, {}, None
            raise Interrupted
        self.carried = batch.paused
        done = batch.prompts
        # The first that are complete; all others stay where they are written.
        if ahead:
            done = {name: prompt for name, prompt in done.items() if batch.handles[name].done}
            done = dict(list(done.items())[: self.due(count, rank)])
            self.flying = {
                name: (prompt, batch.handles[name])
                for name, prompt in batch.prompts.items()
                if name not in done
            }
            self.ahead = batch

        # Complete groups alone are trained; their answers may be of several iterations.
        self.spent["seconds"] += time.perf_counter() - start
        return [
            self.ready.pop(name) if name in self.ready else Group(prompt, batch.answers(name))
            for name, prompt in done.items()
        ]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """With `roles.ahead`: engines are fed, and what they have written is judged, while the caller trains.
        Raises at the end what went wrong with them."""
        if self.ahead is None:
            yield
            return
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            driven = pool.submit(self.ahead.drive, over)
            try:
                yield
            finally:
                over.set()
        driven.result()

    def state_dict(self) -> list[Any]:
        """The unfinished requests of this process, with their states, for the checkpoint. Those that are
        being written pause for it."""
        packed, carried = [], list(self.carried)
        for name, (prompt, handle) in self.flying.items():
            paused = taken_out(self.engine, name, handle)
            carried.append((prompt, paused))
            self.flying[name] = prompt, self.engine.resume(paused)
        for prompt, paused in carried:
            # The engine's own export, kept as bytes: a checkpoint holds tensors and plain values only.
            parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in paused.to_bytes()]
            packed.append([prompt.ids, *parts])
        return packed

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """What `state_dict` gave."""
        self.carried = []
        for ids, *parts in state:
            paused = PausedRequest.from_bytes(*(part.numpy().tobytes() for part in parts))
            self.carried.append((self.pool.prompt(*ids), paused))


def answer_limit(config: RLConfig, problem: Problem) -> int:
    """Most tokens of an answer to a problem: its own limit, at most the run's."""
    return min(config.rollout.max_new_tokens, problem.max_new_tokens or config.rollout.max_new_tokens)


class _Batch:
    """The requests of one call of `Collector.collect`, by name."""

    def __init__(self, collector: Collector, temperature: float) -> None:
        config, rollout, pool = collector.config, collector.config.rollout, collector.pool
        self.collector, self.config = collector, config
        self.engine, self.stop = collector.engine, collector.runtime.stop
        self.replay, self.spent = collector.replay, collector.spent
        # One seed for all: the noise of a sample is keyed by its request's name and its index.
        self.params = SamplingParams(
            rollout.max_new_tokens,
            temperature,
            rollout.top_p,
            rollout.min_p,
            seed=config.run.seed,
            logprobs=True,
            n=rollout.group_size,
        )
        # Telling every token costs the engine time, so only those ask for it who look.
        self.watched = config.watched
        self.tools: Episodes | None = None
        if pool.environments is not None:
            given = (pool.tokenizer, pool.vision, self.params, self.replay, self.watched)
            self.tools = Episodes(pool.environments, *given)
        self.queue: deque[tuple[str, Prompt]] = deque()
        self.turns: deque[Turn] = deque()
        self.prompts: dict[str, Prompt] = {}
        self.handles: dict[str, Handle] = {}
        self.paused: list[tuple[Prompt, PausedRequest]] = []
        self.unfinished = self.finished = 0  # answers carried over, answers finished here
        self.written: dict[tuple[str, int], list[int]] = defaultdict(list)

    def resume(self, prompt: Prompt, paused: PausedRequest) -> None:
        """Go on with what an earlier iteration left; the rest is drawn at today's temperature."""
        request = paused.request
        params = replace(request.params, temperature=self.params.temperature)
        paused = replace(paused, request=replace(request, params=params))
        handle = self.engine.resume(paused)
        self.prompts[request.id], self.handles[request.id] = prompt, handle
        self.unfinished += handle.samples - len(paused.finished)

    def run(self, groups: int | None) -> None:
        """Run the engine until the share of answers that rollout.fraction asks for is finished, or nothing is
        left; pause what is unfinished. groups: until so many prompts are complete, and nothing is paused. A
        signal ends it at once."""
        if groups is not None:
            self._run_ahead(groups)
            return
        unfinished = self.unfinished + self.params.n * len(self.queue)
        # lambda of K3, over the answers that are in work on this process.
        goal = math.ceil(self.config.rollout.fraction * unfinished)
        while self.finished < goal and (
            self.queue or self.engine.has_work or (self.tools is not None and self.tools.waits)
        ):
            if self.stop.received is not None:
                return
            self.spent["engine_s"] += self._step()
            self._pause_over_the_cap()
        # What is left over goes on first in the next iteration.
        for name, handle in list(self.handles.items()):
            if not handle.done:
                self._pause(name)

    def _run_ahead(self, groups: int) -> None:
        # Whoever is complete already asks for no step; what follows them must not wait for one.
        self._submit()
        while sum(handle.done for handle in self.handles.values()) < groups:
            if self.stop.received is not None:
                return
            self.spent["engine_s"] += self._step()

    def drive(self, over: threading.Event) -> None:
        """Run the engine until everything is complete, or `over`."""
        while not over.is_set() and (self.queue or not all(handle.done for handle in self.handles.values())):
            self._step()

    def _step(self) -> float:
        """One step of the engine, and what it says; its seconds."""
        self._submit()
        start = time.perf_counter()
        events = self.engine.step()
        seconds = time.perf_counter() - start
        for event in events:
            self._take(event)
        return seconds

    def answers(self, name: str) -> list[Trajectory]:
        """The finished answers of a request."""
        answers = self.tools.answers(name) if self.tools is not None else None
        if answers is None:
            prompt = self.prompts[name]
            entry, tokenizer = self.config.tasks[prompt.entry], self.engine.tokenizer
            answers = []
            for done in self.handles[name].completions:
                # In the chat form the reward sees the response; people see the thoughts as well.
                shown, said = "", Message("assistant", (Text(done.text),))
                if entry.chat:
                    shown, said = done.text, parse_assistant(done.ids, tokenizer, entry.thought).message
                    done = replace(done, text=answer_text_of(done.ids, done.text, entry, tokenizer))
                answers.append(Trajectory(prompt.encoded, done, shown=shown, messages=(said,)))
        return answers

    def _submit(self) -> None:
        """Next turns first, then new prompts, as many as the engine queues."""
        if self.tools is not None:
            turns, ended = self.tools.due(idle=not (self.queue or self.engine.has_work))
            self.turns.extend(turns)
            self.finished += ended
        # A turn whose tool replied holds a state in the engine, so it goes before a new prompt.
        while (self.turns or self.queue) and self.engine.waiting < self.engine.max_waiting:
            if self.turns:
                self.engine.submit(*self.turns.popleft())
                continue
            name, prompt = self.queue.popleft()
            entry = self.config.tasks[prompt.entry]
            if self.tools is not None and entry.place:
                tokens = answer_limit(self.config, prompt.problem)
                self.tools.open(name, prompt.encoded, prompt.problem, entry, tokens)
            request = Request(
                name,
                prompt.encoded,
                replace(self.params, max_new_tokens=answer_limit(self.config, prompt.problem)),
                self.replay,
                pieces=self.watched,
                keep_state=entry.place is not None,
            )
            self.prompts[name], self.handles[name] = prompt, self.engine.submit(request)

    def _take(self, event: Event) -> None:
        """Count the tokens of an event, and end an answer that has become a repetition."""
        key, done, repeat = (event.request_id, event.index), event.completion, self.config.repeat
        new = [token.id for token in event.tokens]
        # Watched requests tell every token; the others only their end.
        if done is not None and not self.watched:
            new = done.ids
        ids = self.written[key]
        ids += new
        self.spent["tokens"] += len(new)
        if done is not None:
            self.finished += self.tools is None or self.tools.take(done, event.left)
            self._ask_workers(event.request_id)
        # The penalty comes with the reward; ending it here only saves its remaining tokens.
        elif repeat is not None and len(ids) % CHECK_EVERY == 0 and repeat_period(repeat, ids) is not None:
            self.engine.end_sample(*key)

    def _ask_workers(self, name: str) -> None:
        """What the answers to a prompt earn, once they are complete; conversations go on after an answer."""
        judges, rewards = self.collector.judges, self.collector.rewards
        ready, handle = self.collector.ready, self.handles.get(name)
        if judges is None or rewards is None or handle is None or name in ready or not handle.done:
            return
        prompt = self.prompts[name]
        if self.config.tasks[prompt.entry].place is None:
            group = Group(prompt, self.answers(name))
            ready[name] = replace(group, earned=judges.submit(judged, rewards, group))

    def _pause_over_the_cap(self) -> None:
        """Pause requests whose unfinished answers have all written rollout.token_cap tokens in this
        iteration."""
        cap = self.config.rollout.token_cap
        if cap is None:
            return
        for name, handle in list(self.handles.items()):
            alive = set(range(handle.samples)) - {completion.index for completion in handle.completions}
            if alive and all(len(self.written[name, index]) >= cap for index in alive):
                self._pause(name)

    def _pause(self, name: str) -> None:
        self.paused.append((self.prompts.pop(name), self.engine.pause(name)))
        del self.handles[name]


def taken_out(engine: Sampler, name: str, handle: Handle) -> PausedRequest:
    """A request out of its engine; a finished one as well."""
    if not handle.done:
        return engine.pause(name)
    request = Request(name, TokenPrompt(torch.zeros(1, dtype=torch.long)), SamplingParams(n=handle.samples))
    return PausedRequest(request, [], list(handle.completions), version=0)


RIGHT = 0.999
"""Scores from this share of their range on count as right answers (length reward, Toggle)."""


@dataclass
class Experience:
    """Groups with what their answers earned. All tensors float32, int64 or bool [N], in the order of the
    answers.

    bounds: first and last + 1 answer of every group. entries, bins: of the prompts. shares: how far a score
    is on the way from the lowest to the highest of the declared range, in [0, 1].
    """

    groups: list[Group]
    bounds: list[tuple[int, int]]
    scored: list[Scored]
    entries_N: Tensor
    bins_N: Tensor
    scores_N: Tensor
    shares_N: Tensor
    right_N: Tensor
    rewards_N: Tensor
    advantages_N: Tensor
    lengths_N: Tensor
    cut_N: Tensor
    trained_N: Tensor
    informative_N: Tensor

    @property
    def answers(self) -> list[Trajectory]:
        """All answers, [N]."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def build_rewards(section: RewardSection, tasks: Sequence[Task], seed: int) -> Rewards:
    """The recipe's reward function, contained as it needs. Raises RewardError for one that cannot be set
    up."""
    functions, isolation = make_reward(section.name, tasks, seed, section.weights)
    workers, memory_mb = section.workers, section.memory_mb
    if section.judge is not None:
        given, share = section.judge, section.judge.weight
        judge: Judge | RewardModel
        if given.kind == "score":
            judge = RewardModel(given.model.removeprefix("hf:"))
        else:
            judge = Judge(given.model, given.name, timeout_s=section.timeout_s)
        if share < 1 and len(functions) > 1:
            raise RewardError(
                "reward.judge.weight below 1 stands on top of one function; name one, or weight 1"
            )
        function = judge if share == 1 else OnTop(functions[0].function, judge, share)
        functions, isolation = [Weighed(function, "judge")], "process"
        # Weights of a model of one's own are held once, whatever their size.
        if not given.model.startswith(("http://", "https://")):
            workers, memory_mb = 1, None
    return Rewards(
        functions,
        isolation=isolation,
        timeout_s=section.timeout_s,
        workers=workers,
        memory_mb=memory_mb,
        span=Range(section.low, section.high),
    )


def judged(rewards: Rewards, *groups: Group) -> list[Scored]:
    """The reward's judgement of every answer that ended by itself, in order, neither counted nor annealed."""
    # In one call: a reward with workers is asked for all answers at once.
    answers: list[Response] = []
    sizes = []
    for group in groups:
        ended = [t for t in group.trajectories if t.ended]
        sizes.append(len(ended))
        # A conversation holds pictures, which are sent to the worker only if somebody looks at them.
        before = group.prompt.messages if "messages" in rewards.asked or rewards.whole_groups else ()
        for t in ended:
            talk = (*before, *t.messages) if before else ()
            answers.append(Response(group.problem, t.answer, talk, tuple(t.ids), t.paid, t.counts))
    return rewards.judged(answers, sizes)


def score(rewards: Rewards, groups: Sequence[Group]) -> list[Scored]:
    """What every answer earns, in order. One that did not end by itself is not judged: it earns the lowest
    of the declared range, or of its group where that is lower, so that it is never better than a wrong
    answer."""
    rest = iter(judged(rewards, *(group for group in groups if group.earned is None)))
    scored: list[Scored] = []
    for group in groups:
        ended = [trajectory.ended for trajectory in group.trajectories]
        found = group.earned.result() if group.earned else [next(rest) for _ in range(sum(ended))]
        settled = iter(rewards.settled(found))
        own = [next(settled) if one else None for one in ended]
        low = min([rewards.span.low, *(one.value for one in own if one is not None)])
        scored += [Scored(low) if one is None else one for one in own]
    return scored


def experience(
    config: RLConfig,
    groups: Sequence[Group],
    scored: Sequence[Scored],
    update: int,
    budgets: dict[int, float],
) -> Experience:
    """Rewards after shaping, in this order: the entry's power, Toggle, length reward, penalties for overlong
    answers and repetitions; then advantages. budgets: of Toggle, by bin."""
    answers: list[Trajectory] = []
    bounds: list[tuple[int, int]] = []
    numbers: list[tuple[int, int, int]] = []
    for number, group in enumerate(groups):
        count = len(group.trajectories)
        bounds.append((len(answers), len(answers) + count))
        answers += group.trajectories
        numbers += [(number, group.prompt.entry, group.prompt.bin)] * count

    # One number an answer, in the order of the groups.
    groups_N, entries_N, bins_N = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).unbind(1)
    lengths_N = torch.tensor([float(len(answer.ids)) for answer in answers])
    cut_N = torch.tensor([t.completion.finish_reason == "length" for t in answers], dtype=torch.bool)
    scores_N = torch.tensor([one.value for one in scored], dtype=torch.float32)
    low, high = config.reward.low, config.reward.high
    shares_N = ((scores_N - low) / (high - low)).clamp(0, 1)
    right_N = shares_N >= RIGHT

    # The sign stays: a power of a negative number may be none, or a positive one.
    powers_E = torch.tensor([entry.power for entry in config.tasks])
    rewards_N = scores_N.sign() * scores_N.abs() ** powers_E[entries_N]
    # Toggle replaces a reward, the others add to it: it must come first.
    rewards_N = toggle_rewards(
        config.toggle, rewards_N, lengths_N, bins_N, groups_N, budgets, update, (low, high)
    )
    rewards_N = rewards_N + length_rewards(config.length, lengths_N, right_N, groups_N, update)
    limits = [float(answer_limit(config, groups[number].problem)) for number, *_ in numbers]
    rewards_N = rewards_N - overlong_penalty(config.overlong, lengths_N, cut_N, torch.tensor(limits))
    if config.repeat is not None:
        repeats = [repeat_period(config.repeat, answer.ids) is not None for answer in answers]
        rewards_N = rewards_N - config.repeat.penalty * torch.tensor(repeats).float()

    # What a limit cut off says nothing about its beginning: "filter" leaves it out of the loss.
    filtered_N = cut_N if config.overlong.mode == "filter" else torch.zeros_like(cut_N)
    return Experience(
        list(groups),
        bounds,
        list(scored),
        entries_N,
        bins_N,
        scores_N,
        shares_N,
        right_N,
        rewards_N,
        advantages(config.objective, rewards_N, groups_N),
        lengths_N,
        cut_N,
        ~filtered_N,
        informative(rewards_N, groups_N),
    )
