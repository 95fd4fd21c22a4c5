"""Parameters and arithmetic of a model, counted from its configuration and its parameters' shapes.

FLOPs are useful matrix work: a multiply-add is two, and backward is twice forward. Causal attention counts
only the pairs it uses; KDA counts its recurrence (per token and head: decay K V, prediction 2 K V, update 2 K
V, read 2 K V), not the extra work a chunked kernel does. Norms, activations, softmax and recomputation are
left out.

Shapes: T tokens, P patches, D hidden, H heads, K key dim, V value dim, E experts, F expert width.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, VisionCost, num_tokens

ROOMS = ("embedding", "kda", "mla", "moe", "dense", "attnres", "norm", "head", "vision", "projector")


@dataclass(frozen=True)
class ParameterCount:
    """total and by room; active: those one text token passes (all rooms of the decoder, k of E routed
    experts)."""

    total: int
    active: int
    by_room: dict[str, int]


PARTS = {
    "vision_tower": "vision",
    "mm_projector": "projector",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "block_sparse_moe": "moe",
    "mlp": "dense",
}
"""Where a parameter counts, by a part of its name; what stands nowhere is a norm."""


def count_parameters(model: NativeFusion) -> ParameterCount:
    """Count a model, which may live on the meta device. A tied head counts once, as embedding."""
    config = model.config.text
    by_room, idle = dict.fromkeys(ROOMS, 0), 0
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("decoder.").split(".")
        if "_res_" in name:
            room = "attnres"
        elif parts[0] == "layers" and parts[2] == "self_attn":
            room = config.plan()[int(parts[1])]
        else:
            room = PARTS.get(parts[2 if parts[0] == "layers" else 0], "norm")
        by_room[room] += parameter.numel()
        # Of E experts a token passes k; routers and shared experts are always active.
        if ".experts." in name:
            idle += parameter[config.num_experts_per_token :].numel()
    total = sum(by_room.values())
    return ParameterCount(total, total - idle - by_room["vision"] - by_room["projector"], by_room)


def decoder_flops(config: ModelConfig, lengths: Sequence[int]) -> dict[str, float]:
    """Forward FLOPs by room of one packed row of documents with these lengths (tokens)."""
    tokens = float(sum(lengths))
    # Causal attention uses half the square; counting all of it would flatter long documents.
    pairs = float(sum(length * (length + 1) // 2 for length in lengths))
    hidden, linear, heads = config.hidden_size, config.linear_attn_config, config.num_attention_heads

    # KDA. Two low-rank maps: the forget gate's, and the output gate's unless it is full rank.
    dim, channels = linear.head_dim, linear.num_heads * linear.head_dim
    low_rank = dim * (hidden + channels)
    gate = hidden * channels if linear.full_rank_output_gate else low_rank
    projections = 4 * hidden * channels + low_rank + gate + hidden * linear.num_heads
    conv = 3 * channels * linear.short_conv_kernel_size
    kda = tokens * (2 * (projections + conv) + 7 * channels * dim)

    # MLA. A low-rank query pays for both of its projections.
    rank, query, value = config.kv_lora_rank, heads * config.qk_head_dim, heads * config.v_head_dim
    weights = hidden * query
    if config.q_lora_rank is not None:
        weights = config.q_lora_rank * (hidden + query)
    weights += hidden * (rank + config.qk_rope_head_dim) + rank * (heads * config.qk_nope_head_dim + value)
    weights += hidden * value * (2 if config.mla_output_gate else 1)
    mixers = {"kda": kda, "mla": 2 * tokens * weights + 2 * pairs * (query + value)}

    # Feed-forward, useful work only: the chosen and the shared experts, and the router's scores.
    rooms: dict[str, float] = defaultdict(float)
    latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
    experts = 3 * width * config.num_experts_per_token * (latent or hidden)
    experts += 3 * width * config.num_shared_experts * hidden + 2 * hidden * (latent or 0)
    for index, kind in enumerate(config.plan()):
        rooms[kind] += mixers[kind]
        if config.is_moe(index):
            rooms["moe"] += 2 * tokens * (experts + hidden * config.num_experts)
        else:
            rooms["dense"] += 2 * tokens * hidden * 3 * config.intermediate_size

    if config.attn_res != "none":
        # Each source of each mix costs a dot product and a weighted add: 4 D. A sub-layer reads the finished
        # blocks before it, and its own block's sum once that has begun; the last mix reads them all.
        sublayers, size = 2 * config.num_hidden_layers, config.sublayers_per_block()
        mixed = sum(1 + i // size + (i % size > 0) for i in range(sublayers))
        rooms["attnres"] = 4 * tokens * hidden * (mixed + 1 + -(-sublayers // size))
    rooms["head"] = 2 * tokens * hidden * config.vocab_size
    return dict(rooms)


def vision_flops(config: VisionConfig, hidden_size: int, grids: Sequence[Grid]) -> dict[str, float]:
    """Forward FLOPs of tower and projector for images (clips) of these (t, h, w) grids, in patches."""
    features = sum(num_tokens(grid, config.merge_kernel_size) for grid in grids)
    merged = config.hidden_size * config.merge_size
    return {
        "vision": VisionCost.from_config(config).of(grids),
        "projector": 2.0 * features * merged * (merged + hidden_size),
    }


def training_flops(
    config: FusionConfig, lengths: Sequence[int], grids: Sequence[Grid] = ()
) -> dict[str, float]:
    """Forward plus backward FLOPs by room of one packed batch; their sum over the step time is the achieved
    rate."""
    rooms = decoder_flops(config.text, lengths)
    rooms.update(vision_flops(config.vision, config.text.hidden_size, grids))
    return {room: 3 * flops for room, flops in rooms.items()}  # forward plus twice as much
