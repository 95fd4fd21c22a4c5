"""Answers in several turns: the model calls python(code), the sandbox answers, the same answer goes on.

    prompt (chat form) -> generated: thinking, a call -> tool turn -> generated: the result, or another call
    -> ...

Tokens in, tokens out: generated ids are kept as they are and never made anew from text; a tool turn is
encoded once and put behind them (rollout.Inserted), and the next turn is a request whose prompt is all of it.
Its noise is a function of (seed, request, sample, turn); it goes on from the state that the turn before left
in the engine, so a conversation is read once, however many turns it has. A result joins the engine a fixed
number of engine steps after the call, whenever the program was ready: neither the clock nor the batch decides
what is generated.

An answer ends with a message without calls, with one whose markup is broken, after `tool_turns` messages with
calls, or with its last token. The reward sees the text of that last message (its response channel), "" where
it is no answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.sample import Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import ProgramResult
from earlyfusion.model.engine.requests import (
    Completion,
    FinishReason,
    PausedSample,
    Prompt,
    Request,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.rl.recipe import RolloutSection
from earlyfusion.rl.rollouts.packing import Inserted, Trajectory
from earlyfusion.rl.rollouts.tool_desk import Reply, ToolDesk
from earlyfusion.vision.config import VisionConfig

STEPS = 16
"""Engine steps between a call and its result: time for the program while other answers are written."""


Turn: TypeAlias = tuple[Request, PausedSample | None]
"""What is asked, and what it goes on from."""


@dataclass
class Talk:
    """One answer on its way: sample `index` of request `name`."""

    name: str
    index: int
    prompt: Prompt
    files: Mapping[str, bytes]
    parts: list[Completion] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    turns: int = 0
    valid: bool = False
    done: Trajectory | None = None
    left: PausedSample | None = None

    @property
    def made(self) -> int:
        """Generated tokens."""
        return sum(len(part.ids) for part in self.parts)


class ToolRollouts:
    """The answers with tools of one call of the collector."""

    def __init__(
        self,
        rollout: RolloutSection,
        desk: ToolDesk,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        params: SamplingParams,
        replay: bool,
    ) -> None:
        self.rollout, self.desk, self.tokenizer, self.vision = rollout, desk, tokenizer, vision
        self.params, self.replay = params, replay
        self.talks: dict[str, list[Talk]] = {}
        self._asked: dict[str, Talk] = {}
        self._running: deque[tuple[int, Talk, Future[Reply]]] = deque()
        self._step = 0

    def open(self, name: str, prompt: Prompt, files: Mapping[str, bytes]) -> None:
        """A prompt with tools whose first turn goes to the engine as request `name`."""
        self.talks[name] = [Talk(name, index, prompt, files) for index in range(self.params.n)]

    @property
    def waits(self) -> bool:
        """Whether results of programs are still to come."""
        return bool(self._running)

    def answers(self, name: str) -> list[Trajectory] | None:
        """The answers to a prompt in order, None for a prompt without tools."""
        if name not in self.talks:
            return None
        return [talk.done for talk in self.talks[name] if talk.done is not None]

    def take(self, completion: Completion, left: PausedSample | None = None) -> bool:
        """A turn that the engine has finished, of any request, with the state it left; True when an answer is
        complete by it."""
        talk = self._asked.pop(completion.request_id, None)
        if talk is None:
            if completion.request_id not in self.talks:
                return True
            talk = self.talks[completion.request_id][completion.index]
        talk.parts.append(completion)
        parsed = parse_assistant(completion.ids, self.tokenizer)
        if not (parsed.well_formed and parsed.message.calls) or completion.finish_reason != "stop":
            broken = not parsed.well_formed and self.tokenizer.open_id in completion.ids
            self.desk.counts["malformed"] += broken and completion.finish_reason == "stop"
            talk.said.append(spoken(parsed) if not broken else self.tokenizer.decode(completion.ids))
            return self._end(talk, "" if broken or parsed.message.calls else parsed.message.text)
        talk.said.append(spoken(parsed))
        if talk.turns == self.rollout.tool_turns:
            self.desk.counts["over_turns"] += 1
            return self._end(talk, "")
        if talk.made >= self.rollout.max_new_tokens:
            return self._end(talk, "", "length")
        talk.turns, talk.left = talk.turns + 1, left
        self._running.append((self._step + STEPS, talk, self.desk.start(parsed.message, talk.files)))
        return False

    def due(self, idle: bool) -> tuple[list[Turn], int]:
        """Called once before every engine step: (next turns of the answers whose time has come, arguments of
        `Engine.submit`; answers that ended instead). idle: the engine has nothing else to do."""
        self._step += 1
        if idle and self._running:
            self._step = max(self._step, self._running[0][0])
        turns: list[Turn] = []
        ended = 0
        while self._running and self._running[0][0] <= self._step:
            _, talk, future = self._running.popleft()
            request = self._go_on(talk, *future.result())
            ended += request is None
            turns += [(request, talk.left)] if request is not None else []
            talk.left = None
        return turns, ended

    def _go_on(
        self, talk: Talk, messages: Sequence[Message], results: Sequence[ProgramResult | None] | None
    ) -> Request | None:
        talk.valid |= self.desk.count(results)
        heard = fitted(messages, self.tokenizer, self.vision, self.rollout.tool_output_tokens)
        if heard is None:
            self.desk.counts["over_tokens"] += 1
            self._end(talk, "", "length")
            return None
        talk.said += [f"[{one.tool}] {one.text}" for one in heard]
        talk.inserted.append(Inserted(talk.made, turn_ids(heard, self.tokenizer, self.vision)))
        so_far = Trajectory(talk.prompt, merged(talk, "stop", ""), tuple(talk.inserted))
        prompt = talk.prompt
        whole = torch.cat([torch.as_tensor(prompt.ids).long(), torch.tensor(so_far.tail, dtype=torch.long)])
        places = tuple(int(i) for i in torch.as_tensor(prompt.media_positions).tolist())
        grids = tuple((t, h, w) for t, h, w in prompt.grids)
        name = f"{talk.name}#{talk.index}.{talk.turns}"
        params = replace(self.params, n=1, max_new_tokens=self.rollout.max_new_tokens - talk.made)
        self._asked[name] = talk
        prompt = TokenPrompt(whole, prompt.patches, grids, places)
        return Request(name, prompt, params, self.replay, keep_state=True)

    def _end(self, talk: Talk, answer: str, reason: FinishReason | None = None) -> bool:
        self.desk.counts["answers"] += 1
        self.desk.counts["valid"] += talk.valid
        whole = merged(talk, reason or talk.parts[-1].finish_reason, answer)
        talk.done = Trajectory(talk.prompt, whole, tuple(talk.inserted), "\n".join(talk.said))
        return True


def merged(talk: Talk, reason: FinishReason, answer: str) -> Completion:
    """The turns as one completion of generated tokens, each with the numbers of the request that made it."""
    first, last = talk.parts[0], talk.parts[-1]
    routing, known = [], 0
    for part in talk.parts:  # what was read again went through the same layers before: the first time counts
        if part.routing is not None:
            routing.append(part.routing[known:])
            known = len(part.routing)
    return replace(
        last,
        request_id=talk.name,
        index=talk.index,
        ids=[i for part in talk.parts for i in part.ids],
        logprobs=[p for part in talk.parts for p in part.logprobs],
        logprobs1=[p for part in talk.parts for p in part.logprobs1],
        versions=[v for part in talk.parts for v in part.versions],
        text=answer,
        finish_reason=reason,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        routing=np.concatenate(routing) if len(routing) == len(talk.parts) else None,
    )


def fitted(
    messages: Sequence[Message], tokenizer: Tokenizer, vision: VisionConfig, limit: int
) -> list[Message] | None:
    """The tool's messages with texts cut, evenly, so that their turn has at most `limit` tokens, markup
    included; None where there is no room for any text."""
    bare = [replace(one, content=(Text(""),)) for one in messages]
    room = (limit - len(turn_ids(bare, tokenizer, vision))) // max(1, len(messages))
    if room < 1:
        return None
    return [replace(one, content=(Text(cut(one.text, room, tokenizer)),)) for one in messages]


def turn_ids(messages: Sequence[Message], tokenizer: Tokenizer, vision: VisionConfig) -> tuple[int, ...]:
    """Ids of the tool's messages and of the opening of the assistant's next one, as they stand in a
    document."""
    return tuple(encode_chat(messages, tokenizer, vision).ids.tolist()[1:])  # all but [BOS]


def cut(text: str, room: int, tokenizer: Tokenizer) -> str:
    """The longest beginning of a text, character by character, that has at most `room` tokens (or nearly
    so)."""
    ids = tokenizer.encode(text)
    if len(ids) <= room:
        return text
    short = tokenizer.decode(ids[:room]).rstrip("\ufffd")
    while len(tokenizer.encode(short)) > room:  # a cut may split a token in two
        short = short[:-1]
    return short


def spoken(parsed: Parsed) -> str:
    """A message of the assistant as people read it."""
    message = parsed.message
    lines = [f"(thinks) {message.thinking}"] if message.thinking else []
    lines += [message.text] if message.text else []
    lines += [f"({call.tool}) {call.arguments.get('code', dict(call.arguments))}" for call in message.calls]
    return "\n".join(lines)
