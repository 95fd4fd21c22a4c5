"""A request outside an engine: JSON for the facts and safetensors for the tensors.

It carries everything a continuation depends on: the prompt with its pictures, the sampling options, what was
generated with log-probabilities and the weight version of every token, and (unless it was dropped) the KDA
state and the MLA latents. Nothing is pickled.

Shapes: n prompt tokens, P patches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from earlyfusion.model.engine.requests import (
    Completion,
    PausedSample,
    Request,
    RequestError,
    SamplingParams,
    TokenPrompt,
)

FORMAT = "earlyfusion-paused-2"
TENSOR = "tensor"
"""The only field of an object that stands in the JSON for the tensor of that name."""


@dataclass
class PausedRequest:
    """A request with its unfinished samples and the completions of the finished ones. version: of the
    engine's weights when it was paused."""

    # Plain data: any process with the same model can go on with it.
    request: Request
    samples: list[PausedSample]
    finished: list[Completion]
    version: int
    cached_tokens: int = 0

    def to_bytes(self) -> tuple[bytes, bytes]:
        """(JSON in UTF-8, safetensors)."""
        # Tensors are numbered as they are met; the JSON says where each belongs.
        tensors: dict[str, Tensor] = {}

        def plain(value: Any) -> Any:
            """What JSON cannot hold: tensors go beside it, objects become their fields."""
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value.astype(np.int32))
            if isinstance(value, Tensor):
                name = str(len(tensors))
                tensors[name] = value.cpu().contiguous()
                return {TENSOR: name}
            return vars(value)

        # Any document will do as a prompt; what comes back is a TokenPrompt.
        prompt = self.request.prompt
        facts = {
            **vars(self),
            "format": FORMAT,
            "request": {**vars(self.request), "prompt": None},
            "prompt": {
                "ids": torch.as_tensor(prompt.ids).long(),
                "patches": prompt.patches,
                "grids": prompt.grids,
                "media_positions": torch.as_tensor(prompt.media_positions).tolist(),
            },
        }
        return json.dumps(facts, default=plain).encode(), save_tensors(tensors)

    @classmethod
    def from_bytes(cls, facts: bytes, tensors: bytes) -> PausedRequest:
        """The reverse of `to_bytes`. Raises RequestError for anything else."""
        try:
            # Nothing here runs what it reads: JSON, safetensors, and constructors that check.
            found = load_tensors(tensors)

            def whole(fields: dict[str, Any]) -> Any:
                if TENSOR in fields:
                    return found[fields[TENSOR]]
                return fields

            known = json.loads(facts, object_hook=whole)
            if known.get("format") != FORMAT:
                raise ValueError(f"format {known.get('format')!r}, expected {FORMAT!r}")
            prompt = known["prompt"]
            prompt["grids"] = tuple(map(tuple, prompt["grids"]))
            params = SamplingParams(**known["request"].pop("params"))
            request = Request(**{**known["request"], "prompt": TokenPrompt(**prompt), "params": params})
            # Experts travel as int32, which every reader of safetensors knows.
            for entry in [*known["samples"], *known["finished"]]:
                if entry["routing"] is not None:
                    entry["routing"] = narrow(entry["routing"].numpy())
            samples = [PausedSample(**sample) for sample in known["samples"]]
            finished = [Completion(**completion) for completion in known["finished"]]
            return cls(request, samples, finished, known["version"], known["cached_tokens"])
        except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise RequestError(f"not a paused request: {type(error).__name__}: {error}") from None


def narrow(ids: np.ndarray) -> np.ndarray:
    """Expert ids in the smallest unsigned type that holds them."""
    return ids.astype(np.uint8 if ids.size == 0 or ids.max() < 256 else np.uint16)
