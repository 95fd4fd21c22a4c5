"""Our models in the words of others: the files beside the weights, and the names of the weights.

| format | read by | holds |
|---|---|---|
| earlyfusion | earlyfusion; transformers with trust_remote_code, by code that travels along | everything |
| kimi_linear | transformers' KimiLinear, vLLM's Kimi-Linear loader | the text model |
| kimi_k25 | transformers' Kimi_K25ForConditionalGeneration | everything |
| kimi_k3 | vLLM's and NVIDIA's KimiK3ForConditionalGeneration | everything |

The foreign formats compute less than our models can: what they would leave out without a word is refused by
name. Source: transformers 5.24, models/kimi_linear and models/kimi_k25; vLLM 0.33, models/kimi_k3.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from huggingface_hub import ModelCard
from pydantic import BaseModel
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import pad

from earlyfusion.kernels.files import Record, write_atomic, write_json
from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.hub.config import ModelDirectoryError, json_files, read_json
from earlyfusion.model.hub.folder import LICENSED, UNLICENSED, PublicTensor
from earlyfusion.model.hub.foreign import HEAD_TILE, V2_FIXED
from earlyfusion.vision.config import VisionConfig

PORTABLE = Path(__file__).parent / "portable"
MODULES = ("configuration_earlyfusion", "modeling_earlyfusion", "processing_earlyfusion")
MODEL, CONFIG, PROCESSOR = (
    "modeling_earlyfusion.EarlyFusionForConditionalGeneration",
    "configuration_earlyfusion.EarlyFusionConfig",
    "processing_earlyfusion.EarlyFusionProcessor",
)
HEAD = "language_model.lm_head.weight"
IMAGE = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
"""A picture in a text for `AutoProcessor`, as our chat template writes it."""

# Sizes that the foreign configurations name as ours does.
TEXT_KEYS = tuple(
    "vocab_size hidden_size num_hidden_layers intermediate_size rms_norm_eps initializer_range bos_token_id"
    " eos_token_id pad_token_id num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim"
    " qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts"
    " moe_intermediate_size first_k_dense_replace moe_renormalize routed_scaling_factor".split()
)
# Fields that say how a model is trained, or that are written in other words.
OTHER_TEXT = {
    "tie_word_embeddings",
    "router_balance",
    "router_bias_update_rate",
    "linear_attn_config",
    "attn_res_block_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "latent_moe_use_norm",
}
LINEAR_KEYS = ("num_heads", "head_dim", "short_conv_kernel_size")
# What Kimi K3 has besides, under our names.
K3_KEYS = {
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "moe_layer_freq",
}
VISION_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
VISION_TABLE = ("pos_emb_height", "pos_emb_width", "pos_emb_time")
VISION_KEYS = ("patch_size", *VISION_SIZES, *VISION_TABLE, "merge_kernel_size")
# Limits of the preparation stand in a file of their own; theta among the RoPE parameters.
OTHER_VISION = {
    "max_patches_per_side",
    "in_patch_limit",
    "in_patch_limit_each_frame",
    "alpha_background",
    "head_dim",
    "initializer_range",
    "projector_ln_eps",
    "rope_theta",
}


@dataclass(frozen=True)
class Dialect:
    """A format. files: what it has in place of files of a model directory, by name; prefix: of the tensors
    that it takes, which their names there lack; untied: its head is always a matrix of its own; shaped: a
    tensor, by its name, as it stands there; use: of the card."""

    files: Callable[[FusionConfig, str], dict[str, Record]]
    use: str
    prefix: str = ""
    untied: bool = True
    shaped: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor

    def tensors(self, config: FusionConfig, items: Iterable[PublicTensor]) -> dict[str, PublicTensor]:
        """Of our tensors those that the format takes, by their names there."""
        every = list(items)
        if self.untied and config.text.tie_word_embeddings:
            every.append(PublicTensor(HEAD, "decoder.embed_tokens.weight", itemgetter(...)))
        taken = (item for item in every if item.name.startswith(self.prefix))
        return {item.name.removeprefix(self.prefix): item for item in taken}


def _differs(model: BaseModel, same: BaseModel, written: set[str]) -> list[str]:
    """Fields outside `written` that are not as in `same`, the one model that the other side computes."""
    return [
        f"{name} = {getattr(model, name)!r} (computed there: {getattr(same, name)!r})"
        for name in type(model).model_fields
        if name not in written and getattr(model, name) != getattr(same, name)
    ]


def _refuse(format: str, found: list[str], instead: str = "use --format earlyfusion") -> None:
    if found:
        raise ModelDirectoryError(f"format {format} cannot hold this model: {'; '.join(found)}; {instead}")


def _text(text: ModelConfig, dtype: str) -> Record:
    """What the configurations of Kimi-Linear and Kimi K3 say alike."""
    plan = list(enumerate(text.plan(), 1))
    values = text.model_dump(mode="json", include={*TEXT_KEYS})
    # A single weight divided by itself is always one; there it would be divided.
    values["moe_renormalize"] = text.moe_renormalize and text.num_experts_per_token > 1
    return {
        "model_type": "kimi_linear",
        "dtype": dtype,
        **values,
        "linear_attn_config": {
            # Both lists: the class default puts MLA elsewhere, and one alone is not read.
            "kda_layers": [layer for layer, kind in plan if kind == "kda"],
            "full_attn_layers": [layer for layer, kind in plan if kind == "mla"],
            **text.linear_attn_config.model_dump(mode="json", include={*LINEAR_KEYS}),
        },
        "num_key_value_heads": text.num_attention_heads,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "use_cache": True,
        # The classes do not tie: a tied head is written as a matrix of its own.
        "tie_word_embeddings": False,
    }


def kimi_linear_config(text: ModelConfig, dtype: str) -> Record:
    """The text model's configuration for transformers' KimiLinear. Raises ModelDirectoryError for what that
    class does not compute."""
    found = _differs(text, ModelConfig(), {*TEXT_KEYS, *OTHER_TEXT})
    linear = text.linear_attn_config
    found += _differs(linear, type(linear)(), {*LINEAR_KEYS, "kda_layers", "full_attn_layers"})
    if not text.num_experts:
        found.append("num_experts = 0 (that class always has experts)")
    _refuse("kimi_linear", found)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        **_text(text, dtype),
        "model_max_length": 1 << 20,
    }


def kimi_k3_config(config: FusionConfig, dtype: str) -> Record:
    """The whole model's configuration for vLLM's and NVIDIA's Kimi K3. Raises ModelDirectoryError for what
    those classes do not compute."""
    text, vision = config.text, config.vision
    linear = text.linear_attn_config
    found = _differs(text, ModelConfig(), {*TEXT_KEYS, *OTHER_TEXT, *K3_KEYS, "mla_output_gate", "attn_res"})
    if text.attn_res == "full":
        found.append("attn_res = 'full' (computed there: 'none', 'block')")
    written = {*VISION_KEYS, *OTHER_VISION, "norm_eps"} - {"rope_theta"}
    found += _differs(vision, VisionConfig.preset("moonvit_v2"), written)
    _refuse("kimi_k3", found)

    words = _text(text, dtype) | text.model_dump(mode="json", include=K3_KEYS)
    words["linear_attn_config"] |= {
        "gate_lower_bound": linear.gate_lower_bound,
        "use_full_rank_gate": linear.full_rank_output_gate,
    }
    words |= {
        # Null is what those classes know as dense throughout.
        "num_experts": text.num_experts or None,
        "mla_use_output_gate": text.mla_output_gate,
        "attn_res_block_size": text.attn_res_block_size if text.attn_res == "block" else None,
        "topk_method": "noaux_tc",
        "max_position_embeddings": 1 << 20,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        **{name: words[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tie_word_embeddings": False,
        "media_placeholder_token_id": config.media_token_id,
        "image_placeholder": IMAGE,
        "text_config": words,
        "vision_config": {
            "model_type": "kimi_k3_vision",
            **V2_FIXED,
            **{f"vt_{name}": getattr(vision, name) for name in VISION_SIZES},
            **{f"init_{name}": getattr(vision, name) for name in VISION_TABLE},
            "patch_size": vision.patch_size,
            "merge_kernel_size": list(vision.merge_kernel_size),
            "qkv_hidden_size": vision.qkv_width,
            "mm_hidden_size": vision.hidden_size,
            "text_hidden_size": text.hidden_size,
            "projector_ln_eps": vision.projector_ln_eps,
            # Of the tower; the classes name none, and take that of their version of torch.
            "norm_eps": vision.norm_eps,
        },
    }


def whole_tiles(name: str, tensor: Tensor) -> Tensor:
    """K3's kernels want A_log of 128 heads, or a multiple: zeros stand behind the last."""
    if not name.endswith("A_log"):
        return tensor
    heads = tensor.flatten()
    return pad(heads, (0, -len(heads) % HEAD_TILE))


def kimi_k25_config(config: FusionConfig, dtype: str) -> Record:
    """The whole model's configuration for transformers' Kimi_K25ForConditionalGeneration around KimiLinear.
    Raises ModelDirectoryError for what those classes do not compute."""
    vision = config.vision
    found = _differs(vision, VisionConfig.preset("moonvit3d"), {*VISION_KEYS, *OTHER_VISION})
    if vision.qkv_width != vision.hidden_size:
        found.append(f"head_dim = {vision.head_dim} (computed there: hidden_size / num_attention_heads)")
    if vision.rope_theta is None:
        found.append("rope_theta = None (computed there: a number)")
    _refuse("kimi_k25", found, "use --format earlyfusion, or --format kimi_linear for the text model alone")
    text = kimi_linear_config(config.text, dtype)
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": dtype,
        **ids,
        "tie_word_embeddings": False,
        "image_token_id": config.media_token_id,
        "media_placeholder_token_id": config.media_token_id,
        # Clips have items of their own, with the placeholder of pictures.
        "video_token_id": config.media_token_id,
        "projection_hidden_size": vision.hidden_size,
        "projection_layer_norm_eps": vision.projector_ln_eps,
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            **vision.model_dump(mode="json", include={*VISION_KEYS}),
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        },
    }


def with_code(config: FusionConfig, dtype: str) -> dict[str, Record]:
    """Our own configuration, which names the code that transformers takes from the folder."""
    rows, columns = config.vision.merge_kernel_size
    if rows != columns or config.vision.tower != "moonvit":
        raise ModelDirectoryError(
            f"vision.tower = {config.vision.tower!r} with merge_kernel_size {(rows, columns)}: the code for"
            " transformers has MoonViT with square tokens alone"
        )
    files = json_files(config, dtype)
    files["config.json"]["auto_map"] = {
        "AutoConfig": CONFIG,
        "AutoModelForCausalLM": MODEL,
        "AutoModelForImageTextToText": MODEL,
    }
    files["config.json"]["architectures"] = [MODEL.partition(".")[2]]
    prepare = files["preprocessor_config.json"]
    prepare["media_proc_cfg"]["alpha_background"] = list(config.vision.alpha_background)
    prepare |= {"auto_map": {"AutoProcessor": PROCESSOR}, "processor_class": PROCESSOR.partition(".")[2]}
    return files


Format = Literal["earlyfusion", "kimi_linear", "kimi_k25", "kimi_k3"]
DIALECTS: dict[Format, Dialect] = {
    "earlyfusion": Dialect(
        with_code,
        """\
## With transformers

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(".", trust_remote_code=True)
processor = AutoProcessor.from_pretrained(".", trust_remote_code=True)
```
The code in this folder is plain PyTorch and needs no other package; it is slower than earlyfusion itself.""",
        untied=False,
    ),
    "kimi_linear": Dialect(
        lambda config, dtype: {"config.json": kimi_linear_config(config.text, dtype)},
        """\
## With transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
The text model alone: the vision tower and its projector are not here.""",
        prefix="language_model.",
    ),
    "kimi_k25": Dialect(
        lambda config, dtype: {"config.json": kimi_k25_config(config, dtype)},
        """\
## With transformers

```python
from transformers import AutoModelForImageTextToText, AutoTokenizer

model = AutoModelForImageTextToText.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```""",
    ),
    "kimi_k3": Dialect(
        lambda config, dtype: {"config.json": kimi_k3_config(config, dtype)},
        """\
## With vLLM

`vllm serve .` reads this folder as Kimi K3, and writes the size of a picture before it, which this model has
not seen; the default format with earlyfusion's plugin for vLLM does not.""",
        shaped=whole_tiles,
    ),
}


def begin_with_bos(folder: Path) -> None:
    """Let the tokenizer of a folder put [BOS] before a text, as every document of training began; one that
    says itself what it adds stays as it is."""
    path = folder / "tokenizer.json"
    words = Tokenizer.from_file(str(path))
    if words.post_processor is None:
        bos = str(read_json(folder / "tokenizer_config.json")["bos_token"])
        words.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, words.token_to_id(bos))]
        )
        write_atomic(path, words.to_str(pretty=True))


def finish(folder: Path, config: FusionConfig, dtype: str, format: Format, licence: str | None) -> None:
    """Turn the files beside the weights of a model directory in `folder` into those of a format; the card
    keeps what it says and gains how the folder is used."""
    for name, content in DIALECTS[format].files(config, dtype).items():
        write_json(folder / name, content, indent=2)
    for name in MODULES if format == "earlyfusion" else ():
        shutil.copyfile(PORTABLE / f"{name}.py", folder / f"{name}.py")

    begin_with_bos(folder)
    card = ModelCard.load(folder / "README.md")
    card.data.library_name = "vllm" if format == "kimi_k3" else "transformers"
    if format == "kimi_linear":
        card.data.pipeline_tag = "text-generation"
    if licence is not None:
        card.data.license = licence
        card.text = card.text.replace(UNLICENSED, LICENSED % licence)
    card.text = card.text.rstrip() + f"\n\n{DIALECTS[format].use}\n"
    card.save(folder / "README.md")
