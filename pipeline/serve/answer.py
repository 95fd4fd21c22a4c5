"""One HTTP answer of the endpoint: the samples of one or several prompts, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response, StreamingResponse

from earlyfusion.data.chat.template import Template
from earlyfusion.data.chat.tokens import ChatStream, parse_assistant
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.request import Completion, Event, Request, RequestError
from earlyfusion.pipeline.serve.engine import EngineStopped, EngineWorker
from earlyfusion.pipeline.serve.prepare import Preparer
from earlyfusion.pipeline.serve.schema import Common, Limits


@dataclass(frozen=True)
class Service:
    """Everything the routes need."""

    worker: EngineWorker
    preparer: Preparer
    tokenizer: Tokenizer
    name: str
    limits: Limits
    template: Template = "chat"
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    """Names that are served (the Host header), None for all."""
    connections: int = 256


class Answer:
    """One HTTP answer: the samples of one or several prompts, whole or streamed."""

    def __init__(
        self, service: Service, kind: str, requests: list[Request], body: Common, *, chat: bool
    ) -> None:
        self.service, self.kind, self.requests, self.body, self.chat = service, kind, requests, body, chat
        self.base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.name,
        }
        self.first = {request.id: number * body.n for number, request in enumerate(requests)}
        self.done: list[tuple[int, Completion]] = []
        self.streams: dict[int, ChatStream] = {}

    async def respond(self) -> Any:
        """Whole, or as a stream. A caller who leaves cancels it (serve_front.py), and with it its
        requests."""
        events = self._events()
        if self.body.stream:
            first = await anext(events)  # errors of the submission become a status, not a broken stream
            return StreamingResponse(self._sse(first, events), media_type="text/event-stream")
        async for _ in events:
            pass
        return Response(await asyncio.to_thread(self._whole), media_type="application/json")

    def _whole(self) -> bytes:
        """The answer as JSON, choice by choice: one long one would hold the interpreter's lock."""
        done = sorted(self.done, key=lambda d: d[0])
        choices = [json.dumps(self._choice(index, completion)) for index, completion in done]
        head = json.dumps({**self.base, "object": self.kind, "usage": self._usage()})
        return f'{head[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice index, event) of all requests as they come."""
        merged: asyncio.Queue[Any] = asyncio.Queue()

        async def pump(request: Request) -> None:
            try:
                async for event in self.service.worker.stream(request):
                    merged.put_nowait((self.first[request.id] + event.index, event))
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(request)) for request in self.requests]
        left = len(tasks)
        try:
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                    continue
                if item[1].completion is not None:
                    self.done.append((item[0], item[1].completion))
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sse(
        self, first: tuple[int, Event], events: AsyncIterator[tuple[int, Event]]
    ) -> AsyncIterator[str]:
        try:
            if self.chat:
                for index in range(self.body.n):
                    yield self._chunk(
                        [
                            {
                                "index": index,
                                "delta": {"role": "assistant", "content": ""},
                                "finish_reason": None,
                            }
                        ]
                    )
            yield self._chunk([self._delta(*first)])
            async for index, event in events:
                yield self._chunk([self._delta(index, event)])
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield self._chunk([], usage=self._usage())
        except (EngineStopped, RequestError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'server_error'}})}\n\n"
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self.chat else self.kind
        return f"data: {json.dumps({**self.base, 'object': kind, 'choices': choices, **more})}\n\n"

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        finish = None if event.completion is None else _finish(event.completion)
        ids, values = [t.id for t in event.tokens], [t.logprob1 for t in event.tokens]
        logprobs = self._logprobs(ids, values)
        if self.chat:
            delta = (
                self._chat_delta(index, event) if self.service.template == "chat" else {"content": event.text}
            )
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": finish}

    def _chat_delta(self, index: int, event: Event) -> dict[str, Any]:
        """The words of one event without markup, by channel; calls come whole, with the last event of a
        sample."""
        stream = self.streams.setdefault(index, ChatStream(self.service.tokenizer))
        pieces = [piece for token in event.tokens for piece in stream.push(token.id)]
        names = {"content": "content", "thinking": "reasoning_content"}
        delta: dict[str, Any] = {"content": ""}
        for channel, text in pieces:
            if channel in names:
                delta[names[channel]] = delta.get(names[channel], "") + text
        if event.completion is not None:
            delta |= chat_calls(event.completion.ids, self.service.tokenizer)
        return delta

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        common = {
            "index": index,
            "finish_reason": _finish(completion),
            "logprobs": self._logprobs(completion.ids, completion.logprobs1),
        }
        if self.chat and self.service.template == "chat":
            parsed = parse_assistant(completion.ids, self.service.tokenizer).message
            message = {"role": "assistant", "content": self._stopped(parsed.text), "refusal": None}
            message |= {"reasoning_content": parsed.thinking} if parsed.thinking is not None else {}
            return {**common, "message": message | chat_calls(completion.ids, self.service.tokenizer)}
        if self.chat:
            return {**common, "message": {"role": "assistant", "content": completion.text, "refusal": None}}
        return {**common, "text": completion.text}

    def _stopped(self, text: str) -> str:
        """The text up to the first stop string: the engine cuts its own text, not the ids."""
        ends = [text.find(stop) for stop in self.body.stops if stop in text]
        return text[: min(ends)] if ends else text

    def _logprobs(self, ids: list[int], values: list[float]) -> dict[str, Any] | None:
        if not self.requests[0].params.logprobs:
            return None
        tokens = [self.service.tokenizer.decode([i]) for i in ids]
        if self.chat:
            return {
                "content": [
                    {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, value in zip(tokens, values)
                ]
            }
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}

    def _usage(self) -> dict[str, Any]:
        by_prompt = {index // self.body.n: completion for index, completion in self.done}
        read = sum(completion.prompt_tokens for completion in by_prompt.values())
        written = sum(len(completion.ids) for _, completion in self.done)
        cached = sum(completion.cached_tokens for completion in by_prompt.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def chat_calls(ids: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"tool_calls": [...]} in the OpenAI form, or {} for a message without calls."""
    calls = parse_assistant(ids, tokenizer).message.calls
    if not calls:
        return {}
    listed = []
    for number, call in enumerate(calls):
        function = {"name": call.tool, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        listed.append({"index": number, "id": f"call_{number + 1}", "type": "function", "function": function})
    return {"tool_calls": listed}


def _finish(completion: Completion) -> str:
    return "stop" if completion.finish_reason in ("cancelled", "error") else completion.finish_reason
