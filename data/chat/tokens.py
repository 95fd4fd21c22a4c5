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
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    name: str
    attributes: dict[str, str]
    text: str
    children: list[_Element]


class _Broken(Exception):
    """The markup does not keep the form."""


def parse_assistant(ids: Sequence[int], tokenizer: Tokenizer) -> Parsed:
    """Ids that follow the opening of an assistant's message, with or without its end -> Parsed."""
    given = [int(i) for i in ids]
    ended = tokenizer.end_of_msg_id in given
    end = given.index(tokenizer.end_of_msg_id) if ended else len(given)
    closing = [tokenizer.close_id, *tokenizer.encode("message"), tokenizer.sep_id]
    body = given[:end]
    closed = body[-len(closing) :] == closing
    body = body[: -len(closing)] if closed else body
    try:
        root = _Reader(body, tokenizer).content(None)
        return Parsed(_message(root), ended and closed)
    except (_Broken, DataError):
        text = tokenizer.decode(body, skip_special=True)
        return Parsed(Message("assistant", (Text(text),)), False)


class _Reader:
    """Recursive descent over ids."""

    def __init__(self, ids: list[int], tokenizer: Tokenizer) -> None:
        self.ids, self.tokenizer, self.at = ids, tokenizer, 0
        self.markup = {tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id}

    def _plain(self) -> str:
        start = self.at
        while self.at < len(self.ids) and self.ids[self.at] not in self.markup:
            self.at += 1
        return self.tokenizer.decode(self.ids[start : self.at])

    def _take(self, wanted: int) -> None:
        if self.at >= len(self.ids) or self.ids[self.at] != wanted:
            raise _Broken
        self.at += 1

    def content(self, name: str | None, depth: int = 0) -> _Element:
        """Text and elements up to the end of element `name` (None: up to the end of the ids)."""
        found = _Element(name or "", {}, "", [])
        while True:
            found.text += self._plain()
            if self.at == len(self.ids):
                if name is not None:
                    raise _Broken
                return found
            if self.ids[self.at] == self.tokenizer.open_id and depth < 4:
                self.at += 1
                header = self._plain()
                self._take(self.tokenizer.sep_id)
                child = self.content(header.partition(" ")[0], depth + 1)
                child.attributes = dict(_ATTRIBUTE.findall(header))
                found.children.append(child)
                continue
            self._take(self.tokenizer.close_id)
            if name is None or self._plain() != name:
                raise _Broken
            self._take(self.tokenizer.sep_id)
            return found


def _message(root: _Element) -> Message:
    if not root.children:
        return Message("assistant", (Text(root.text),))
    parts = {child.name: child for child in root.children}
    order = [child.name for child in root.children]
    if root.text or order != [name for name in ("think", "response", "tools") if name in parts]:
        raise _Broken
    think, response, tools = (parts.get(name) for name in ("think", "response", "tools"))
    if (think and think.children) or response is None or response.children:
        raise _Broken
    calls = tuple(_call(child) for child in tools.children) if tools else ()
    if tools is not None and (tools.text or not calls):
        raise _Broken
    return Message("assistant", (Text(response.text),), thinking=think.text if think else None, calls=calls)


def _call(element: _Element) -> ToolCall:
    if element.name != "call" or element.text or "tool" not in element.attributes:
        raise _Broken
    arguments: dict[str, Any] = {}
    for child in element.children:
        if child.name != "argument" or child.children or "key" not in child.attributes:
            raise _Broken
        try:
            kind = child.attributes.get("type", "string")
            arguments[child.attributes["key"]] = child.text if kind == "string" else json.loads(child.text)
        except (ValueError, RecursionError):
            raise _Broken from None
    return ToolCall(element.attributes["tool"], arguments)


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
        tokenizer = self.tokenizer
        if self.ended or token in (tokenizer.end_of_msg_id, tokenizer.eos_id):
            self.ended = True
            return self._flush()
        if token in (tokenizer.open_id, tokenizer.close_id):
            given = self._flush()
            self._header, self._closing = [], token == tokenizer.close_id
            return given
        if token == tokenizer.sep_id:
            self._enter()
            return []
        if self._header is not None:
            self._header.append(token)
            return []
        self._pending.append(token)
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
        return self._flush()

    def _flush(self) -> list[tuple[Channel, str]]:
        text = self.tokenizer.decode(self._pending, skip_special=True) if self._pending else ""
        self._pending = []
        return [(self.channel, text)] if text else []

    def _enter(self) -> None:
        name = self.tokenizer.decode(self._header or []).partition(" ")[0]
        if self._header is not None and not self._closing:
            self._path.append(name)
        elif self._path:
            self._path.pop()
        self._header = None
