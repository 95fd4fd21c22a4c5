"""An OpenAI-compatible server as an engine of a fleet: prompts as token ids in, ids and log-probabilities
out.

    earlyfusion serve --model START --weights-from WEIGHTS        or vLLM, SGLang, started on START
    roles.servers = ["http://localhost:8000/v1"]                  in the recipe

Answers come whole: a part that is paused is asked for again from where it began. Weights go by a folder that
trainer and servers see (POST /update_weights_from_disk, the route of SGLang), or to vLLM over NCCL
(rl/weightsync/vllm.py). The first is tested with our own server, the second with one that stands for vLLM.

A token's version is that of the weights when its answer was asked for: the oldest that it may be of.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from earlyfusion.data.loading.order import digest64
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.models.base import EndpointModel
from earlyfusion.eval.protocol import EvalError
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.requests import (
    Completion,
    Event,
    PausedRequest,
    PausedSample,
    Request,
    Token,
    TokenPrompt,
)
from earlyfusion.model.engine.scheduler import WRITTEN
from earlyfusion.model.hub.folder import load_model, public_tensors, save_model
from earlyfusion.pipeline.parallel.shard import full
from earlyfusion.rl.fleet.fleet import PartRefused
from earlyfusion.rl.fleet.schedule import Room
from earlyfusion.rl.weightsync.vllm import WeightTransfer

PAGE = 16
ASKED_S = 5.0
"""Seconds that a server which was gone may take to say that it is there."""
NOTHING = TokenPrompt(torch.zeros(1, dtype=torch.long))
"""In the place of a prompt that the fleet has."""


@dataclass(frozen=True)
class ServedOptions:
    """start: model directory of tokenizer and first weights; weights: folder that new ones are written to;
    slots: answers asked for at a time; context: most tokens of a prompt with its answer."""

    start: Path
    weights: Path
    reload: str = "update_weights_from_disk"
    slots: int = 64
    context: int = 4096


class Served:
    """See Instance. url: up to and with /v1; the server's first model answers. Raises EvalError for a server
    that does not."""

    news = threading.Event()

    def __init__(self, url: str, options: ServedOptions) -> None:
        self.options = options
        self.server = EndpointModel(url, concurrent=options.slots)
        self.tokenizer = Tokenizer.load(options.start)
        self.room = Room(options.slots, options.slots * options.context, PAGE)
        self.version = 0
        self.transfer: WeightTransfer | None = None
        self.open: dict[str, dict[int, PausedSample]] = {}
        self.arrived: SimpleQueue[Event | OSError] = SimpleQueue()

    def start(self, part: PausedRequest) -> None:
        """See Instance. Raises PartRefused for what servers do not take."""
        request, params = part.request, part.request.params
        for wrong, why in (
            (request.prompt.patches is not None, "pictures: servers take token ids alone"),
            (request.capture_routing, "they do not tell experts: set rollout.replay_routing = false"),
            (
                params.logprobs and (params.temperature, params.top_p, params.min_p) != (1, 1, 0),
                "their log-probabilities are at temperature 1, over all tokens",
            ),
            (params.banned_ids, "banned_ids are not served"),
        ):
            if wrong:
                raise PartRefused(request.id, f"a server in roles.servers cannot write this; {why}")
        # What is asked for now; an answer to anything else came too late.
        self.open[request.id] = {sample.index: sample for sample in part.samples}
        for sample in part.samples:
            self.server.pool.submit(self._answer, request, sample, self.version)

    def _answer(self, request: Request, sample: PausedSample, version: int) -> None:
        """In a thread: ask, and put what came where `step` finds it."""
        params, prompt = request.params, [int(one) for one in request.prompt.ids]
        number = (request.numbers or range(params.n))[sample.index]
        body: Record = {
            "prompt": [prompt + sample.ids],
            "max_tokens": params.max_new_tokens - len(sample.ids),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "ignore_eos": params.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
            # What is drawn is the sample's own, as far as a server keeps to its seed.
            "seed": digest64("served", params.seed, request.noise or request.id, number, len(sample.ids))
            % 2**31,
        }
        if params.min_p:
            body["min_p"] = params.min_p
        if params.stop_ids:
            body["stop_token_ids"] = list(params.stop_ids)
        # Whatever a server sends: it is another program's.
        try:
            (choice,) = self.server.request("/completions", body)["choices"]
            ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            new = [Token(int(i), float(v), float(v), version) for i, v in zip(ids, values, strict=True)]
            self.arrived.put(self._event(request, sample, new, choice["finish_reason"] == "length"))
        except (EvalError, LookupError, TypeError, ValueError) as error:
            self.arrived.put(ConnectionError(f"{self.server.url}: {one_line(error, 200)}"))
        self.news.set()

    def _event(self, request: Request, sample: PausedSample, new: Sequence[Token], cut: bool) -> Event:
        # Without a state: whoever goes on from it reads all of it again.
        left = PausedSample(
            sample.index,
            sample.ids + [token.id for token in new],
            sample.logprobs + [token.logprob for token in new],
            sample.logprobs1 + [token.logprob1 for token in new],
            sample.versions + [token.version for token in new],
            length=0,
        )
        done = Completion(
            request.id,
            sample.index,
            **{name: getattr(left, name) for name in WRITTEN},
            text=self.tokenizer.decode(left.ids, skip_special=True),
            finish_reason="length" if cut else "stop",
            prompt_tokens=len(request.prompt.ids),
            cached_tokens=0,
        )
        return Event(request.id, sample.index, tuple(new), "", done, left)

    def step(self) -> list[Event]:
        """What has arrived and is still wanted. Raises OSError for a server that is gone."""
        events: list[Event] = []
        while True:
            try:
                found = self.arrived.get_nowait()
            except Empty:
                return events
            if isinstance(found, OSError):
                raise found
            if self.open.get(found.request_id, {}).pop(found.index, None) is not None:
                events.append(found)
            if not self.open.get(found.request_id, True):
                del self.open[found.request_id]

    def pause(self, request_id: str) -> tuple[PausedRequest | None, list[Event]]:
        """See Instance. What the server is writing is not waited for."""
        events = self.step()
        left = self.open.pop(request_id, None)
        if left is None:
            return None, events
        nothing = Request(request_id, NOTHING)
        return PausedRequest(nothing, list(left.values()), [], self.version), events

    def end_sample(self, request_id: str, index: int) -> None:
        """See Instance: with what it had before this part."""
        sample = self.open.get(request_id, {}).get(index)
        if sample is not None:
            ended = self._event(Request(request_id, NOTHING), sample, (), False)
            assert ended.completion is not None
            ended.completion = replace(ended.completion, finish_reason="cancelled")
            self.arrived.put(ended)
            self.news.set()

    @staticmethod
    def publish(instances: Sequence[Served], weights: Mapping[str, Tensor], version: int) -> dict[int, str]:
        """See Instance. Written once for every folder, then read by every server."""
        failed = {}
        for options in {one.options for one in instances if one.options.reload != "update_weights"}:
            model = load_model(options.start)
            model.load_state_dict({name: full(weight) for name, weight in weights.items()})
            save_model(model, Tokenizer.load(options.start), options.weights)
        for place, one in enumerate(instances):
            try:
                one.take(weights, version)
                one.version = version
            except (EvalError, RuntimeError) as error:  # the second: of a group that broke
                failed[place] = one_line(error, 200)
        return failed

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Make the server take new weights. Raises EvalError."""
        if self.options.reload == "update_weights":
            whole = {name: full(weight) for name, weight in weights.items()}
            device = next(iter(whole.values())).device
            self.transfer = self.transfer or WeightTransfer(self.server, device)
            tensors = {one.name: one.view(whole[one.ours]) for one in public_tensors(whole.items())}
            return self.transfer.send(tensors, version)
        route = f"{self.server.url.removesuffix('/v1')}/update_weights_from_disk"
        told = self.server.request(route, {"model_path": str(self.options.weights)})
        if told.get("success") is False:
            raise EvalError(str(told.get("message", told)))

    def successor(self) -> Served | None:
        """See Instance: the same server, where somebody has started it again."""
        try:
            EndpointModel(self.server.url, tries=1, timeout_s=ASKED_S)
            return Served(self.server.url, self.options)
        except EvalError:
            return None

    def close(self) -> None:
        """The server goes on; nothing more is asked of it."""
        self.server.pool.shutdown(wait=False, cancel_futures=True)
