"""Chat as token ids: messages to ids, and an assistant's ids back to a message, whole or while it is
generated.

    encode_chat        messages -> one document, open where the assistant is to speak
    parse_assistant    the ids of one message -> a Message with thinking, text and tool calls
    ChatStream         the ids one by one -> pieces of text by channel

        stream = ChatStream(tokenizer)
        for id in ids:
            for channel, text in stream.push(id): ...    # ("thinking", "I count"), ("content", "three"), ...

A model in training writes broken markup: nothing here raises for it. Parsed.well_formed says whether the
message kept the form of data/chat/template.py; what cannot be read as a channel is kept as plain text. Markup
is never text: what stands between <|open|> or <|close|> and <|sep|> names an element and is kept back.

Legend: n tokens, P patches.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from earlyfusion.data.chat.template import Message, Template, ToolCall, chat_sample, opening
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Segment, Special, Text
from earlyfusion.data.tokenizer import OPEN, SEP, Tokenizer
from earlyfusion.vision.config import VisionConfig

THINK: tuple[Segment, ...] = (Special(OPEN), Text("think", 0.0), Special(SEP))
"""The opening of the thinking channel."""


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    vision: VisionConfig,
    *,
    template: Template = "chat",
    add_generation_prompt: bool = True,
    thinking: bool = False,
    key: str = "chat",
    decode: DecodeConfig | None = None,
) -> Encoded:
    """Messages -> Encoded (ids int64 [n], uint8 patches [P, 3, p, p]).

    With `add_generation_prompt` the document stays open where the assistant is to speak; without it, it is
    closed with [EOS], for training. thinking: the assistant's thinking channel is open already, so that it
    thinks first (`parse_assistant(..., thinking=True)` reads the answer). Raises DataError without a message,
    BadSample for media that cannot be read.
    """
    # By the same way as training documents, so that a prompt is a document's beginning.
    sample = chat_sample(messages, source="chat", key=key, template=template)
    if not add_generation_prompt:
        return encode(sample, tokenizer, vision, decode=decode)
    if template == "chat":
        start = [*opening(Message("assistant", ())), *(THINK if thinking else ())]
        sample = replace(sample, segments=[*sample.segments, *start])
    elif messages[-1].role != "user":
        raise DataError(
            f"the last message is of role {messages[-1].role!r}; the model answers a user's message"
        )
    return encode(sample, tokenizer, vision, eos=False, decode=decode)


# Halves of characters that no decoded text holds stand for the three tokens of the markup, so that an
# expression can tell markup from words that look like it.
_OPEN, _CLOSE, _SEP = "\ud800", "\ud801", "\ud802"
_WORDS = f"[^{_OPEN}{_CLOSE}{_SEP}]*"


def _element(name: str, content: str = _WORDS) -> str:
    """An expression of an element with its header's attributes and its content as groups."""
    return f"{_OPEN}{name}(|(?: {_WORDS})){_SEP}({content}){_CLOSE}{name}{_SEP}"


_ARGUMENT = _element("argument")
# The calls are taken apart later; here they only have to be whole.
_CALL = _element("call", f"(?:{_ARGUMENT})*")
_MESSAGE = re.compile(
    f"(?:{_element('think')})?{_element('response')}(?:{_element('tools', f'(?:{_CALL})+')})?"
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Parsed:
    """A message and whether it kept the form: every element closed, every call complete, the message
    ended."""

    message: Message
    well_formed: bool


def parse_assistant(ids: Sequence[int], tokenizer: Tokenizer, thinking: bool = False) -> Parsed:
    """Ids that follow the opening of an assistant's message, with or without its end -> Parsed. thinking: the
    prompt has opened the thinking channel."""
    # What comes after the end of the message was never said.
    body, ended = list(ids), tokenizer.end_of_msg_id in ids
    if thinking:
        body = [tokenizer.open_id, *tokenizer.encode("think"), tokenizer.sep_id, *body]
    if ended:
        body = body[: body.index(tokenizer.end_of_msg_id)]
    marks = {tokenizer.open_id: _OPEN, tokenizer.close_id: _CLOSE, tokenizer.sep_id: _SEP}
    text = ""
    for mark, run in groupby(body, marks.get):
        tokens = list(run)
        text += mark * len(tokens) if mark else tokenizer.decode(tokens)
    end = f"{_CLOSE}message{_SEP}"
    closed, text = text.endswith(end), text.removesuffix(end)
    try:
        return Parsed(_message(text), ended and closed)
    except (KeyError, ValueError, RecursionError):
        words = tokenizer.decode(body, skip_special=True)
        words = words.removesuffix("message") if closed else words
        return Parsed(Message("assistant", (Text(words),)), False)


def _message(text: str) -> Message:
    """The message of a text with marks; raises KeyError or ValueError for broken markup."""
    if re.fullmatch(_WORDS, text):
        return Message("assistant", (Text(text),))
    found = _MESSAGE.fullmatch(text)
    if found is None:
        raise ValueError
    _, thinking, _, response, _, tools, *_ = found.groups()
    calls = []
    for header, body, *_ in re.findall(_CALL, tools or ""):
        arguments: dict[str, Any] = {}
        for written, value in re.findall(_ARGUMENT, body):
            attributes = dict(_ATTRIBUTE.findall(written))
            # Only strings are written as they are; everything else is JSON.
            plain = attributes.get("type", "string") == "string"
            arguments[attributes["key"]] = value if plain else json.loads(value)
        calls.append(ToolCall(dict(_ATTRIBUTE.findall(header))["tool"], arguments))
    return Message("assistant", (Text(response),), thinking=thinking, calls=tuple(calls))


Channel = Literal["content", "thinking", "tools"]
CHANNELS: dict[str, Channel] = {"think": "thinking", "response": "content", "tools": "tools"}
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Tokens that may be waited for when the bytes of a character are not complete."""


class ChatStream:
    """Splits the ids of one assistant's message, after its opening, into channels."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._path: list[str] = []
        self._header: list[int] | None = None
        self._closing = False
        self._pending: list[int] = []
        self.ended = False

    @property
    def channel(self) -> Channel:
        """Where a plain token would go now."""
        return CHANNELS.get(self._path[0], "content") if self._path else "content"

    def push(self, token: int) -> list[tuple[Channel, str]]:
        """Take one more id; returns the text that became certain, with its channel."""
        # Markup is kept back until it is whole; text goes out as soon as it is certain.
        tokenizer = self.tokenizer
        if self.ended or token in (tokenizer.end_of_msg_id, tokenizer.eos_id):
            self.ended = True
            return self.finish()
        if token in (tokenizer.open_id, tokenizer.close_id):
            given = self.finish()
            self._header, self._closing = [], token == tokenizer.close_id
            return given
        if token == tokenizer.sep_id:
            self._enter()
            return []
        if self._header is not None:
            self._header.append(token)
            return []
        self._pending.append(token)
        # A character may be cut between two tokens: its first half is no text yet.
        text = tokenizer.decode(self._pending, skip_special=True)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return []
        self._pending = []
        return [(self.channel, text)] if text else []

    def content(self, ids: Sequence[int]) -> str:
        """Everything that is said in `ids`, without what is thought and called for."""
        pieces = [piece for token in ids for piece in self.push(int(token))] + self.finish()
        return "".join(text for channel, text in pieces if channel == "content")

    def finish(self) -> list[tuple[Channel, str]]:
        """What was held back, when no more ids come."""
        text = ""
        if self._pending:
            text = self.tokenizer.decode(self._pending, skip_special=True)
        self._pending = []
        return [(self.channel, text)] if text else []

    def _enter(self) -> None:
        # A broken header opens or closes something all the same; nothing here raises.
        name = self.tokenizer.decode(self._header or []).partition(" ")[0]
        if self._header is not None and not self._closing:
            self._path.append(name)
        elif self._path:
            self._path.pop()
        self._header = None
