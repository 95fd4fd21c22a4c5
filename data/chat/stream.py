"""An assistant's message while it is generated: token ids one by one to pieces of text by channel.

    stream = ChatStream(tokenizer)
    for id in ids:
        for channel, text in stream.push(id): ...        # ("thinking", "I count"), ("content", "three"),
                                                         ("tools", "...")

Markup is never text: what stands between <|open|> or <|close|> and <|sep|> names an element and is kept back,
so that a reader sees the words alone. `data/chat/parse.py` reads the whole message when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from earlyfusion.data.tokenizer import Tokenizer

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
