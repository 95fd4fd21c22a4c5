"""What every form of packed attention asks of its arguments' shapes.

Legend: T tokens, H query heads, G key/value heads, D key dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from earlyfusion.kernels.segments import Segments, check_packed


def check_attention(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, segments: Segments) -> None:
    """Raise ValueError if the tensors do not describe grouped attention over this packed row."""
    for name, tensor in (("q_THD", q_THD), ("k_TGD", k_TGD), ("v_TGV", v_TGV)):
        if tensor.dim() != 3:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}; expected [tokens, heads, dim]"
            )
        check_packed(f"attention {name}", tensor, segments)
    heads, key_heads = q_THD.shape[1], k_TGD.shape[1]
    if v_TGV.shape[1] != key_heads or heads % key_heads:
        raise ValueError(
            f"attention: {heads} query heads, {key_heads} key heads and {v_TGV.shape[1]} value heads do not"
            " group; keys and values need the same number of heads, which divides the number of query heads"
        )
    if q_THD.shape[2] != k_TGD.shape[2]:
        raise ValueError(
            f"attention: q has head dim {q_THD.shape[2]} but k has {k_TGD.shape[2]}; they must agree"
        )


def check_append(
    q_THD: Tensor, k_LGD: Tensor, v_LGV: Tensor, segments: Segments, key_segments: Segments
) -> None:
    """Raise ValueError if the tensors are not the newest tokens of documents and all keys of the same
    documents."""
    check_packed("attention_append q_THD", q_THD, segments)
    check_attention(k_LGD, k_LGD, v_LGV, key_segments)
    if q_THD.dim() != 3 or q_THD.shape[2] != k_LGD.shape[2] or q_THD.shape[1] % k_LGD.shape[1]:
        raise ValueError(
            f"attention_append: q_THD is {tuple(q_THD.shape)} for keys {tuple(k_LGD.shape)}; expected"
            " [tokens, heads, dim] with the keys' dim and a multiple of their heads"
        )
    both = list(zip(segments.lengths, key_segments.lengths))
    if segments.num != key_segments.num or any(new > length for new, length in both):
        raise ValueError(
            f"attention_append: new tokens {segments.lengths} are not the ends of documents of"
            f" {key_segments.lengths} keys; give one length of each per document, the keys' at least as long"
        )
