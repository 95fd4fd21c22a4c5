"""A request taken out of an engine, to go on later, here or elsewhere: JSON for the facts, safetensors for
the tensors.

It carries everything a continuation depends on: the prompt with its pictures, the sampling options, what was
generated with log-probabilities and the weight version of every token, and (unless it was dropped) the KDA
state and the MLA latents. Nothing is pickled.

Shapes: n prompt tokens, P patches.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from earlyfusion.model.engine.request import (
    Completion,
    Grammar,
    Request,
    RequestError,
    SamplingParams,
    TokenPrompt,
)
from earlyfusion.model.engine.sequence import Sample

FORMAT = "earlyfusion-paused-1"
PER_TOKEN = ("ids", "logprobs", "logprobs1", "versions")


@dataclass
class PausedSample:
    """One unfinished sample. length: tokens that the state covers (0 without state: nothing was read yet)."""

    index: int
    ids: list[int]
    logprobs: list[float]
    logprobs1: list[float]
    versions: list[int]
    resumes: list[str]
    length: int
    state: dict[str, Tensor] = field(default_factory=dict)
    routing: np.ndarray | None = None


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
        """(JSON in UTF-8, safetensors). Raises RequestError for a request with a grammar, which is code."""
        params = self.request.params
        if params.grammar is not None:
            raise RequestError(
                f"request {self.request.id!r} has a grammar, which cannot be exported; set it aside with "
                "dataclasses.replace and give it back to PausedRequest.from_bytes(..., grammar=...)"
            )
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
            "params": {key: value for key, value in vars(params).items() if key != "grammar"},
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
    def from_bytes(cls, facts: bytes, tensors: bytes, grammar: Grammar | None = None) -> PausedRequest:
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
            params = SamplingParams(**known["params"], grammar=grammar)
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


def pause_sample(sample: Sample, state: dict[str, Tensor]) -> PausedSample:
    """What leaves the engine of one sample."""
    return PausedSample(
        index=sample.index,
        **{name: list(getattr(sample, name)) for name in PER_TOKEN},
        resumes=list(sample.resumes),
        length=sample.length if state else 0,
        state=state,
        routing=np.concatenate(sample.routing) if sample.routing and state else None,
    )
