"""`earlyfusion bench train`: speed and memory of a training step, beside transformers measured in the same
run.

The recipe's decoder shape without vision and Attention Residuals is trained beside transformers'
KimiLinearForCausalLM (its pure-torch path on a CPU), each side in its own process, in turn (A B A B ...), on
equal token ids. Ours takes the documents packed; transformers takes them as the rows of a batch, because its
pure-torch KDA refuses packing. Forward, cross-entropy, backward, AdamW step (torch.optim, fused off) on both
sides, under bf16 autocast on a GPU. Medians, and the ratio of neighbours in time; everything is saved as
JSON. What a whole recipe does here stands in the log of its run (tokens/s, MFU).
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.decoder import Decoder
from earlyfusion.pipeline.bench.frame import (
    Result,
    alternate,
    compared,
    default_device,
    peak_mib,
    run_side,
    save_record,
)
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import keep_freed_memory

KEPT = "transformers-kept"
"""transformers with glibc keeping freed memory, as our verbs tell it for ours."""
SHARED = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads"
    " num_shared_experts routed_scaling_factor kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim"
    " v_head_dim rms_norm_eps num_experts_per_token num_experts moe_renormalize bos_token_id eos_token_id"
    " pad_token_id"
).split()
"""Keys that mean the same on both sides."""


class TrainOptions(Options):
    recipe: str = "nano"
    """recipe whose shape is used"""
    documents: PositiveInt = 8
    """documents in a step"""
    length: PositiveInt = 512
    """tokens of a document"""
    steps: PositiveInt = 4
    """timed steps of one round"""
    rounds: PositiveInt = 2
    """rounds, each side once a round"""
    out: str = "runs/bench/train.json"
    """where the numbers are saved"""


def shared_shape(shape: Record) -> Record:
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


def with_kda(shape: Record, layers: list[int]) -> Record:
    """The decoder shape with KDA in these layers, counted from 1, and MLA in all others."""
    linear = {**shape["linear_attn_config"], "kda_layers": layers, "full_attn_layers": None}
    return {**shape, "linear_attn_config": linear}


def their_model(shape: Record, device: torch.device) -> Any:
    """KimiLinearForCausalLM of a decoder shape, with weights as they come, on the CPU; with its pure-torch
    kernels where `device` is no GPU."""
    if device.type == "cpu":
        # Importable fla would be chosen and crash without a GPU.
        sys.modules["fla"] = None  # type: ignore[assignment]
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    text = ModelConfig.model_validate(shared_shape(shape))
    linear = text.linear_attn_config

    # Everything is given: their defaults are those of the 48B model.
    fields: Record = {name: getattr(text, name) for name in SHARED}
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


def our_loss(text: ModelConfig, ids_NL: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Our decoder, and its loss on packed documents."""
    decoder = Decoder(text).to(ids_NL.device)
    documents, length = ids_NL.shape
    segments = Segments.from_lengths([length] * documents)

    # A document's last token has nothing to predict.
    labels = torch.cat([ids_NL[:, 1:], torch.full_like(ids_NL[:, :1], -100)], dim=1).flatten()
    weights = (labels >= 0).float()
    loss_kernel = resolve("linear_cross_entropy", ids_NL.device)

    def loss() -> Tensor:
        hidden = decoder(decoder.embed_tokens(ids_NL.flatten()), segments)
        total, _ = loss_kernel(hidden, decoder.head_weight(), labels, weights)
        return total / weights.sum()

    return decoder, loss


def their_loss(shape: Record, ids_NL: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """transformers' model, and its loss on the rows of a batch."""
    model = their_model(shape, ids_NL.device).to(ids_NL.device).train()
    return model, lambda: model(input_ids=ids_NL, labels=ids_NL, use_cache=False).loss


def train_side(side: str, shape: Record, documents: int, length: int, steps: int) -> Result:
    """One side in its process: tokens/s of `steps` training steps, memory in MiB, the first loss."""
    device = default_device()
    if side != "transformers":
        keep_freed_memory()

    # The ids are drawn on the CPU, so that both sides see the same on any device.
    torch.manual_seed(0)
    ids = torch.randint(0, shape["vocab_size"], (documents, length)).to(device)
    # Equal shapes and ids; each side packs them as it can.
    if side == "ours":
        model, loss = our_loss(ModelConfig.model_validate(shared_shape(shape)), ids)
    else:
        model, loss = their_loss(shape, ids)

    # What is there before the first step is weights; what comes on top is training.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaded = peak_mib()

    losses, seconds = [], []
    for _ in range(1 + steps):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())  # also waits for the device
        seconds.append(time.perf_counter() - start)
    return {
        # The first step compiles and allocates.
        "tokens_per_s": documents * length / statistics.median(seconds[1:]),
        "peak_mib": peak_mib(),
        "step_mib": peak_mib() - loaded,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": losses[0],
    }


@verb
def train(options: TrainOptions) -> None:
    """Entry of `earlyfusion bench train`. Raises UserError when a side cannot run."""
    shape = load_config([options.recipe]).model.model_dump(mode="json")
    request = {"shape": shape, **options.model_dump(include={"documents", "length", "steps"})}

    def run(side: str) -> Result:
        return run_side(train_side, {"side": side, **request})

    rounds = alternate(("ours", "transformers", KEPT), options.rounds, run)
    if "transformers" not in rounds:
        raise UserError("bench train: half a comparison is none; mend what transformers says above")
    columns = compared(rounds)
    show(f"decoder training step, {options.documents * options.length} tokens", columns)
    save_record(options.out, options.model_dump(), comparison=columns, rounds=rounds)
