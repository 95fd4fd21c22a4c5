"""SwiGLU experts for inference on a CPU: a token's result does not depend, bit for bit, on the others (from
four rows in all).

A CPU's matrix product sums in another order for one, two or three rows than for more. So an expert with so
few takes its neighbours' rows along and drops what comes of them.

Legend: T tokens, D hidden, J experts per token, R = T * J rows sorted by expert, E experts, F expert width, C
= 2F.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.moe import grouped
from earlyfusion.kernels.products import product

FEWEST_ROWS = 4
"""From so many rows on, a row of a float32 product has the same bits whatever the number of rows."""

Part = tuple[int, slice, slice]
"""An expert, its rows, and the rows its product is computed over."""


def moe_experts(
    x_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
) -> Tensor:
    """See :func:`earlyfusion.kernels.moe.naive.moe_experts`; no gradient."""
    if not x_TD.shape[0] or x_TD.dtype != down_EDF.dtype:
        return grouped.moe_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
    (experts, _, width), choices = down_EDF.shape, expert_ids_TJ.shape[1]

    # Sort the rows by expert. numpy: a fifth of torch's time for a few rows.
    # The loads are needed on the host, where they already are.
    flat_R = expert_ids_TJ.flatten().numpy()
    order = np.argsort(flat_R, kind="stable")
    parts: list[Part] = []
    start, rows = 0, flat_R.shape[0]
    for expert, count in enumerate(np.bincount(flat_R, minlength=experts).tolist()):
        if count:
            # The window slides to where there are enough rows, before or behind.
            low = max(0, min(start, rows - FEWEST_ROWS))
            window = slice(low, max(start + count, low + FEWEST_ROWS))
            parts.append((expert, slice(start, start + count), window))
        start += count

    # Gate, activation and output product of every expert's rows; the router weight goes into the activation.
    order_R = torch.from_numpy(order)
    h_RC = _grouped(x_TD.index_select(0, order_R // choices), gate_up_ECD, parts)
    weight_R1 = weights_TJ.flatten().index_select(0, order_R).to(x_TD.dtype).unsqueeze(1)
    act_RF = F.silu(h_RC[:, :width]).mul_(h_RC[:, width:]).mul_(weight_R1)
    y_RD = _grouped(act_RF, down_EDF, parts)

    # Back into the order of the tokens, and the sum over each token's choices.
    place = np.empty_like(order)
    place[order] = np.arange(rows)
    return y_RD.index_select(0, torch.from_numpy(place)).view(*expert_ids_TJ.shape, -1).sum(1)


def _grouped(x_RA: Tensor, weight_EBA: Tensor, parts: list[Part]) -> Tensor:
    """[R, B]: rows of every part times the transposed weight of its expert."""
    out_RB = x_RA.new_empty(x_RA.shape[0], weight_EBA.shape[1])
    for expert, rows, window in parts:
        if window == rows:
            product(x_RA[rows], weight_EBA[expert].T, out=out_RB[rows])
        else:
            wide = product(x_RA[window], weight_EBA[expert].T)
            out_RB[rows] = wide[rows.start - window.start : rows.stop - window.start]
    return out_RB
