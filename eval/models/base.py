"""What --model may be: a model directory of ours, hf:PATH (any transformers causal LM, also GGUF), or
http(s)://...: an OpenAI-compatible endpoint, /v1/completions for text, /v1/chat/completions for pictures and
with --chat.

An endpoint is asked for answers alone: hardly a server tells the log-probabilities of a prompt. The key,
where one is needed, is read from the environment variable OPENAI_API_KEY and is never written anywhere.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import torch

from earlyfusion.eval.models.engine import load_own
from earlyfusion.eval.models.tokens import content_parts, cut_at, has_media
from earlyfusion.eval.protocol import EvalError, GenerateRequest, Generation, Model, prompt_text
from earlyfusion.kernels.files import Record
from earlyfusion.model.hub.config import model_folder

TRIES, FIRST_WAIT_S, TIMEOUT_S = 5, 0.5, 600.0
MAX_BYTES = 1 << 24
"""Most bytes of a server's answer."""
RETRIED = {408, 409, 429, 500, 502, 503, 504}


class EndpointModel:
    """url: up to and with /v1. model: the name to ask for; None takes the server's
    first. concurrent: requests in flight. chat: prompts as the user's message."""

    capabilities = frozenset({"text", "image", "generate"})
    max_length = None

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        concurrent: int = 8,
        chat: bool = False,
        tries: int = TRIES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.chat, self.pool = chat, ThreadPoolExecutor(concurrent)
        self.tries, self.timeout_s = tries, timeout_s
        if model is None:
            listed = self.request("/models").get("data")
            if not listed:
                raise EvalError(f"{self.url}/models lists no model; give its name with --endpoint-model")
            model = str(listed[0]["id"])
        self.name = model

    def request(self, path: str, body: Record | None = None) -> Record:
        """The JSON answer; a server that is busy or away is asked again, a little later each time. path:
        below /v1, or a whole address."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        # A request with a body is a POST.
        data = json.dumps({"model": self.name, **body}).encode() if body else None
        url = path if "://" in path else self.url + path
        request = urllib.request.Request(url, data=data, headers=headers)

        for attempt in range(self.tries):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    # Nobody controls the server: what it sends is bounded.
                    raw = answer.read(MAX_BYTES + 1)
                if len(raw) > MAX_BYTES:
                    problem = f"the answer is larger than {MAX_BYTES >> 20} MiB"
                    break
                found: Record = json.loads(raw)
                return found
            except urllib.error.HTTPError as error:
                text = " ".join(error.read(400).decode("utf-8", "replace").split())
                problem = f"HTTP {error.code}: {text}"
                if error.code not in RETRIED:
                    break
            except OSError as error:  # no connection, or a time limit
                problem = f"no answer ({error}); is the server running?"
            except (ValueError, RecursionError):
                problem = "the answer is not JSON; is this an OpenAI-compatible URL?"
                break
            # Twice as long each time: a busy server is not helped by more requests.
            if attempt + 1 < self.tries:
                time.sleep(FIRST_WAIT_S * 2**attempt)
        raise EvalError(f"{url}: {problem}")

    def count_tokens(self, text: str) -> int:
        """The server is not asked: about one token for every three bytes, which is more than most tokenizers
        give."""
        return len(text.encode("utf-8")) // 3 + 1

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """See Model. The server batches; here requests only have to be under way at the same time."""
        return list(self.pool.map(self._generate, requests))

    def _generate(self, request: GenerateRequest) -> Generation:
        body: Record = {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
        }
        if request.stop:
            body["stop"] = list(request.stop)[:4]  # more are cut off below

        # Pictures can only be given in messages; not every server takes a text in parts.
        media = has_media(request.prompt)
        path, body["prompt"] = "/completions", prompt_text(request.prompt)
        if self.chat or media:
            path, content = "/chat/completions", body.pop("prompt")
            content = content_parts(request.prompt) if media else content
            body["messages"] = [{"role": "user", "content": content}]
        answer = self.request(path, body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]

        # Some servers leave the stop string in, and none takes more than four.
        text, stopped = cut_at(text or "", request.stop)
        stopped |= choice.get("finish_reason") == "stop"
        tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
        return Generation(text, int(tokens), "stop" if stopped else "length")

    def identity(self) -> Record:
        """Address and model name: the weights behind them are not known."""
        about = {"kind": "endpoint", "path": self.url, "model": self.name}
        return {**about, "weights_sha256": None, "chat": self.chat}


def open_model(
    given: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    batch_size: int = 16,
    batch_tokens: int = 4096,
    chat: bool | None = None,
    endpoint_model: str | None = None,
    exact: bool = False,
) -> Model:
    """The model behind a --model value. dtype "auto": as stored. exact: one sequence in a call, so that an
    answer does not depend on what else is asked, bit for bit. chat: prompts as the user's message; None: a
    model directory as it was trained, others without. Raises EvalError when there is no such model."""
    if given.startswith(("http://", "https://")):
        return EndpointModel(given, endpoint_model, concurrent=batch_size, chat=bool(chat))

    options: Record = {"device": device, "dtype": getattr(torch, dtype, None)}
    options |= {"batch_size": 1 if exact else batch_size, "batch_tokens": batch_tokens}
    if given.startswith("hf:"):
        # Brings transformers, which takes a second; whoever asks an endpoint need not wait for it.
        load_hf = import_module("earlyfusion.eval.models.hf").load_hf
        found: Model = load_hf(given.removeprefix("hf:"), chat=bool(chat), **options)
        return found
    return load_own(model_folder(given), chat=chat, **options)
