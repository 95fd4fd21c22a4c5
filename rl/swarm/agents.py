"""Who speaks in a swarm: a served model, a model of this machine's engine, or a script; and how a sub-agent
works.

    speaker = Endpoint("http://localhost:8000/v1")
    report = await work(speaker, "You search.", "Which page names X?", tools, Limits(steps=8), trace, None)

A speaker answers messages with one message of the assistant. A sub-agent is a conversation of its own: its
system prompt, its task, the tools of the library, until it answers without a call or one of its limits ends
it. Whatever it writes is text to whoever reads it: markers in it are no markup.
"""

import asyncio
import inspect
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message, Template, ToolCall, tools_message
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.models.base import EndpointModel
from earlyfusion.eval.models.tokens import content_parts
from earlyfusion.kernels.aside import aside
from earlyfusion.kernels.errors import did_you_mean, one_line
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.serve.worker import EngineWorker
from earlyfusion.rl.swarm.spans import Trace

MOST_CHARS = 20_000
"""Characters of one tool's output, or of one report, that anybody is shown."""
MOST_CALLS = 8
"""Calls of one message of a sub-agent that are run."""
Tool = Callable[..., Any]


class Said(NamedTuple):
    """A message of the assistant, tokens read and written (0 where nobody counts)."""

    message: Message
    read: int = 0
    written: int = 0


class Speaker(Protocol):
    """Answers messages; `name` stands in traces."""

    name: str

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said: ...


@dataclass(frozen=True)
class Limits:
    """What one sub-agent may spend: messages, written tokens, seconds by the clock."""

    steps: int = 8
    tokens: int = 4096
    seconds: float = 120.0


@dataclass(frozen=True)
class Report:
    """What came of an assignment. finished: it answered by itself; why: what ended it otherwise."""

    text: str
    steps: int
    tokens: int
    finished: bool
    why: str = ""


class Scripted:
    """A function of the messages, a coroutine or not, that returns text, (tool, arguments) calls in a list,
    or a Message."""

    def __init__(self, function: Callable[[Sequence[Message]], Any], name: str = "script") -> None:
        self.function, self.name = function, name

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker."""
        # A plain function may hang; in a thread it costs its own assignment alone.
        plain = not inspect.iscoroutinefunction(self.function)
        found = await aside(self.function, messages) if plain else self.function(messages)
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, str):
            found = Message("assistant", (Text(found),))
        elif isinstance(found, list):
            found = Message("assistant", (), calls=tuple(ToolCall(tool, given) for tool, given in found))
        return Said(found, 0, len(found.text.split()))


class Endpoint:
    """A model behind an OpenAI-compatible URL; requests wait in threads, any number at a time."""

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 120.0) -> None:
        self.client = EndpointModel(url, model, timeout_s=timeout_s)
        self.name = self.client.name

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker. Raises EvalError where the server gives no answer."""
        body: Record = {"messages": [*map(openai_message, messages)], "max_tokens": most_tokens}
        # As a model of this machine: the likeliest token.
        body["temperature"] = 0.0
        if tools:
            body["tools"] = list(tools)
        answer = await asyncio.to_thread(self.client.request, "/chat/completions", body)
        choices = answer.get("choices") or [{}]
        told, usage = choices[0].get("message") or {}, answer.get("usage") or {}
        calls = []
        for call in told.get("tool_calls") or ():
            inner = call.get("function") or {}
            try:
                given = json.loads(inner.get("arguments") or "{}")
                calls.append(ToolCall(str(inner.get("name")), given if isinstance(given, dict) else {}))
            # Arguments that are no JSON, a name that is none: the model is told, not the run ended.
            except Exception as error:
                calls.append(ToolCall("malformed", {"error": one_line(error, 200)}))
        text = told.get("content")
        content = (Text(text),) if isinstance(text, str) and text else ()
        message = Message("assistant", content, calls=tuple(calls))
        return Said(message, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def openai_message(message: Message) -> Record:
    """A message in the OpenAI form, pictures as data URIs."""
    seen = any(isinstance(part, Image) for part in message.content)
    made: Record = {"role": message.role}
    made["content"] = content_parts(message.content) if seen else message.text
    if message.role == "tool":
        made["tool_call_id"] = f"call_{message.index}"
    if message.calls:
        made["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(message.calls, 1)
        ]
    return made


class Local:
    """A model of this machine: all that is said at a time is decoded in one batch. temperature 0 takes the
    likeliest token. template: the form that the model was trained on."""

    def __init__(
        self,
        model: NativeFusion,
        tokenizer: Tokenizer,
        *,
        name: str = "local",
        slots: int = 16,
        most_tokens: int = 8192,
        temperature: float = 0.0,
        template: Template = "chat",
    ) -> None:
        self.model, self.tokenizer, self.name, self.temperature = model, tokenizer, name, temperature
        self.template = template
        page = 16
        engine = Engine(
            model, tokenizer, max_slots=slots, page_size=page, max_pages=slots * (most_tokens // page + 1)
        )
        self.most_tokens, self.worker = most_tokens, EngineWorker(engine, max_open=10_000)
        self._numbers = itertools.count()

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker. Raises RequestError for a conversation that is longer than the engine's memory."""
        told = [tools_message(list(tools)), *messages] if tools else list(messages)
        prompt = encode_chat(told, self.tokenizer, self.model.config.vision, template=self.template)
        room = max(1, self.most_tokens - len(prompt.ids) - 1)
        params = SamplingParams(min(most_tokens, room), self.temperature)
        request = Request(f"agent-{next(self._numbers)}", prompt, params, pieces=False)
        ids: list[int] = []
        async for event in self.worker.stream([request]):
            if event.completion is not None:
                ids = list(event.completion.ids)
        message = parse_assistant(ids, self.tokenizer).message
        if self.template == "qa":
            message = Message("assistant", (Text(self.tokenizer.decode(ids, skip_special=True).strip()),))
        return Said(message, len(prompt.ids), len(ids))

    def close(self) -> None:
        """Stop the engine's thread."""
        self.worker.stop()


def shown(value: Any) -> tuple[Segment, ...]:
    """What a tool returned as content: a picture, or text of at most MOST_CHARS."""
    if isinstance(value, PILImage.Image):
        return (Image(value),)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS]} ... ({len(text):,} characters, the first {MOST_CHARS:,} shown)"
    return (Text(text, 0.0),)


async def call_tool(
    tools: Mapping[str, Tool], call: ToolCall, number: int, trace: Trace, parent: int | None
) -> Message:
    """The tool message of a call; a mistake is told in one line."""
    with trace.span("execute_tool", call.tool, parent, **{"gen_ai.tool.name": call.tool}) as span:
        if call.tool not in tools:
            value: Any = f"no tool {call.tool!r}; {did_you_mean(call.tool, tools)}"
            if call.tool == "malformed":
                value = f"the call could not be read: {call.arguments.get('error', '')}"
            span.about["error.type"] = "unknown_tool"
        else:
            try:
                inspect.signature(tools[call.tool]).bind(**call.arguments)
                value = tools[call.tool](**call.arguments)
                value = await value if isinstance(value, Awaitable) else value
            except Exception as error:
                span.about["error.type"] = type(error).__name__
                value = one_line(f"{type(error).__name__}: {error}", 300)
    return Message("tool", shown(value), tool=call.tool, index=number)


async def work(
    speaker: Speaker,
    system: str,
    task: str,
    tools: Mapping[str, Tool],
    declared: Sequence[Record],
    limits: Limits,
    trace: Trace,
    span: int | None,
) -> Report:
    """A sub-agent's conversation, to its end or its limits. What its speaker raises ends it, told in the
    report."""
    messages = [Message("system", (Text(system, 0.0),))] if system else []
    messages.append(Message("user", (Text(task, 0.0),)))
    steps = tokens = 0

    async def converse() -> Report:
        nonlocal steps, tokens
        while steps < limits.steps and tokens < limits.tokens:
            with trace.span("chat", speaker.name, span) as one:
                said = await speaker.say(messages, declared, limits.tokens - tokens)
                one.about["gen_ai.usage.input_tokens"] = said.read
                one.about["gen_ai.usage.output_tokens"] = said.written
            steps, tokens = steps + 1, tokens + said.written
            if not said.message.calls:
                return Report(said.message.text[:MOST_CHARS], steps, tokens, True)
            messages.append(said.message)
            for number, call in enumerate(said.message.calls, 1):
                if number > MOST_CALLS:
                    note = (Text(f"not run: at most {MOST_CALLS} calls in one message", 0.0),)
                    messages.append(Message("tool", note, tool=call.tool, index=number))
                    continue
                messages.append(await call_tool(tools, call, number, trace, span))
        spent = f"{steps} steps" if steps >= limits.steps else f"{tokens} tokens"
        return Report("", steps, tokens, False, f"no answer within {spent}")

    try:
        return await asyncio.wait_for(converse(), limits.seconds)
    except TimeoutError:
        return Report("", steps, tokens, False, f"no answer within {limits.seconds:g} s")
    except Exception as error:  # a server that is away, a prompt that is too long
        return Report("", steps, tokens, False, one_line(f"{type(error).__name__}: {error}", 300))
