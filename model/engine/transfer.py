"""Requests that leave an engine and come back, here or elsewhere, and weights that change under those that
stay.

A paused request is JSON for the facts and safetensors for the tensors. It carries everything a continuation
depends on: the prompt with its pictures, the sampling options, what was generated with log-probabilities and
the weight version of every token, and (unless it was dropped) the KDA state and the MLA latents. Nothing is
pickled.

Shapes: n prompt tokens, P patches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.requests import (
    Completion,
    Handle,
    PausedSample,
    Request,
    RequestError,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.model.engine.state import RequestState, Sample
from earlyfusion.model.engine.table import RequestTable
from earlyfusion.model.fusion import NativeFusion

FORMAT = "earlyfusion-paused-1"
PER_SAMPLE = ("ids", "logprobs", "logprobs1", "versions", "resumes")
Policy = Literal["keep", "reprefill"]


@dataclass
class PausedRequest:
    """A request with its unfinished samples and the completions of the finished ones. version: of the
    engine's weights when it was paused."""

    request: Request
    samples: list[PausedSample]
    finished: list[Completion]
    version: int
    cached_tokens: int = 0

    def to_bytes(self) -> tuple[bytes, bytes]:
        """(JSON in UTF-8, safetensors)."""
        prompt = self.request.prompt
        tensors = {"prompt.ids": torch.as_tensor(prompt.ids).long().cpu()}
        if prompt.patches is not None:
            tensors["prompt.patches"] = prompt.patches.cpu()

        samples = []
        for sample in self.samples:
            facts = asdict(replace(sample, state={}, routing=None))
            samples.append({key: value for key, value in facts.items() if key not in ("state", "routing")})
            tensors |= {f"sample.{sample.index}.{name}": tensor for name, tensor in sample.state.items()}
            if sample.routing is not None:
                tensors[f"sample.{sample.index}.routing"] = torch.from_numpy(sample.routing.astype(np.int32))

        finished = []
        for completion in self.finished:
            facts = {key: value for key, value in vars(completion).items() if key != "routing"}
            finished.append(facts)
            if completion.routing is not None:
                tensors[f"finished.{completion.index}.routing"] = torch.from_numpy(
                    completion.routing.astype(np.int32)
                )

        facts = {
            "format": FORMAT,
            "id": self.request.id,
            "capture_routing": self.request.capture_routing,
            "noise": self.request.noise,
            "params": vars(self.request.params),
            "grids": [list(grid) for grid in prompt.grids],
            "media_positions": [int(i) for i in torch.as_tensor(prompt.media_positions).tolist()],
            "samples": samples,
            "finished": finished,
            "version": self.version,
            "cached_tokens": self.cached_tokens,
        }
        blobs = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return json.dumps(facts).encode(), save_tensors(blobs)

    @classmethod
    def from_bytes(cls, facts: bytes, tensors: bytes) -> PausedRequest:
        """The reverse of `to_bytes`. Raises RequestError for anything else."""
        try:
            known: dict[str, Any] = json.loads(facts)
            found = load_tensors(tensors)
            if known["format"] != FORMAT:
                raise ValueError(f"format {known['format']!r}, expected {FORMAT!r}")
            prompt = TokenPrompt(
                ids=found["prompt.ids"],
                patches=found.get("prompt.patches"),
                grids=tuple(tuple(grid) for grid in known["grids"]),
                media_positions=tuple(known["media_positions"]),
            )
            params = SamplingParams(**known["params"])
            request = Request(known["id"], prompt, params, known["capture_routing"], known["noise"])
            samples = [_sample(entry, found) for entry in known["samples"]]
            finished = [_completion(entry, found) for entry in known["finished"]]
            return cls(request, samples, finished, known["version"], known["cached_tokens"])
        except (KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
            raise RequestError(f"not a paused request: {type(error).__name__}: {error}") from None
        except Exception as error:  # safetensors raises a bare Exception of its own
            raise RequestError(f"not a paused request: {error}") from None


def _routing(found: dict[str, Tensor], name: str) -> np.ndarray | None:
    return None if name not in found else narrow(found[name].numpy())


def narrow(ids: np.ndarray) -> np.ndarray:
    """Expert ids in the smallest unsigned type that holds them."""
    return ids.astype(np.uint8 if ids.size == 0 or ids.max() < 256 else np.uint16)


def _sample(entry: dict[str, Any], found: dict[str, Tensor]) -> PausedSample:
    prefix = f"sample.{entry['index']}."
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(prefix) and not name.endswith(".routing")
    }
    return PausedSample(**entry, state=state, routing=_routing(found, prefix + "routing"))


def _completion(entry: dict[str, Any], found: dict[str, Tensor]) -> Completion:
    entry = {**entry, "resumes": tuple(entry["resumes"])}
    return Completion(**entry, routing=_routing(found, f"finished.{entry['index']}.routing"))


def pause(table: RequestTable, pools: Pools, request_id: str) -> PausedRequest:
    """See `Engine.pause`."""
    parent = table.states.get(request_id)
    if parent is None:
        raise RequestError(f"request {request_id!r} is not unfinished here")
    samples: list[PausedSample] = []
    for sample in parent.alive:
        begun = sample in table.scheduler.running
        state = pools.export(sample.slot, sample.pages, sample.length) if begun else (sample.saved or {})
        samples.append(sample.paused(state))
    table.leave_scheduler(parent)
    del table.states[request_id]
    table.counts["paused"] += 1
    return PausedRequest(
        parent.request, samples, list(parent.handle.completions), table.version, parent.cached_tokens
    )


def resume(
    table: RequestTable,
    pools: Pools,
    paused: PausedRequest,
    keep_state: bool,
    new_state: Callable[[Request], RequestState],
) -> Handle:
    """See `Engine.resume`."""
    parent = new_state(paused.request)
    parent.handle.completions = list(paused.finished)
    done = {completion.index for completion in paused.finished}
    parent.cached_tokens = paused.cached_tokens
    by_index = {sample.index: sample for sample in paused.samples}
    if done | set(by_index) != set(range(len(parent.samples))):
        raise RequestError(
            f"paused request {paused.request.id!r} lacks some of its {len(parent.samples)} samples"
        )
    for sample in parent.samples:
        sample.finished = sample.index in done
        if not sample.finished:
            _recall(table, pools, sample, by_index[sample.index], keep_state)
    table.scheduler.check(parent)
    table.states[paused.request.id] = parent
    table.scheduler.waiting.append(parent)
    return parent.handle


def go_on(pools: Pools, parent: RequestState, after: PausedSample) -> None:
    """See `Engine.submit`."""
    request = parent.request
    if len(parent.samples) != 1 or not 0 < after.length < len(parent.ids):
        raise RequestError(
            f"request {request.id!r} goes on after {after.length} tokens: expected one sample (has"
            f" {len(parent.samples)}) and a longer prompt (has {len(parent.ids)})"
        )
    if request.capture_routing and after.routing is None:
        raise RequestError(
            f"request {request.id!r}: capture_routing, but the state it goes on from knows no routing"
        )
    (sample,) = parent.samples
    _keep_state(pools, sample, after)
    parent.cached_tokens = after.length


def _recall(
    table: RequestTable, pools: Pools, sample: Sample, paused: PausedSample, keep_state: bool
) -> None:
    for name in PER_SAMPLE:
        setattr(sample, name, list(getattr(paused, name)))
    for token in sample.ids:
        sample.stream.push(token)
    sample.reported = len(sample.ids)

    keep = keep_state and bool(paused.state)
    if keep:
        _keep_state(pools, sample, paused)
    _log_resume(table, sample, "keep" if keep else "reprefill")


def _keep_state(pools: Pools, sample: Sample, paused: PausedSample) -> None:
    """The sample's exported state is put back when it is admitted. Raises RequestError for another
    model's."""
    try:
        pools.check(paused.state, paused.length)
    except ValueError as error:
        raise RequestError(str(error)) from None
    sample.saved, sample.length = paused.state, paused.length
    sample.routing = [] if paused.routing is None else [paused.routing]


def _log_resume(table: RequestTable, sample: Sample, policy: Policy) -> None:
    sample.resumes.append(f"{policy}@{table.version}")
    table.counts[f"resumed_{policy}"] += 1


@torch.no_grad()
def load_weights(
    table: RequestTable, model: NativeFusion, state_dict: Mapping[str, Tensor], version: int, paused: Policy
) -> None:
    """See `Engine.load_weights`; image features are the caller's."""
    if paused not in ("keep", "reprefill"):
        raise ValueError(f"paused={paused!r}: give 'keep' or 'reprefill'")
    own = model.state_dict()
    wrong = sorted(set(own) ^ set(state_dict)) + [
        name for name in own if name in state_dict and own[name].shape != state_dict[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors are missing, unknown or of another shape: {', '.join(wrong[:8])}"
        )

    for name, tensor in own.items():
        tensor.copy_(state_dict[name])
    table.version = version
    table.runner.refresh()
    table.prefix.clear()

    # What was read with the old weights goes on from there, or is read again, first in line.
    scheduler = table.scheduler
    for parent in reversed(list(table.states.values())):
        begun = [s for s in parent.alive if s.length or s in scheduler.reading or s in scheduler.running]
        for sample in begun:
            _log_resume(table, sample, paused)
        if paused == "reprefill" and begun:
            table.leave_scheduler(parent)
            for sample in parent.alive:
                sample.saved, sample.length, sample.routing = None, 0, []
            parent.cached_tokens = 0
            scheduler.waiting.appendleft(parent)
