"""MoonViT-V2 and its projector as Kimi K3 publishes them: names, shapes, the norm's epsilon, and NVIDIA's
implementation where it is installed (`pip install --no-deps nemo-automodel`)."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import Projector, RMSNorm, VisionTower
from tests.vision.test_parity import GRIDS, PARITY_TOL, randomise

SMALL = VisionConfig.preset(
    "moonvit_v2",
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=3,
    head_dim=32,
    intermediate_size=160,
    pos_emb_height=16,
    pos_emb_width=16,
)


def test_names_and_shapes_are_the_published_ones():
    """168 tensors: qkv wider than the stream, no bias, a norm behind the projector."""
    expected = {
        "patch_embed.proj.weight": (1024, 3, 14, 14),
        "patch_embed.pos_emb.weight": (64, 64, 1024),
        "encoder.final_layernorm.weight": (1024,),
        "proj.0.weight": (4096, 4096),
        "proj.2.weight": (7168, 4096),
        "post_norm.weight": (7168,),
    }
    for layer in range(27):
        for name, shape in (
            ("norm0", (1024,)),
            ("norm1", (1024,)),
            ("wqkv", (4608, 1024)),
            ("wo", (1024, 1536)),
            ("mlp.fc0", (4096, 1024)),
            ("mlp.fc1", (1024, 4096)),
        ):
            expected[f"encoder.blocks.{layer}.{name}.weight"] = shape
    cfg = VisionConfig.preset("moonvit_v2")
    with torch.device("meta"):
        state = VisionTower(cfg).state_dict() | Projector(cfg, 7168).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    assert len(expected) == 168


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_eps_that_is_not_named_is_float32s(seed, dtype):
    """The released tower names none. torch takes that of the type it computes in, float32, for bfloat16 as
    well (since 2.7; before, 2^-7): inputs as small as their root tell them apart. Ours is named."""
    torch.manual_seed(seed)
    x = (torch.randn(9, 64) * 0.05).to(dtype)
    unnamed = nn.functional.rms_norm(x, (64,))
    assert torch.equal(unnamed, nn.functional.rms_norm(x, (64,), eps=torch.finfo(torch.float32).eps))
    norm = VisionTower(SMALL).encoder.blocks[0].norm0.to(dtype)
    assert torch.equal(norm(x), unnamed)
    older = nn.functional.rms_norm(x, (64,), eps=2.0**-7)
    assert (unnamed / older).float().mean() > 1.5


@pytest.fixture(scope="module")
def nvidias():
    """(our tower and projector, NVIDIA's with the same weights)."""
    theirs = pytest.importorskip("nemo_automodel.components.models.kimi_k3.vision")
    configs = pytest.importorskip("nemo_automodel.components.models.kimi_k3.config")
    # As it is called, without the compiler.
    theirs.get_rope_shape = lambda table, interpolation_mode, shape: (
        nn.functional.interpolate(table.permute(2, 0, 1)[None], size=shape, mode=interpolation_mode)[0]
        .permute(1, 2, 0)
        .flatten(0, 1)
    )
    config = configs.KimiK3VisionConfig(
        vt_hidden_size=64,
        vt_num_hidden_layers=3,
        vt_num_attention_heads=3,
        vt_intermediate_size=160,
        qkv_hidden_size=96,
        init_pos_emb_height=16,
        init_pos_emb_width=16,
        attn_implementation="eager",
    )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        setattr(config, name, getattr(config, f"vt_{name}"))
    config.kimi_attn_implementation = "eager"
    sizes = SimpleNamespace(
        mm_hidden_size=64, hidden_size=40, merge_kernel_size=(2, 2), projector_ln_eps=config.projector_ln_eps
    )
    found = []
    for ours, other in (
        (VisionTower(SMALL), theirs.MoonViT3dPretrainedModel(config)),
        (Projector(SMALL, 40), theirs.PatchMergerMLPV2(sizes)),
    ):
        other.load_state_dict(randomise(ours, seed=5).state_dict(), strict=True)
        found.append((ours.eval(), other.eval()))
    assert all(module.eps is None for module in found[0][1].modules() if isinstance(module, nn.RMSNorm))
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_tower_and_projector_agree_with_nvidias(nvidias, make_pack, grids, seed):
    (tower, other), (projector, merger) = nvidias
    patches, grid = make_pack(grids, SMALL, seed)
    with torch.no_grad():
        features = tower(patches, grid)
        expected = other(patches, torch.tensor(grids))
        torch.testing.assert_close(features, torch.cat(expected), atol=PARITY_TOL, rtol=PARITY_TOL)
        joined = torch.cat(list(merger(expected)))
        torch.testing.assert_close(projector(features), joined, atol=PARITY_TOL, rtol=PARITY_TOL)


@pytest.mark.parametrize("eps", [2.0**-7, 1e-4])
def test_another_eps_is_seen_there(nvidias, make_pack, eps):
    (tower, other), _ = nvidias
    patches, grid = make_pack([(1, 6, 10)], SMALL, 0)
    norms = [module for module in tower.modules() if isinstance(module, RMSNorm)]
    with torch.no_grad():
        try:
            for norm in norms:
                norm.eps = eps
            off = tower(patches, grid) - torch.cat(other(patches, torch.tensor([(1, 6, 10)])))
        finally:
            for norm in norms:
                norm.eps = SMALL.norm_eps
    assert off.abs().max() > 10 * PARITY_TOL
