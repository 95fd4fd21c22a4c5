"""What the loader packs trains as its documents one by one: pieces of long documents, pictures, several
rows."""

import pytest
import torch

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.data.loading.loader import Loader
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import FusionConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import num_patches, num_tokens

MIX = {"pydoc": 0.4, "easy_vqa": 0.3, "synth_clips": 0.3}
LOSS_RTOL, GRAD_RTOL = 1e-10, 1e-8
"""float64; the sums are taken in another order."""


def one_by_one(batch):
    """Every document of a batch, filler left out, as a batch of its own."""
    grids, patch, media = list(batch.grids), 0, batch.media_positions.tolist()
    for start, stop in zip(batch.segments.offsets, batch.segments.offsets[1:]):
        if start >= batch.num_tokens:
            return
        inside = [m - start for m in media if start <= m < stop]
        mine, count = [], len(inside)
        while count:
            mine.append(grids.pop(0))
            count -= num_tokens(mine[-1])
        patches = sum(map(num_patches, mine))
        yield PackedBatch(
            ids=batch.ids[start:stop],
            labels=batch.labels[start:stop],
            loss_weights=batch.loss_weights[start:stop],
            segments=Segments((stop - start,)),
            patches=batch.patches[patch : patch + patches],
            grids=mine,
            media_positions=torch.tensor(inside, dtype=torch.int64),
            source_ids=batch.source_ids[start:stop],
            sources=batch.sources,
            has_image=batch.has_image[start:stop],
        )
        patch += patches
    assert not grids


@pytest.fixture(scope="module")
def model(tokenizer):
    text = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=48,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
        mla_output_gate=True,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=24,
        router_balance="quantile",
        attn_res="block",
        attn_res_block_size=1,
        tie_word_embeddings=True,
        linear_attn_config={
            "num_heads": 2,
            "head_dim": 8,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
        },
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    vision = VisionConfig.preset("tiny").model_copy(
        update={
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
        }
    )
    torch.manual_seed(0)
    fusion = NativeFusion(
        FusionConfig(text=text, vision=vision, media_token_id=tokenizer.media_pad_id)
    ).double()
    with (
        torch.no_grad()
    ):  # residual queries and gates begin at zero, where a leak through them would not show
        for parameter in fusion.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return fusion.train()


def loss_and_gradients(model, batches):
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = model(batch).loss_sum
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_of_packed_rows_are_those_of_their_documents(
    model, tokenizer, vision, mix, seed, rows
):
    """length 96 splits every chapter of the manual; three rows make a micro-batch of 288 positions."""
    loader = Loader(
        mix(MIX, seed=seed), tokenizer, vision, length=96, tokens=96 * rows, max_patches=2048, lanes=2
    )
    pieces, pictures, trained = 0, 0, 0.0
    for _ in range(2 if rows > 1 else 4):
        for batch in loader.next_step():
            singles = list(one_by_one(batch))
            assert len(singles) == len(batch.keys) and batch.ids.shape[0] == 96 * rows
            pieces += sum("[" in key for key in batch.keys)
            pictures += len(batch.grids)
            loss, packed = loss_and_gradients(model, [batch])
            total, apart = loss_and_gradients(model, singles)
            assert loss == pytest.approx(total, rel=LOSS_RTOL)
            trained += loss
            for name, gradient in packed.items():
                scale = max(1e-6, float(apart[name].abs().max()))
                assert float((gradient - apart[name]).abs().max()) <= GRAD_RTOL * scale, name
    assert pieces and pictures and trained > 0, "long documents and pictures were there"


def fill_of(loader):
    """Share of the positions that hold data."""
    stats = loader.stats()
    return sum(stats["tokens"].values()) / stats["positions"]


@pytest.mark.parametrize(("length", "least"), [(1024, 0.97), (4096, 0.99)])
@pytest.mark.parametrize("seed", [0, 1])
def test_fill_of_the_nano_mix(tokenizer, vision, mix, capsys, length, least, seed):
    weights = {"easy_vqa": 0.76, "pydoc": 0.12, "stdlib_code": 0.07, "synth_scenes": 0.05}
    config = mix(weights, options={"easy_vqa": {"questions_per_image": 3}}, seed=seed)
    loader = Loader(config, tokenizer, vision, length=length, tokens=length, max_patches=65536)
    for _ in range(120_000 // length):
        loader.next_step()
    with capsys.disabled():
        print(f"\nfill at {length}: {fill_of(loader):.4f}")
    assert fill_of(loader) >= least
