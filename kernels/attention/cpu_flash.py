"""One bucket of documents through torch's CPU flash kernel: quickest in float32 and for long documents.

The kernel wants one head dim for q, k and v, and as many key heads as query heads in its backward pass; both
are arranged here by zero-filling and by repeating, whose gradients are a cut and a sum.

Legend: T tokens, H query heads, G key/value heads, D key dim, V value dim, B documents, L padded length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attention.buckets import Bucket

LENGTH = 1024  # padded length from which the kernel beats batched products in half precision


def suits(bucket: Bucket, q_THD: Tensor) -> bool:
    """Whether this kernel is the quicker way for the bucket; False off the CPU."""
    if q_THD.device.type != "cpu":
        return False
    return q_THD.dtype in (torch.float32, torch.float64) or bucket.length >= LENGTH


def _operands(bucket: Bucket, causal: bool, *packed: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """[B, heads, L, dim] views of the padded tensors, filled up to one dim, and the additive key mask."""
    # Zero channels change neither logits nor sums, and are cut off again.
    width = max(x.shape[-1] for x in packed)
    padded = [
        F.pad(y, (0, width - y.shape[-1])) if y.shape[-1] < width else y for y in map(bucket.pad, packed)
    ]
    bias_BL = None if causal else bucket.key_bias(packed[0].dtype)
    return [y.transpose(1, 2) for y in padded], None if bias_BL is None else bias_BL[:, None, None, :]


def forward_bucket(
    bucket: Bucket, q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Padded output [B, L, H, V] and log-sum-exp [B, L, H]."""
    (q, k, v), mask = _operands(bucket, causal, q_THD, k_TGD, v_TGV)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2)[..., : v_TGV.shape[-1]], lse.transpose(1, 2)


def backward_bucket(
    bucket: Bucket, saved: tuple[Tensor, ...], do_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded gradients [B, L, heads, dim] of q, k, v; ``saved`` is (q, k, v, o, lse)."""
    q_THD, k_TGD, v_TGV, o_THV, lse_TH = saved
    # The backward of that kernel knows no shared keys: they are repeated and their gradients summed.
    repeats = q_THD.shape[1] // k_TGD.shape[1]
    k_THD, v_THV = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k_TGD, v_TGV))
    (q, k, v, o, do), mask = _operands(bucket, causal, q_THD, k_THD, v_THV, o_THV, do_THV)
    lse = bucket.pad(lse_TH).transpose(1, 2)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    if repeats > 1:
        dk, dv = (x.unflatten(2, (-1, repeats)).sum(dim=3) for x in (dk, dv))
    return dq[..., : q_THD.shape[-1]], dk[..., : k_TGD.shape[-1]], dv[..., : v_TGV.shape[-1]]
