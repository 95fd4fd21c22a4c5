"""The forms of OpenAI's chat and completions endpoints that are spoken here: requests and answers.

A field that would change the answer and is not served is refused, never ignored. pydantic reads the requests
and bounds their counts; what a server bounds by its own size (text, pictures, new tokens) stands in `Limits`
and is looked at before anything is decoded or tokenised.
"""

import base64
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from earlyfusion.data.chat.template import Message, Template, call_from, tools_message
from earlyfusion.data.chat.tokens import ChatStream, parse_assistant
from earlyfusion.data.sample import Image, Segment, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.requests import TOP, Completion, Event

KEYS, TURNS, PARTS, CALLS = 64, 1024, 1024, 128
"""Most keys of a request, messages, parts of a message's content, and tool calls of a message."""
STOPS, STOP_CHARACTERS = 4, 256
"""Most stop strings (as OpenAI) and their length: each is looked for in every new token's text."""
PROMPTS, SAMPLES, SEQUENCES = 64, 16, 128
"""Most prompts of a request, samples of a prompt, and samples in all."""
Top = tuple[tuple[int, float], ...]
"""The likeliest tokens in one place: (id, log-probability)."""
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)


class Refused(Exception):
    """A request that is not served: HTTP status, the parameter at fault, one line."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


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
        # The tokenizer holds the interpreter's lock for as long as the text is.
        if count > self.characters:
            text = f"{param}: {count} characters (a token id counts as 4); at most {self.characters} are read"
            raise Refused(text, param=param, code="context_length_exceeded")


# ---- Requests.


# What these models do not name is ignored: clients send what other servers know.
class Url(BaseModel):
    url: str


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: Url


class VideoPart(BaseModel):
    """A whole video file as one data URL."""

    type: Literal["video_url"]
    video_url: Url


class FramesPart(BaseModel):
    """Video frames, each a picture as a data URL, `fps` of them a second."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1)
    fps: float = Field(2.0, ge=0.001, le=1000)


Part = Annotated[TextPart | ImagePart | VideoPart | FramesPart, Field(discriminator="type")]


def segment_of(part: Part, frames: int) -> Segment:
    """A part as a segment; media stay encoded. frames: most frames that a video file may give."""
    match part:
        case ImagePart():
            return Image(data_url(part.image_url.url, "image"))
        case VideoPart():
            return VideoFile(data_url(part.video_url.url, "video"), max_frames=frames)
        case FramesPart():
            pictures = [data_url(frame, "image") for frame in part.video]
            return Video(pictures, [i / part.fps for i in range(len(pictures))])
        case _:
            return Text(part.text)


def as_parts(content: Any) -> Any:
    """A text alone is one part of it, no content is none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


class Turn(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], Field(max_length=PARTS, fail_fast=True), BeforeValidator(as_parts)] = []
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Record], Field(max_length=CALLS)] | None = None
    tool_call_id: str = ""
    name: str = ""

    def characters(self) -> int:
        """How much text it holds."""
        texts = [part.text for part in self.content if isinstance(part, TextPart)]
        texts += [self.reasoning_content or "", json.dumps(self.tool_calls or "")]
        return sum(map(len, texts))

    def message(self, number: int, frames: int, called: Sequence[Record] = ()) -> Message:
        """The turn as a Message: an assistant's with its thinking and calls, a tool's with the tool's name.

        number: place among the messages. frames: most frames that a video file may give. called: the calls of
        the assistant's message before, one of which a tool answers. Raises Refused for media that are no
        data URLs, DataError for calls that are none.
        """
        content = tuple(segment_of(part, frames) for part in self.content)
        match self.role:
            case "assistant":
                calls = tuple(call_from(call, number) for call in self.tool_calls or [])
                return Message("assistant", content, thinking=self.reasoning_content, calls=calls)
            case "tool":
                # OpenAI's clients send an id and no name; the model was trained on both.
                for index, call in enumerate(called, 1):
                    if self.tool_call_id and call.get("id") == self.tool_call_id:
                        named = self.name or call_from(call, number).tool
                        return Message("tool", content, tool=named, index=index)
                # The ids that this server gives are call_1, call_2, ...
                found = self.tool_call_id.rpartition("call_")[2][:6]
                return Message("tool", content, tool=self.name, index=int(found) if found.isdecimal() else 1)
            case "developer":
                return Message("system", content)
        return Message(self.role, content)


class StreamOptions(BaseModel):
    include_usage: bool = False


def as_list(given: Any) -> Any:
    """One text, or one prompt of ids, is a list of it; nothing is an empty list."""
    ids = isinstance(given, list) and given[:1] and isinstance(given[0], int)
    if isinstance(given, str) or ids:
        return [given]
    return [] if given is None else given


# Fields that OpenAI knows and this server does not: taken where they change nothing.
UNSERVED = set(
    "frequency_penalty presence_penalty logit_bias suffix echo functions response_format top_k"
    " repetition_penalty".split()
)
# A factor that changes nothing is one.
FACTORS = {"repetition_penalty"}
NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {}, {"type": "text"})
# Fields that never change an answer.
UNREAD = {"user", "metadata", "store"}

Stop = Annotated[str, Field(max_length=STOP_CHARACTERS)]
Count = Annotated[int, Field(ge=0)]


class Common(BaseModel):
    """Fields of both endpoints. new_tokens: how many are asked for; None takes default_new_tokens."""

    model_config = ConfigDict(extra="forbid")
    default_new_tokens: ClassVar[int] = 256

    model: str = ""
    new_tokens: Count | None = Field(None, alias="max_tokens")
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=SAMPLES)
    stop: Annotated[list[Stop], Field(max_length=STOPS), BeforeValidator(as_list)] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    """Go on after the end token, up to max_tokens (an extension, as in vLLM)."""
    return_token_ids: bool = False
    """The ids of prompt and answer, too (an extension, as in vLLM, which TRL's client asks for)."""
    return_tokens_as_token_ids: bool = False
    """Tokens of log-probabilities as "token_id:17": texts of two tokens may be the same."""
    best_of: Literal[1] | None = None
    logprobs: Any = None
    top_logprobs: int = Field(0, ge=0, le=0)

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # Silently ignored they would change what the caller gets.
        for name in UNSERVED & given.keys():
            if given[name] not in (NEUTRAL if name not in FACTORS else (None, 1)):
                text = f"{name}: this is not served here; leave it out"
                raise Refused(text, param=name, code="unsupported_parameter")
        # A null is as good as a field that is not there.
        kept = given.keys() - UNSERVED - UNREAD
        return {key: given[key] for key in kept if given[key] is not None}


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=TURNS)
    new_tokens: Count | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    tools: Annotated[list[Record], Field(max_length=CALLS)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    """Nothing here can force a call."""
    parallel_tool_calls: Literal[True] = True
    top_logprobs: int = Field(0, ge=0, le=TOP)
    """So many of the likeliest tokens beside every chosen one; with logprobs"""

    def conversation(self, limits: Limits) -> tuple[list[Message], int]:
        """The turns as messages, and how many characters of text they hold; pictures stay encoded.

        Media come from data URLs (base64 only). Everything is counted before any of it is decoded.
        """
        # Counts first: decoding is what costs.
        offered = self.tools if self.tool_choice == "auto" else []
        media, length = 0, len(json.dumps(offered))
        for turn in self.messages:
            length += turn.characters()
            for part in turn.content:
                # A picture or a video file counts as one, frames each.
                media += len(part.video) if isinstance(part, FramesPart) else part.type != "text"
        if media > limits.images:
            text = f"{media} pictures or frames in one request; at most {limits.images} are taken"
            raise Refused(text, param="messages")
        limits.check_characters(length, "messages")

        frames = max(limits.images - media + 1, 1)
        messages = [tools_message(offered)] if offered else []
        called: list[Record] = []
        for number, turn in enumerate(self.messages):
            called = (turn.tool_calls or []) if turn.role == "assistant" else called
            messages.append(turn.message(number, frames, called))
        return messages, length


Prompt = str | Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Common):
    """POST /v1/completions: text as it is, no template."""

    default_new_tokens: ClassVar[int] = 16
    prompt: Annotated[
        list[Prompt], Field(min_length=1, max_length=PROMPTS, fail_fast=True), BeforeValidator(as_list)
    ]
    """A text, token ids, or a list of either"""
    logprobs: int | None = Field(None, ge=0, le=1)
    """0 or 1: the log-probability of every chosen token (alternatives are not served)."""

    def prompts(self, limits: Limits) -> list[str | list[int]]:
        """Every prompt, a text or token ids; raises Refused for too much."""
        # Every sample is a request of the engine.
        if len(self.prompt) * self.n > SEQUENCES:
            text = f"{len(self.prompt)} prompts of {self.n} samples; at most {SEQUENCES} samples in all"
            raise Refused(f"{text} are served", param="prompt")
        characters = sum(len(p) if isinstance(p, str) else 4 * len(p) for p in self.prompt)
        limits.check_characters(characters, "prompt")
        return self.prompt


class WeightsRequest(BaseModel):
    """POST /update_weights_from_disk, where what else SGLang knows is not looked at."""

    model_path: str


Body = TypeVar("Body", bound=BaseModel)


def read(kind: type[Body], body: bytes | bytearray) -> Body:
    """The request in a JSON body; raises Refused, naming what is wrong in one line."""
    try:
        # Much quicker than the standard library, and nested only so deep.
        value = from_json(body)
        if isinstance(value, dict) and len(value) > KEYS:
            raise Refused(f"{len(value)} keys in one request; at most {KEYS} are taken")
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(reversed(found), key=lambda each: len(each["loc"]))  # of a union the furthest branch
        names = [str(part) for part in first["loc"] if part != "str" and "[" not in str(part)]
        place = ".".join(names)
        raise Refused(f"{place or 'body'}: {first['msg']}", param=place or None) from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None


def data_url(url: str, kind: str) -> bytes:
    """Bytes of a base64 data URL; other URLs are refused, so that the server never fetches anything."""
    # Only the beginning is looked at: a pattern over megabytes takes its time.
    head = DATA_URL.match(url[:256])
    if head is None:
        text = f"{kind} {url[:40]!r}: give a data URL (data:{kind}/…;base64,…); nothing is fetched"
        raise Refused(text, param="messages")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError:
        raise Refused(f"{kind}: its base64 cannot be decoded", param="messages") from None


# ---- Answers.


class Answer:
    """One answer: the samples ("choices") of one or several prompts, whole or in pieces.

    requests: ids of the engine's requests, one a prompt. prompts: the ids of each, for callers who ask.
    """

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        requests: Sequence[str],
        tokenizer: Tokenizer,
        model: str,
        template: Template,
        prompts: Sequence[list[int]] = (),
    ) -> None:
        self.prompts = prompts
        self.body, self.tokenizer = body, tokenizer
        self.chat = isinstance(body, ChatRequest)
        self.channels = self.chat and template == "chat"
        """Whether words, thoughts and calls are told apart."""
        self.kind = "chat.completion" if self.chat else "text_completion"
        self.base = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.first = {name: number * body.n for number, name in enumerate(requests)}
        self.done: dict[int, Completion] = {}
        self.tops: dict[int, list[Top]] = defaultdict(list)
        """Number of a choice -> the likeliest tokens in the place of each of its tokens"""
        self.streams: dict[int, ChatStream] = defaultdict(lambda: ChatStream(tokenizer))

    def take(self, event: Event) -> int:
        """Note what an event brings; the number of its choice."""
        index = self.first[event.request_id] + event.index
        if event.completion is not None:
            self.done[index] = event.completion
        if self.body.top_logprobs and not self.body.stream:
            self.tops[index] += [token.top for token in event.tokens]
        return index

    def whole(self) -> bytes:
        """The answer as JSON, choice by choice: one long one would hold the interpreter's lock."""
        choices = [json.dumps(self.choice(index, done)) for index, done in sorted(self.done.items())]
        read = {"prompt_token_ids": self.prompts[0]} if self.chat and self.body.return_token_ids else {}
        head = json.dumps({**self.base, "object": self.kind, "usage": self.usage(), **read})
        return f'{head[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    def choice(self, index: int, done: Completion) -> Record:
        """One sample of a whole answer."""
        tops = self.tops[index] or [()] * len(done.ids)
        choice = self._common(index, done.ids, done.logprobs1, tops, done)
        if not self.chat:
            return {**choice, "text": done.text}
        message = {"role": "assistant", "content": done.text, "refusal": None}

        # Of a chat in channels the ids are read again: the text has lost its markup.
        if self.channels:
            parsed = parse_assistant(done.ids, self.tokenizer).message
            # The engine cuts its own text at a stop string, not the ids.
            ends = [parsed.text.find(stop) for stop in self.body.stop if stop in parsed.text]
            message |= {"content": parsed.text[: min(ends, default=None)], **tool_calls(parsed)}
            choice = reasoned(choice, parsed)
            if parsed.thinking is not None:
                message["reasoning_content"] = parsed.thinking
        return {**choice, "message": message}

    def opening(self) -> str:
        """What a streamed chat begins with: the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "finish_reason": None} for i in range(self.body.n)]
        return "".join(self.chunk([choice]) for choice in choices if self.chat)

    def piece(self, event: Event) -> str:
        """An event of the engine as one of the stream: words without markup; calls come whole, with the last
        event of a sample."""
        index, tokens, done = self.take(event), event.tokens, event.completion
        ids, values, tops = [t.id for t in tokens], [t.logprob1 for t in tokens], [t.top for t in tokens]
        choice = self._common(index, ids, values, tops, done)
        delta = {"content": event.text}
        if not self.chat:
            return self.chunk([{**choice, "text": event.text}])
        if self.channels:
            delta["content"] = ""
            for token in tokens:
                for channel, text in self.streams[index].push(token.id):
                    key = CHANNELS.get(channel)
                    if key is not None:
                        delta[key] = delta.get(key, "") + text
            if done is not None:
                parsed = parse_assistant(done.ids, self.tokenizer).message
                delta, choice = delta | tool_calls(parsed), reasoned(choice, parsed)
        return self.chunk([{**choice, "delta": delta}])

    def chunk(self, choices: list[Record], **more: Any) -> str:
        """A server-sent event."""
        kind = "chat.completion.chunk" if self.chat else self.kind
        return sse({**self.base, "object": kind, "choices": choices, **more})

    def usage(self) -> Record:
        """Tokens read and written; a prompt counts once, however many samples it has."""
        # Samples of one prompt share what was read.
        prompts = {index // self.body.n: done for index, done in self.done.items()}.values()
        read = sum(done.prompt_tokens for done in prompts)
        written = sum(len(done.ids) for done in self.done.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in prompts)},
        }

    def _common(
        self, index: int, ids: list[int], values: list[float], tops: list[Top], done: Completion | None
    ) -> Record:
        """What a choice says whatever the endpoint. values: log-probabilities of the ids. tops: the likeliest
        in the place of each. done: the sample, where it is complete."""
        reason = None if done is None else done.finish_reason
        choice: Record = {"index": index, "finish_reason": "stop" if reason == "cancelled" else reason}
        if self.body.return_token_ids:
            choice["token_ids"] = ids
            if not self.chat:
                choice["prompt_token_ids"] = self.prompts[index // self.body.n]
        if not wants_logprobs(self.body):
            return {**choice, "logprobs": None}
        if not self.chat:
            tokens = [self._name(i) for i in ids]
            # Alternatives are not served: each place has the token that stands there.
            tops_of = [{token: value} for token, value in zip(tokens, values)]
            told = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops_of, "text_offset": None}
            return {**choice, "logprobs": told}
        entries = []
        for one, value, top in zip(ids, values, tops, strict=True):
            others = [self._entry(*other) for other in top]
            entries.append({**self._entry(one, value), "top_logprobs": others})
        return {**choice, "logprobs": {"content": entries}}

    def _name(self, one: int) -> str:
        """How log-probabilities call a token."""
        return f"token_id:{one}" if self.body.return_tokens_as_token_ids else self.tokenizer.decode([one])

    def _entry(self, one: int, value: float) -> Record:
        written = self.tokenizer.decode([one]).encode()
        return {"token": self._name(one), "logprob": value, "bytes": list(written)}


CHANNELS = {"content": "content", "thinking": "reasoning_content"}
"""Channel of the chat form -> key of a streamed answer; calls are no words."""


def wants_logprobs(body: ChatRequest | CompletionRequest) -> bool:
    """Of a chat a truth value asks for them, of a completion any number, 0 too."""
    return body.logprobs is not None and body.logprobs is not False


def sse(value: Record) -> str:
    """A JSON object as one server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def reasoned(choice: Record, message: Message) -> Record:
    """A choice that ends with calls says so."""
    ended = bool(message.calls) and choice["finish_reason"] == "stop"
    return {**choice, "finish_reason": "tool_calls"} if ended else choice


def tool_calls(message: Message) -> Record:
    """{"tool_calls": [...]} in the OpenAI form, or {} for a message without calls."""
    found: Record = {}
    for number, call in enumerate(message.calls):
        function = {"name": call.tool, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        told = {"index": number, "id": f"call_{number + 1}", "type": "function", "function": function}
        found.setdefault("tool_calls", []).append(told)
    return found
