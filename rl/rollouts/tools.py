"""Answers in several turns: the model calls python(code), the sandbox answers, the same answer goes on.

    prompt (chat form) -> thinking, a call -> tool turn -> the result, or another call -> tool turn -> ...

Tokens in, tokens out: generated ids are kept as they are and never made anew from text; a tool turn is
encoded once and put behind them (packing.Inserted), and the next turn is a request whose prompt is all of it.
Its noise is a function of (seed, request, sample, turn); it goes on from the state that the turn before left
in the engine, so a conversation is read once, however many turns it has. A result joins the engine a fixed
number of engine steps after the call, whenever the program was ready: neither the clock nor the batch decides
what is generated.

An answer ends with a message without calls, with one whose markup is broken, after `tool_turns` messages with
calls, or with its last token. The reward sees the text of that last message (its response channel), "" where
it is no answer. Whatever a program does costs its own answer: it ends within its limits
(eval/sandbox/host.py) and the model reads why.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.sample import Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import Limits, ProgramResult, Sandbox, SandboxError
from earlyfusion.eval.tool_talks import answer_calls
from earlyfusion.model.engine import requests as engine
from earlyfusion.model.engine.requests import PausedSample
from earlyfusion.rl.recipe import RolloutSection
from earlyfusion.rl.rollouts.packing import Inserted, Trajectory
from earlyfusion.vision.config import VisionConfig

STEPS = 16
"""Engine steps between a call and its result: time for the program while other answers are written."""
MEMORY_MB = 256.0
"""Memory of a program beyond that of an idle interpreter."""
WORKERS = 2
"""Programs that run at a time, by one process."""

Turn = tuple[engine.Request, PausedSample | None]
"""What the engine is asked, and what it goes on from."""
Reply = tuple[list[Message], Sequence[ProgramResult | None] | None]
"""A tool message for every call, and the result of its program (None: none was run); None: the sandbox
failed."""

COUNTED = (
    "answers valid turns calls ok error timeout memory output_limit forbidden blocked not_a_program malformed"
    " over_turns over_tokens unavailable"
).split()
"""answers; those with a valid call (valid); messages with calls that were answered (turns); programs run
(calls) by how they ended (ok ... forbidden); refusals of the sandbox, which a program may catch (blocked);
calls of another tool or without code (not_a_program); messages whose markup is broken around a call
(malformed); calls after the last turn; tool turns without room; programs that could not be started
(unavailable)."""
_FOLDER = re.compile(r"/[^\s'\"]*/program-[a-z0-9_]{8}\b")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")


def repeatable(text: str) -> str:
    """The text without what is random about a place, not about a program: names of temporary directories,
    addresses of objects. A run with one seed then reads the same text again."""
    # What differs from run to run would otherwise reach the model's context.
    return _ADDRESS.sub("0x0", _FOLDER.sub(".", text))


class ToolRunner:
    """Runs the calls of messages, WORKERS messages at a time, and counts what became of them.

    Raises SandboxError when no sandbox can be started here, or one of its walls is missing and allow_weaker
    is not set, at once and not in the middle of a run. weaker: what records say of a sandbox with walls
    missing, "" for a whole one.
    """

    def __init__(self, rollout: RolloutSection, allow_weaker: bool = False) -> None:
        # The clock, which a busy machine slows, gets twice the CPU time.
        # Sixteen characters a token is more than any tokenizer needs; the rest would be cut anyway.
        limits = Limits(
            wall_s=2 * rollout.tool_timeout_s,
            cpu_s=rollout.tool_timeout_s,
            memory_mb=MEMORY_MB,
            max_chars=16 * rollout.tool_output_tokens,
        )
        self.sandbox = Sandbox(limits, allow_weaker=allow_weaker)
        self.counts: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="tool")
        try:
            self.weaker = self.sandbox.check().weaker
        except BaseException:
            self.close()
            raise

    def start(self, message: Message, files: Mapping[str, bytes]) -> Future[Reply]:
        """Run the calls of a message; the result never raises."""
        return self._threads.submit(self._run, message, files)

    def _run(self, message: Message, files: Mapping[str, bytes]) -> Reply:
        try:
            messages, results = answer_calls(message, self.sandbox, files)
        except (SandboxError, OSError) as error:
            # The name of the error alone: its text may hold paths of this machine.
            failure = (Text(f"the tool is not available: {type(error).__name__}"),)
            calls = enumerate(message.calls, start=1)
            return [Message("tool", failure, tool=call.tool, index=index) for index, call in calls], None
        return [replace(one, content=(Text(repeatable(one.text)),)) for one in messages], results

    def count(self, results: Sequence[ProgramResult | None] | None) -> bool:
        """Count what became of the calls of one message; True when a program ran. Called by one thread."""
        # In the main thread, where the order of the engine's steps decides: counters are repeatable.
        self.counts["turns"] += 1
        self.counts["unavailable"] += results is None
        for result in results or ():
            if result is None:
                self.counts["not_a_program"] += 1
                continue
            self.counts.update(["calls", result.reason])
            self.counts["blocked"] += len(result.refused)
        return any(result is not None for result in results or ())

    def close(self) -> None:
        """Wait for the programs that run (their limits end them), drop the others, stop the sandbox."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.sandbox.close()


@dataclass
class Conversation:
    """One answer on its way: sample `index` of request `name`. parts: what was generated, a turn each; lines:
    the answer as people read it; left: the state to go on from; answer: set when it has ended."""

    name: str
    index: int
    prompt: engine.Prompt
    files: Mapping[str, bytes]
    parts: list[engine.Completion] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    turns: int = 0
    valid: bool = False
    left: PausedSample | None = None
    answer: Trajectory | None = None

    @property
    def generated(self) -> int:
        """Generated tokens."""
        return sum(len(part.ids) for part in self.parts)

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
        said = tuple(self.said)
        return Trajectory(self.prompt, completion, tuple(self.inserted), "\n".join(self.lines), said)


class ToolRollouts:
    """The answers with tools of one call of the collector."""

    def __init__(
        self,
        rollout: RolloutSection,
        runner: ToolRunner,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        params: engine.SamplingParams,
        replay: bool,
    ) -> None:
        self.rollout, self.runner, self.tokenizer, self.vision = rollout, runner, tokenizer, vision
        self.params, self.replay = params, replay
        self.conversations: dict[str, list[Conversation]] = {}
        self._by_request: dict[str, Conversation] = {}
        self._running: deque[tuple[int, Conversation, Future[Reply]]] = deque()
        self._step = 0

    def open(self, name: str, prompt: engine.Prompt, files: Mapping[str, bytes]) -> None:
        """A prompt with tools whose first turn goes to the engine as request `name`."""
        self.conversations[name] = [Conversation(name, i, prompt, files) for i in range(self.params.n)]

    @property
    def waits(self) -> bool:
        """Whether results of programs are still to come."""
        return bool(self._running)

    def answers(self, name: str) -> list[Trajectory] | None:
        """The answers to a prompt in order, None for a prompt without tools."""
        if name not in self.conversations:
            return None
        return [one.answer for one in self.conversations[name] if one.answer is not None]

    def take(self, completion: engine.Completion, left: PausedSample | None = None) -> bool:
        """A turn that the engine has finished, of any request, with the state it left; True when an answer is
        complete by it."""
        # Turns have requests of their own; a first turn is a sample of the prompt's request.
        talk = self._by_request.pop(completion.request_id, None)
        if talk is None:
            if completion.request_id not in self.conversations:
                return True
            talk = self.conversations[completion.request_id][completion.index]
        talk.parts.append(completion)
        parsed = parse_assistant(completion.ids, self.tokenizer)
        talk.said.append(parsed.message)

        # Without a whole call the message is the last: an answer, or markup that nothing can be made of.
        counts, stopped = self.runner.counts, completion.finish_reason == "stop"
        if not (parsed.well_formed and parsed.message.calls and stopped):
            broken = not parsed.well_formed and self.tokenizer.open_id in completion.ids
            counts["malformed"] += broken and stopped
            talk.lines.append(self.tokenizer.decode(completion.ids) if broken else readable(parsed))
            return self._end(talk, "" if broken or parsed.message.calls else parsed.message.text)

        # A call, if there is a turn and a token left for what comes after it.
        talk.lines.append(readable(parsed))
        if talk.turns == self.rollout.tool_turns:
            counts["over_turns"] += 1
            return self._end(talk, "")
        if talk.generated >= self.rollout.max_new_tokens:
            return self._end(talk, "", "length")
        # The state goes with the conversation: the next turn reads only what the tool said.
        talk.turns, talk.left = talk.turns + 1, left
        self._running.append((self._step + STEPS, talk, self.runner.start(parsed.message, talk.files)))
        return False

    def due(self, idle: bool) -> tuple[list[Turn], int]:
        """Called once before every engine step: (next turns of the answers whose time has come, arguments of
        `Engine.submit`; answers that ended instead). idle: the engine has nothing else to do."""
        # With nothing else to do the steps until the next reply are passed over.
        self._step += 1
        if idle and self._running:
            self._step = max(self._step, self._running[0][0])
        turns: list[Turn] = []
        ended = 0
        while self._running and self._running[0][0] <= self._step:
            _, talk, future = self._running.popleft()
            request = self._go_on(talk, *future.result())
            if request is None:
                ended += 1
            else:
                turns.append((request, talk.left))
            talk.left = None
        return turns, ended

    def _go_on(
        self, talk: Conversation, messages: Sequence[Message], results: Sequence[ProgramResult | None] | None
    ) -> engine.Request | None:
        """The next turn of an answer whose tools replied; None where there is no room for the reply."""
        talk.valid |= self.runner.count(results)
        replies = fitted(messages, self.tokenizer, self.vision, self.rollout.tool_output_tokens)
        if replies is None:
            self.runner.counts["over_tokens"] += 1
            self._end(talk, "", "length")
            return None
        talk.lines += [f"[{reply.tool}] {reply.text}" for reply in replies]
        talk.said += replies
        talk.inserted.append(Inserted(talk.generated, turn_ids(replies, self.tokenizer, self.vision)))

        # All of it so far is the next prompt.
        prompt, (tail, _) = talk.prompt, talk.whole("stop", "").tail
        document = engine.TokenPrompt(
            torch.cat([torch.as_tensor(prompt.ids).long(), torch.tensor(tail, dtype=torch.long)]),
            prompt.patches,
            tuple(prompt.grids),
            tuple(torch.as_tensor(prompt.media_positions).tolist()),
        )
        name = f"{talk.name}#{talk.index}.{talk.turns}"
        self._by_request[name] = talk
        params = replace(self.params, n=1, max_new_tokens=self.rollout.max_new_tokens - talk.generated)
        return engine.Request(name, document, params, self.replay, keep_state=True)

    def _end(self, talk: Conversation, answer: str, reason: engine.FinishReason | None = None) -> bool:
        self.runner.counts["answers"] += 1
        self.runner.counts["valid"] += talk.valid
        talk.answer = talk.whole(reason or talk.parts[-1].finish_reason, answer)
        return True


def fitted(
    messages: Sequence[Message], tokenizer: Tokenizer, vision: VisionConfig, limit: int
) -> list[Message] | None:
    """The tool's messages with texts cut, evenly, so that their turn has at most `limit` tokens, markup
    included; None where there is no room for any text."""
    bare = [replace(one, content=(Text(""),)) for one in messages]
    # Markup first: a cut markup would be no message.
    each = (limit - len(turn_ids(bare, tokenizer, vision))) // max(1, len(messages))
    if each < 1:
        return None
    return [replace(one, content=(Text(cut(one.text, each, tokenizer)),)) for one in messages]


def turn_ids(messages: Sequence[Message], tokenizer: Tokenizer, vision: VisionConfig) -> tuple[int, ...]:
    """Ids of the tool's messages and of the opening of the assistant's next one, as they stand in a
    document."""
    return tuple(encode_chat(messages, tokenizer, vision).ids.tolist()[1:])  # all but [BOS]


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
