"""The names and shapes that our weights have in public checkpoints, as views of our own tensors.

A public tensor is a view of (part of) one of ours, so the same table writes a checkpoint and, by copying into
the views, reads one; what is saved comes back bit for bit.

| ours | public (Kimi K2.5, Kimi K3, Kimi-Linear) |
|---|---|
| text model | language_model.model.*, language_model.lm_head.* |
| vision tower, projector | vision_tower.*, mm_projector.* |
| self_attn.A_log [H] | [1, 1, H, 1] |
| experts.gate_up_proj [E, 2F, D] | experts.{e}.w1.weight [F, D] (gate), experts.{e}.w3.weight [F, D] |
| experts.down_proj [E, D, F] | experts.{e}.w2.weight [D, F] |
| self_attention_res_query, mlp_res_query, output_attn_res_query [D] | *_res_proj.weight [1, D] |

Source: released checkpoints and the conversion maps of transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

# Longest match first: lm_head stands beside `model` in the public layout, not inside it.
PREFIXES = (
    ("decoder.lm_head.", "language_model.lm_head."),
    ("decoder.", "language_model.model."),
    ("vision_tower.", "vision_tower."),
    ("mm_projector.", "mm_projector."),
)
FP32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias")  # stay fp32 whatever the model's dtype


@dataclass(frozen=True)
class PublicTensor:
    """One tensor of a public checkpoint: its name, the name of our tensor it is part of, and how to see it
    there."""

    name: str
    ours: str
    view: Callable[[Tensor], Tensor]


def public_tensors(shapes: Iterable[tuple[str, Tensor]]) -> Iterator[PublicTensor]:
    """The public tensors behind (our name, our tensor) pairs; tensors may be on the meta device."""
    for ours, tensor in shapes:
        # Every name must be known: a tensor without a public name could be written but not read.
        (name,) = [public + ours.removeprefix(own) for own, public in PREFIXES if ours.startswith(own)][:1]
        module, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e in range(len(tensor)):
                # gate rows first, then those of the up projection
                rows = tensor.shape[1] // 2
                yield PublicTensor(f"{module}.{e}.w1.weight", ours, itemgetter((e, slice(rows))))
                yield PublicTensor(f"{module}.{e}.w3.weight", ours, itemgetter((e, slice(rows, None))))
        elif module.endswith(".experts"):
            for e in range(len(tensor)):
                yield PublicTensor(f"{module}.{e}.w2.weight", ours, itemgetter(e))
        elif last.endswith("_res_query"):
            # Public checkpoints hold a pseudo-query as a linear layer of one row.
            yield PublicTensor(name.removesuffix("_query") + "_proj.weight", ours, itemgetter(None))
        elif last == "A_log":
            yield PublicTensor(name, ours, itemgetter((None, None, slice(None), None)))
        else:
            yield PublicTensor(name, ours, itemgetter(...))


def keeps_fp32(name: str) -> bool:
    """Whether a tensor (ours or public) stays fp32 in a model of another dtype."""
    return name.endswith(FP32_SUFFIXES)
