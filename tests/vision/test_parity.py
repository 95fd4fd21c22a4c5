"""MoonViT-3D and its projector against transformers' own `kimi_k25`, with the same weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import Projector, VisionTower

oracle = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
oracle_config = pytest.importorskip("transformers.models.kimi_k25.configuration_kimi_k25")

# float32 rounding over three layers with features of size one;
# both sides are 1e-6 to 3e-6 from a float64 run.
PARITY_TOL = 1e-5
CFG = VisionConfig.preset(
    "moonvit3d",
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=24,
    intermediate_size=160,
    pos_emb_height=16,
    pos_emb_width=16,
)


def randomise(module, seed):
    """Matrices of gain one; positions, biases and norms large enough to show in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 0.5 if parameter.ndim == 1 or "pos_emb" in name else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return module


def halves(rows, heads):
    """Adjacent-pair rotation layout -> the oracle's rotate-half layout, head by head."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def to_oracle(state, heads):
    out = {}
    for name, tensor in state.items():
        name = name.replace("patch_embed.pos_emb.weight", "patch_embed.pos_emb.position_embeddings")
        name = name.replace("encoder.blocks.", "layers.").replace("encoder.final", "final")
        name = name.replace("norm1", "norm2").replace("norm0", "norm1")
        name = name.replace("mlp.fc1", "mlp.fc2").replace("mlp.fc0", "mlp.fc1").replace("wo.", "attn.proj.")
        if "wqkv" in name:
            q, k, v = tensor.chunk(3)
            for key, value in (("q", halves(q, heads)), ("k", halves(k, heads)), ("v", v)):
                out[name.replace("wqkv", f"attn.{key}_proj")] = value
        else:
            out[name] = tensor
    return out


@pytest.fixture(scope="module")
def towers():
    config = oracle_config.Kimi_K25VisionConfig(
        hidden_size=CFG.hidden_size,
        num_hidden_layers=CFG.num_hidden_layers,
        num_attention_heads=CFG.num_attention_heads,
        intermediate_size=CFG.intermediate_size,
        pos_emb_height=CFG.pos_emb_height,
        pos_emb_width=CFG.pos_emb_width,
        rope_parameters={"rope_type": "axial", "rope_theta": CFG.rope_theta},
    )
    config._attn_implementation = "sdpa"
    ours = randomise(VisionTower(CFG), seed=3)
    theirs = oracle.Kimi_K25VisionModel(config).eval()
    theirs.load_state_dict(to_oracle(ours.state_dict(), CFG.num_attention_heads), strict=True)
    return ours, theirs


def oracle_features(model, patches, grids):
    """Features per item; one call for each t, because the oracle cannot mix clips of different length."""
    items, out = patches.split([t * h * w for t, h, w in grids]), {}
    for frames in {t for t, _, _ in grids}:
        which = [i for i, grid in enumerate(grids) if grid[0] == frames]
        rows, sizes = torch.cat([items[i] for i in which]), torch.tensor([grids[i] for i in which])
        pooled = model(rows, grid_thw=sizes).pooler_output
        out |= dict(zip(which, pooled.split((sizes[:, 1] * sizes[:, 2] // 4).tolist())))
    return torch.cat([out[i] for i in range(len(grids))])


GRIDS = [
    [(1, 6, 10)],
    [(1, 16, 16), (1, 2, 2), (1, 20, 4)],
    [(4, 4, 8), (3, 8, 6)],
    [(2, 4, 6), (1, 4, 6), (4, 4, 6), (3, 2, 2), (1, 30, 18)],
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_tower_and_its_gradients_agree_with_transformers(towers, make_pack, grids, seed):
    ours, theirs = towers
    patches, grid = make_pack(grids, CFG, seed)
    got, expected = ours(patches, grid), oracle_features(theirs, patches, grids)
    assert got.shape == (sum(grid.tokens), 4, CFG.hidden_size) and expected.std() > 0.1
    assert (got - expected).abs().max() <= PARITY_TOL

    torch.manual_seed(0)
    weight = torch.randn(got.shape) / len(got)
    for model, features in ((ours, got), (theirs, expected)):
        model.zero_grad()
        (features * weight).sum().backward()
    mine = to_oracle({name: p.grad for name, p in ours.named_parameters()}, CFG.num_attention_heads)
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max().clamp_min(1.0)
        assert (mine[name] - parameter.grad).abs().max() <= PARITY_TOL * scale, name


@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_projector_v1_agrees_with_transformers(seed):
    sizes = SimpleNamespace(hidden_size=CFG.hidden_size, merge_kernel_size=(2, 2))
    config = SimpleNamespace(
        projection_hidden_size=CFG.hidden_size,
        projection_layer_norm_eps=1e-5,
        vision_config=sizes,
        text_config=SimpleNamespace(hidden_size=80),
    )
    ours = randomise(Projector(CFG, 80), seed)
    theirs: nn.Module = oracle.Kimi_K25MultimodalProjection(config)
    renamed = {
        name.replace("proj.0", "in_proj").replace("proj.2", "out_proj"): tensor
        for name, tensor in ours.state_dict().items()
    }
    theirs.load_state_dict(renamed, strict=True)
    torch.manual_seed(seed)
    features = torch.randn(7, 4, CFG.hidden_size)
    assert (ours(features) - theirs(features).squeeze(1)).abs().max() <= PARITY_TOL
