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

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from earlyfusion.data.chat.template import Message, Template, ToolCall, chat_sample, opening
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    vision: VisionConfig,
    *,
    template: Template = "chat",
    add_generation_prompt: bool = True,
    key: str = "chat",
    decode: DecodeConfig | None = None,
) -> Encoded:
    """Messages -> Encoded (ids int64 [n], uint8 patches [P, 3, p, p]).

    With `add_generation_prompt` the document stays open where the assistant is to speak; without it, it is
    closed with [EOS], for training. Raises DataError without a message, BadSample for media that cannot be
    read.
    """
    # By the same way as training documents, so that a prompt is a document's beginning.
    sample = chat_sample(messages, source="chat", key=key, template=template)
    if not add_generation_prompt:
        return encode(sample, tokenizer, vision, decode=decode)
    if template == "chat":
        sample = replace(sample, segments=[*sample.segments, *opening(Message("assistant", ()))])
    elif messages[-1].role != "user":
        raise DataError(
            f"the last message is of role {messages[-1].role!r}; the model answers a user's message"
        )
    return encode(sample, tokenizer, vision, eos=False, decode=decode)


_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Parsed:
    """A message and whether it kept the form: every element closed, every call complete, the message
    ended."""

    message: Message
    well_formed: bool


@dataclass
class _Element:
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    children: list[_Element] = field(default_factory=list)


class _Broken(Exception):
    """The markup does not keep the form."""


def parse_assistant(ids: Sequence[int], tokenizer: Tokenizer) -> Parsed:
    """Ids that follow the opening of an assistant's message, with or without its end -> Parsed."""
    # What comes after the end of the message was never said.
    body, ended = [int(i) for i in ids], False
    if tokenizer.end_of_msg_id in body:
        body, ended = body[: body.index(tokenizer.end_of_msg_id)], True
    closing = [tokenizer.close_id, *tokenizer.encode("message"), tokenizer.sep_id]
    closed = body[-len(closing) :] == closing
    if closed:
        body = body[: -len(closing)]
    try:
        return Parsed(_message(_tree(body, tokenizer)), ended and closed)
    except (_Broken, DataError):
        text = tokenizer.decode(body, skip_special=True)
        return Parsed(Message("assistant", (Text(text),)), False)


def _runs(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[int | None, str]]:
    """(None, text), (open_id, header) and (close_id, name) in order; raises _Broken."""
    markup = (tokenizer.open_id, tokenizer.close_id)
    kind, run = None, list[int]()
    for token in ids:
        if (kind is None and token in markup) or (kind is not None and token == tokenizer.sep_id):
            yield kind, tokenizer.decode(run)
            kind, run = token if kind is None else None, []
        elif token in (*markup, tokenizer.sep_id):
            raise _Broken
        else:
            run.append(token)
    if kind is not None:
        raise _Broken
    yield None, tokenizer.decode(run)


def _tree(ids: Sequence[int], tokenizer: Tokenizer) -> _Element:
    """The elements of a message as children of one without a name."""
    # A stack and no recursion: a model may open any number of elements.
    path = [_Element()]
    for kind, text in _runs(ids, tokenizer):
        if kind is None:
            path[-1].text += text
        elif kind == tokenizer.open_id:
            child = _Element(text.partition(" ")[0], dict(_ATTRIBUTE.findall(text)))
            path[-1].children.append(child)
            path.append(child)
        elif len(path) == 1 or path.pop().name != text:
            raise _Broken
    if len(path) > 1:
        raise _Broken
    return path[0]


def _message(root: _Element) -> Message:
    if not root.children:
        return Message("assistant", (Text(root.text),))
    parts = {child.name: child for child in root.children}
    # In this order, and each at most once.
    names = [name for name in CHANNELS if name in parts]
    if root.text or [child.name for child in root.children] != names or "response" not in parts:
        raise _Broken
    # Only calls have parts of their own.
    response, think = parts["response"], parts.get("think")
    tools = parts.get("tools", _Element())
    if (
        response.children
        or (think and think.children)
        or tools.text
        or ("tools" in parts and not tools.children)
    ):
        raise _Broken
    thinking = think.text if think else None
    calls = tuple(_call(child) for child in tools.children)
    return Message("assistant", (Text(response.text),), thinking=thinking, calls=calls)


def _call(element: _Element) -> ToolCall:
    if element.name != "call" or element.text:
        raise _Broken
    arguments: dict[str, Any] = {}
    try:
        for child in element.children:
            if child.name != "argument" or child.children:
                raise _Broken
            # Only strings are written as they are; everything else is JSON.
            value: Any = child.text
            if child.attributes.get("type", "string") != "string":
                value = json.loads(value)
            arguments[child.attributes["key"]] = value
        return ToolCall(element.attributes["tool"], arguments)
    except (KeyError, ValueError, RecursionError):
        raise _Broken from None


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
