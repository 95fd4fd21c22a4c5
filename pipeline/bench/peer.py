"""One side of `earlyfusion bench train`, run in a process of its own so that its peak memory is its own.

    python -m earlyfusion.pipeline.bench.peer '{"side": "ours" | "transformers", ...}'   -> one JSON line

Both sides train the same text decoder shape (KDA 3:1 MLA, MoE, no Attention Residuals, untied head) on the
same token ids: `documents` documents of `length` tokens. Ours takes them packed; transformers takes them as
the rows of a batch, because its pure-torch KDA refuses packing. Forward, cross-entropy, backward, AdamW step
(torch.optim, fused off) on both sides.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (or of the CUDA device when one is used)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(
    shape: dict[str, Any], ids_NL: Tensor, device: torch.device
) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    """Our decoder on packed documents."""
    from earlyfusion.kernels.dispatch import resolve
    from earlyfusion.kernels.segments import Segments
    from earlyfusion.model.config import ModelConfig
    from earlyfusion.model.decoder import Decoder

    # What transformers' model does not have is left out on our side too: the same function of the same
    # parameters.
    plain_gates = {"gate_lower_bound": None, "full_rank_output_gate": False}
    linear = {**shape.get("linear_attn_config", {}), **plain_gates}
    same = {
        "attn_res": "none",
        "tie_word_embeddings": False,
        "mla_output_gate": False,
        "linear_attn_config": linear,
    }
    config = ModelConfig.model_validate({**shape, **same})
    decoder = Decoder(config).to(device)
    documents, length = ids_NL.shape
    segments = Segments.from_lengths([length] * documents)
    ids = ids_NL.reshape(-1).to(device)
    labels = torch.cat([ids_NL[:, 1:], torch.full((documents, 1), -100)], dim=1).reshape(-1).to(device)
    weights = (labels >= 0).float()
    loss_kernel = resolve("linear_cross_entropy", device)

    def loss() -> Tensor:
        hidden = decoder(decoder.embed_tokens(ids), segments)
        total, _ = loss_kernel(hidden, decoder.head_weight(), labels, weights)
        return total / weights.sum()

    return decoder, loss


def transformers_side(
    shape: dict[str, Any], ids_NL: Tensor, device: torch.device
) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    """transformers' KimiLinearForCausalLM with its pure-torch kernels."""
    if device.type == "cpu":
        sys.modules["fla"] = None  # type: ignore[assignment]  # importable fla would be chosen and crash without a GPU
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    from earlyfusion.model.config import ModelConfig

    ours_ = ModelConfig.model_validate(shape)
    linear = ours_.linear_attn_config
    config = KimiLinearConfig(
        vocab_size=ours_.vocab_size,
        hidden_size=ours_.hidden_size,
        intermediate_size=ours_.intermediate_size,
        moe_intermediate_size=ours_.moe_intermediate_size,
        num_hidden_layers=ours_.num_hidden_layers,
        num_attention_heads=ours_.num_attention_heads,
        num_key_value_heads=ours_.num_attention_heads,
        n_shared_experts=ours_.num_shared_experts,
        routed_scaling_factor=ours_.routed_scaling_factor,
        kv_lora_rank=ours_.kv_lora_rank,
        qk_rope_head_dim=ours_.qk_rope_head_dim,
        v_head_dim=ours_.v_head_dim,
        qk_nope_head_dim=ours_.qk_nope_head_dim,
        num_experts_per_tok=ours_.num_experts_per_token,
        num_local_experts=ours_.num_experts,
        linear_head_dim=linear.head_dim,
        linear_num_heads=linear.num_heads,
        linear_conv_kernel_dim=linear.short_conv_kernel_size,
        tie_word_embeddings=False,
        use_cache=False,
        layer_types=["full_attention" if kind == "mla" else "linear_attention" for kind in ours_.plan()],
        mlp_layer_types=["sparse" if ours_.is_moe(i) else "dense" for i in range(ours_.num_hidden_layers)],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = KimiLinearForCausalLM(config)
    model.to(device)  # type: ignore[arg-type]
    model.train()
    ids = ids_NL.to(device)

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return model, loss


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Build one side, warm it up, time `steps` training steps; times in seconds, memory in MiB."""
    torch.manual_seed(request["seed"])
    torch.set_num_threads(request["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(request["seed"])
    ids = torch.randint(
        0, request["shape"]["vocab_size"], (request["documents"], request["length"]), generator=generator
    )
    build = ours if request["side"] == "ours" else transformers_side
    model, loss = build(request["shape"], ids, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaded = peak_mib()
    seconds, losses = [], []
    for index in range(request["warmup"] + request["steps"]):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=request["bf16"]):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())  # also waits for the device
        if index >= request["warmup"]:
            seconds.append(time.perf_counter() - start)
    return {
        "side": request["side"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "losses": losses,
        "peak_mib": peak_mib(),
        "loaded_mib": loaded,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
