"""The forms of OpenAI's chat and completions endpoints that are spoken here: requests and answers.

A field that would change the answer and is not served is refused, never ignored. pydantic reads the requests
and bounds their counts; what a server bounds by its own size (text, pictures, new tokens) stands in `Limits`
and is looked at before anything is decoded or tokenised.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
)
from pydantic_core import PydanticCustomError, from_json

from earlyfusion.data.chat.template import Message, Template, call_from
from earlyfusion.data.chat.tokens import ChatStream, parse_assistant
from earlyfusion.data.sample import Image, Segment, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.requests import Completion, Event

KEYS, TURNS, PARTS, CALLS = 64, 1024, 1024, 128
"""Most keys of a request, messages, parts of a message's content, and tool calls of a message."""
STOPS, STOP_CHARACTERS = 4, 256
"""Most stop strings (as OpenAI) and their length: each is looked for in every new token's text."""
PROMPTS, SAMPLES, SEQUENCES = 64, 16, 128
"""Most prompts of a request, samples of a prompt, and samples in all."""
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
    """Bounds of one server. body (of one request) and held (by all together) in bytes; characters of text in
    all parts of a request, a token id counts as four; images: pictures and frames of a request."""

    body: int = 32 * 2**20
    held: int = 128 * 2**20
    characters: int = 1 << 20
    images: int = 64
    new_tokens: int = 4096

    def check_characters(self, count: int, param: str) -> None:
        """Raises Refused for a text that is too long to be tokenised, whatever the tokens."""
        if count > self.characters:
            raise Refused(
                f"{param}: {count} characters (a token id counts as 4), more than the {self.characters}"
                " that are read",
                param=param,
                code="context_length_exceeded",
            )


# ---- Requests.


class _Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class Url(_Loose):
    url: str

    def data(self, kind: str) -> bytes:
        return data_url(self.url, kind)


class TextPart(_Loose):
    type: Literal["text"]
    text: str
    media: ClassVar[int] = 0

    def segment(self, frames: int) -> Segment:
        return Text(self.text)


class ImagePart(_Loose):
    type: Literal["image_url"]
    image_url: Url
    media: ClassVar[int] = 1

    def segment(self, frames: int) -> Segment:
        return Image(self.image_url.data("image"))


class VideoPart(_Loose):
    """A whole video file as one data URL."""

    type: Literal["video_url"]
    video_url: Url
    media: ClassVar[int] = 1

    def segment(self, frames: int) -> Segment:
        return VideoFile(self.video_url.data("video"), max_frames=frames)


class FramesPart(_Loose):
    """Video frames, each a picture as a data URL, `fps` of them a second."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1)
    fps: float = Field(2.0, ge=0.001, le=1000)

    @property
    def media(self) -> int:
        return len(self.video)

    def segment(self, frames: int) -> Segment:
        pictures = [data_url(frame, "image") for frame in self.video]
        return Video(pictures, [i / self.fps for i in range(len(pictures))])


def _as_parts(content: Any) -> Any:
    """A text alone is one part of it, no content is none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


Part = Annotated[TextPart | ImagePart | VideoPart | FramesPart, Field(discriminator="type")]


class Turn(_Loose):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], Field(max_length=PARTS, fail_fast=True), BeforeValidator(_as_parts)] = []
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def characters(self) -> int:
        """How much text it holds."""
        texts = [part.text for part in self.content if isinstance(part, TextPart)]
        texts += [self.reasoning_content or "", json.dumps(self.tool_calls or "")]
        return sum(map(len, texts))

    def message(self, number: int, frames: int) -> Message:
        """The turn as a Message: an assistant's with its thinking and calls, a tool's with the tool's name.

        number: place among the messages. frames: most frames that a video file may give. Raises Refused for
        media that are no data URLs, DataError for calls that are none.
        """
        content = tuple(part.segment(frames) for part in self.content)
        if self.role == "assistant":
            calls = tuple(call_from(call, number) for call in self.tool_calls or [])
            return Message("assistant", content, thinking=self.reasoning_content, calls=calls)
        if self.role == "tool":
            index = (self.tool_call_id or "").rpartition("call_")[2]
            index = index[:6] if index.isdecimal() else "1"
            return Message("tool", content, tool=self.name or "", index=int(index))
        return Message("system" if self.role == "developer" else self.role, content)


class StreamOptions(_Loose):
    include_usage: bool = False


def _refuse_unserved(value: Any) -> Any:
    if value not in (None, False, 0, "", [], {}, {"type": "text"}):
        raise PydanticCustomError("unsupported_parameter", "this is not served here; leave it out")
    return value


Unserved = Annotated[Any, AfterValidator(_refuse_unserved)]
"""A field that OpenAI knows: taken where it changes nothing."""


def _as_list(given: Any) -> Any:
    """One text, or one prompt of ids, is a list of it; nothing is an empty list."""
    ids = isinstance(given, list) and given[:1] and isinstance(given[0], int)
    if isinstance(given, str) or ids:
        return [given]
    return [] if given is None else given


Stop = Annotated[str, Field(max_length=STOP_CHARACTERS)]


class Common(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid")
    default_new_tokens: ClassVar[int] = 256
    """Where nothing is asked for."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=SAMPLES)
    stop: Annotated[list[Stop], Field(max_length=STOPS), BeforeValidator(_as_list)] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Go on after the end token, up to max_tokens (an extension, as in vLLM)."""
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    best_of: Literal[1] | None = None
    frequency_penalty: Unserved = None
    presence_penalty: Unserved = None
    logit_bias: Unserved = None
    suffix: Unserved = None
    echo: Unserved = None
    tools: Unserved = None
    tool_choice: Any = None
    functions: Unserved = None
    response_format: Unserved = None
    top_logprobs: Unserved = None

    @property
    def new_tokens(self) -> int | None:
        """How many tokens are asked for."""
        return self.max_tokens


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=TURNS)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def conversation(self, limits: Limits) -> tuple[list[Message], int]:
        """The turns as messages, and how many characters of text they hold; pictures stay encoded.

        Media come from data URLs (base64 only). Everything is counted before any of it is decoded.
        """
        # Counts first: decoding is what costs.
        media = sum(part.media for turn in self.messages for part in turn.content)
        if media > limits.images:
            raise Refused(
                f"{media} pictures or frames in one request; at most {limits.images} are taken",
                param="messages",
            )
        length = sum(turn.characters() for turn in self.messages)
        limits.check_characters(length, "messages")

        frames = max(limits.images - media + 1, 1)
        return [turn.message(number, frames) for number, turn in enumerate(self.messages)], length


Prompt = str | Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Common):
    """POST /v1/completions: text as it is, no template."""

    default_new_tokens: ClassVar[int] = 16
    prompt: Annotated[
        list[Prompt], Field(min_length=1, max_length=PROMPTS, fail_fast=True), BeforeValidator(_as_list)
    ]
    """A text, token ids, or a list of either"""
    logprobs: int | None = Field(None, ge=0, le=1)
    """0 or 1: the log-probability of every chosen token (alternatives are not served)."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """Every prompt, a text or token ids; raises Refused for too much."""
        if len(self.prompt) * self.n > SEQUENCES:
            raise Refused(
                f"{len(self.prompt)} prompts of {self.n} samples; at most {SEQUENCES} samples in all are"
                " served",
                param="prompt",
            )
        characters = sum(len(p) if isinstance(p, str) else 4 * len(p) for p in self.prompt)
        limits.check_characters(characters, "prompt")
        return self.prompt


Body = TypeVar("Body", bound=Common)


def read(kind: type[Body], body: bytes | bytearray) -> Body:
    """The request in a JSON body; raises Refused, naming what is wrong in one line."""
    try:
        value = from_json(body)
        if isinstance(value, dict) and len(value) > KEYS:
            raise Refused(f"{len(value)} keys in one request; at most {KEYS} are taken")
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(reversed(found), key=lambda each: len(each["loc"]))  # of a union the furthest branch
        names = [str(part) for part in first["loc"] if part != "str" and "[" not in str(part)]
        place = ".".join(names) or None
        code = first["type"] if first["type"] == "unsupported_parameter" else None
        raise Refused(f"{place or 'body'}: {first['msg']}", param=place, code=code) from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None


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


# ---- Answers.


class Answer:
    """One answer: the samples ("choices") of one or several prompts, whole or in pieces.

    requests: ids of the engine's requests, one a prompt.
    """

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        requests: Sequence[str],
        tokenizer: Tokenizer,
        model: str,
        template: Template,
    ) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.chat = isinstance(body, ChatRequest)
        self.channels = self.chat and template == "chat"
        """Whether words, thoughts and calls are told apart."""
        self.kind = "chat.completion" if self.chat else "text_completion"
        self.base = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.first = {name: number * body.n for number, name in enumerate(requests)}
        self.done: dict[int, Completion] = {}
        self.streams: dict[int, ChatStream] = defaultdict(lambda: ChatStream(tokenizer))

    def take(self, event: Event) -> int:
        """Note what an event brings; the number of its choice."""
        index = self.first[event.request_id] + event.index
        if event.completion is not None:
            self.done[index] = event.completion
        return index

    def whole(self) -> bytes:
        """The answer as JSON, choice by choice: one long one would hold the interpreter's lock."""
        choices = [json.dumps(self.choice(index, done)) for index, done in sorted(self.done.items())]
        head = json.dumps({**self.base, "object": self.kind, "usage": self.usage()})
        return f'{head[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """One sample of a whole answer."""
        # Of a chat in channels the ids are read again: the text has lost its markup.
        common = {
            "index": index,
            "finish_reason": _finish(done),
            "logprobs": self._logprobs(done.ids, done.logprobs1),
        }
        if not self.chat:
            return {**common, "text": done.text}
        message = {"role": "assistant", "content": done.text, "refusal": None}
        if self.channels:
            parsed = parse_assistant(done.ids, self.tokenizer).message
            message |= {"content": self._stopped(parsed.text), **tool_calls(parsed)}
            if parsed.thinking is not None:
                message["reasoning_content"] = parsed.thinking
        return {**common, "message": message}

    def opening(self) -> str:
        """What a streamed chat begins with: the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "finish_reason": None} for i in range(self.body.n)]
        return "".join(self.chunk([choice]) for choice in choices) if self.chat else ""

    def piece(self, event: Event) -> str:
        """An event of the engine as one of the stream."""
        index = self.take(event)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs([t.id for t in event.tokens], [t.logprob1 for t in event.tokens]),
            "finish_reason": None if event.completion is None else _finish(event.completion),
        }
        if self.channels:
            choice["delta"] = self._by_channel(index, event)
        elif self.chat:
            choice["delta"] = {"content": event.text}
        else:
            choice["text"] = event.text
        return self.chunk([choice])

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """A server-sent event."""
        kind = "chat.completion.chunk" if self.chat else self.kind
        return sse({**self.base, "object": kind, "choices": choices, **more})

    def usage(self) -> dict[str, Any]:
        """Tokens read and written; a prompt counts once, however many samples it has."""
        by_prompt = {index // self.body.n: completion for index, completion in self.done.items()}
        read = sum(completion.prompt_tokens for completion in by_prompt.values())
        written = sum(len(completion.ids) for completion in self.done.values())
        cached = sum(completion.cached_tokens for completion in by_prompt.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _by_channel(self, index: int, event: Event) -> dict[str, Any]:
        """The words of one event without markup; calls come whole, with the last event of a sample."""
        delta: dict[str, Any] = {"content": ""}
        for token in event.tokens:
            for channel, text in self.streams[index].push(token.id):
                if channel in ("content", "thinking"):
                    key = "content" if channel == "content" else "reasoning_content"
                    delta[key] = delta.get(key, "") + text
        if event.completion is not None:
            delta |= tool_calls(parse_assistant(event.completion.ids, self.tokenizer).message)
        return delta

    def _stopped(self, text: str) -> str:
        """The text up to the first stop string: the engine cuts its own text, not the ids."""
        ends = [text.find(stop) for stop in self.body.stop if stop in text]
        return text[: min(ends)] if ends else text

    def _logprobs(self, ids: list[int], values: list[float]) -> dict[str, Any] | None:
        if not self.body.wants_logprobs:
            return None
        tokens = [self.tokenizer.decode([i]) for i in ids]
        if not self.chat:
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        entries = []
        for token, value in zip(tokens, values, strict=True):
            entries.append(
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            )
        return {"content": entries}


def sse(value: Mapping[str, Any]) -> str:
    """A JSON object as one server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def tool_calls(message: Message) -> dict[str, Any]:
    """{"tool_calls": [...]} in the OpenAI form, or {} for a message without calls."""
    listed = []
    for number, call in enumerate(message.calls):
        function = {"name": call.tool, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        listed.append({"index": number, "id": f"call_{number + 1}", "type": "function", "function": function})
    return {"tool_calls": listed} if listed else {}


def _finish(completion: Completion) -> str:
    return "stop" if completion.finish_reason == "cancelled" else completion.finish_reason
