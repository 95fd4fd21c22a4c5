"""Configuration of the vision side: patches, MoonViT tower, projector.

One configuration describes three generations of the tower (Kimi-VL report section 2.1, Kimi K2.5 report
section 4.2, Kimi K3 report section 2.4); `VisionConfig.preset` gives each with its published numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record

# `nn.RMSNorm(eps=None)`, as the released MoonViT-V2 module has it: since torch 2.7 the machine epsilon of
# float32, whatever the input (pytorch #142848); before, that of the input, 2^-7 in bfloat16. With which the
# weights were trained is not said; the former is what vLLM and nemo-automodel compute.
FP32_EPS = 2.0**-23
Count = Annotated[int, Field(ge=1, le=4096)]
Channel = Annotated[int, Field(ge=0, le=255)]


class VisionConfig(BaseModel):
    """Tower, projector and image preparation. Field defaults are MoonViT-V2 (Kimi K3), 401,214,464 tower
    parameters.

    Limits count patches, not pixels or tokens: an image is shrunk to about `in_patch_limit` patches, a video
    frame to about `in_patch_limit_each_frame` (padding and rounding may add some: `patches.navit_size`).
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    # patches
    patch_size: int = Field(14, ge=1, le=1024)
    """side of a square patch in pixels"""
    in_channels: int = Field(3, ge=1, le=64)
    """channels of a pixel"""
    merge_kernel_size: tuple[PositiveInt, PositiveInt] = (2, 2)
    """(rows, columns) of patches that become one token"""
    max_patches_per_side: int = Field(512, ge=1, le=1 << 14)
    """longest side in patches; also the range of the 2-D RoPE"""
    in_patch_limit: PositiveInt = 65536
    """patches of one image, before padding"""
    in_patch_limit_each_frame: PositiveInt = 4096
    """patches of one video frame before padding"""
    alpha_background: tuple[Channel, Channel, Channel] = (255, 255, 255)
    """RGB put behind transparent pixels"""

    # tower
    tower: str = "moonvit"
    """a registered tower (moonvit, timm), or "package.module:Class" of your own"""
    timm: str | None = None
    """tower timm: the name of the model there"""
    hidden_size: int = Field(1024, ge=1, le=1 << 18)
    """width of the tower"""
    num_hidden_layers: int = Field(27, ge=0, le=256)
    """layers of the tower"""
    num_attention_heads: Count = 12
    """heads of the tower"""
    head_dim: int = Field(128, ge=4, le=1 << 14)
    """multiple of 4; qkv width is heads * head_dim, free of hidden_size"""
    intermediate_size: int = Field(4096, ge=1, le=1 << 20)
    """width of the feed-forward"""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm"""
    norm_eps: PositiveFloat = FP32_EPS
    """always explicit: see FP32_EPS"""
    bias: bool = False
    """biases of patch embedding, attention and MLP"""
    pos_emb_height: Count = 64
    """rows of the learned position table, which is stretched to the picture"""
    pos_emb_width: Count = 64
    """its columns"""
    pos_emb_time: Count = 4
    """frames that share one item (and its tokens); 1 means images only"""
    pos_emb_interpolation: Literal["bilinear", "bicubic", "bilinear_antialias"] = "bilinear"
    """how it is stretched"""
    rope_theta: PositiveFloat | None = 1e4
    """base of the 2-D RoPE; null: none (SigLIP)"""
    initializer_range: PositiveFloat = 0.02
    """standard deviation of fresh weights"""

    # projector
    projector: Literal["v1", "v2"] = "v2"
    """v1 LayerNorm before and biases; v2 RMSNorm after, none"""
    projector_ln_eps: PositiveFloat = 1e-5
    """of the projector's norm in every release, V2 included"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim % 4:
            raise ValueError(
                f"head_dim={self.head_dim}: the 2-D RoPE turns pairs for x and y in equal number, "
                f"so head_dim must be a multiple of 4 (nearest: {max(4, round(self.head_dim / 4) * 4)})"
            )
        if any(self.max_patches_per_side % side for side in self.merge_kernel_size):
            raise ValueError(
                f"max_patches_per_side={self.max_patches_per_side} must be a multiple of merge_kernel_size="
                f"{self.merge_kernel_size}, or padding would push a full-length side over the limit"
            )
        if self.hidden_size % 2 and self.pos_emb_time > 1:
            raise ValueError(f"hidden_size={self.hidden_size} must be even for the sine/cosine time table")
        return self

    @property
    def qkv_width(self) -> int:
        """Width of each of q, k and v: heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def merge_size(self) -> int:
        """Patches (of one frame) behind one token."""
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> VisionConfig:
        """Configuration `name` of PRESETS, with single fields replaced by `overrides`.

        Raises ValueError for an unknown name, naming the nearest preset.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown vision preset {name!r}; {did_you_mean(name, PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})


_SO400M: Record = dict(
    hidden_size=1152,
    num_hidden_layers=27,
    num_attention_heads=16,
    head_dim=72,
    intermediate_size=4304,
    norm="layer",
    norm_eps=1e-5,
    bias=True,
    pos_emb_interpolation="bicubic",
    projector="v1",
)

PRESETS: dict[str, Record] = {
    # Kimi K3: trained from scratch with next-token prediction; the default.
    "moonvit_v2": {},
    # Kimi-VL: images only. 4,096 patches is the budget of Kimi-VL-A3B.
    "moonvit": {**_SO400M, "pos_emb_time": 1, "in_patch_limit": 4096},
    # Kimi K2.5: the same parameters, with up to four frames in one item.
    "moonvit3d": {**_SO400M, "in_patch_limit": 16384},
    # MoonViT-V2 in small, for tests and CPU runs. No released weights to agree with, hence a usual eps.
    "tiny": dict(
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        intermediate_size=192,
        norm_eps=1e-5,
        pos_emb_height=16,
        pos_emb_width=16,
        in_patch_limit=1024,
        in_patch_limit_each_frame=256,
    ),
}
