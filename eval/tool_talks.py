"""The turn of the tool, in which an assistant's calls of `python` run in the sandbox and are answered with
tool messages, and conversations with it played by a model:

    parsed = parse_assistant(ids, tokenizer)
    messages += [parsed.message, *answer_calls(parsed.message, sandbox, {"image.png": picture})]

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.sources.zero_vision import Talk
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import ProgramResult, Sandbox
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.engine import engine_for, evaluating
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion

TOOL = "python"
MAX_CALLS = 8
"""Calls of one message that are run; the others are told so."""
MEASURES = ("well_formed", "called", "ran", "result", "answered")
MAX_MESSAGES = 3
"""Messages of the assistant for one question: a call, a correction, the answer."""


def picture_files(messages: Sequence[Message]) -> Record:
    """The pictures of a conversation by the names they have for programs: image.png, image2.png, ..."""
    # In the order in which the model sees them, which is how it will count them.
    pictures = [part.open() for message in messages for part in message.content if isinstance(part, Image)]
    return {f"image{i + 1 if i else ''}.png": picture for i, picture in enumerate(pictures)}


def answer_calls(
    message: Message, sandbox: Sandbox, files: Mapping[str, Any]
) -> tuple[list[Message], list[ProgramResult | None]]:
    """One tool message for every call, in order, with the result of its program (None: there was none to
    run).

    A call of another tool, or without a string `code`, is answered with one line that says what was expected.
    """
    answers: list[Message] = []
    results: list[ProgramResult | None] = []
    for number, call in enumerate(message.calls):
        # Whatever the model asked for is answered with one line, so that the talk can go on.
        code = call.arguments.get("code")
        result = None
        if call.tool != TOOL:
            text = f"no tool {call.tool!r}; there is {TOOL}(code)"
        elif not isinstance(code, str):
            text = f"{TOOL} needs one argument: code, a string"
        elif number >= MAX_CALLS:
            text = f"not run: at most {MAX_CALLS} calls in one message"
        else:
            result = sandbox.run(code, files)
            text = result.text

        answers.append(Message("tool", (Text(text),), tool=call.tool, index=number + 1))
        results.append(result)
    return answers, results


@dataclass
class Played:
    """One question as it went. said: the messages after the question."""

    talk: Talk
    said: list[Message] = field(default_factory=list)
    marks: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(MEASURES, False))
    done: bool = False

    @property
    def messages(self) -> list[Message]:
        """System message, the first question, and what was said."""
        return [*self.talk.messages[:2], *self.said]

    def take(self, parsed: Parsed, sandbox: Sandbox, ended: bool) -> None:
        """One message of the assistant, and the tool's answers to it. ended: the message did, not its
        limit."""
        first, message, turn = not self.said, parsed.message, self.talk.turns[0]
        self.done = not parsed.well_formed or not message.calls
        answers: list[Message] = []
        results: list[ProgramResult | None] = []
        if not self.done:
            answers, results = answer_calls(message, sandbox, self.talk.files)
        self.said += [message, *answers]

        if first:
            # Each mark only counts where the one before it held.
            codes = [call.arguments.get("code") for call in message.calls if call.tool == TOOL]
            called = parsed.well_formed and any(isinstance(code, str) for code in codes)
            ran = called and any(result is not None and result.ok for result in results)
            # What counts is what the program says last, whatever it said on the way.
            expected = turn.output.splitlines()[-1:]
            right = ran and any(answer.text.splitlines()[-1:] == expected for answer in answers)
            self.marks |= {"well_formed": parsed.well_formed, "called": called, "ran": ran, "result": right}
        # A call for the tool is no last word.
        self.marks["answered"] = ended and not message.calls and message.text.strip() == turn.answer


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
    with evaluating(model):
        for _ in range(MAX_MESSAGES):
            # Talks that are over leave; the others say their next message side by side.
            active = [game for game in played if not game.done]
            if not active:
                break
            prompts = [encode_chat(game.messages, tokenizer, model.config.vision) for game in active]
            # Conversations grow by what programs print, so the memory is measured anew.
            engine = engine_for(model, tokenizer, prompts, max_new_tokens, slots)
            requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
            for game, done in zip(active, engine.generate(requests), strict=True):
                game.take(parse_assistant(done.ids, tokenizer), sandbox, done.finish_reason == "stop")
    return played


def summary(played: Sequence[Played]) -> Record:
    """{"talks": n, measure: share, "by_kind": {kind: {"talks": n, measure: share}}}."""
    kinds = {"": list(played)}
    for game in played:
        kinds.setdefault(game.talk.turns[0].kind, []).append(game)
    shares: dict[str, dict[str, float]] = {}
    for kind, part in sorted(kinds.items()):
        shares[kind] = {"talks": len(part)}
        for name in MEASURES:
            shares[kind][name] = sum(game.marks[name] for game in part) / max(1, len(part))
    return {**shares.pop(""), "by_kind": shares}


def transcript(game: Played) -> Record:
    """A played talk as JSON: messages with role, text, thinking and programs; its marks; the right answer."""
    shown = []
    for message in game.messages:
        about: Record = {"role": message.role, "text": message.text, "thinking": message.thinking}
        about["calls"] = [dict(call.arguments) for call in message.calls]
        about["pictures"] = sum(isinstance(part, Image) for part in message.content)
        shown.append(about)
    return {"messages": shown, "marks": game.marks, "expected": game.talk.turns[0].answer}
