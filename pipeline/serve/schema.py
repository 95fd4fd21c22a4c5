"""What the endpoint accepts: the parts of OpenAI's chat and completions requests that this engine serves.

A field that would change the answer and is not served is refused, never ignored. How many of each thing a
request may hold stands in `Limits`, and is looked at before anything is decoded or tokenised.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from earlyfusion.data.chat.template import Message, call_from
from earlyfusion.data.sample import Image, Segment, Text, Video, VideoFile

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*)(;base64)?,", re.IGNORECASE)


class Refused(Exception):
    """A request that is not served: HTTP status, the parameter at fault, one line."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


@dataclass(frozen=True)
class Limits:
    """Bounds of one request. body and held (all requests together) in bytes; characters of text in all its
    parts, and ids, of which one counts as four characters."""

    body: int = 32 * 2**20
    held: int = 128 * 2**20
    characters: int = 1 << 20
    images: int = 64
    turns: int = 1024
    prompts: int = 64
    samples: int = 16
    sequences: int = 128
    """Prompts times samples."""
    new_tokens: int = 4096
    default_new_tokens: int = 256


STOPS, STOP_CHARACTERS = 4, 256
"""Most stop strings (as OpenAI) and their length: each is looked for in every new token's text."""
KEYS, CALLS, PARTS = 64, 128, 1024
"""Most keys of a request, tool calls of a message, and parts of its content."""
Body = TypeVar("Body", bound="Common")


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class Url(_Loose):
    url: str


class TextPart(_Loose):
    type: Literal["text"]
    text: str


class ImagePart(_Loose):
    type: Literal["image_url"]
    image_url: Url


class VideoPart(_Loose):
    """A whole video file as one data URL."""

    type: Literal["video_url"]
    video_url: Url


class FramesPart(_Loose):
    """Video frames, each a picture as a data URL, `fps` of them a second."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1)
    fps: float = Field(2.0, ge=0.001, le=1000)


Part = Annotated[TextPart | ImagePart | VideoPart | FramesPart, Field(discriminator="type")]


class Turn(_Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=PARTS)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(_Loose):
    include_usage: bool = False


class Common(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Go on after the end token, up to max_tokens (an extension, as in vLLM)."""
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    # refused unless they change nothing
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    top_logprobs: int | None = None

    @classmethod
    def read(cls: type[Body], body: dict[str, Any] | None, limits: Limits) -> Body:
        """The request in a JSON object; raises Refused, naming the first thing that is wrong."""
        body = body or {}
        stop, turns = body.get("stop"), body.get("messages")
        counted = (
            (body, KEYS, "keys", None),
            (stop, STOPS, "stop strings", "stop"),
            (turns, limits.turns, "messages", "messages"),
        )
        for things, most, what, param in counted:
            if isinstance(things, list | dict) and len(things) > most:
                raise Refused(f"{len(things)} {what} in one request; at most {most} are taken", param=param)
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            first = max(found, key=lambda each: len(each["loc"]))  # of a union the branch that came furthest
            place = ".".join(str(part) for part in first["loc"])
            raise Refused(f"{place or 'body'}: {first['msg']}", param=place or None) from None
        request.check(limits)
        return request

    def check(self, limits: Limits) -> None:
        """Refuse what is asked for and not served."""
        if any(len(stop) > STOP_CHARACTERS for stop in self.stops):
            raise Refused(f"a stop string of more than {STOP_CHARACTERS} characters", param="stop")
        if self.n > limits.samples:
            raise Refused(
                f"n = {self.n}: at most {limits.samples} samples of one prompt are served", param="n"
            )
        unsupported = {
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
            "logit_bias": bool(self.logit_bias),
            "suffix": bool(self.suffix),
            "echo": bool(self.echo),
            "best_of": self.best_of not in (None, self.n),
            "tools": bool(self.tools),
            "functions": bool(self.functions),
            "response_format": (self.response_format or {"type": "text"}).get("type") != "text",
            "top_logprobs": bool(self.top_logprobs),
        }
        for name, asked in unsupported.items():
            if asked:
                raise Refused(
                    f"{name} is not served here; leave it out", param=name, code="unsupported_parameter"
                )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False

    def conversation(self, limits: Limits) -> tuple[list[Message], int]:
        """The turns as messages, and how many characters of text they hold; pictures stay encoded.

        Media come from data URLs (base64 only). Everything is counted before any of it is decoded.
        """
        parts = [
            (
                [TextPart(type="text", text=turn.content)]
                if isinstance(turn.content, str)
                else turn.content or []
            )
            for turn in self.messages
        ]
        every = [part for turn in parts for part in turn]
        media = sum(len(p.video) if isinstance(p, FramesPart) else not isinstance(p, TextPart) for p in every)
        if media > limits.images:
            text = f"{media} pictures or frames in one request; at most {limits.images} are taken"
            raise Refused(text, param="messages")
        length = sum(len(part.text) for part in every if isinstance(part, TextPart))
        length += sum(len(turn.reasoning_content or "") + _length(turn.tool_calls) for turn in self.messages)
        refuse_longer(length, limits, "messages")
        frames = max(limits.images - media + 1, 1)
        messages: list[Message] = []
        for turn, content in zip(self.messages, parts):
            role = "system" if turn.role == "developer" else turn.role
            segments = tuple(_segment(part, frames) for part in content)
            messages.append(_message(turn, role, segments, len(messages)))
        return messages, length


class CompletionRequest(Common):
    """POST /v1/completions: text as it is, no template."""

    prompt: Any
    """A text, token ids, or a list of either"""
    logprobs: int | None = Field(None, ge=0, le=1)
    """0 or 1: the log-probability of every chosen token (alternatives are not served)."""

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """One or several prompts, each a text or token ids; raises Refused for other shapes and for too
        much."""
        given = [self.prompt] if isinstance(self.prompt, str) or _ids(self.prompt) else self.prompt
        if (
            not isinstance(given, list)
            or not given
            or not all(isinstance(p, str) or _ids(p) for p in given[:1000])
        ):
            raise Refused(
                "prompt: expected a text, a list of token ids, or a list of these, not empty", param="prompt"
            )
        if len(given) > limits.prompts or len(given) * self.n > limits.sequences:
            text = f"{len(given)} prompts of {self.n} samples; at most {limits.prompts} prompts and"
            raise Refused(f"{text} {limits.sequences} samples in all are served at once", param="prompt")
        refuse_longer(sum(len(p) if isinstance(p, str) else 4 * len(p) for p in given), limits, "prompt")
        return given


def _ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)


def _length(value: Any) -> int:
    """Characters of the strings and numbers in a JSON value; raises RecursionError for one nested too
    deep."""
    if isinstance(value, Mapping):
        return sum(len(key) + _length(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_length, value)) + len(value)
    return len(value) if isinstance(value, str) else 8


def refuse_longer(characters: int, limits: Limits, param: str) -> None:
    """Raises Refused for a text that is too long to be tokenised, whatever the tokens."""
    if characters > limits.characters:
        text = (
            f"{param}: {characters} characters (a token id counts as 4), more than the {limits.characters}"
            " that are read"
        )
        raise Refused(text, param=param, code="context_length_exceeded")


def _message(turn: Turn, role: str, content: tuple[Segment, ...], number: int) -> Message:
    """A turn as a Message, with thinking and calls of an assistant, and the name of the tool that answers."""
    if role == "assistant":
        calls = tuple(call_from(call, number) for call in turn.tool_calls or [])
        return Message(role, content, thinking=turn.reasoning_content, calls=calls)
    if role == "tool":
        index = (turn.tool_call_id or "").rpartition("call_")[2]
        return Message(role, content, tool=turn.name or "", index=int(index[:6]) if index.isdecimal() else 1)
    return Message(role, content)


def _segment(part: Any, frames: int) -> Segment:
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, ImagePart):
        return Image(data_url(part.image_url.url, "image"))
    if isinstance(part, VideoPart):
        return VideoFile(data_url(part.video_url.url, "video"), max_frames=frames)
    pictures = [data_url(frame, "image") for frame in part.video]
    return Video(pictures, [i / part.fps for i in range(len(pictures))])


def data_url(url: str, kind: str) -> bytes:
    """Bytes of a base64 data URL; other URLs are refused, so that the server never fetches anything."""
    head = _DATA_URL.match(url[:256])
    if head is None or not head.group(3):
        shown = url[:40] + ("…" if len(url) > 40 else "")
        raise Refused(
            f"{kind} {shown!r}: give a data URL (data:{kind}/…;base64,…); nothing is fetched",
            param="messages",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"{kind}: its base64 cannot be decoded", param="messages") from None
