"""Checkpoints of others: what their configuration says in our words, and where each of our tensors lies in
their files.

    read = Foreign(folder)      read.text, read.vision: what it has      read.find(name): a public tensor

Names of public Kimi checkpoints are ours (folder.py); what differs by family:

| family (`model_type`) | taken | differs |
|---|---|---|
| kimi_linear | text | no prefix `language_model.`; transformers: dense layers as `block_sparse_moe.*_proj` |
| kimi_k3 | text, tower, projector | `A_log` filled up to whole 128s; MXFP4 is refused |
| kimi_k25, kimi_vl | tower, projector | Kimi-VL: `multi_modal_projector.{pre_norm,linear_1,linear_2}` |
| siglip, siglip_vision_model | tower | other names, separate q, k, v; it has no RoPE |
| siglip2, siglip2_vision_model (NaFlex) | tower | and patches as rows of pixels, an antialiased table |
| timm (`architecture`) | tower | its own names below `vision_tower.model.` (vision/timm_tower.py) |
| deepseek_v3 (Moonlight) | parts, to begin with | RoPE in MLA; `mlp.experts.{e}.gate_proj` and the like |
| llama, qwen2, qwen3, mistral | parts, to begin with | another attention; vocabulary and feed-forward alike |

Nothing is unpickled, no code from a folder is run, and one tensor is read at a time. What a configuration
asks for that our model does not compute is refused, never dropped.

Sources: published config.json files and modelling code; the weight conversion maps of transformers 5.23.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from earlyfusion.kernels.files import Record
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.hub.config import MODEL_TYPE, ModelDirectoryError, fault, load_config, read_json
from earlyfusion.model.hub.folder import tensor_headers, weight_files
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.timm_tower import timm_config

HEAD_TILE = 128
MOST_SEEN = 1 << 29
"""Bytes of a file that are mapped at once, and a tensor more."""
TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "mm_projector."

# Key of a kimi_linear configuration -> the only value that our model computes.
FIXED: Record = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_parameters": None,
}
# Keys that say nothing about what is computed, or only what others say already.
IDLE = set(
    (
        "architectures auto_map dtype torch_dtype transformers_version use_cache model_type model_max_length"
        " max_position_embeddings initializer_range pretraining_tp head_dim qk_head_dim num_key_value_heads"
        " layer_types mlp_layer_types linear_attn_config use_grouped_topk linear_conv_kernel_dim"
        " linear_head_dim linear_num_heads linear_num_key_heads linear_num_value_heads linear_key_head_dim"
        " linear_value_head_dim rope_theta return_dict output_hidden_states output_attentions"
        " is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type _name_or_path"
        " _attn_implementation_autoset attn_implementation _attn_implementation"
    ).split()
)
OWN = ("num_experts_per_tok", "num_experts_per_token")
# Kimi K3's words for what ours calls otherwise, or what only its kernels ask.
K3 = {"topk_method", "mla_use_output_gate"}
K3_LINEAR = {"use_full_rank_gate": "full_rank_output_gate"}
# Left out they would take defaults that are not ours, and no shape would tell.
K3_SAID = ("hidden_act", "num_experts_per_token", "routed_scaling_factor")
# What null means there: SiTU's bounds have other defaults.
K3_NULL: Record = {"activation_situ_beta": 1.0, "activation_situ_linear_beta": None}
QUANTISED = re.compile(r"[._](packed|scale|scale_inv|zero_point|qweight|qzeros)$")
KERNELS = ("kda_", "situ_backend", "attn_res_triton")
VISION_FIXED: Record = {
    "hidden_act": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "num_channels": 3,
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "pos_emb_type": "divided_fixed",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
}
# What MoonViT-V2 has in place of its predecessors' biases, norms and projector.
V2_FIXED: Record = {
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "patch_embed_proj_bias": False,
    "linear_bias": False,
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "pos_emb_interpolation_mode": "bilinear",
}
VISION_IDLE = set(
    (
        "image_size layer_norm_eps merge_kernel_size rope_parameters rope_theta mm_hidden_size"
        " text_hidden_size vision_use_head ignore_index media_placeholder_token_id pad_token_id"
        " qkv_hidden_size num_patches"
    ).split()
)
# Family -> what its tower is, but for its sizes.
TOWERS = {
    "kimi_k25": "moonvit3d",
    "kimi_k3": "moonvit_v2",
    "kimi_vl": "moonvit",
    "siglip": "moonvit",
    "siglip_vision_model": "moonvit",
    "siglip2": "moonvit",
    "siglip2_vision_model": "moonvit",
}
PIXELS = 3
VISION_KEYS = {
    # theirs -> ours; both generations of names
    "hidden_size": "hidden_size",
    "vt_hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "vt_num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "vt_num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vt_intermediate_size": "intermediate_size",
    "patch_size": "patch_size",
    "init_pos_emb_height": "pos_emb_height",
    "pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "pos_emb_time": "pos_emb_time",
    "projector_ln_eps": "projector_ln_eps",
    "norm_eps": "norm_eps",
    "in_patch_limit": "in_patch_limit",
    "in_patch_limit_each_frame": "in_patch_limit_each_frame",
    "patch_limit_on_one_side": "max_patches_per_side",
}


UNPACK = "convert the text model to bfloat16 first (its tower can be taken as it is, --tower)"


def refuse(path: Path, what: str) -> ModelDirectoryError:
    return ModelDirectoryError(f"{path}: {what}")


def lose_nothing(path: Path, raw: Record, fixed: Record, known: set[str]) -> None:
    """Refuse a configuration that asks for what is not computed here, or for what nobody knows."""
    for key, value in fixed.items():
        if raw.get(key) not in (value, None):
            raise refuse(path, f"{key} is {raw[key]!r}; the model here computes {value!r} alone")
    strange = {key for key in set(raw) - set(fixed) - known if raw[key] not in (None, False)}
    if strange:
        raise refuse(path, f"keys that are not known: {sorted(strange)}; what they ask for might be lost")


def text_config(path: Path, raw: Record) -> ModelConfig:
    """A kimi_linear configuration in our words. Raises ModelDirectoryError for anything that our decoder does
    not compute."""
    known = set(ModelConfig.model_fields) - {"linear_attn_config", "initializer_range"}
    raw = {key: value for key, value in raw.items() if not key.startswith(KERNELS)}
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise refuse(path, f"quantised weights ({method}); {UNPACK}")
    if raw.get("hidden_act") not in ("silu", "situ", None):
        raise refuse(path, f"hidden_act is {raw['hidden_act']!r}; the model here computes 'silu' and 'situ'")
    values = {key: value for key, value in raw.items() if key in known and value is not None}
    values |= next(({"num_experts_per_token": raw[key]} for key in OWN if key in raw), {})
    values |= {key: null for key, null in K3_NULL.items() if key in raw and raw[key] is None}
    values |= {"num_experts": 0} if raw.get("num_experts", 0) is None else {}
    unsaid = [key for key in K3_SAID if raw.get("routed_expert_hidden_size") and key not in values]
    if unsaid:
        raise refuse(path, f"says nothing of {', '.join(unsaid)}; take the values from the release")
    lose_nothing(path, raw, FIXED, known | IDLE | set(OWN) | K3)
    values |= {"mla_output_gate": True} if raw.get("mla_use_output_gate") else {}
    # Its unit is ours: layers of a block.
    values |= {"attn_res": "block"} if raw.get("attn_res_block_size") and "attn_res" not in raw else {}
    values |= {"router_balance": "quantile"} if raw.get("routed_expert_hidden_size") else {}
    heads = raw.get("num_key_value_heads")
    if heads is not None and heads != raw.get("num_attention_heads"):
        raise refuse(path, f"num_key_value_heads is {heads}; MLA here has as many as num_attention_heads")

    linear = {K3_LINEAR.get(key, key): v for key, v in dict(raw.get("linear_attn_config") or {}).items()}
    if "layer_types" in raw:
        kinds = list(enumerate(raw["layer_types"], 1))
        full = [index for index, kind in kinds if kind == "full_attention"]
        kda = [index for index, kind in kinds if kind != "full_attention"]
        if linear.get("full_attn_layers", full) != full:
            raise refuse(path, "layer_types and linear_attn_config.full_attn_layers disagree")
        linear |= {"full_attn_layers": full, "kda_layers": kda}
    for theirs, ours in (
        ("linear_head_dim", "head_dim"),
        ("linear_num_heads", "num_heads"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        if theirs in raw:
            linear.setdefault(ours, raw[theirs])
    # The class default of transformers puts MLA elsewhere than the checkpoint has it.
    if not linear.get("full_attn_layers") and not linear.get("kda_layers"):
        raise refuse(path, "says nowhere which layers are MLA (layer_types, or linear_attn_config)")
    if "mlp_layer_types" in raw:
        sparse = [kind == "sparse" for kind in raw["mlp_layer_types"]]
        first = sparse.index(True) if True in sparse else len(sparse)
        if not all(sparse[first:]):
            raise refuse(path, "mlp_layer_types: dense layers stand between those with experts")
        values |= {"first_k_dense_replace": first, "moe_layer_freq": 1}
    try:
        # RMSNorm of the latents has an epsilon of its own, which no configuration names.
        return ModelConfig(**values, linear_attn_config=linear)
    except ValidationError as error:
        raise refuse(path, fault(error)) from None


def vision_config(path: Path, family: str, raw: Record) -> VisionConfig:
    """A tower's configuration in our words. Raises ModelDirectoryError."""
    fixed = VISION_FIXED | (V2_FIXED if family == "kimi_k3" else {})
    lose_nothing(path, raw, fixed, set(VISION_KEYS) | VISION_IDLE | IDLE)
    values = {ours: raw[theirs] for theirs, ours in VISION_KEYS.items() if raw.get(theirs) is not None}
    rope = raw.get("rope_parameters") or raw
    values |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    if family.startswith("siglip"):
        side = raw.get("image_size", 224) // raw.get("patch_size", 16)
        if family.startswith("siglip2"):
            side = isqrt(raw.get("num_patches", 256))
            values["pos_emb_interpolation"] = "bilinear_antialias"
        values |= {"norm_eps": raw.get("layer_norm_eps", 1e-6), "pos_emb_height": side, "pos_emb_width": side}
        values |= {"pos_emb_time": 1, "rope_theta": None}
    merge = raw.get("merge_kernel_size") or (2, 2)
    values["merge_kernel_size"] = tuple(merge) if isinstance(merge, list | tuple) else (merge, merge)
    if "hidden_size" in values and "num_attention_heads" in values:
        width = raw.get("qkv_hidden_size") or values["hidden_size"]
        values.setdefault("head_dim", width // values["num_attention_heads"])
    try:
        return VisionConfig.preset(TOWERS[family], **values)
    except ValidationError as error:
        raise refuse(path, f"vision_config.{fault(error)}") from None


@dataclass(frozen=True)
class Found:
    """Where a public tensor lies: names in the files, and how it is made of them."""

    names: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor


def from_rows(weight: Tensor) -> Tensor:
    """A patch embedding [C, 3, p, p]; NaFlex has it on rows of pixels, [C, p * p * 3]."""
    side = isqrt(weight.shape[1] // PIXELS)
    return weight.view(-1, side, side, PIXELS).permute(0, 3, 1, 2)


def stacked(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


SIGLIP = (
    (r"patch_embed\.proj\.(weight|bias)", r"embeddings.patch_embedding.\1"),
    (r"encoder\.final_layernorm\.(weight|bias)", r"post_layernorm.\1"),
    (r"encoder\.blocks\.(\d+)\.norm0\.(weight|bias)", r"encoder.layers.\1.layer_norm1.\2"),
    (r"encoder\.blocks\.(\d+)\.norm1\.(weight|bias)", r"encoder.layers.\1.layer_norm2.\2"),
    (r"encoder\.blocks\.(\d+)\.wo\.(weight|bias)", r"encoder.layers.\1.self_attn.out_proj.\2"),
    (r"encoder\.blocks\.(\d+)\.mlp\.fc0\.(weight|bias)", r"encoder.layers.\1.mlp.fc1.\2"),
    (r"encoder\.blocks\.(\d+)\.mlp\.fc1\.(weight|bias)", r"encoder.layers.\1.mlp.fc2.\2"),
)


# Families whose model ours does not compute, and what of it may begin one of ours.
LLAMA = re.compile(r"(model\.(embed_tokens|norm)|lm_head|.*layernorm|.*\.mlp\.(gate|up|down)_proj)\.weight")
WARM = dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), LLAMA) | {"deepseek_v3": re.compile(".*")}
EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Foreign:
    """A checkpoint of others in `folder`. warm: one whose weights may only begin a model is taken as well.
    tower: its tower alone is wanted, whatever its text model is. Raises ModelDirectoryError for one that is
    none, or of a family that is not known."""

    def __init__(self, folder: str | Path, warm: bool = False, tower: bool = False) -> None:
        self.folder = Path(folder)
        path = self.folder / "config.json"
        if not path.is_file():
            raise refuse(self.folder, "no config.json; give a checkpoint's folder")
        self.raw = read_json(path)
        # timm's own files name no model type, but the model.
        self.family = "timm" if "architecture" in self.raw else str(self.raw.get("model_type"))
        text = self.raw.get("text_config") if isinstance(self.raw.get("text_config"), dict) else None
        text = self.raw if self.family == "kimi_linear" else text
        vision = self.raw.get("vision_config")
        self.text: ModelConfig | None = None
        self.vision: VisionConfig | None = None
        if self.family == MODEL_TYPE:
            ours = load_config(self.folder)
            self.text, self.vision = ours.text, ours.vision
        elif not tower and text is not None and text.get("model_type", "kimi_linear") == "kimi_linear":
            # transformers moves it to the top.
            packed = {key: self.raw[key] for key in ("quantization_config",) if self.raw.get(key)}
            self.text = text_config(path, {"tie_word_embeddings": False} | text | packed)
        if self.family in TOWERS and isinstance(vision, dict):
            beside = _projector(self.raw) | _limits(self.folder / "preprocessor_config.json")
            self.vision = vision_config(path, self.family, vision | beside)
        elif self.family == "timm":
            self.vision = timm_config(str(self.raw["architecture"]))
        elif self.family in ("siglip_vision_model", "siglip2_vision_model"):
            self.vision = vision_config(path, self.family, self.raw)
        self.tied = bool(self.raw.get("tie_word_embeddings"))
        if self.text is None and self.vision is None and not (tower or (warm and self.family in WARM)):
            known = "kimi_linear, kimi_k25, kimi_k3, kimi_vl, siglip, siglip2, timm"
            hint = "; --like RECIPE takes what fits of it" if self.family in WARM else ""
            raise refuse(path, f"model_type {self.family!r}; what can be imported: {known}{hint}")
        self.shapes = self._headers()
        quantised = [name for name in self.shapes if QUANTISED.search(name) and self._part(name) == TEXT]
        if self.text is not None and quantised:
            raise refuse(self.folder, f"quantised weights ({quantised[0]}); {UNPACK}")
        self.used: set[str] = set()
        """Names in the files that have been asked for."""
        self._open: tuple[Path, Any] | None = None
        self._seen = 0

    def _headers(self) -> dict[str, tuple[Path, list[int], str]]:
        pickled = [p.name for kind in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(kind)]
        if pickled and not any(self.folder.glob("*.safetensors")):
            raise refuse(
                self.folder,
                f"{pickled[0]} is a pickle, which can run code when it is read; convert it to safetensors",
            )
        found = tensor_headers(weight_files(self.folder))
        # Kernels want whole tiles of heads: what is behind the last head is filling.
        heads = self.text.linear_attn_config.num_heads if self.text is not None else 0
        for name, (path, shape, dtype) in found.items():
            if name.endswith("A_log") and heads < prod(shape) == -(-heads // HEAD_TILE) * HEAD_TILE:
                found[name] = path, [heads], dtype
        return found

    def find(self, public: str) -> Found | None:
        """Where a tensor of ours, by its public name, lies; None where it is not there."""
        found = self.peek(public)
        self.used.update(() if found is None else found.names)
        return found

    def peek(self, public: str) -> Found | None:
        """The same, only looked at."""
        ways = (found for found in self._ways(public) if all(name in self.shapes for name in found.names))
        return next(ways, None)

    def _ways(self, public: str) -> Iterator[Found]:
        if public.startswith(TEXT):
            bare = public.removeprefix(TEXT)
            if self.family in WARM:
                name = re.sub(r"(experts\.\d+)\.(w\d)", lambda m: f"{m[1]}.{EXPERT[m[2]]}", bare)
                if WARM[self.family].fullmatch(bare):
                    yield Found((name.replace(".block_sparse_moe.", ".mlp."),))
                return
            for name in (public, bare):
                yield Found((name,))
                # transformers writes dense feed-forwards as if they were experts.
                yield Found((name.replace(".mlp.", ".block_sparse_moe."),))
        elif self.family.startswith("siglip"):
            yield from self._siglip(public)
        elif self.family == "timm":
            yield Found((public.removeprefix(f"{TOWER}model."),))
        else:
            yield Found((public,))
            linear = public.replace(".proj.0.", ".linear_1.").replace(".proj.2.", ".linear_2.")
            yield Found((linear.replace(PROJECTOR, "multi_modal_projector."),))
            # MoonViT by itself has no prefix.
            yield Found((public.removeprefix(TOWER),))

    def _siglip(self, public: str) -> Iterator[Found]:
        name = public.removeprefix(TOWER)
        # With and without the name of the whole, as releases and newer versions of transformers have it.
        for root in ("vision_model.", ""):
            rows = f"{root}embeddings.patch_embedding.weight"
            if name == "patch_embed.proj.weight" and len(self.shapes.get(rows, ("", []))[1]) == 2:
                yield Found((rows,), from_rows)
            for ours, theirs in SIGLIP:
                if re.fullmatch(ours, name):
                    yield Found((root + re.sub(ours, theirs, name),))
            if match := re.fullmatch(r"encoder\.blocks\.(\d+)\.wqkv\.(weight|bias)", name):
                layer = f"{root}encoder.layers.{match[1]}.self_attn."
                yield Found(tuple(f"{layer}{one}_proj.{match[2]}" for one in "qkv"), stacked)
            if name == "patch_embed.pos_emb.weight":
                yield Found((f"{root}embeddings.position_embedding.weight",))

    def left(self, parts: Sequence[str]) -> list[str]:
        """Tensors of these parts (TEXT, TOWER, PROJECTOR) that nobody has asked for."""
        return [name for name in self.shapes if name not in self.used and self._part(name) in parts]

    def _part(self, name: str) -> str:
        """Of a tensor in the files: the part of the model that it belongs to; "" for none of ours."""
        if "rotary_emb" in name or "position_ids" in name:
            return ""
        if name.startswith(("mm_projector.", "multi_modal_projector.")):
            return PROJECTOR
        if self.family == "timm":
            return "" if name.startswith(("head", "fc_norm", "attn_pool")) else TOWER
        if self.family.startswith("siglip"):
            # The pooling head and the text side are of another use.
            inside = name.removeprefix("vision_model.")
            return TOWER if inside.startswith(("embeddings.", "encoder.", "post_layernorm.")) else ""
        if name.startswith(("vision_tower.", "patch_embed.", "encoder.")):
            return TOWER
        return TEXT

    def shape(self, found: Found) -> list[int]:
        """The shape of a tensor: of several, parts below one another."""
        shapes = [self.shapes[name][1] for name in found.names]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def tensor(self, found: Found) -> Tensor:
        """The tensor itself."""
        return found.make(*(self._read(name) for name in found.names))

    def _read(self, name: str) -> Tensor:
        path = self.shapes[name][0]
        # One file is open at a time, and not for long: its pages that were read count as memory.
        if self._open is None or self._open[0] != path or self._seen > MOST_SEEN:
            self._open, self._seen = None, 0
            self._open = path, safe_open(str(path), framework="pt")
        tensor: Tensor = self._open[1].get_tensor(name)
        self._seen += tensor.nbytes
        wanted = prod(self.shapes[name][1])
        return tensor if tensor.numel() == wanted else tensor.flatten()[:wanted]


def _projector(raw: Record) -> Record:
    """What the top of a configuration says about the projector."""
    return {key: raw[key] for key in ("projector_ln_eps",) if key in raw}


def _limits(path: Path) -> Record:
    """How large pictures are taken, which stands in a file of its own."""
    said = read_json(path).get("media_proc_cfg") if path.is_file() else None
    keys = ("in_patch_limit", "in_patch_limit_each_frame", "patch_limit_on_one_side")
    return {key: said[key] for key in keys if key in said} if isinstance(said, dict) else {}
