"""Reading what an assistant wrote: the ids of one message back as a Message with thinking, text and tool
calls.

A model in training writes broken markup: nothing here raises for it. `well_formed` says whether the message
kept the form; what cannot be read as a channel is kept as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Text
from earlyfusion.data.tokenizer import Tokenizer

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
