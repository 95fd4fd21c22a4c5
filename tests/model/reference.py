"""transformers' KimiLinear as an independent oracle: build it on a CPU, and copy our weights into it.

With fla importable it dispatches to GPU kernels even on a CPU; the pure torch forms it wraps are put back
here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from earlyfusion.model.config import ModelConfig
from earlyfusion.model.decoder import Decoder

SAME = set(
    (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
        "num_attention_heads num_shared_experts routed_scaling_factor kv_lora_rank q_lora_rank "
        "qk_rope_head_dim qk_nope_head_dim v_head_dim num_experts_per_token num_experts moe_renormalize "
        "rms_norm_eps bos_token_id eos_token_id pad_token_id "
    ).split()
)
"""Fields that transformers calls as we do."""
_KERNELIZED = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@contextmanager
def pure_torch() -> Iterator[None]:
    """Run transformers' KimiLinear with its torch fallbacks instead of the GPU kernels found by import."""
    with mock.patch.multiple(hf, **{name: getattr(hf, name).__wrapped__ for name in _KERNELIZED}):
        yield


def reference_model(config: ModelConfig) -> Any:
    linear = config.linear_attn_config
    layer_types = ["linear_attention" if kind == "kda" else "full_attention" for kind in config.plan()]
    shape = KimiLinearConfig(
        **config.model_dump(include=SAME),
        num_key_value_heads=config.num_attention_heads,
        layer_types=layer_types,
        mlp_layer_types=["sparse" if config.is_moe(i) else "dense" for i in range(config.num_hidden_layers)],
        linear_head_dim=linear.head_dim,
        linear_num_heads=linear.num_heads,
        linear_conv_kernel_dim=linear.short_conv_kernel_size,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return KimiLinearForCausalLM(shape)


def reference_name(name: str) -> str:
    """Name in transformers' module tree of the parameter that our decoder calls `name`."""
    for ours, theirs in (
        (".block_sparse_moe.", ".mlp."),
        ("self_attn.A_log", "self_attn.forget_gate.A_log"),
        ("self_attn.dt_bias", "self_attn.forget_gate.dt_bias"),
        ("self_attn.f_a_proj", "self_attn.forget_gate.f_a_proj"),
        ("self_attn.f_b_proj", "self_attn.forget_gate.f_b_proj"),
    ):
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head") else f"model.{name}"


def to_reference(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names and shapes -> transformers' (weights, or gradients by the same map)."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_conv1d.weight" in name:
            continue
        if name.endswith("A_log"):
            tensor = tensor.view(1, 1, -1, 1)
        out[reference_name(name)] = tensor
    for name in [n for n in tensors if n.endswith("q_conv1d.weight")]:
        stacked = [tensors[name.replace("q_conv1d", f"{which}_conv1d")] for which in "qkv"]
        out[f"model.{name.replace('q_conv1d', 'conv1d')}"] = torch.cat(stacked)
    return out


def copy_weights(decoder: Decoder, model: Any) -> None:
    missing = model.load_state_dict(to_reference(decoder.state_dict()), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
