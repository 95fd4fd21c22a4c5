"""Answers in several turns: the model speaks, its environment answers, the same answer goes on.

    prompt (chat form) -> a message -> what the environment says -> the next message -> ...

Tokens in, tokens out: generated ids are kept as they are and never made anew from text; what the environment
says is encoded once, with its pictures, and put behind them (packing.Inserted), and the next turn is a
request whose prompt is all of it. Its noise is a function of (seed, request, sample, turn); it goes on from
the state that the turn before left in the engine, so a conversation is read once, however many turns it has.
With rollout.ordered a reply joins the engine a fixed number of engine steps after the message, whenever the
environment was ready: neither the clock nor the batch decides what is generated, and counters repeat. Without
it a reply joins as soon as it is there, which keeps the engine busy beside slow environments.

An answer ends where its environment ends it, with its last word (tools: a message without calls), with a
message whose markup is broken, after its turns, or with its last token. The reward sees the text of the last
message, "" where it is no answer, and what the environment paid. Whatever an environment does costs its own
answer: it has a deadline, and what it raises is counted.
"""

import asyncio
import queue
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.sample import Segment, Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError, one_line
from earlyfusion.model.engine import requests as engine
from earlyfusion.model.engine.requests import PausedSample
from earlyfusion.rl.environments.base import (
    Environment,
    EnvironmentFault,
    Loop,
    content_of,
    factory_of,
    make_environment,
    message_of,
    step_of,
)
from earlyfusion.rl.environments.isolated import Isolated, ready
from earlyfusion.rl.environments.python import Programs, PythonTool
from earlyfusion.rl.recipe import RolloutSection, TaskEntry
from earlyfusion.rl.rollouts.packing import Inserted, Trajectory
from earlyfusion.vision.config import VisionConfig

STEPS = 16
"""Engine steps between a message and the reply to it: time for the environment while other answers are
written."""

BEGIN_S = 60.0
"""Least time for an environment to begin, which may start a process and import much."""

Turn = tuple[engine.Request, PausedSample | None]
"""What the engine is asked, and what it goes on from."""

COUNTED = (
    "answers valid turns calls ok error timeout memory output_limit forbidden blocked not_a_program actions"
    " not_an_action malformed over_turns over_tokens unavailable failed late"
    " assigned finished critical_steps total_steps"
).split()
"""answers; those with a valid call or action (valid); messages that were replied to (turns); programs and
functions run (calls) by how they ended (ok ... forbidden); refusals of the sandbox, which a program may catch
(blocked); calls of another tool or without code (not_a_program); actions of a game, and messages without one
(not_an_action); messages whose markup is broken around a call (malformed); messages after the last turn;
replies without room; programs that could not be started (unavailable); environments that raised (failed) or
missed their deadline (late); what a swarm did (assigned ...)."""


class Budget(NamedTuple):
    """What an answer may spend: replies, generated tokens, tokens of one reply (markup included)."""

    turns: int
    tokens: int
    reply_tokens: int


def budget_of(rollout: RolloutSection, entry: TaskEntry, tokens: int) -> Budget:
    """The entry's own limits where it has them. tokens: most generated ones."""
    return Budget(entry.turns or rollout.tool_turns, tokens, entry.reply_tokens or rollout.tool_output_tokens)


class Begun(NamedTuple):
    """An environment of one answer, and what it began with."""

    made: Environment
    messages: list[Message]


class Environments:
    """Makes the environments of a run and runs them beside the engine; `counts` is what became of them.

    Raises SandboxError where Python is asked for and no sandbox can be started, EnvironmentFault for
    environments that cannot be made, at once and not in the middle of a run. weaker: what records say of a
    sandbox with walls missing.
    """

    def __init__(
        self, entries: Sequence[TaskEntry], rollout: RolloutSection, allow_weaker: bool = False
    ) -> None:
        self.rollout, self.loop, self.counts = rollout, Loop(), Counter[str]()
        self.programs: Programs | None = None
        self.weaker = ""
        try:
            for entry in entries:
                if entry.place == "python" and self.programs is None:
                    self.programs = Programs(rollout.tool_timeout_s, rollout.tool_output_tokens, allow_weaker)
                    self.weaker = self.programs.weaker
        except BaseException:
            self.close()
            raise

    def answers(self, entry: TaskEntry) -> bool:
        """Whether the assistant has the last word there."""
        return bool(getattr(factory_of(str(entry.place)), "answers", False))

    def make(self, entry: TaskEntry) -> Environment:
        """A new instance for one answer."""
        if entry.place == "python":
            return PythonTool(entry.form, self.programs)
        if entry.isolated:
            return Isolated(str(entry.place), entry.environment_options)
        return make_environment(str(entry.place), entry.environment_options)

    def begin(self, entry: TaskEntry, problem: Problem) -> Future[Begun]:
        """A new instance that has begun with a problem; the future raises what making it or `reset` raises,
        TimeoutError."""
        if entry.isolated:
            ready()
        # A process that imports what it needs takes its time where many begin at once.
        return self.loop.submit(self._begin(entry, problem), max(self.rollout.step_timeout_s, BEGIN_S))

    async def _begin(self, entry: TaskEntry, problem: Problem) -> Begun:
        # A game may take its time to be made, so it is made beside the engine, too.
        made = await self.loop.run(self.make, entry)
        try:
            given, needed = entry.turns or self.rollout.tool_turns, getattr(made, "least_turns", 1)
            if needed > given:
                raise EnvironmentFault(
                    f"environment {entry.place!r} replies {needed} times, the recipe ends answers after"
                    f" {given}; set turns of the task, or rollout.tool_turns, to {needed}"
                )
            return Begun(made, [message_of(one) for one in await self.loop.run(made.reset, problem)])
        except BaseException:
            self._close(made)
            raise

    def prompt(self, entry: TaskEntry, problem: Problem) -> list[Message]:
        """The messages that begin a conversation about a problem; raises what `begin` raises."""
        begun = self.begin(entry, problem)
        self.loop.flush()
        messages = begun.result().messages
        self.end(begun)
        return messages

    def check(self, entry: TaskEntry, problem: Problem) -> None:
        """Raises EnvironmentFault for an environment that does not begin, or begins with one problem in two
        ways."""
        try:
            first, second = (self.prompt(entry, problem) for _ in range(2))
        except UserError:
            raise
        except Exception as error:  # an environment may raise anything
            raise EnvironmentFault(
                f"environment {entry.place!r}: reset raised {type(error).__name__}: {one_line(error, 300)}"
            ) from error
        if list(map(content_of, first)) != list(map(content_of, second)):
            raise EnvironmentFault(
                f"environment {entry.place!r}: reset began one problem in two ways, but all answers to a"
                " problem share its beginning; make it a function of the problem (problem.meta['seed'])"
            )
        if not first or first[-1].role == "assistant":
            raise EnvironmentFault(
                f"environment {entry.place!r}: reset must end with a message that is not the assistant's"
            )

    def step(self, begun: Future[Begun], message: Message) -> Future[Any]:
        """The environment's step, once it has begun; the future raises what either raises."""
        return self.loop.submit(self._step(begun, message), None)

    async def _step(self, begun: Future[Begun], message: Message) -> Any:
        made = (await asyncio.wrap_future(begun)).made
        return await asyncio.wait_for(self.loop.run(made.step, message), self.rollout.step_timeout_s)

    def end(self, begun: Future[Begun]) -> None:
        """Close an instance, as soon as there is one; nobody waits for it."""

        def close(done: Future[Begun]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._close(done.result().made)

        begun.add_done_callback(close)

    def _close(self, made: Environment) -> None:
        method = getattr(made, "close", None)
        # Most hold nothing.
        if method is not None and getattr(type(made), "close", None) is not Environment.close:
            self.loop.submit(self.loop.run(method), self.rollout.step_timeout_s)
            self.loop.flush()

    def close(self) -> None:
        """Stop what still runs."""
        self.loop.close()
        if self.programs is not None:
            self.programs.close()


@dataclass
class Episode:
    """One answer on its way: sample `index` of request `name`. parts: what was generated, a turn each; lines:
    the answer as people read it; paid: sum of the environment's rewards, None where it paid nothing yet;
    begun: its environment; last_word: whether the assistant ends the conversation, as with tools; left: the
    state to go on from; answer: set when it has ended."""

    name: str
    index: int
    prompt: engine.Prompt
    budget: Budget
    thinking: bool
    begun: Future[Begun]
    last_word: bool
    parts: list[engine.Completion] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    turns: int = 0
    valid: bool = False
    paid: float | None = None
    left: PausedSample | None = None
    answer: Trajectory | None = None
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def generated(self) -> int:
        """Generated tokens."""
        return sum(len(part.ids) for part in self.parts)

    def say(self, messages: Sequence[Message]) -> None:
        """Note what the environment said."""
        self.said += messages
        self.lines += [f"[{one.tool or one.role}] {one.text}" for one in messages]

    def whole(self, reason: engine.FinishReason, text: str) -> Trajectory:
        """The turns as one answer of generated tokens, each with the numbers of the request that made it."""
        first, last = self.parts[0], self.parts[-1]

        # What was read again went through the same layers before: the first time counts.
        routing, known = [], 0
        for part in self.parts:
            if part.routing is not None:
                routing.append(part.routing[known:])
                known = len(part.routing)
        joined: dict[str, Any] = {}
        for name in ("ids", "logprobs", "logprobs1", "versions"):
            joined[name] = list(chain.from_iterable(getattr(part, name) for part in self.parts))
        completion = replace(
            last,
            **joined,
            request_id=self.name,
            index=self.index,
            text=text,
            finish_reason=reason,
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            routing=np.concatenate(routing) if len(routing) == len(self.parts) else None,
        )
        said, lines = tuple(self.said), "\n".join(self.lines)
        inserted, counts = tuple(self.inserted), dict(self.counts)
        return Trajectory(self.prompt, completion, inserted, lines, said, self.paid, counts)


class Episodes:
    """The answers with environments of one call of the collector."""

    def __init__(
        self,
        environments: Environments,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        params: engine.SamplingParams,
        replay: bool,
        pieces: bool = True,
    ) -> None:
        self.pieces = pieces
        self.environments, self.tokenizer, self.vision = environments, tokenizer, vision
        self.params, self.replay, self.ordered = params, replay, environments.rollout.ordered
        self.episodes: dict[str, list[Episode]] = {}
        self._by_request: dict[str, Episode] = {}
        self._running: deque[tuple[int, Episode, Future[Any]]] = deque()
        self._ready: queue.SimpleQueue[tuple[Episode, Future[Any]]] = queue.SimpleQueue()
        self._waiting = self._step = 0

    def open(self, name: str, prompt: engine.Prompt, problem: Problem, entry: TaskEntry, tokens: int) -> None:
        """A prompt whose first turn goes to the engine as request `name`; tokens: most of an answer."""
        budget = budget_of(self.environments.rollout, entry, tokens)
        self.episodes[name] = []
        for index in range(self.params.n):
            # Every answer has a world of its own; it is made while the model writes.
            begun = self.environments.begin(entry, problem)
            last_word = self.environments.answers(entry)
            self.episodes[name].append(Episode(name, index, prompt, budget, entry.thought, begun, last_word))

    @property
    def waits(self) -> bool:
        """Whether replies are still to come."""
        return self._waiting > 0

    def answers(self, name: str) -> list[Trajectory] | None:
        """The answers to a prompt in order, None for a prompt without an environment."""
        if name not in self.episodes:
            return None
        return [one.answer for one in self.episodes[name] if one.answer is not None]

    def take(self, completion: engine.Completion, left: PausedSample | None = None) -> bool:
        """A turn that the engine has finished, of any request, with the state it left; True when an answer is
        complete by it."""
        # Turns have requests of their own; a first turn is a sample of the prompt's request.
        talk = self._by_request.pop(completion.request_id, None)
        if talk is None:
            if completion.request_id not in self.episodes:
                return True
            talk = self.episodes[completion.request_id][completion.index]
        talk.parts.append(completion)
        parsed = parse_assistant(completion.ids, self.tokenizer, talk.thinking)
        message = parsed.message
        talk.said.append(message)

        # Markup that nothing can be made of, a message that did not end, or the assistant's last word.
        counts, stopped = self.environments.counts, completion.finish_reason == "stop"
        whole = parsed.well_formed and stopped
        if not whole or (talk.last_word and not message.calls):
            broken = not parsed.well_formed and self.tokenizer.open_id in completion.ids
            counts["malformed"] += broken and stopped
            talk.lines.append(self.tokenizer.decode(completion.ids) if broken else readable(parsed))
            # A game is played in plain text as well: only markup that is broken ends it.
            if broken or not stopped or talk.last_word:
                return self._end(talk, "" if broken or message.calls else message.text)
        else:
            talk.lines.append(readable(parsed))

        # A step, if there is a turn and a token left for what comes after it.
        if talk.turns == talk.budget.turns:
            counts["over_turns"] += 1
            return self._end(talk, "")
        if talk.last_word and talk.generated >= talk.budget.tokens:
            return self._end(talk, "", "length")
        # The state goes with the conversation: the next turn reads only what the environment said.
        talk.turns, talk.left = talk.turns + 1, left
        self._start(talk, message)
        return False

    def _start(self, talk: Episode, message: Message) -> None:
        """The environment's step."""
        future = self.environments.step(talk.begun, message)
        self._waiting += 1
        if self.ordered:
            self._running.append((self._step + STEPS, talk, future))
        else:
            future.add_done_callback(lambda done: self._ready.put((talk, done)))

    def due(self, idle: bool) -> tuple[list[Turn], int]:
        """Called once before every engine step: (next turns of the answers whose time has come, arguments of
        `Engine.submit`; answers that ended instead). idle: the engine has nothing else to do."""
        self._step += 1
        self.environments.loop.flush()
        found: list[tuple[Episode, Future[Any]]] = []
        if self.ordered:
            # With nothing else to do the steps until the next reply are passed over.
            if idle and self._running:
                self._step = max(self._step, self._running[0][0])
            while self._running and self._running[0][0] <= self._step:
                _, talk, future = self._running.popleft()
                found.append((talk, future))
        elif self._waiting:
            try:
                found.append(self._ready.get(block=idle))
                while True:
                    found.append(self._ready.get_nowait())
            except queue.Empty:
                pass
        turns: list[Turn] = []
        ended = 0
        for talk, future in found:
            self._waiting -= 1
            request = self._go_on(talk, future)
            if request is None:
                ended += 1
            else:
                turns.append((request, talk.left))
            talk.left = None
        return turns, ended

    def _go_on(self, talk: Episode, future: Future[Any]) -> engine.Request | None:
        """The next turn of an answer that was replied to; None where there is none."""
        counts = self.environments.counts
        try:
            step = step_of(future.result())
        except Exception as error:
            # What an environment does wrong is nobody's reward: the answer counts as cut off.
            late = isinstance(error, TimeoutError)
            counts["late" if late else "failed"] += 1
            talk.lines.append(f"[environment] {'no reply in time' if late else type(error).__name__}")
            self._end(talk, "", "length")
            return None
        # In the main thread, where the order of the engine's steps decides: counters are repeatable.
        counts["turns"] += 1
        counts.update(step.counts)
        talk.counts.update(step.counts)
        talk.valid |= bool(step.counts.get("calls") or step.counts.get("actions") or not step.counts)
        if step.reward is not None:
            talk.paid = (talk.paid or 0.0) + step.reward
        # The end of a game, also where its turns or the tokens for another message are used up.
        text = talk.said[-1].text
        over = talk.turns >= talk.budget.turns or talk.generated >= talk.budget.tokens
        if step.done or (over and not talk.last_word):
            talk.say(step.messages)
            self._end(talk, text, "stop")
            return None
        limit, replies = talk.budget.reply_tokens, step.messages
        turn = reply_of(replies, self.tokenizer, self.vision, talk.thinking)
        if len(turn) - 1 > limit:
            cut_ones = fitted(replies, self.tokenizer, self.vision, limit, talk.thinking)
            if cut_ones is None:
                counts["over_tokens"] += 1
                self._end(talk, "", "length")
                return None
            replies = cut_ones
            turn = reply_of(replies, self.tokenizer, self.vision, talk.thinking)
        talk.say(replies)
        talk.inserted.append(
            Inserted(
                talk.generated,
                tuple(turn.ids.tolist()[1:]),  # all but [BOS]
                turn.patches,
                tuple(turn.grids),
                tuple((turn.media_positions - 1).tolist()),
            )
        )

        # All of it so far is the next prompt.
        name = f"{talk.name}#{talk.index}.{talk.turns}"
        self._by_request[name] = talk
        params = replace(self.params, n=1, max_new_tokens=talk.budget.tokens - talk.generated)
        return engine.Request(
            name,
            document_of(talk.whole("stop", "")),
            params,
            self.replay,
            pieces=self.pieces,
            keep_state=True,
        )

    def _end(self, talk: Episode, answer: str, reason: engine.FinishReason | None = None) -> bool:
        self.environments.counts["answers"] += 1
        self.environments.counts["valid"] += talk.valid
        # What a swarm's last word comes to: it may take in what others wrote.
        if answer and talk.turns and hasattr(made := talk.begun.result().made, "answer"):
            answer = made.answer(answer)
        talk.answer = talk.whole(reason or talk.parts[-1].finish_reason, answer)
        self.environments.end(talk.begun)
        return True


def document_of(trajectory: Trajectory) -> engine.TokenPrompt:
    """Prompt and answer so far as one open document, with the pictures of both."""
    prompt, (tail, _) = trajectory.prompt, trajectory.tail
    patches: list[Tensor] = [] if prompt.patches is None else [prompt.patches]
    more, grids, places = trajectory.media
    return engine.TokenPrompt(
        torch.cat([torch.as_tensor(prompt.ids).long(), torch.tensor(tail, dtype=torch.long)]),
        torch.cat([*patches, *more]) if patches or more else None,
        (*prompt.grids, *grids),
        (*torch.as_tensor(prompt.media_positions).tolist(), *places),
    )


def reply_of(
    messages: Sequence[Message], tokenizer: Tokenizer, vision: VisionConfig, thinking: bool
) -> Encoded:
    """Messages and the opening of the assistant's next one, as they stand in a document behind its [BOS]."""
    return encode_chat(messages, tokenizer, vision, thinking=thinking)


def fitted(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    vision: VisionConfig,
    limit: int,
    thinking: bool = False,
) -> list[Message] | None:
    """The messages with texts cut, evenly, so that their turn has at most `limit` tokens, markup and pictures
    included; None where there is no room for any text."""
    bare = []
    for one in messages:
        media = [part for part in one.content if not isinstance(part, Text)]
        bare.append(replace(one, content=(*media, Text(""))))
    # Markup first: a cut markup would be no message.
    each = (limit - len(reply_of(bare, tokenizer, vision, thinking)) + 1) // max(1, len(messages))
    if each < 1:
        return None
    out = []
    for one in messages:
        left, content = each, list[Segment]()
        for part in one.content:
            if isinstance(part, Text):
                part = Text(cut(part.text, max(0, left), tokenizer))
                left -= len(tokenizer.encode(part.text))
            content.append(part)
        out.append(replace(one, content=tuple(content)))
    return out


def cut(text: str, most: int, tokenizer: Tokenizer) -> str:
    """The longest beginning of a text, character by character, that has at most `most` tokens (or nearly
    so)."""
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        return text
    # A cut inside a character leaves a replacement character.
    short = tokenizer.decode(ids[:most]).rstrip("\ufffd")
    while len(tokenizer.encode(short)) > most:  # a cut may split a token in two
        short = short[:-1]
    return short


def readable(parsed: Parsed) -> str:
    """A message of the assistant as people read it."""
    message = parsed.message
    lines = [f"(thinks) {message.thinking}"] if message.thinking else []
    lines += [message.text] if message.text else []
    lines += [f"({call.tool}) {call.arguments.get('code', dict(call.arguments))}" for call in message.calls]
    return "\n".join(lines)


def counted(environments: Environments) -> Mapping[str, float]:
    """The counters by name, zeros included, and clears them."""
    found = {name: float(environments.counts[name]) for name in COUNTED}
    environments.counts.clear()
    return found
