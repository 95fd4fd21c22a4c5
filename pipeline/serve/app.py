"""`earlyfusion serve`: an OpenAI-compatible endpoint over one model directory.

    earlyfusion serve --model runs/nano/model --port 8000
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none \\
        python my_client.py

    GET  /  a page to talk to the model (playground.html)
    GET  /health  /v1/models  /v1/models/{name}  /stats
    POST /v1/chat/completions  /v1/completions        (both with stream: true)
    POST /update_weights_from_disk  {"model_path": ...}, below --weights-from
    POST /page  GET /page/{id}  a page that the model wrote, to be looked at (website.py)

Chat and completions, streamed or whole; tools, where the model speaks the chat form; pictures, video files
and video frames as data URLs. It listens on loopback unless told otherwise, and there serves only loopback
names. SIGTERM or Ctrl-C: no new requests, those in flight get --grace seconds to end.

Errors: 400 what cannot be served, 401 a wrong key, 403 a foreign Host, 404 an unknown model or path, 408 too
slow, 413 too large, 429 the line is full, 503 busy or stopping. There are no CORS headers.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import template_of
from earlyfusion.data.loading.encode import MAX_TEXT_CHARS
from earlyfusion.data.options import Options, verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError, one_line
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Event, Request, RequestError, SamplingParams, TokenPrompt
from earlyfusion.model.hub.config import model_folder, model_name
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.generate_cmd import device_of, dtype_on, model_on
from earlyfusion.pipeline.runtime import keep_freed_memory

try:
    import uvicorn
    from starlette.requests import Request as HttpRequest
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route, Router
except ImportError as error:
    raise UserError(f"serve needs {error.name}: pip install {error.name}") from None

from earlyfusion.pipeline.serve.front import ACCEPTED, Front, guarded, is_loopback
from earlyfusion.pipeline.serve.listen import Listener, page, run_server
from earlyfusion.pipeline.serve.prepare import Preparer, Setup
from earlyfusion.pipeline.serve.protocol import (
    Answer,
    ChatRequest,
    CompletionRequest,
    Limits,
    Refused,
    WeightsRequest,
    read,
    sse,
    wants_logprobs,
)
from earlyfusion.pipeline.serve.website import Website
from earlyfusion.pipeline.serve.worker import EngineStopped, EngineWorker

LAST_WORDS_S = 2
"""Time to send what is left to say after the grace."""
KEEP = 64 * 2**20
"""Bytes of freed memory that the C library keeps for reuse."""
PAGE = 64
"""Tokens in a page of the engine's memory."""


class ServeOptions(Options):
    model: str
    """model directory, or embedded:NAME"""
    name: str = ""
    """name of the model in the API; empty: the run's"""
    question: str = ""
    """what the page says where a message holds pictures or clips alone"""
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
    weights_from: str = ""
    """folder that callers may have new weights read from (/update_weights_from_disk); empty: nobody"""
    grace: int = 30
    """seconds that requests in flight have when the server stops"""


class Service:
    """One model behind the routes: engine, tokenizer, limits. Raises UserError or the loaders' errors."""

    def __init__(self, options: ServeOptions) -> None:
        # Model, its words, and an engine with the memory that was asked for.
        folder = model_folder(options.model)
        model = model_on(folder, options.device)
        self.dtype = dtype_on(device_of(options.device))
        self.tokenizer = Tokenizer.load(folder)
        try:
            engine = Engine(
                model,
                self.tokenizer,
                max_slots=options.slots,
                page_size=PAGE,
                prefix_cache=options.prefix_cache,
                max_pages=options.slots * -(-options.context // PAGE),
                max_waiting=options.queue,
                run_ahead=4,  # a piece of text is not long in coming
            )
        except ValueError as error:
            raise UserError(str(error)) from None

        # Limits follow the memory: more than fits is refused, not queued.
        # What callers may ask for. A body is held as JSON, as bytes and as pictures, each for a while.
        self.name, self.question = options.name or model_name(folder), options.question
        self.samples = {path.stem: path for path in sorted(folder.glob("*.mp4"))}
        self.template = template_of(folder) if options.template == "auto" else options.template
        body = int(options.max_body_mb * 2**20)
        self.limits = Limits(
            body=body,
            held=max(4 * body, 1 << 26),
            characters=min(16 * engine.pools.num_pages * PAGE, MAX_TEXT_CHARS),
            images=options.max_images,
            new_tokens=options.max_new_tokens,
        )
        self.weights_from = Path(options.weights_from).resolve() if options.weights_from else None
        self.worker = EngineWorker(engine, max_open=options.queue)
        self.preparer = Preparer(Setup(self.tokenizer, model.config.vision, self.template))

    # ---- Routes.

    async def health(self, http: HttpRequest) -> Response:
        if self.worker.accepting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopping"}, 503)

    async def stats(self, http: HttpRequest) -> Response:
        return JSONResponse({**self.worker.engine.stats(), "open_requests": len(self.worker.waiting)})

    async def sample(self, http: HttpRequest) -> Response:
        """A clip that lies beside the model, to try it with."""
        path = self.samples.get(http.path_params["name"])
        if path is None:
            raise Refused("no such sample; /v1/models names them", status=404)
        return FileResponse(path, media_type="video/mp4")

    async def models(self, http: HttpRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "earlyfusion"}
        model |= {"question": self.question, "samples": [*self.samples]}
        asked = http.path_params.get("name")
        if asked is None:
            return JSONResponse({"object": "list", "data": [model]})
        self.check_model(asked)
        return JSONResponse(model)

    async def chat(self, http: HttpRequest) -> Response:
        incoming = http.state.incoming
        body = read(ChatRequest, incoming.taken())
        params = self.params(body)
        if body.tools and self.template != "chat":
            text = "tools: this model was not trained on the chat form; fine-tune it with earlyfusion sft"
            raise Refused(text, param="tools", code="unsupported_parameter")
        messages, length = body.conversation(self.limits)
        body.messages.clear()  # the data URLs, which are as large as the body
        prompt = await self.preparer.prompt(messages, length)
        del messages
        incoming.holds(0 if prompt.patches is None else prompt.patches.numel())
        return await self.respond(body, params, [prompt])

    async def completions(self, http: HttpRequest) -> Response:
        body = read(CompletionRequest, http.state.incoming.taken())
        params = self.params(body)
        prompts = [await self.text_prompt(prompt) for prompt in body.prompts(self.limits)]
        return await self.respond(body, params, prompts)

    async def update_weights(self, http: HttpRequest) -> Response:
        """As SGLang has it: what a trainer has left in a folder that both see. Answers under way go on."""
        # Links are followed before anything is compared.
        folder = Path(read(WeightsRequest, http.state.incoming.taken()).model_path).resolve()
        if self.weights_from is None or not folder.is_relative_to(self.weights_from):
            text = "model_path: weights are read from the folder of --weights-from alone"
            raise Refused(text, status=403, param="model_path")
        try:
            new = await asyncio.to_thread(load_model, folder, "cpu", self.dtype)
            weights = new.state_dict()
            version = await self.worker.load(weights)
        except (UserError, ValueError, OSError) as error:
            return JSONResponse({"success": False, "message": one_line(error, 300)}, 400)
        return JSONResponse({"success": True, "message": f"version {version}"})

    # ---- What they share.

    def check_model(self, name: str) -> None:
        """Raises Refused for a model that is not here."""
        if name not in ("", self.name):
            message = f"model {name!r} is not served here; this server has {self.name!r}"
            raise Refused(message, status=404, param="model", code="model_not_found")

    def params(self, body: ChatRequest | CompletionRequest) -> SamplingParams:
        """How to sample; raises Refused and EngineFull for what can be told before a prompt is made."""
        # What costs nothing to see is looked at first.
        self.check_model(body.model)
        most, wanted = self.limits.new_tokens, body.new_tokens
        if wanted is None:
            wanted = min(body.default_new_tokens, most)
        if wanted > most:
            raise Refused(f"max_tokens = {wanted}: at most {most} are served", param="max_tokens")
        self.worker.check_room()
        return SamplingParams(
            max_new_tokens=wanted,
            temperature=body.temperature,
            top_p=body.top_p,
            min_p=body.min_p,
            stop=tuple(body.stop),
            seed=secrets.randbits(31) if body.seed is None else body.seed % 2**31,
            n=body.n,
            ignore_eos=body.ignore_eos,
            logprobs=wants_logprobs(body),
            top_logprobs=body.top_logprobs,
        )

    async def text_prompt(self, prompt: str | list[int]) -> TokenPrompt:
        if isinstance(prompt, str):
            return await self.preparer.prompt(prompt, len(prompt))
        words = self.tokenizer
        if any(not 0 <= i < words.vocab_size or i == words.media_pad_id for i in prompt):
            raise Refused("prompt: some token ids are not text tokens of this model", param="prompt")
        return TokenPrompt(torch.tensor(prompt))

    async def respond(
        self, body: ChatRequest | CompletionRequest, params: SamplingParams, prompts: list[TokenPrompt]
    ) -> Response:
        """The answer, whole or as a stream. A caller who leaves cancels it (front.py), and with it its
        requests."""
        # The noise is of the prompt's number, not of the id: a seed gives the same answer again.
        requests = []
        for number, prompt in enumerate(prompts):
            requests.append(Request(secrets.token_hex(12), prompt, params, noise=f"prompt {number}"))
        read = [prompt.ids.tolist() for prompt in prompts] if body.return_token_ids else []
        answer = Answer(body, [r.id for r in requests], self.tokenizer, self.name, self.template, read)
        events = self.worker.stream(requests)
        if body.stream:
            first = await anext(events)  # errors of the submission become a status, not a broken stream
            # From here on the status is sent: errors become events of the stream.
            return StreamingResponse(pieces(answer, first, events), media_type="text/event-stream")
        async for event in events:
            answer.take(event)
        return Response(await asyncio.to_thread(answer.whole), media_type="application/json")


async def pieces(answer: Answer, first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer."""
    try:
        yield answer.opening() + answer.piece(first)
        async for event in events:
            yield answer.piece(event)
        if answer.body.stream_options.include_usage:
            yield answer.chunk([], usage=answer.usage())
    except (EngineStopped, RequestError) as error:
        yield sse({"error": {"message": str(error), "type": "server_error"}})
    finally:
        await events.aclose()
    yield "data: [DONE]\n\n"


def create_app(service: Service, options: ServeOptions) -> Front:
    """The application for one model. A server that others cannot reach serves loopback names alone."""
    routes = [
        Route("/", page(Path(__file__).with_name("playground.html"))),
        Route("/health", service.health),
        Route("/stats", service.stats),
        Route("/update_weights_from_disk", service.update_weights, methods=["POST"]),
        Route("/sample/{name}", service.sample),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
        *Website().routes,
    ]
    # On a command line everybody on the machine could read it.
    key = options.api_key or os.environ.get("EARLYFUSION_API_KEY") or None
    hosts = None
    if options.allow_host or is_loopback(options.host):
        hosts = frozenset(map(str.lower, options.allow_host))
    elif key is None:
        warning = f"warning: {options.host} can be reached from outside and no API key is set (--api-key)"
        print(warning, file=sys.stderr)
    return Front(Router(routes, redirect_slashes=False), service.limits, key, hosts, options.connections)


# ---- The verb.


class Server(Listener):
    """A listener that takes no new request once it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        words = f"serving {service.name} ({service.template} form) on {{}}/v1\na page to talk to it: {{}}/"
        super().__init__(config, words, self._refuse)
        self.service, self.grace = service, grace

    async def shutdown(self, sockets: Any = None) -> None:
        # Streams still open at the end of the grace get an error
        # event and [DONE] before uvicorn cuts connections.
        asyncio.get_running_loop().call_later(self.grace, self._cut)
        await super().shutdown(sockets=sockets)

    def _cut(self) -> None:
        self.service.preparer.close()
        self.service.worker.cut("the server stopped before this answer was complete")

    def _refuse(self) -> None:
        self.service.worker.accepting = False


@verb
def serve(options: ServeOptions) -> int:
    """Serve until stopped; returns the exit code."""
    keep_freed_memory(KEEP)
    service = Service(options)

    # The protocol class guards connections; uvicorn's own limits stay wide.
    config = uvicorn.Config(
        create_app(service, options),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        ws="none",
        lifespan="off",
        http=guarded(options.connections),
        backlog=ACCEPTED,
        timeout_graceful_shutdown=options.grace + LAST_WORDS_S,
    )
    server = Server(config, service, options.grace)
    try:
        run_server(server)
    finally:
        service.preparer.close()
        service.worker.stop()
    return EXIT_OK
