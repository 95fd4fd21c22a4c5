"""What the sub-layers read: mean Attention Residual weights by sub-layer and source, image tokens beside text
tokens."""

from __future__ import annotations

from typing import Any

import torch

from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating


def attnres_weights(model: NativeFusion, batch: Any) -> dict[str, Any] | None:
    """Mean mixing weights over the tokens of one packed batch; None for a model without Attention Residuals.

    batch: a PackedBatch on the model's device. Returns, for `eval.results.save_result` under the name
    "attnres": `sublayers` (names of the mixes, in order), `sources` ("embedding", "block 1", ..., and "own
    block" for the running sum of the sub-layer's own block), `image` and `text`: one row per sub-layer with a
    weight per source, None where the sub-layer does not read that source. Rows sum to 1. A kind of token the
    batch does not hold is left out.
    """
    if model.config.text.attn_res == "none":
        return None
    # Tokens of pictures are told from those of texts by their places.
    image_T = torch.zeros_like(batch.ids, dtype=torch.bool)
    image_T[batch.media_positions] = True
    masks = {"image": image_T, "text": ~image_T & (batch.source_ids >= 0)}  # filler is neither
    with evaluating(model):
        recorder = model.decoder.attnres_weights(model.embed(batch), batch.segments, masks)

    # A mix reads the finished blocks, and the running sum of its own block where that has begun.
    width = 1 + max(len(means["text"]) - own for (_, means), own in zip(recorder.rows, recorder.has_partial))
    blocks = [f"block {number}" for number in range(1, width - 1)]
    result: dict[str, Any] = {
        "sublayers": [name.removeprefix("layers.") for name, _ in recorder.rows],
        "sources": ["embedding", *blocks, "own block"],
    }
    for kind, mask_T in masks.items():
        # A kind of token that the batch lacks has no mean.
        if not mask_T.any():
            continue
        result[kind] = rows = []
        for (_, means), own in zip(recorder.rows, recorder.has_partial):
            # Finished sources from the left, the own block's running sum in the last column.
            weights: list[float | None] = means[kind].tolist()
            last = weights.pop() if own else None
            rows.append([*weights, *[None] * (width - 1 - len(weights)), last])
    return result
