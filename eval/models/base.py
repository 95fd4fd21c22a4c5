"""What --model may be: a model directory of ours, hf:PATH (any transformers causal LM, also GGUF), or
http(s)://..."""

from __future__ import annotations

import json
from typing import Any

import torch

from earlyfusion.eval.models.engine import load_own
from earlyfusion.eval.models.hf import load_hf
from earlyfusion.eval.models.http import EndpointModel
from earlyfusion.eval.protocol import EvalError, Model
from earlyfusion.model.hub.config import MODEL_TYPE, model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_model(
    given: str,
    *,
    device: str = "auto",
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
    # Before anything is read: a typing error should not cost the loading of a model.
    if dtype not in ("auto", *DTYPES):
        raise EvalError(f"--dtype {dtype}: expected auto, {', '.join(DTYPES)}")
    if given.startswith(("http://", "https://")):
        return EndpointModel(given, endpoint_model, concurrent=batch_size, chat=bool(chat))

    options: dict[str, Any] = {"device": usable_device(device), "dtype": DTYPES.get(dtype)}
    options |= {"batch_size": 1 if exact else batch_size, "batch_tokens": batch_tokens}
    if given.startswith("hf:"):
        return load_hf(given.removeprefix("hf:"), chat=bool(chat), **options)
    folder = model_folder(given)
    # A checkpoint of another library is told apart from no checkpoint at all.
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        kind = None
    if kind != MODEL_TYPE:
        raise EvalError(
            f"--model {given}: not a model directory of this project (model_type {kind!r}); give a"
            f" directory of one, hf:{given} for a transformers checkpoint, or http://..."
        )
    return load_own(folder, chat=chat, **options)


def usable_device(name: str) -> str:
    """The device, "auto" resolved; raises EvalError when torch cannot use it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise EvalError(f"--device {name}: not usable here ({str(error).splitlines()[0]}); try cpu") from None
    return name
