"""One row of a chat file, as datasets have it, to messages: roles, contents, pictures by place or by name,
tools.

    {"messages": [{"role": "user", "content": "<image>how many?"}, {"role": "assistant", "content": "3"}],
     "images": ["a.png"]}

`messages` is a list in the OpenAI form; {"from": "human", "value": ...} under "conversations" (ShareGPT,
LLaVA) is read as well. Content is a string, in which <image> and <video> stand for the next of "images" and
"videos", or a list of parts: {"type": "text", "text"}, {"type": "image" | "video"} (the next one), {"type":
"image", "image": reference}, {"type": "image_url", "image_url": {"url": reference}}. A reference is a path
below the folder of the pictures, or a data: URI. An assistant's message may have "reasoning_content",
"tool_calls" and "weight" (0: context only); a tool's has "name" and "index". "tools" (declarations in the
OpenAI form) become a system message before all others.

Every mistake is a BadSample that names the row, what was found and what was expected.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earlyfusion.data.chat.template import ROLES, Message, call_from, tools_message
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import Image, Segment, Text, VideoFile, file_below
from earlyfusion.kernels.errors import did_you_mean

ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "developer": "system", "function": "tool"}
"""Names of roles in other datasets."""
_PLACE = re.compile(r"<(image|video)>")
Part = tuple[str, Any]
"""("text", str), ("image" | "video", reference) or ("image" | "video", None): the next of the row's list."""


@dataclass(frozen=True)
class Media:
    """Where the pictures and videos of a file lie, and how videos are read."""

    folder: Path
    max_frames: int | None = None
    fps: float = 2.0


def messages_of(row: Any, where: str, media: Media) -> list[Message]:
    """The messages of one row; raises BadSample (bad_json, missing_member, empty_text)."""
    # All turns first: pictures without a place are dealt out over the whole row.
    read = turns_of(row, where)
    _fill_places(read, row, where)
    messages = []
    try:
        if row.get("tools"):
            messages.append(tools_message(row["tools"]))
        for number, (role, parts, turn) in enumerate(read):
            here = f"{where}: message {number}"
            content = tuple(_segment(kind, value, here, media) for kind, value in parts)
            messages.append(_message(role, content, turn, number))
    except BadSample:
        raise
    except (DataError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadSample(f"{where}: {error}", "bad_json") from None
    # A row that teaches nothing would only take up room.
    if not any(message.role == "assistant" and message.weight > 0 for message in messages):
        raise BadSample(f"{where}: no message of the assistant with a weight: nothing to learn", "empty_text")
    return messages


def turns_of(row: Any, where: str) -> list[tuple[str, list[Part], Mapping[str, Any]]]:
    """Role, content and the whole of every turn; raises BadSample (bad_json, empty_text)."""
    turns = row.get("conversations", row.get("messages")) if isinstance(row, Mapping) else None
    if not isinstance(turns, list):
        raise BadSample(f'{where}: expected an object with a list "messages"', "bad_json")
    read = []
    for number, turn in enumerate(turns):
        here = f"{where}: message {number}"
        if not isinstance(turn, Mapping):
            found = type(turn).__name__
            raise BadSample(f"{here}: is {found}, expected an object with role and content", "bad_json")
        # ShareGPT and LLaVA say from and value.
        name = str(turn.get("role", turn.get("from"))).lower()
        role = ALIASES.get(name, name)
        if role not in ROLES:
            raise BadSample(f"{here}: unknown role {name!r}; {did_you_mean(name, ROLES)}", "bad_json")
        parts = _parts(turn.get("content", turn.get("value")), here)
        says = parts or turn.get("tool_calls") or turn.get("reasoning_content") is not None
        if not says and role in ("user", "assistant"):
            raise BadSample(f"{here}: an empty message of the {role}", "empty_text")
        read.append((role, parts, turn))
    return read


def _parts(content: Any, here: str) -> list[Part]:
    # A message of nothing but tool calls.
    if content is None:
        return []
    if isinstance(content, str):
        # Texts stand at even places, the kinds of media between them.
        pieces: list[Part] = []
        for i, text in enumerate(_PLACE.split(content)):
            pieces.append((text, None) if i % 2 else ("text", text))
        return [piece for piece in pieces if piece != ("text", "")]
    if not isinstance(content, list):
        raise BadSample(
            f"{here}: content is {type(content).__name__}, expected a string or a list of parts", "bad_json"
        )
    parts: list[Part] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(("text", part["text"]))
        elif kind in ("image", "video"):
            parts.append((kind, part.get(kind, part.get("path"))))
        elif kind == "image_url":
            parts.append(("image", part.get("image_url")))
        else:
            raise BadSample(
                f"{here}: a part of type {kind!r}; known: text, image, image_url, video", "bad_json"
            )
    return parts


def _fill_places(read: Sequence[tuple], row: Mapping[str, Any], where: str) -> None:
    """Give every place without a name the next of the row's pictures; counts that differ are refused."""
    for kind in ("image", "video"):
        # One picture is often not in a list.
        given = row.get(f"{kind}s", row.get(kind))
        if not isinstance(given, list):
            given = [] if given is None else [given]
        named = any(part[0] == kind for _, parts, _ in read for part in parts)
        # Nobody said where: before the first question.
        if given and not named:
            first: list[Part] = next((parts for role, parts, _ in read if role == "user"), [])
            first[:0] = [(kind, None)] * len(given)
        places = [(parts, i) for _, parts, _ in read for i, part in enumerate(parts) if part == (kind, None)]
        if len(places) != len(given):
            raise BadSample(
                f"{where}: {len(places)} places for {kind}s (<{kind}> or a part without a name) and"
                f' {len(given)} in "{kind}s"; give one for each',
                "missing_member",
            )
        for (parts, i), reference in zip(places, given):
            parts[i] = (kind, reference)


def _segment(kind: str, value: Any, here: str, media: Media) -> Segment:
    if kind == "text":
        return Text(value)
    if isinstance(value, Mapping):  # datasets write {"bytes": ..., "path": ...}
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        raise BadSample(f"{here}: {kind} {value!r:.60}; expected a path or a data: URI", "missing_member")
    found: bytes | Path
    if value.startswith("data:"):
        try:
            found = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError as error:
            raise BadSample(f"{here}: a data: URI that is not base64 ({error})", "bad_json") from None
    elif re.match(r"[a-z][a-z0-9+.-]*://", value):
        # A row must not make this machine ask another.
        raise BadSample(f"{here}: {kind} {value[:80]}; fetch it and name the file", "missing_member")
    else:
        found = file_below(media.folder, value, f"{here}: {kind}")
    if kind == "image":
        return Image(found)
    return VideoFile(found, max_frames=media.max_frames, fps=media.fps)


def _message(role: str, content: tuple[Segment, ...], turn: Mapping[str, Any], number: int) -> Message:
    # An empty thought is a thought: the channel is there and empty.
    calls, thinking = turn.get("tool_calls") or [], turn.get("reasoning_content")
    if not isinstance(calls, list):
        raise DataError(f"message {number}: tool_calls is {type(calls).__name__}, expected a list")
    if not isinstance(thinking, str | None):
        raise DataError(
            f"message {number}: reasoning_content is {type(thinking).__name__}, expected a string"
        )
    return Message(
        role,
        content,
        thinking=thinking,
        calls=tuple(call_from(call, number) for call in calls),
        tool=str(turn.get("name") or "") if role == "tool" else "",
        index=int(turn.get("index") or 1),
        weight=float(turn.get("weight", 1.0)),
    )
