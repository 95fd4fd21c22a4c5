"""Model sizes by a few numbers: `model.preset` begins [model] with the shape of a shipped recipe,
`model.scale` is a factor on the parameters of its layers; width, depth and experts keep their keys.

    earlyfusion plan nano --model.preset small --model.scale 2
    earlyfusion plan nano --model.preset small --model.hidden_size 512 --model.num_hidden_layers 12

Fixed ratios: heads, feed-forward widths and latent ranks follow the width, head_dim and experts stay, and the
initial weights get smaller with the square root of the width. Widths are whole heads; depths keep three KDA
to one MLA and whole AttnRes blocks. Parameters of the layers grow with depth x width^2 (but for the first
layer and the gates), so a scale is met as nearly as whole heads and groups of layers allow.
"""

import math
from typing import Any

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.config import ModelConfig

SIZE_KEYS = {
    "preset": "A shipped recipe whose [model] this one begins with; what recipes below set there is dropped.",
    "scale": "Factor on the parameters of the layers of the preset, or of the [model] below: width and depth"
    " grow together, heads and feed-forward follow, experts stay.",
    "from": "A checkpoint whose weights this model begins with, ours or a foreign one: its shape (other keys"
    " lie over it), its tower and its tokenizer are taken; what does not fit is made anew.",
}
"""Keys of [model] that are read before it is checked, and their meaning."""
FOLLOW_WIDTH = tuple(
    "intermediate_size moe_intermediate_size routed_expert_hidden_size kv_lora_rank q_lora_rank".split()
)
TOLERANCE = 1.5
"""Largest factor between the scale asked for and the one of the nearest shape."""
KEEP_RATIO = 0.25
"""Weight of a changed ratio of width to depth beside that of a missed scale (both as logarithms)."""
MOST_WIDTH, MOST_DEPTH = 1 << 15, 256


def sized(base: Record, own: Record) -> Record:
    """`base`, a [model] table, in the size that `own` asks for: scale, hidden_size, num_hidden_layers.

    What else `own` holds is left to the caller to lay over it. Raises UserError, naming the nearest that
    works, for widths and depths that keep no whole heads, groups of layers or blocks.
    """
    # The vocabulary is the tokenizer's.
    default = ModelConfig.model_construct().model_dump(
        exclude={"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
    )
    linear = default["linear_attn_config"] | (base.get("linear_attn_config") or {})
    base = default | base | {"linear_attn_config": linear}
    width, depth = base["hidden_size"], base["num_hidden_layers"]
    heads = math.gcd(base["num_attention_heads"], linear["num_heads"], width)
    # Three KDA to one MLA, and blocks of Attention Residuals that end with them.
    group = math.lcm(4, base["attn_res_block_size"] if base["attn_res"] == "block" else 1)

    wanted = {"hidden_size": own.get("hidden_size"), "num_hidden_layers": own.get("num_hidden_layers")}
    # What is no number is reported with the other mistakes of the recipe.
    fixed_width, fixed_depth = (value if type(value) is int else None for value in wanted.values())
    if fixed_width and "num_attention_heads" not in own:
        _check_multiple("hidden_size", fixed_width, width // heads, width, "a head")
    if fixed_depth:
        _check_multiple("num_hidden_layers", fixed_depth, group, depth, "a group of layers")

    if "scale" not in own:
        return _shape(base, fixed_width or width, fixed_depth or depth)
    if fixed_width and fixed_depth:
        raise UserError(
            f"model.scale {own['scale']}: hidden_size and num_hidden_layers are given as well; remove one of"
            " the three"
        )
    widths = [fixed_width] if fixed_width else [*range(width // heads, MOST_WIDTH + 1, width // heads)]
    depths = [fixed_depth] if fixed_depth else sorted({depth, *range(group, MOST_DEPTH + 1, group)})
    return _shape(base, *_nearest(own["scale"], width, depth, widths, depths))


def _check_multiple(key: str, value: int, unit: int, known: int, what: str) -> None:
    """Raise UserError, naming the nearest, when value is neither the shape's own nor a multiple of unit."""
    if value == known or (value > 0 and value % unit == 0):
        return
    below = max(value, 0) // unit * unit
    nearest = " or ".join(str(choice) for choice in (below, below + unit) if choice)
    raise UserError(f"model.{key} {value}: no multiple of {unit} ({what} of this shape); nearest: {nearest}")


def _nearest(scale: Any, width: int, depth: int, widths: list[int], depths: list[int]) -> tuple[int, int]:
    """The (width, depth) whose layers have nearest to `scale` times the parameters of (width, depth)."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise UserError(f"model.scale {scale!r}: expected a number above 0, such as 0.5 or 2")

    def growth(w: int, d: int) -> float:
        return (w / width) ** 2 * d / depth

    def cost(w: int, d: int) -> float:
        ratio = math.log(w * depth / (d * width))
        return abs(math.log(growth(w, d) / scale)) + KEEP_RATIO * abs(ratio)

    found = min(((w, d) for w in widths for d in depths), key=lambda shape: cost(*shape))
    if not scale / TOLERANCE <= growth(*found) <= scale * TOLERANCE:
        raise UserError(
            f"model.scale {scale}: no shape of whole heads and groups of layers has about that size; nearest:"
            f" {growth(*found):.3g}"
        )
    return found


def _shape(base: Record, width: int, depth: int) -> Record:
    """`base` at another width and depth, everything that follows them in its ratio."""
    ratio, shape = width / base["hidden_size"], dict(base)
    linear = dict(base["linear_attn_config"])
    shape |= {"hidden_size": width, "num_hidden_layers": depth, "linear_attn_config": linear}
    if ratio != 1:
        # Eights: quick products everywhere.
        for key in FOLLOW_WIDTH:
            if type(base[key]) is int:
                shape[key] = max(8, round(base[key] * ratio / 8) * 8)
        shape["num_attention_heads"] = max(1, round(base["num_attention_heads"] * ratio))
        linear["num_heads"] = max(1, round(linear["num_heads"] * ratio))
        shape["initializer_range"] = round(base["initializer_range"] / math.sqrt(ratio), 5)
    # Lists of layers are those of one depth; without them the pattern is the published one.
    if depth != base["num_hidden_layers"]:
        linear |= {"kda_layers": None, "full_attn_layers": None}
    return shape
