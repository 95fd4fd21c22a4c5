"""Conversations with the Python tool, played by a model: it asks for programs, the sandbox answers, it says
the result.

    played = play_talks(model, tokenizer, talks, sandbox)      # greedily, the first question of every talk
    report = summary(played)                                   # shares by kind of question, and of all

Four things are asked of a model, each only counted where the one before it held:

    well_formed   its first message keeps the form: every element closed, the message ended
                  (data/chat/tokens.py)
    called        that message calls python(code) with a string
    ran           the program ended in the sandbox by itself, without an error
    result        what the program says last is what the right program says last
    answered      the model's last message, with nothing but text, is the right answer (answers without a tool
                  count too)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.sample import Image
from earlyfusion.data.sources.zero_vision import Talk
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.eval.tool_turns import TOOL, answer_calls
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating

MEASURES = ("well_formed", "called", "ran", "result", "answered")
MAX_MESSAGES = 3
"""Messages of the assistant for one question: a call, a correction, the answer."""


@dataclass
class Played:
    """One question as it went; `said` are the messages after the question; `ended`: the last one ended by
    itself."""

    talk: Talk
    said: list[Message] = field(default_factory=list)
    first: Parsed | None = None
    ran: bool = False
    result: bool = False
    done: bool = False
    ended: bool = True

    @property
    def prompt(self) -> list[Message]:
        """System message and the first question."""
        return list(self.talk.messages[:2])

    @property
    def marks(self) -> dict[str, bool]:
        """MEASURES of this talk."""
        formed = self.first is not None and self.first.well_formed
        called = (
            formed and self.first is not None and any(_runnable(call) for call in self.first.message.calls)
        )
        last = self.said[-1] if self.said else None
        answered = last is not None and last.role == "assistant" and not last.calls
        right = (
            answered and self.ended and last is not None and last.text.strip() == self.talk.turns[0].answer
        )
        ran = called and self.ran
        return dict(zip(MEASURES, (formed, called, ran, ran and self.result, right), strict=True))


def _runnable(call: Any) -> bool:
    return call.tool == TOOL and isinstance(call.arguments.get("code"), str)


def play_talks(
    model: NativeFusion,
    tokenizer: Tokenizer,
    talks: Sequence[Talk],
    sandbox: Sandbox,
    *,
    max_new_tokens: int = 384,
    slots: int = 16,
) -> list[Played]:
    """Every talk's first question, greedily, message by message, all talks side by side."""
    played = [Played(talk) for talk in talks]
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    vision = model.config.vision
    with evaluating(model):
        longest = 0
        for turn in range(MAX_MESSAGES):
            # Talks that are over leave; the others say their next message side by side.
            active = [(i, game) for i, game in enumerate(played) if not game.done]
            prompts = [encode_chat([*game.prompt, *game.said], tokenizer, vision) for _, game in active]
            if not prompts:
                break

            longest = max(len(prompt) for prompt in prompts) + max_new_tokens
            engine = Engine(model, tokenizer, max_slots=slots, max_pages=slots * -(-longest // 64))
            requests = [
                Request(f"{turn}/{i}", prompt, params) for (i, _), prompt in zip(active, prompts, strict=True)
            ]
            for (_, game), completion in zip(active, engine.generate(requests), strict=True):
                _take(
                    game,
                    parse_assistant(completion.ids, tokenizer),
                    sandbox,
                    completion.finish_reason == "stop",
                )
    return played


def _take(game: Played, parsed: Parsed, sandbox: Sandbox, ended: bool) -> None:
    """One message of the assistant, and the tool's answers to it. ended: the message did, not its limit."""
    game.first = game.first or parsed
    game.said.append(parsed.message)
    game.ended = ended
    if not parsed.well_formed or not parsed.message.calls:
        game.done = True
        return
    answers, results = answer_calls(parsed.message, sandbox, game.talk.files)
    game.said += answers
    if parsed is game.first:
        game.ran = any(result is not None and result.ok for result in results)
        wanted = game.talk.turns[0].output.splitlines()[-1]
        game.result = any(answer.text.splitlines()[-1:] == [wanted] for answer in answers)


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """{"talks": n, measure: share, "by_kind": {kind: {"talks": n, measure: share}}}."""
    kinds: dict[str, list[dict[str, bool]]] = {}
    for game in played:
        kinds.setdefault(game.talk.turns[0].task.kind, []).append(game.marks)
    every = [marks for rows in kinds.values() for marks in rows]
    return {**_shares(every), "by_kind": {kind: _shares(rows) for kind, rows in sorted(kinds.items())}}


def _shares(rows: Sequence[dict[str, bool]]) -> dict[str, float]:
    count = max(1, len(rows))
    return {"talks": len(rows)} | {name: sum(row[name] for row in rows) / count for name in MEASURES}


def transcript(game: Played) -> dict[str, Any]:
    """A played talk as JSON: messages with role, text, thinking and programs; its marks; the right answer."""
    shown = []
    for message in [*game.prompt, *game.said]:
        shown.append(
            {
                "role": message.role,
                "text": message.text,
                "thinking": message.thinking,
                "calls": [dict(call.arguments) for call in message.calls],
                "pictures": sum(isinstance(part, Image) for part in message.content),
            }
        )
    return {"messages": shown, "marks": game.marks, "expected": game.talk.turns[0].answer}
