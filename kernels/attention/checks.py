"""What every form of packed attention asks of its arguments' shapes.

Legend: T tokens, L keys, H query heads, G key/value heads, D key dim, V value dim.
"""

from __future__ import annotations

from torch import Tensor

from earlyfusion.kernels.checks import check_multiple, check_shapes
from earlyfusion.kernels.segments import Segments


def check_attention(q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, segments: Segments) -> None:
    """Raise ValueError if the tensors do not describe grouped attention over this packed row."""
    sizes = check_shapes("attention", {"T": segments.total}, q_THD=q_THD, k_TGD=k_TGD, v_TGV=v_TGV)
    check_multiple("attention", "query heads", sizes["H"], "key heads", sizes["G"])


def check_append(
    q_THD: Tensor, k_LGD: Tensor, v_LGV: Tensor, segments: Segments, key_segments: Segments
) -> None:
    """Raise ValueError if the tensors are not the newest tokens of documents and all keys of the same
    documents."""
    known = {"T": segments.total, "L": key_segments.total}
    sizes = check_shapes("attention_append", known, q_THD=q_THD, k_LGD=k_LGD, v_LGV=v_LGV)
    check_multiple("attention_append", "query heads", sizes["H"], "key heads", sizes["G"])
    ends = segments.num == key_segments.num
    for new, length in zip(segments.lengths, key_segments.lengths):
        ends = ends and new <= length
    if not ends:
        raise ValueError(
            f"attention_append: new tokens {segments.lengths} are not the ends of documents of"
            f" {key_segments.lengths} keys; give one length of each per document, the keys' at least as long"
        )
