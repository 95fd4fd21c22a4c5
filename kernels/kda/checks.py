"""The arguments that every form of Kimi Delta Attention takes, and what it asks of them.

Legend: T tokens (or B sequences of one token each), H query/key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from earlyfusion.kernels.checks import check_multiple, check_shapes


class Inputs(NamedTuple):
    """The tensors of a call in their order; also their gradients, or what a kernel takes for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


def check_kda(op: str, x: Inputs, tokens: int) -> dict[str, int]:
    """Sizes by letter.

    Raises:
        ValueError: naming the argument whose shape does not fit the others or the number of tokens.
    """
    sizes = check_shapes(
        op,
        {"T": tokens},
        q_THK=x.q,
        k_THK=x.k,
        v_TGV=x.v,
        f_TGK=x.f,
        b_TG=x.b,
        A_log_G=x.A_log,
        dt_bias_GK=x.dt_bias,
    )
    check_multiple(op, "value heads", sizes["G"], "query heads", sizes["H"])
    return sizes
