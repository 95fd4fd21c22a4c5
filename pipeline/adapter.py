"""LoRA: the weights stay as they are, and a product of two thin matrices beside each is trained.

    y = (W + alpha / rank * B A) x         A [rank, in] drawn, B [out, rank] zero: step 0 is the model

The sum is what `weight` of an adapted layer gives, since not all that reads a projection calls it: KDA joins
six of them, absorbed attention and the compiled decoder take kv_b_proj apart. So training, evaluation and
rollouts see the same function to the bit. The sum is made in every training step (2 rank in out operations
and as much memory as the weight), and kept while there is no gradient.

What is written is peft's: RUN/adapter with adapter_config.json and adapter_model.safetensors, named as the
layers of an exported model are (`peft.PeftModel.from_pretrained(exported, "RUN/adapter")`). RUN/model is the
merged model. Source: LoRA (arXiv 2106.09685).
"""

import math
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import cast, public_tensors
from earlyfusion.pipeline.config.schema import AdapterSection
from earlyfusion.pipeline.parallel.mesh import Layout

FOLDER = "adapter"


class Adapted(nn.Module):
    """What an adapted linear layer is beside what it was: `weight` with its adapter, parameters lora_A and
    lora_B."""

    scale: float
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    kept: tuple[Any, Tensor] | None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        base, A, B = (self._parameters[name] for name in ("weight", "lora_A", "lora_B"))
        assert base is not None and A is not None and B is not None
        if torch.is_grad_enabled():
            self.kept = None
            return base + (self.scale * (B @ A)).to(base.dtype)
        # Without a gradient it stands until one of the three changes. torch's fused AdamW raises no version:
        # what is kept is dropped before each of its steps by the forward pass, and nothing reads in between.
        now = base._version, A._version, B._version, base.data_ptr()
        if self.kept is None or self.kept[0] != now:
            self.kept = now, base + (self.scale * (B @ A)).to(base.dtype)
        return self.kept[1]


def peft_package() -> Any:
    """The peft package. Raises UserError, with what to install, where there is none."""
    try:
        import peft
    except ImportError:
        raise UserError("adapter.rank needs the package peft: pip install 'earlyfusion[adapters]'") from None
    return peft


def check_plan(config: AdapterSection, layout: Layout) -> None:
    """UserError for adapters in a model that is spread over processes."""
    # A spread model is built anew from its configuration, which knows of no adapters: all of it would be
    # trained. A launcher may ask for shards where the recipe does not, so this is said of the plan at hand.
    if config.rank and layout.sharded:
        raise UserError(
            f"adapter.rank {config.rank} trains a model that every process holds, not one of {layout.sizes}:"
            " set dp_shard, ep, pp and cp to 1 (dp_replicate is free)"
        )


def attach(model: NativeFusion, config: AdapterSection) -> NativeFusion:
    """The model with adapters beside the layers that `config.targets` names, and all else frozen; as it is
    where `config.rank` is None. Raises UserError for a target that names no linear layer."""
    if config.rank is None:
        return model
    # What is written at the end needs it: better said now. A model without storage is only read by.
    if model.device.type != "meta":
        peft_package()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for target in config.targets:
        if not any(fnmatchcase(name, target) for name in layers):
            leaves = sorted({name.rpartition(".")[2] for name in layers})
            hint = did_you_mean(target.rpartition(".")[2], leaves)
            raise UserError(f"adapter.targets: {target!r} matches no linear layer; {hint}, as '*.NAME'")
    model.requires_grad_(False)
    for name, layer in layers.items():
        if any(fnmatchcase(name, target) for target in config.targets):
            _adapt(layer, config.rank, config.alpha)
    return model


def _adapt(layer: Any, rank: int, alpha: float) -> None:
    rows, columns = layer.weight.shape
    device = layer.weight.device
    # A class of its own for each kind of layer, so that nothing else of it changes.
    layer.__class__ = type(f"Adapted{type(layer).__name__}", (Adapted, type(layer)), {})
    layer.scale, layer.kept = alpha / rank, None
    layer.lora_A = nn.Parameter(torch.empty(rank, columns, device=device))
    layer.lora_B = nn.Parameter(torch.zeros(rows, rank, device=device))
    nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))  # as peft draws it


def adapted(model: nn.Module) -> dict[str, Adapted]:
    """Adapted layers by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}


def merged(
    model: NativeFusion, read: Callable[[str], Tensor] | None = None
) -> tuple[NativeFusion, Callable[[str], Tensor]]:
    """A model of the same configuration without adapters and storage, and its weights by name, adapters
    added. read: where the weights lie, by name, if not in the model."""
    layers = adapted(model)
    with torch.device("meta"):
        bare = NativeFusion(model.config)
    cast(bare, model.decoder.embed_tokens.weight.dtype)
    find = model.state_dict().__getitem__ if read is None else read

    def whole(name: str) -> Tensor:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return find(name)
        A, B = (find(f"{name.removesuffix('weight')}lora_{part}") for part in "AB")
        base = find(name)
        return base + (layer.scale * (B @ A)).to(base.dtype)

    return bare, whole


def save_adapter(folder: Path, model: NativeFusion, base: str) -> Path:
    """Write the adapters as peft does. base: the model that they belong to."""
    layers = adapted(model)
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    tensors, names = {}, []
    # The same names as in an export: weights of a layer lie under its public name.
    own = {f"{name}.weight": torch.empty(0) for name in layers}
    for item in public_tensors(own.items()):
        place, layer = item.name.removesuffix(".weight"), layers[item.ours.removesuffix(".weight")]
        names.append(place)
        for part in ("lora_A", "lora_B"):
            value = getattr(layer, part).detach().cpu().contiguous()
            tensors[f"base_model.model.{place}.{part}.weight"] = value
    folder.mkdir(parents=True, exist_ok=True)
    lora = peft_package().LoraConfig(
        r=rank,
        lora_alpha=first.scale * rank,
        target_modules=names,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    lora.save_pretrained(str(folder))
    file = folder / "adapter_model.safetensors"
    save_file(tensors, str(file), metadata={"format": "pt"})
    # safetensors writes 600, whatever the umask.
    shutil.copymode(folder / "adapter_config.json", file)
    return folder
