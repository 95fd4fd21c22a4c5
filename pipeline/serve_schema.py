"""What the endpoint accepts: the parts of OpenAI's chat and completions requests that this engine serves.

A field that would change the answer and is not served is refused, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from earlyfusion.data.chat import Message, call_from
from earlyfusion.data.sample import Image, Segment, Text, Video, VideoFile

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*)(;base64)?,", re.IGNORECASE)


class Refused(Exception):
    """A request that is not served: HTTP status, the parameter at fault, one line."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


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
    fps: float = Field(2.0, gt=0)


Part = Annotated[TextPart | ImagePart | VideoPart | FramesPart, Field(discriminator="type")]


class Turn(_Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
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
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # refused unless they change nothing
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Refuse what is asked for and not served."""
        unsupported = {
            "frequency_penalty": bool(self.frequency_penalty), "presence_penalty": bool(self.presence_penalty),
            "logit_bias": bool(self.logit_bias), "suffix": bool(self.suffix), "echo": bool(self.echo),
            "best_of": self.best_of not in (None, self.n), "tools": bool(self.tools), "functions": bool(self.functions),
            "response_format": (self.response_format or {"type": "text"}).get("type") != "text",
            "top_logprobs": bool(self.top_logprobs),
        }  # fmt: skip
        for name, asked in unsupported.items():
            if asked:
                raise Refused(f"{name} is not served here; leave it out", param=name, code="unsupported_parameter")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False

    def conversation(self, *, max_images: int) -> list[Message]:
        """The turns as messages with media decoded from their data URLs (base64 only; pictures stay encoded)."""
        messages: list[Message] = []
        media = 0
        for turn in self.messages:
            role = "system" if turn.role == "developer" else turn.role
            content: list[Segment] = []
            for part in (
                [TextPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content or []
            ):
                segment = _segment(part)
                media += 0 if isinstance(segment, Text) else len(segment.frames) if isinstance(segment, Video) else 1
                content.append(segment)
            messages.append(_message(turn, role, tuple(content), len(messages)))
        if media > max_images:
            raise Refused(
                f"{media} pictures or frames in one request; at most {max_images} are taken", param="messages"
            )
        return messages


class CompletionRequest(Common):
    """POST /v1/completions: text as it is, no template."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=1)
    """0 or 1: the log-probability of every chosen token (alternatives are not served)."""


def _message(turn: Turn, role: str, content: tuple[Segment, ...], number: int) -> Message:
    """A turn as a Message, with thinking and calls of an assistant, and the name of the tool that answers."""
    if role == "assistant":
        calls = tuple(call_from(call, number) for call in turn.tool_calls or [])
        return Message(role, content, thinking=turn.reasoning_content, calls=calls)
    if role == "tool":
        index = (turn.tool_call_id or "").rpartition("call_")[2]
        return Message(role, content, tool=turn.name or "", index=int(index) if index.isdecimal() else 1)
    return Message(role, content)


def _segment(part: Any) -> Segment:
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, ImagePart):
        return Image(data_url(part.image_url.url, "image"))
    if isinstance(part, VideoPart):
        return VideoFile(data_url(part.video_url.url, "video"))
    frames = [data_url(frame, "image") for frame in part.video]
    return Video(frames, [i / part.fps for i in range(len(frames))])


def data_url(url: str, kind: str) -> bytes:
    """Bytes of a base64 data URL; other URLs are refused, so that the server never fetches anything."""
    head = _DATA_URL.match(url[:256])
    if head is None or not head.group(3):
        shown = url[:40] + ("…" if len(url) > 40 else "")
        raise Refused(
            f"{kind} {shown!r}: give a data URL (data:{kind}/…;base64,…); nothing is fetched", param="messages"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"{kind}: its base64 cannot be decoded", param="messages") from None
