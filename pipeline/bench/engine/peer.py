"""One side of `earlyfusion bench engine`, in a process of its own so that its peak memory is its own.

    python -m earlyfusion.pipeline.bench.engine.peer '{"side": "engine" | "generate" | "static" | "continuous"
    | "generate-kept" |
        "generate-tuned", ...}'

Every side generates greedily from equal weights and equal prompts: `engine` is ours; `generate` is
transformers' generate with its dynamic cache, `static` with a static cache, `continuous` its continuous
batching. `generate-kept` is generate in a process that keeps freed buffers, as ours does; `generate-tuned` is
that with the chunk rule of its linear attention replaced by its own recurrent one, which a CPU computes
faster for short prompts: what somebody gets who tunes it by hand. A side that transformers refuses for this
model answers {"refused": reason}. Prints one JSON line.

In a grouped case GROUP neighbours have the same prompt, as the samples of one rollout group do: the engine
reads it once and forks, transformers reads it for every row (its num_return_sequences repeats the input
before reading, too). In a ragged case prompts and answers have lengths between a quarter and the whole of the
given ones. transformers' generate pads prompts on the left and runs until the longest answer is done; only
wanted tokens are counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earlyfusion.model.hub.folder import cast
from earlyfusion.pipeline.bench.peer import peak_mib
from earlyfusion.pipeline.runtime import keep_freed_memory

FIRST_TOKEN = 6
"""Prompts hold ordinary tokens only."""
GROUP = 16
KEPT = "generate-kept"
"""transformers' generate in a process that keeps freed buffers, as ours does."""
TUNED = "generate-tuned"
"""The same with the recurrent rule in the place of the chunk rule."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Prompts and how many tokens each is to be continued by. group: neighbours with the same prompt."""

    prompts: list[Tensor]
    wanted: list[int]
    group: int = 1

    @classmethod
    def make(cls, batch: int, prompt: int, new: int, lengths: str, vocabulary: int, seed: int) -> Case:
        """lengths: "equal", "ragged" or "groups". Grouped batches are multiples of GROUP."""
        ragged, group = lengths == "ragged", GROUP if lengths == "groups" else 1
        generator = torch.Generator().manual_seed(seed)
        draw = lambda most: int(torch.randint(max(1, most // 4), most + 1, (1,), generator=generator))
        sizes = [draw(prompt) if ragged else prompt for _ in range(batch // group)]
        wanted = [draw(new) if ragged else new for _ in range(batch)]
        ids = [torch.randint(FIRST_TOKEN, vocabulary, (n,), generator=generator) for n in sizes]
        return cls([row for row in ids for _ in range(group)], wanted, group)

    def padded(self) -> tuple[Tensor, Tensor]:
        """input_ids and attention_mask, padded on the left."""
        width = max(len(ids) for ids in self.prompts)
        ids, mask = (
            torch.zeros(len(self.prompts), width, dtype=torch.long),
            torch.zeros(len(self.prompts), width),
        )
        for row, prompt in enumerate(self.prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        return ids, mask.long()


Generate = Callable[[Case], list[list[int]]]


def shared_shape(shape: dict[str, Any]) -> dict[str, Any]:
    """The decoder shape without what transformers' model does not have."""
    plain_gates = {"gate_lower_bound": None, "full_rank_output_gate": False}
    linear = {**shape.get("linear_attn_config", {}), **plain_gates}
    same = {
        "attn_res": "none",
        "tie_word_embeddings": False,
        "mla_output_gate": False,
        "linear_attn_config": linear,
    }
    return {**shape, **same}


def our_model(
    shape: dict[str, Any],
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    drawn_there: bool = False,
) -> Any:
    """Our model of a decoder shape with seeded weights; its vision side is the tiny preset and stays unused.

    drawn_there: draw the weights on the device itself, quicker for billions and other than those of a CPU.
    """
    from earlyfusion.model.config import FusionConfig, ModelConfig
    from earlyfusion.model.fusion import NativeFusion
    from earlyfusion.vision.config import VisionConfig

    torch.manual_seed(seed)
    text = ModelConfig.model_validate(shape)
    config = FusionConfig(text=text, vision=VisionConfig.preset("tiny"), media_token_id=FIRST_TOKEN - 1)
    with torch.device(device if drawn_there else "cpu"):
        model = NativeFusion(config)
    return cast(model, dtype).to(device).eval()


def engine_side(request: dict[str, Any], device: torch.device) -> Generate:
    """Our engine, made once for a number of prompts, since its pools are sized for them."""
    from earlyfusion.model.engine.engine import Engine
    from earlyfusion.model.engine.requests import Request, SamplingParams, TokenPrompt
    from earlyfusion.model.generate import engine_for

    model = our_model(shared_shape(request["shape"]), request["seed"], device, DTYPES[request["dtype"]])
    engines: dict[int, Engine] = {}

    def generate(case: Case) -> list[list[int]]:
        prompts = [TokenPrompt(ids) for ids in case.prompts]
        if len(prompts) not in engines:
            longest = max(*case.wanted, request["new"])
            engines[len(prompts)] = engine_for(model, None, prompts, longest, most_slots=len(prompts))
        engine = engines[len(prompts)]
        prompts, wanted = prompts[:: case.group], case.wanted[:: case.group]
        params = [SamplingParams(count, 0.0, ignore_eos=True, n=case.group) for count in wanted]
        requests = [Request(str(i), prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params))]
        return [done.ids for done in engine.generate(requests)]

    return generate


def reference(request: dict[str, Any], device: torch.device) -> Any:
    """transformers' KimiLinearForCausalLM with our weights."""
    if device.type == "cpu":
        sys.modules["fla"] = None  # type: ignore[assignment]  # importable fla would be chosen and crash without a GPU
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    ours = our_model(shared_shape(request["shape"]), request["seed"], torch.device("cpu"))
    text = ours.config.text
    linear = text.linear_attn_config
    fields: dict[str, Any] = dict(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        moe_intermediate_size=text.moe_intermediate_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_attention_heads,
        num_shared_experts=text.num_shared_experts,
        routed_scaling_factor=text.routed_scaling_factor,
        kv_lora_rank=text.kv_lora_rank,
        q_lora_rank=text.q_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim,
        qk_nope_head_dim=text.qk_nope_head_dim,
        v_head_dim=text.v_head_dim,
        rms_norm_eps=text.rms_norm_eps,
        num_experts_per_token=text.num_experts_per_token,
        num_experts=text.num_experts,
        moe_renormalize=text.moe_renormalize,
        linear_head_dim=linear.head_dim,
        linear_num_heads=linear.num_heads,
        linear_conv_kernel_dim=linear.short_conv_kernel_size,
        tie_word_embeddings=False,
        layer_types=["full_attention" if kind == "mla" else "linear_attention" for kind in text.plan()],
        mlp_layer_types=["sparse" if text.is_moe(i) else "dense" for i in range(text.num_hidden_layers)],
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    model = KimiLinearForCausalLM(KimiLinearConfig(**fields))
    model.load_state_dict(their_names(ours.decoder.state_dict()), strict=True)
    return cast(model, DTYPES[request["dtype"]]).to(device).eval()


def their_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our decoder's tensors under transformers' names and shapes (its convolutions are one, A_log is [1, 1,
    H, 1])."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_conv1d.weight" in name:
            if "q_conv1d" in name:
                parts = [tensors[name.replace("q_conv1d", f"{which}_conv1d")] for which in "qkv"]
                out[f"model.{name.replace('q_conv1d', 'conv1d')}"] = torch.cat(parts)
            continue
        renamed = name.replace(".block_sparse_moe.", ".mlp.")
        for part in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
            renamed = renamed.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        value = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
        out[renamed if renamed.startswith("lm_head") else f"model.{renamed}"] = value
    return out


def transformers_side(request: dict[str, Any], device: torch.device) -> Generate:
    """transformers' generate, with a dynamic or static cache."""
    model = reference(request, device)
    if request["side"] == TUNED:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs

        theirs.chunk_kimi_delta_attention = theirs.recurrent_kimi_delta_attention
    options = {"cache_implementation": "static"} if request["side"] == "static" else {}

    def generate(case: Case) -> list[list[int]]:
        ids, mask = (tensor.to(device) for tensor in case.padded())
        count = max(case.wanted)
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=2,
                **options,
            )
        return [row[ids.shape[1] :][:wanted] for row, wanted in zip(out.tolist(), case.wanted)]

    return generate


def continuous_side(request: dict[str, Any], device: torch.device) -> Generate:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    model = reference(request, device)

    def generate(case: Case) -> list[list[int]]:
        count = max(case.wanted)
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=2)
        done = model.generate_batch(inputs=[ids.tolist() for ids in case.prompts], generation_config=config)
        if len(done) != len(case.prompts):
            raise RuntimeError(f"generate_batch returned {len(done)} of {len(case.prompts)} answers")
        ordered = [done[key] for key in sorted(done, key=lambda key: int(str(key).split("_")[-1]))]
        return [list(answer.generated_tokens)[:wanted] for answer, wanted in zip(ordered, case.wanted)]

    return generate


SIDES = {
    "engine": engine_side,
    "generate": transformers_side,
    "static": transformers_side,
    "continuous": continuous_side,
    KEPT: transformers_side,
    TUNED: transformers_side,
}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the case and of one new token for the same prompts (what reading costs), and what was
    generated."""
    torch.set_num_threads(request["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and request["side"] in ("engine", KEPT, TUNED):
        keep_freed_memory()
    case = Case.make(
        request["batch"],
        request["prompt"],
        request["new"],
        request["lengths"],
        request["shape"]["vocab_size"],
        request["seed"],
    )
    generate = SIDES[request["side"]](request, device)
    try:
        generate(Case(case.prompts[:1], [2]))
    except Exception as error:  # whatever transformers raises for what it does not support
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    one = Case(case.prompts, [1] * len(case.prompts), case.group)
    if device.type == "cuda":  # kernels are compiled and CUDA graphs captured when shapes are first met
        for wanted in (one, case):
            generate(wanted)
    # one thread on a CPU is timed by its own busy time, which other work on the machine disturbs least
    clock = time.process_time if device.type == "cpu" and request["threads"] == 1 else time.perf_counter
    seconds, answers, began = [], [], time.perf_counter()
    for wanted in (one, case):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        answers = generate(wanted)
        seconds.append(clock() - start)
    return {
        "first_s": seconds[0],
        "total_s": seconds[1],
        "clock": clock.__name__,
        "wall_s": time.perf_counter() - began,
        "tokens": sum(case.wanted),
        "answers": answers,
        "peak_mib": peak_mib(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
