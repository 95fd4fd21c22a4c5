"""Chat: messages as one open or closed document, in the format a model was trained on.

    chat   [BOS], then for every message
           <|open|>message role="user"<|sep|> content <|close|>message<|sep|><|end_of_msg|>
           (Kimi K3's media and message tokens; the jinja form of the same stands in tokenizer_config.json)
    qa     the form of the pretraining sources: pictures, then "\\nQ: question\\nA:" and " answer"; system
           text comes first

In the chat form an assistant that thinks or calls tools writes K3's channels in place of plain content, and a
tool answers with a message of its own (K3's encoder puts every assistant message in channels; ours only those
that need them):

    <|open|>think<|sep|> ... <|close|>think<|sep|><|open|>response<|sep|> ... <|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|>
        <|open|>argument key="code" type="string"<|sep|> ... <|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>
    <|open|>message role="tool" tool="python" index="1"<|sep|> ... <|close|>message<|sep|><|end_of_msg|>

Only what the assistant says has loss weight, with the tokens that end its message; what a tool says has none.
Strings that look like special tokens inside a message stay text. data/chat/tokens.py reads an assistant's
message back.

Rows: one row of a chat file, as datasets have it, to messages: roles, contents, pictures by place or by name,
tools.

    {"messages": [{"role": "user", "content": "<image>how many?"}, {"role": "assistant", "content": "3"}],
     "images": ["a.png"]}

`messages` is a list in the OpenAI form; {"from": "human", "value": ...} under "conversations" (ShareGPT,
LLaVA) is read as well. Content is a string, in which <image> and <video> stand for the next of "images" and
"videos", or a list of parts: {"type": "text", "text"}, {"type": "image" | "video"} (the next one), {"type":
"image", "image": reference}, {"type": "image_url", "image_url": {"url": reference}}. A reference is a path
below the folder of the pictures, a data: URI, {"bytes": ...} as Arrow stores pictures, or, where Media.fetch
allows it, a URL. An assistant's message may have "reasoning_content",
"tool_calls" and "weight" (0: context only); a tool's has "name" and "index". "tools" (declarations in the
OpenAI form) become a system message before all others.

Every mistake is a BadSample that names the row, what was found and what was expected.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sample import (
    Image,
    Regions,
    Sample,
    Segment,
    Special,
    Text,
    Video,
    VideoFile,
    answer_text,
    file_below,
    question_text,
)
from earlyfusion.data.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record, write_atomic

Template = Literal["chat", "qa"]
Wording = Literal["chat", "qa", "plain"]
ROLES = ("system", "user", "assistant", "tool")
JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    dict: "object",
}
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool: JSON values by argument name."""

    tool: str
    arguments: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Names stand in the markup as they are: a quotation mark in one could add an attribute.
        for name in (self.tool, *self.arguments):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise DataError(
                    f"tool call with the name {name!r}: expected letters, digits, '_', '.' and '-'"
                )


@dataclass(frozen=True)
class Message:
    """One turn: who speaks, and text, pictures and videos in order.

    An assistant may have thought (`thinking`, None: no such channel) and may end with `calls`. A message of
    role "tool" may name the `tool` that answers, and which call of the message before it (`index`, from 1).
    """

    role: str
    content: tuple[Segment, ...]
    thinking: str | None = None
    calls: tuple[ToolCall, ...] = ()
    tool: str = ""
    index: int = 1
    weight: float = 1.0
    """Loss weight of an assistant's message; the other roles have none."""

    def __post_init__(self) -> None:
        # Names go into the markup: a quotation mark in one would be markup of its own.
        fault = ""
        if self.role not in ROLES:
            fault = f"expected one of {', '.join(ROLES)}"
        elif self.role != "assistant" and (self.calls or self.thinking is not None):
            fault = "only an assistant's has thinking or tool calls"
        elif self.tool and (self.role != "tool" or not _NAME.fullmatch(self.tool)):
            fault = f"tool {self.tool!r}; expected role 'tool' and a plain name"
        elif not 0 <= self.weight < float("inf"):
            fault = f"weight {self.weight}; expected 0 or more"
        if fault:
            raise DataError(f"a message of role {self.role!r}: {fault}")

    @property
    def text(self) -> str:
        """All text of the message."""
        return "".join(segment.text for segment in self.content if isinstance(segment, Text))


TEMPLATE_FILE = "chat_template.jinja"
"""The file by which a model directory says that it speaks chat."""


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer as a chat stage saves it (`model.hub.save_model`): with TEMPLATE_FILE beside its own
    files."""

    tokenizer: Tokenizer

    def save(self, directory: str | Path) -> Path:
        """Write the tokenizer's files and the template."""
        # The file of its own is what transformers looks for first.
        folder = self.tokenizer.save(directory)
        write_atomic(folder / TEMPLATE_FILE, self.tokenizer.chat_template)
        return folder


def template_of(model_dir: str | Path) -> Template:
    """The form a model directory speaks: "chat" when it holds TEMPLATE_FILE (written by a chat stage), else
    "qa"."""
    return "chat" if (Path(model_dir) / TEMPLATE_FILE).is_file() else "qa"


def chat_sample(messages: Sequence[Message], *, source: str, key: str, template: Wording = "chat") -> Sample:
    """A whole conversation as one Sample, for sources: `encode` adds [BOS] and [EOS] and needs to know
    nothing of chat.

    template: "chat", "qa" (question and answer marks of pretraining), or "plain": the contents one after the
    other, every character as it stands. Raises DataError for no message, and outside "chat" for thinking and
    tool calls.
    """
    if not messages:
        raise DataError("a chat needs at least one message")
    segments: list[Segment] = []
    media = 0
    for message in messages:
        if template == "chat":
            parts = _chat_parts(message)
        elif message.calls or message.thinking is not None:
            raise DataError(
                f"the {template} form has no thinking and no tool calls; train the model on the chat form (a"
                " chat stage)"
            )
        elif template == "qa":
            parts = _qa_parts(message)
        else:
            parts = _content(message)

        # Regions count the media of their own message; in the document they count all before them too.
        before = media
        for part in parts:
            if isinstance(part, Regions):
                part = replace(part, media=part.media + before)
            segments.append(part)
            media += isinstance(part, Image | Video | VideoFile)
    return Sample(segments, source, key)


def _loss(message: Message) -> float:
    return message.weight if message.role == "assistant" else 0.0


def _content(message: Message) -> list[Segment]:
    """What is said, as it stands; only what the assistant says is learned."""
    content: list[Segment] = []
    for part in message.content:
        if isinstance(part, Text | Regions):
            part = replace(part, loss=_loss(message))
        content.append(part)
    return content


def _chat_parts(message: Message) -> list[Segment]:
    loss, body = _loss(message), _content(message)
    if message.thinking is not None or message.calls:
        body = _element("response", body, loss)
        if message.thinking is not None:
            body = [*_element("think", [Text(message.thinking, loss)], loss), *body]
        calls: list[Segment] = []
        for i, call in enumerate(message.calls):
            calls += _call(call, i + 1, loss)
        if calls:
            body += _element("tools", calls, loss)
    return [*opening(message), *body, *_end("message", loss), Special(END_OF_MSG, loss)]


def opening(message: Message) -> list[Segment]:
    """What stands before the content of a message."""
    # As K3 writes it: attributes in this order.
    header = f'message role="{message.role}"'
    if message.tool:
        header += f' tool="{message.tool}" index="{message.index}"'
    return [Special(OPEN), Text(header, 0.0), Special(SEP)]


def _element(name: str, content: Sequence[Segment], loss: float, attributes: str = "") -> list[Segment]:
    """A part of an assistant's message, markup included in what is learned."""
    start: list[Segment] = [Special(OPEN, loss), Text(name + attributes, loss), Special(SEP, loss)]
    return [*start, *content, *_end(name, loss)]


def _end(name: str, loss: float) -> list[Segment]:
    return [Special(CLOSE, loss), Text(name, loss), Special(SEP, loss)]


def _call(call: ToolCall, index: int, loss: float) -> list[Segment]:
    content: list[Segment] = []
    for key, value in call.arguments.items():
        # Strings stand as they are: a program in quotation marks would be hard to learn.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = JSON_TYPES.get(type(value), "array")
        content += _element("argument", [Text(text, loss)], loss, f' key="{key}" type="{kind}"')
    return _element("call", content, loss, f' tool="{call.tool}" index="{index}"')


def _qa_parts(message: Message) -> list[Segment]:
    # Pictures first, as the sources of pretraining have them.
    media: list[Segment] = [segment for segment in message.content if not isinstance(segment, Text)]
    if message.role == "user":
        return [*media, Text(question_text(message.text.strip()), 0.0)]
    if message.role == "assistant":
        return [Text(answer_text(message.text.strip()), 1.0)]
    return [*media, Text(message.text, 0.0)]


def tools_message(tools: Sequence[Any]) -> Message:
    """Declarations of tools (the OpenAI form) as the system message that stands before all others."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("tools: expected a list of objects, declarations in the OpenAI form")
    # One declaration a line: short, and easy to cut.
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return Message("system", (Text("\n".join(["# Tools", *lines])),))


def call_from(call: Any, number: int) -> ToolCall:
    """A tool call in the OpenAI form, with or without its "function"; raises DataError naming message
    `number`."""
    inner = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = inner.get("arguments", {})
    try:
        # OpenAI's own files hold JSON in a string, others an object.
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping) or "name" not in inner:
        raise DataError(
            f"message {number}: a tool call is {{'function': {{'name': str, 'arguments': object or JSON}}}}"
        )
    return ToolCall(inner["name"], dict(arguments))


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
    fetch: Callable[[str], Path] | None = None
    """The local copy of a URL that a row names; None: a row must not make this machine ask another."""


def messages_of(row: Any, where: str, media: Media, learned: bool = True) -> list[Message]:
    """The messages of one row. learned: some message must have a loss weight. Raises BadSample (bad_json,
    missing_member, empty_text)."""
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
    if learned and not any(message.role == "assistant" and message.weight > 0 for message in messages):
        raise BadSample(f"{where}: no message of the assistant with a weight: nothing to learn", "empty_text")
    return messages


def turns_of(row: Any, where: str) -> list[tuple[str, list[Part], Record]]:
    """Role, content and the whole of every turn; raises BadSample (bad_json, empty_text)."""
    turns = row.get("conversations", row.get("messages")) if isinstance(row, Mapping) else None
    if not isinstance(turns, list):
        raise BadSample(f'{where}: expected an object with a list "messages"', "bad_json")
    read = []
    for number, turn in enumerate(turns):
        here = f"{where}: message {number}"
        if not isinstance(turn, dict):
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


def _fill_places(read: Sequence[tuple], row: Record, where: str) -> None:
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
        value = value.get("bytes") or value.get("path") or value.get("url")
    if not isinstance(value, str | bytes) or not value:
        raise BadSample(f"{here}: {kind} {value!r:.60}; expected a path or a data: URI", "missing_member")
    found: bytes | Path
    if isinstance(value, bytes):
        found = value
    elif value.startswith("data:"):
        try:
            found = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError as error:
            raise BadSample(f"{here}: a data: URI that is not base64 ({error})", "bad_json") from None
    elif re.match(r"[a-z][a-z0-9+.-]*://", value):
        if media.fetch is None:
            raise BadSample(
                f'{here}: {kind} {value[:80]}; fetch it and name the file (the task "file": urls = true)',
                "missing_member",
            )
        try:
            found = media.fetch(value)
        except DataError as error:
            raise BadSample(f"{here}: {kind} {error}", "missing_member") from None
    else:
        found = file_below(media.folder, value, f"{here}: {kind}")
    if kind == "image":
        return Image(found)
    return VideoFile(found, max_frames=media.max_frames, fps=media.fps)


def _message(role: str, content: tuple[Segment, ...], turn: Record, number: int) -> Message:
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
