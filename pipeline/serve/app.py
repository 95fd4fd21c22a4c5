"""The OpenAI-compatible application: routes, limits and errors, over an EngineWorker.

    GET  /health  /v1/models  /v1/models/{name}  /stats
    POST /v1/chat/completions  /v1/completions        (both with stream: true)

Errors have OpenAI's form {"error": {"message", "type", "param", "code"}}: 400 what cannot be served, 401 a
wrong key, 403 a foreign Host, 404 an unknown model or path, 408 too slow, 413 too large, 429 the line is
full, 503 busy or stopping. What stands before the routes is in serve_front.py, tokenising and decoding in
serve_prepare.py. There are no CORS headers.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from earlyfusion.data.errors import DataError
from earlyfusion.model.engine.request import (
    EngineFull,
    Request,
    RequestError,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.pipeline.serve.answer import Answer, Service
from earlyfusion.pipeline.serve.engine import EngineStopped
from earlyfusion.pipeline.serve.front import Front, error_response
from earlyfusion.pipeline.serve.prepare import told
from earlyfusion.pipeline.serve.schema import ChatRequest, CompletionRequest, Refused


def create_app(service: Service) -> FastAPI:
    """The application for one model."""
    app = FastAPI(title="earlyfusion", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        Front, limits=service.limits, key=service.api_key, hosts=service.hosts, most=service.connections
    )
    _handle_errors(app)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = "ok" if service.worker.accepting else "stopping"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {**service.worker.engine.stats(), "open_requests": service.worker.open_requests}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service.name)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _known(name, service)
        return _model(service.name)

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest) -> Any:
        asked = http.state.asked
        body = ChatRequest.read(asked.body, service.limits)
        asked.body = None
        _known(body.model, service)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        _check_count(wanted, service)
        service.worker.check_room()
        messages, length = body.conversation(service.limits)
        body.messages.clear()  # the data URLs, which are as large as the body
        prompt = await service.preparer.prompt(messages, length)
        del messages
        asked.holds(0 if prompt.patches is None else prompt.patches.numel())
        request = _request(prompt, body, service, wanted, body.logprobs)
        return await Answer(service, "chat.completion", [request], body, chat=True).respond()

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Any:
        body = CompletionRequest.read(http.state.asked.body, service.limits)
        _known(body.model, service)
        wanted = 16 if body.max_tokens is None else body.max_tokens
        _check_count(wanted, service)
        service.worker.check_room()
        prompts = [await _text_prompt(prompt, service) for prompt in body.prompts(service.limits)]
        known = body.logprobs is not None
        requests = [_request(prompt, body, service, wanted, known, i) for i, prompt in enumerate(prompts)]
        return await Answer(service, "text_completion", requests, body, chat=False).respond()

    return app


def _handle_errors(app: FastAPI) -> None:
    async def refused(_: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(error if isinstance(error, Refused) else Refused(told(error)))

    async def unknown(_: HttpRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(Refused(str(error.detail), status=error.status_code))

    async def full(_: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(Refused(str(error), status=429, code="queue_full"))

    async def stopped(_: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(Refused(str(error), status=503, code="stopping"))

    async def broken(_: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(Refused(f"the server failed: {type(error).__name__}", status=500))

    for kind, handler in (
        (Refused, refused),
        (RequestError, refused),
        (DataError, refused),
        (RecursionError, refused),
        (OverflowError, refused),
        (HTTPException, unknown),
        (EngineFull, full),
        (EngineStopped, stopped),
        (Exception, broken),
    ):
        app.add_exception_handler(kind, handler)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "earlyfusion"}


def _known(name: str, service: Service) -> None:
    if name not in ("", service.name):
        message = f"model {name!r} is not served here; this server has {service.name!r}"
        raise Refused(message, status=404, param="model", code="model_not_found")


def _check_count(wanted: int | None, service: Service) -> None:
    if wanted is not None and wanted > service.limits.new_tokens:
        text = f"max_tokens = {wanted}: at most {service.limits.new_tokens} are served"
        raise Refused(text, param="max_tokens")


async def _text_prompt(prompt: str | list[int], service: Service) -> Any:
    if isinstance(prompt, str):
        return await service.preparer.prompt(prompt, len(prompt))
    tokenizer = service.tokenizer
    wrong = [i for i in prompt if not 0 <= i < tokenizer.vocab_size or i == tokenizer.media_pad_id][:4]
    if wrong:
        shown = [i if abs(i) < 10**12 else "..." for i in wrong]
        raise Refused(f"prompt: token ids {shown} are not text tokens of this model", param="prompt")
    return TokenPrompt(torch.tensor(prompt))


def _request(
    prompt: Any,
    body: ChatRequest | CompletionRequest,
    service: Service,
    wanted: int | None,
    logprobs: bool,
    number: int = 0,
) -> Request:
    limits = service.limits
    count = min(limits.default_new_tokens, limits.new_tokens) if wanted is None else wanted
    params = SamplingParams(
        max_new_tokens=count,
        temperature=body.temperature,
        top_p=body.top_p,
        min_p=body.min_p,
        stop=body.stops,
        seed=secrets.randbits(31) if body.seed is None else body.seed % 2**31,
        n=body.n,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
    )
    return Request(secrets.token_hex(12), prompt, params, noise=f"prompt {number}")
