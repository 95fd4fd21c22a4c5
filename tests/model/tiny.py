"""Small configurations, models and packed batches for tests, the same everywhere."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import FusionConfig, LinearAttnConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig

MEDIA_TOKEN = 5
PAD_TOKEN = 2


def tiny_text(**overrides: Any) -> ModelConfig:
    """Four layers K K K M: dense, MoE, MoE, MoE; odd widths that no kernel tile fits."""
    linear = dict(num_heads=3, head_dim=8, short_conv_kernel_size=4)
    linear.update(overrides.pop("linear_attn_config", {}))
    shape: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=24,
        num_hidden_layers=4,
        intermediate_size=40,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=PAD_TOKEN,
        num_attention_heads=3,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=16,
        linear_attn_config=LinearAttnConfig(**linear),
        initializer_range=0.1,
    )
    return ModelConfig(**{**shape, **overrides})


def tiny_vision(**overrides: Any) -> VisionConfig:
    small = dict(
        patch_size=4, hidden_size=16, head_dim=8, intermediate_size=24, pos_emb_height=4, pos_emb_width=4
    )
    return VisionConfig.preset("tiny", **{**small, **overrides})


def tiny_fusion(**text: Any) -> FusionConfig:
    return FusionConfig(text=tiny_text(**text), vision=tiny_vision(), media_token_id=MEDIA_TOKEN)


def build(config: FusionConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> NativeFusion:
    """A model whose zero-initialised queries and selection biases are moved off zero, so that they matter."""
    torch.manual_seed(seed)
    model = NativeFusion(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_res_query"):
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    return model.to(dtype)


@dataclass
class TinyBatch:
    """The fields of data.pack.PackedBatch that the model reads."""

    ids: Tensor
    labels: Tensor
    loss_weights: Tensor
    segments: Segments
    patches: Tensor
    grids: list[tuple[int, int, int]]
    media_positions: Tensor


def document(length: int, grids: list[tuple[int, int, int]], config: FusionConfig, seed: int) -> TinyBatch:
    """One document of `length` text tokens with its images' pads in the middle; labels shifted, pads
    unlabelled."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(6, config.text.vocab_size, (length,), generator=generator)
    merge = config.vision.merge_size
    media = sum(h * w // merge for _, h, w in grids)
    half = length // 2
    ids = torch.cat([text[:half], torch.full((media,), MEDIA_TOKEN), text[half:]])
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    labels[labels == MEDIA_TOKEN] = -100
    weights = torch.rand(ids.shape[0], generator=generator) + 0.5
    p = config.vision.patch_size
    count = sum(t * h * w for t, h, w in grids)
    patches = torch.randint(0, 256, (count, 3, p, p), generator=generator, dtype=torch.uint8)
    positions = torch.arange(half, half + media)
    return TinyBatch(ids, labels, weights, Segments((ids.shape[0],)), patches, list(grids), positions)


def pack(documents: list[TinyBatch]) -> TinyBatch:
    """Documents side by side in one packed row."""
    segments = Segments.from_lengths([len(doc.ids) for doc in documents])
    starts = zip(documents, segments.offsets)
    whole = {
        name: torch.cat([getattr(doc, name) for doc in documents])
        for name in ("ids", "labels", "loss_weights", "patches")
    }
    return TinyBatch(
        **whole,
        segments=segments,
        grids=[grid for doc in documents for grid in doc.grids],
        media_positions=torch.cat([doc.media_positions + start for doc, start in starts]),
    )


def text_documents(lengths: list[int], config: FusionConfig, seed: int = 0) -> TinyBatch:
    return pack([document(length, [], config, seed + i) for i, length in enumerate(lengths)])


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by name, and the model ready for the next ones."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def close(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    """Every tensor near that of its name; atol: also relative to a tensor's largest entry above 1."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = atol * max(1.0, tensor.abs().max().item())
        message = lambda text, name=name: f"{name}: {text}"
        torch.testing.assert_close(got[name], tensor, atol=bound, rtol=rtol, msg=message)
