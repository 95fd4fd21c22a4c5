"""Small multimodal models with all of their parts, for the tests of generation, model directories and
evaluation."""

import torch

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig

TEXTS = [
    "\nQ: what color is the shape?\nA: red",
    (
        "\nQ: is there a circle?\nA: yes no yes no red teal blue gray green black brown yellow circle"
        " triangle rectangle"
    ),
    "the quick brown fox jumps over the lazy dog; def main(): return 0",
] * 4


def tiny_tokenizer(vocab_size: int = 300) -> Tokenizer:
    return train_bpe(TEXTS, vocab_size)


def tiny_config(
    tokenizer: Tokenizer, *, vocab_size: int | None = None, vision: dict | None = None, **text
) -> FusionConfig:
    """Four layers KDA, KDA, KDA, MLA; dense, then MoE; AttnRes in blocks of two layers; gated and low-rank
    parts on."""
    values = dict(
        vocab_size=vocab_size or tokenizer.vocab_size,
        hidden_size=48,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_output_gate=True,
        linear_attn_config=dict(num_heads=2, head_dim=16, short_conv_kernel_size=4),
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=24,
        attn_res="block",
        attn_res_block_size=2,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    small = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32, intermediate_size=48
    )
    return FusionConfig(
        text={**values, **text},
        vision=VisionConfig.preset("tiny", **{**small, **(vision or {})}),
        media_token_id=tokenizer.media_pad_id,
    )


def tiny_model(config: FusionConfig, seed: int = 0) -> NativeFusion:
    """Random weights with nothing left at a value that hides a mistake (zero queries, unit norms, zero
    biases)."""
    torch.manual_seed(seed)
    model = NativeFusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.ndim == 1 and "A_log" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()
