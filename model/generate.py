"""Text from the model: a batch of prompts with images, by the engine of model/engine. What a prompt gets does
not depend on its neighbours.

Shapes: T tokens of all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Prompt, Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.patches import Grid

MOST_SLOTS = 64
PAGE = 16


@dataclass
class Row:
    """Prompts packed into one row: the part of a PackedBatch that the embedding needs."""

    ids: Tensor
    segments: Segments
    patches: Tensor
    grids: list[Grid]
    media_positions: Tensor


def pack_prompts(model: NativeFusion, prompts: Sequence[Prompt]) -> Row:
    """One packed row on the model's device. Raises ValueError for an empty prompt, or no prompt at all."""
    vision, device = model.config.vision, model.device
    lengths = [len(prompt.ids) for prompt in prompts]
    if not min(lengths, default=0):
        raise ValueError(f"{len(prompts)} prompts of {lengths} tokens; give at least one, each with [BOS]")
    segments = Segments.from_lengths(lengths)
    # The empty beginning gives a row without pictures the right shape and dtype.
    patches = [torch.empty(0, vision.in_channels, vision.patch_size, vision.patch_size, dtype=torch.uint8)]
    places, grids = [], list[Grid]()
    for prompt, start in zip(prompts, segments.offsets):
        # Positions count through the packed row, not through the prompt.
        places.append(torch.as_tensor(prompt.media_positions).long() + start)
        grids += prompt.grids
        if prompt.patches is not None:
            patches.append(prompt.patches)
    return Row(
        ids=torch.cat([prompt.ids.long() for prompt in prompts]).to(device),
        segments=segments,
        patches=torch.cat(patches).to(device),
        grids=grids,
        media_positions=torch.cat(places).to(device),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, the mode restored after.

    Not inference_mode: plans cached on Segments and grids may be used by a training step later on.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def generate(
    model: NativeFusion, tokenizer: Any, prompts: Sequence[Prompt], *, max_new_tokens: int = 64
) -> list[str]:
    """Continue every prompt greedily until [EOS], <|end_of_msg|> or `max_new_tokens`; -> texts.

    Image placeholders and other tokens that only stand in inputs are never produced. Special tokens are left
    out of the texts. tokenizer: `data.tokenizer.Tokenizer` or anything with `special_ids` (name -> id),
    `vocab_size` and `decode(ids, skip_special=...)`. Raises ValueError for no prompt or an empty one.
    """
    params = SamplingParams(max_new_tokens, temperature=0.0)
    engine = engine_for(model, tokenizer, prompts, max_new_tokens)
    requests = [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    return [done.text for done in engine.generate(requests)]


def engine_for(
    model: NativeFusion,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    most_slots: int = MOST_SLOTS,
) -> Engine:
    """An engine just large enough for these prompts, at most `most_slots` at a time. Raises ValueError for no
    prompt."""
    if not prompts:
        raise ValueError("no prompts given; pass at least one")
    # Memory for the longest ones that can run together: no prompt waits for pages.
    slots = min(len(prompts), most_slots)
    longest = sorted(len(prompt.ids) + max(0, max_new_tokens) for prompt in prompts)[-slots:]
    return Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        # Whole pages for each; a forked group may hold one page more than its samples apart.
        max_pages=sum(-(-tokens // PAGE) + 1 for tokens in longest),
        # Whole prompts at once: nobody waits for the first token here.
        prefill_chunk=2048,
        max_waiting=len(prompts),
    )
