"""Our model of a decoder shape, and transformers' Kimi Linear of the same: the peer of `bench train` and
`bench engine`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import cast
from earlyfusion.vision.config import VisionConfig

FIRST_TOKEN = 6
"""Prompts hold ordinary tokens only."""

SHARED = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads"
    " num_shared_experts routed_scaling_factor kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim"
    " v_head_dim rms_norm_eps num_experts_per_token num_experts moe_renormalize bos_token_id eos_token_id"
    " pad_token_id"
).split()
"""Keys that mean the same on both sides."""


def our_model(
    shape: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    drawn_there: bool = False,
) -> NativeFusion:
    """Our model of a decoder shape with the weights of one seed; its vision side is the tiny preset and stays
    unused.

    drawn_there: draw the weights on the device itself, quicker for billions and other than those of a CPU.
    """
    # The same seed on every side, so that the same weights answer.
    torch.manual_seed(0)
    text = ModelConfig.model_validate(shape)
    config = FusionConfig(text=text, vision=VisionConfig.preset("tiny"), media_token_id=FIRST_TOKEN - 1)
    with torch.device(device if drawn_there else "cpu"):
        model = NativeFusion(config)
    cast(model, dtype).to(device).eval()
    return model


def shared_shape(shape: dict[str, Any]) -> dict[str, Any]:
    """The decoder shape without what transformers' model does not have."""
    # What transformers' model does not know, on neither side.
    plain_gates = {"gate_lower_bound": None, "full_rank_output_gate": False}
    return {
        **shape,
        "attn_res": "none",
        "tie_word_embeddings": False,
        "mla_output_gate": False,
        "linear_attn_config": {**shape.get("linear_attn_config", {}), **plain_gates},
    }


def their_model(shape: dict[str, Any], device: torch.device) -> Any:
    """KimiLinearForCausalLM of a decoder shape, with weights as they come, on the CPU; with its pure-torch
    kernels where `device` is no GPU."""
    if device.type == "cpu":
        # Importable fla would be chosen and crash without a GPU.
        sys.modules["fla"] = None  # type: ignore[assignment]
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    text = ModelConfig.model_validate(shared_shape(shape))
    linear = text.linear_attn_config

    # Everything is given: their defaults are those of the 48B model.
    fields: dict[str, Any] = {name: getattr(text, name) for name in SHARED}
    config = KimiLinearConfig(
        **fields,
        num_key_value_heads=text.num_attention_heads,
        linear_head_dim=linear.head_dim,
        linear_num_heads=linear.num_heads,
        linear_conv_kernel_dim=linear.short_conv_kernel_size,
        tie_word_embeddings=False,
        layer_types=["full_attention" if kind == "mla" else "linear_attention" for kind in text.plan()],
        mlp_layer_types=["sparse" if text.is_moe(i) else "dense" for i in range(text.num_hidden_layers)],
    )
    return KimiLinearForCausalLM(config)


def their_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our decoder's tensors under transformers' names and shapes (its convolutions are one, A_log is [1, 1,
    H, 1])."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = name if name.startswith("lm_head") else f"model.{name}"
        # Names first, then the two tensors whose shapes differ.
        theirs = theirs.replace(".block_sparse_moe.", ".mlp.")
        for part in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
            theirs = theirs.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")

        if "_conv1d.weight" not in name:
            renamed[theirs] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
        elif "q_conv1d" in name:
            parts = [tensors[name.replace("q_conv1d", f"{which}_conv1d")] for which in "qkv"]
            renamed[theirs.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return renamed
