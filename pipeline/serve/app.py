"""`earlyfusion serve`: an OpenAI-compatible endpoint over one model directory.

    earlyfusion serve --model runs/nano/model --port 8000
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_client.py

    GET  /health  /v1/models  /v1/models/{name}  /stats
    POST /v1/chat/completions  /v1/completions        (both with stream: true)

Chat and completions, streamed or whole; pictures, video files and video frames as data URLs. It listens on
loopback unless told otherwise, and there serves only loopback names. SIGTERM or Ctrl-C: no new requests,
those in flight get --grace seconds to end.

Errors: 400 what cannot be served, 401 a wrong key, 403 a foreign Host, 404 an unknown model or path, 408 too
slow, 413 too large, 429 the line is full, 503 busy or stopping. There are no CORS headers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Template, template_of
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import MAX_TEXT_CHARS
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import (
    EngineFull,
    Event,
    Request,
    RequestError,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.model.hub.config import model_folder, model_name
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.runtime import keep_freed_memory

try:
    import uvicorn
    from fastapi import Depends, FastAPI
    from fastapi import Request as HttpRequest
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise UserError(f"serve needs {error.name}: pip install {error.name}") from None

from earlyfusion.pipeline.serve.front import (
    ACCEPTED,
    QUEUED,
    Front,
    Incoming,
    error_response,
    guarded,
    is_loopback,
)
from earlyfusion.pipeline.serve.prepare import Preparer, Setup, for_client
from earlyfusion.pipeline.serve.protocol import (
    Answer,
    ChatRequest,
    CompletionRequest,
    Limits,
    Refused,
    read,
    sse,
)
from earlyfusion.pipeline.serve.worker import EngineStopped, EngineWorker

LAST_WORDS_S = 2
"""Time to send what is left to say after the grace."""
KEEP = 64 * 2**20
"""Bytes of freed memory that the C library keeps for reuse."""
PAGE = 64
"""Tokens in a page of the engine's memory."""


@dataclass(frozen=True)
class Service:
    """Everything the routes need. hosts: names that are served (the Host header), None for all."""

    worker: EngineWorker
    preparer: Preparer
    tokenizer: Tokenizer
    name: str
    limits: Limits
    template: Template = "chat"
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    connections: int = 256

    def check_model(self, name: str) -> None:
        """Raises Refused for a model that is not here."""
        if name not in ("", self.name):
            message = f"model {name!r} is not served here; this server has {self.name!r}"
            raise Refused(message, status=404, param="model", code="model_not_found")


def incoming_of(http: HttpRequest) -> Incoming:
    """What the front read of this request."""
    return http.state.incoming


def request_of(kind: type[ChatRequest | CompletionRequest]) -> Any:
    """The dependency that reads a body. FastAPI's own would keep the bytes until the answer is complete."""

    def taken(incoming: Annotated[Incoming, Depends(incoming_of)]) -> Any:
        body, incoming.body = incoming.body, b""
        return read(kind, body)

    return Depends(taken)


def create_app(service: Service) -> FastAPI:
    """The application for one model."""
    app = FastAPI(title="earlyfusion", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        Front, limits=service.limits, key=service.api_key, hosts=service.hosts, most=service.connections
    )
    for kind in (HTTPException, EngineFull, EngineStopped, Exception, *CLIENTS):
        app.add_exception_handler(kind, _explain)
    model = {"id": service.name, "object": "model", "created": 0, "owned_by": "earlyfusion"}

    @app.get("/health")
    async def health() -> JSONResponse:
        if service.worker.accepting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopping"}, status_code=503)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {**service.worker.engine.stats(), "open_requests": service.worker.open_requests}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model

    @app.post("/v1/chat/completions")
    async def chat(
        body: Annotated[ChatRequest, request_of(ChatRequest)],
        incoming: Annotated[Incoming, Depends(incoming_of)],
    ) -> Response:
        params = _params(body, service)
        messages, length = body.conversation(service.limits)
        body.messages.clear()  # the data URLs, which are as large as the body
        prompt = await service.preparer.prompt(messages, length)
        del messages
        incoming.holds(0 if prompt.patches is None else prompt.patches.numel())
        return await _respond(service, body, params, [prompt])

    @app.post("/v1/completions")
    async def completions(
        body: Annotated[CompletionRequest, request_of(CompletionRequest)],
    ) -> Response:
        params = _params(body, service)
        prompts = [await _text_prompt(prompt, service) for prompt in body.prompts(service.limits)]
        return await _respond(service, body, params, prompts)

    return app


CLIENTS = (Refused, RequestError, DataError, RecursionError, OverflowError)
"""Errors that are the caller's."""


async def _explain(_: HttpRequest, error: Exception) -> JSONResponse:
    """The answer to a request that failed."""
    if isinstance(error, Refused):
        refused = error
    elif isinstance(error, HTTPException):
        refused = Refused(str(error.detail), status=error.status_code)
    elif isinstance(error, EngineFull):
        refused = Refused(str(error), status=429, code="queue_full")
    elif isinstance(error, EngineStopped):
        refused = Refused(str(error), status=503, code="stopping")
    elif isinstance(error, CLIENTS):
        refused = Refused(for_client(error))
    else:
        refused = Refused(f"the server failed: {type(error).__name__}", status=500)
    return error_response(refused)


def _params(body: ChatRequest | CompletionRequest, service: Service) -> SamplingParams:
    """How to sample; raises Refused and EngineFull for what can be told before a prompt is made."""
    service.check_model(body.model)

    # Before any work: a full line is told at once.
    most, wanted = service.limits.new_tokens, body.new_tokens
    if wanted is not None and wanted > most:
        raise Refused(f"max_tokens = {wanted}: at most {most} are served", param="max_tokens")
    service.worker.check_room()
    return SamplingParams(
        max_new_tokens=min(body.default_new_tokens, most) if wanted is None else wanted,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        stop=tuple(body.stop),
        seed=secrets.randbits(31) if body.seed is None else body.seed % 2**31,
        n=body.n,
        ignore_eos=body.ignore_eos,
        logprobs=body.wants_logprobs,
    )


async def _text_prompt(prompt: str | list[int], service: Service) -> TokenPrompt:
    if isinstance(prompt, str):
        return await service.preparer.prompt(prompt, len(prompt))
    tokenizer = service.tokenizer
    wrong = [i for i in prompt if not 0 <= i < tokenizer.vocab_size or i == tokenizer.media_pad_id][:4]
    if wrong:
        shown = [i if abs(i) < 10**12 else "..." for i in wrong]
        raise Refused(f"prompt: token ids {shown} are not text tokens of this model", param="prompt")
    return TokenPrompt(torch.tensor(prompt))


async def _respond(
    service: Service,
    body: ChatRequest | CompletionRequest,
    params: SamplingParams,
    prompts: Sequence[TokenPrompt],
) -> Response:
    """The answer, whole or as a stream. A caller who leaves cancels it (front.py), and with it its
    requests."""
    # The noise is of the prompt's number, not of the id: a seed gives the same answer again.
    requests = [
        Request(secrets.token_hex(12), prompt, params, noise=f"prompt {number}")
        for number, prompt in enumerate(prompts)
    ]
    answer = Answer(body, [r.id for r in requests], service.tokenizer, service.name, service.template)
    events = service.worker.stream(requests)
    if body.stream:
        first = await anext(events)  # errors of the submission become a status, not a broken stream
        return StreamingResponse(_pieces(answer, first, events), media_type="text/event-stream")
    async for event in events:
        answer.take(event)
    return Response(await asyncio.to_thread(answer.whole), media_type="application/json")


async def _pieces(answer: Answer, first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer."""
    try:
        yield answer.opening() + answer.piece(first)
        async for event in events:
            yield answer.piece(event)
        options = answer.body.stream_options
        if options is not None and options.include_usage:
            yield answer.chunk([], usage=answer.usage())
    except (EngineStopped, RequestError) as error:
        yield sse({"error": {"message": str(error), "type": "server_error"}})
    finally:
        await events.aclose()
    yield "data: [DONE]\n\n"


# ---- The verb.


class ServeOptions(Options):
    model: str
    """model directory, or embedded:NAME"""
    name: str = ""
    """name of the model in the API; empty: the run's"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(8000, ge=0, lt=65536)
    """port; 0 takes a free one"""
    api_key: str = ""
    """clients must send it as bearer token; better given as EARLYFUSION_API_KEY"""
    template: Literal["auto", "chat", "qa"] = "auto"
    """form of the messages; auto: as trained"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    slots: int = 16
    """samples decoded at a time"""
    context: int = 4096
    """memory for this many tokens per slot, shared by all slots"""
    queue: int = 256
    """open requests; more are refused with 429"""
    prefix_cache: int = 16
    """checkpoints of shared beginnings; 0: off"""
    connections: PositiveInt = 256
    """open connections; idle ones give way, more are refused with 503"""
    allow_host: list[str] = []
    """serve this Host (also); loopback names always"""
    max_body_mb: float = 32.0
    """largest request"""
    max_images: int = 64
    """most pictures and frames of a request"""
    max_new_tokens: int = 4096
    """longest answer, in tokens"""
    grace: int = 30
    """seconds that requests in flight have when the server stops"""


def build_service(options: ServeOptions) -> Service:
    """Model, engine and limits as the options say. Raises UserError or the loaders' errors."""
    # The model, its words, and an engine with the memory that was asked for.
    folder = model_folder(options.model)
    model = load_model(folder, device=device_of(options.device)).eval()
    tokenizer = Tokenizer.load(folder)
    tokenizer.cached_texts = 1024  # strangers send them
    try:
        engine = Engine(
            model,
            tokenizer,
            max_slots=options.slots,
            page_size=PAGE,
            prefix_cache=options.prefix_cache,
            max_pages=options.slots * -(-options.context // PAGE),
            max_waiting=options.queue,
            run_ahead=4,  # a piece of text is not long in coming
        )
    except ValueError as error:
        raise UserError(str(error)) from None

    # What callers may do: a server that others cannot reach serves loopback names alone.
    template = template_of(folder) if options.template == "auto" else options.template
    body = int(options.max_body_mb * 2**20)
    restricted = options.allow_host or is_loopback(options.host)
    return Service(
        worker=EngineWorker(engine, max_open=options.queue),
        preparer=Preparer(Setup(tokenizer, model.config.vision, template)),
        tokenizer=tokenizer,
        name=options.name or model_name(folder),
        template=template,
        api_key=options.api_key or os.environ.get("EARLYFUSION_API_KEY") or None,
        hosts=frozenset(map(str.lower, options.allow_host)) if restricted else None,
        connections=options.connections,
        limits=Limits(
            body=body,
            held=max(4 * body, 1 << 26),
            characters=min(16 * engine.pools.num_pages * PAGE, MAX_TEXT_CHARS),
            images=options.max_images,
            new_tokens=options.max_new_tokens,
        ),
    )


class Server(uvicorn.Server):
    """uvicorn's server that says where it listens, takes no new request once it is told to stop, and ends
    with code 0."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        for server in getattr(self, "servers", []):
            for bound in server.sockets:
                with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
                    same.listen(QUEUED)
                host, port = bound.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                form = f"{self.service.name} ({self.service.template} form)"
                print(f"serving {form} on http://{shown}:{port}/v1", flush=True)

    async def shutdown(self, sockets: Any = None) -> None:
        # Streams still open at the end of the grace get an error
        # event and [DONE] before uvicorn cuts connections.
        asyncio.get_running_loop().call_later(self.grace, self._cut)
        await super().shutdown(sockets=sockets)

    def _cut(self) -> None:
        self.service.preparer.close()
        self.service.worker.cut()

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Without uvicorn's, which raises the signal again at the end.
        self.force_exit = not self.service.worker.accepting and sig == signal.SIGINT  # asked a second time
        self.service.worker.drain()
        self.should_exit = True


@verb
def serve(options: ServeOptions) -> int:
    """Serve until stopped; returns the exit code."""
    keep_freed_memory(KEEP)
    service = build_service(options)
    if not is_loopback(options.host) and service.api_key is None:
        print(
            f"warning: {options.host} can be reached from outside and no API key is set (--api-key)",
            file=sys.stderr,
        )

    # The protocol class guards connections; uvicorn's own limits stay wide.
    config = uvicorn.Config(
        create_app(service),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        ws="none",
        http=guarded(options.connections),
        backlog=ACCEPTED,
        timeout_graceful_shutdown=options.grace + LAST_WORDS_S,
    )
    server = Server(config, service, options.grace)
    try:
        server.run()
    except (KeyboardInterrupt, SystemExit):  # uvicorn leaves this way when it cannot listen
        pass
    finally:
        service.preparer.close()
        service.worker.stop()
    if not server.started:
        raise UserError(
            f"could not listen on {options.host}:{options.port}; is the port in use? try --port 0"
        )
    return EXIT_OK
