"""The tower as a whole: an independent V2 reference, packing, empty packs, meta construction, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from earlyfusion.kernels.errors import UserError
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import (
    Projector,
    TowerError,
    VisionGrid,
    VisionTower,
    build_tower,
    import_tower,
    zero_anchor,
)

# float64 towers still take their RoPE turns and resampling weights from float32 tables.
TABLE_TOL = 1e-5
# The same items in another pack, float64: products of other row
# counts may add in another order, nothing else.
PACK_TOL = 1e-12

# qkv width 80, hidden size 64, as V2 has them unequal
V2 = VisionConfig.preset("tiny", head_dim=40, norm_eps=2.0**-7)
OTHER = dict(pos_emb_interpolation="bicubic", norm="layer", bias=True, projector="v1")
V2_BICUBIC = VisionConfig.preset("tiny", **OTHER)


def lively(module, seed=0):
    """Weights of a size at which attention is not uniform and biases matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 0.4 if parameter.ndim == 1 or "pos_emb" in name else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return module


def reference(state, cfg, patches, grids):
    """MoonViT in plain torch, one item at a time: interpolate, complex RoPE, softmax written out, reshape
    merge."""
    heads, dim = cfg.num_attention_heads, cfg.head_dim

    def norm(x, name):
        weight = state[name + ".weight"]
        if cfg.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, state[name + ".bias"], cfg.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weight

    def linear(x, name):
        return x @ state[name + ".weight"].T + state.get(name + ".bias", 0.0)

    def one(x, t, h, w):
        x = F.conv2d(x, state["patch_embed.proj.weight"], state.get("patch_embed.proj.bias"))[..., 0, 0]
        table = state["patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        pos = F.interpolate(table, (h, w), mode=cfg.pos_emb_interpolation, align_corners=False)
        half = cfg.hidden_size // 2
        angle = torch.outer(torch.arange(t), 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
        time = torch.cat((angle.sin(), angle.cos()), 1) * (t > 1)
        x = x + (pos[0].flatten(1).T + time[:, None]).flatten(0, 1)

        # x before y, each by theta^(-4 i / D)
        where = torch.arange(t * h * w) % (h * w)
        turn = cfg.rope_theta ** (-4 * torch.arange(dim // 4, dtype=torch.float64) / dim)
        angle = torch.stack([torch.outer(where % w, turn), torch.outer(where // w, turn)], -1).flatten(1)
        spin = torch.polar(torch.ones_like(angle), angle)[:, None]

        def rotated(a):
            pairs = torch.view_as_complex(a.reshape(-1, heads, dim // 2, 2)) * spin
            return torch.view_as_real(pairs).flatten(2)

        for i in range(cfg.num_hidden_layers):
            block = f"encoder.blocks.{i}."
            q, k, v = linear(norm(x, block + "norm0"), block + "wqkv").split(heads * dim, dim=-1)
            score = torch.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / math.sqrt(dim)
            out = torch.einsum("hij,jhd->ihd", score.softmax(-1), v.reshape(-1, heads, dim)).flatten(1)
            x = x + linear(out, block + "wo")
            hidden = F.gelu(linear(norm(x, block + "norm1"), block + "mlp.fc0"), approximate="tanh")
            x = x + linear(hidden, block + "mlp.fc1")
        x = norm(x, "encoder.final_layernorm")
        x = x.view(t, h // 2, 2, w // 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
        return x.mean(0).reshape(h * w // 4, 4, -1)

    parts = patches.split([t * h * w for t, h, w in grids])
    return torch.cat([one(x, *grid) for x, grid in zip(parts, grids)])


@pytest.mark.parametrize("cfg", [V2, V2_BICUBIC], ids=["v2", "layer_bias_bicubic"])
@pytest.mark.parametrize("seed", [0, 1])
def test_tower_agrees_with_an_independent_reference(make_pack, cfg, seed):
    grids = [(1, 4, 6), (3, 2, 4), (1, 18, 2), (2, 2, 4), (1, 16, 16)]
    tower = lively(VisionTower(cfg), seed).double()
    patches, grid = make_pack(grids, cfg, seed, torch.float64)
    torch.manual_seed(seed)
    weight = torch.randn(sum(grid.tokens), 4, cfg.hidden_size, dtype=torch.float64)
    state = {name: p.detach().clone().requires_grad_() for name, p in tower.named_parameters()}
    got, expected = tower(patches, grid), reference(state, cfg, patches, grids)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= TABLE_TOL
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in tower.named_parameters():
        scale = state[name].grad.abs().max()
        assert scale > 0, name
        assert (parameter.grad - state[name].grad).abs().max() <= TABLE_TOL * scale, name


def test_packing_leaks_no_gradient_between_items_and_waits_for_no_device_value(make_pack):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "nonzero", "unique", "_unique2"), name
            return func(*args, **(kwargs or {}))

    tower, projector = lively(VisionTower(V2)), Projector(V2, 40)
    patches, grid = make_pack([(1, 4, 6), (3, 2, 4), (1, 6, 4)], V2)
    patches.requires_grad_()
    with Watch():
        projector(tower(patches, grid)).split(grid.tokens)[1].square().sum().backward()
        with pytest.raises(AssertionError):
            patches.sum().item()
    before, own, after = patches.grad.split(grid.segments.lengths)
    assert not before.any() and not after.any() and own.abs().min() > 0


def test_bytes_are_normalised_and_a_clip_of_one_frame_is_an_image_but_not_of_two(make_pack):
    tower = lively(VisionTower(V2))
    patches, grid = make_pack([(1, 4, 6)], V2)
    flat = VisionTower(VisionConfig(**{**V2.model_dump(), "pos_emb_time": 1}))
    flat.load_state_dict(tower.state_dict())
    image = flat(patches, VisionGrid.from_grids([(1, 4, 6)], flat.cfg))
    assert torch.equal(image, tower(patches, grid))
    raw = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8)
    normalised = tower((raw.double() / 255 - 0.5).float() / 0.5, grid)
    torch.testing.assert_close(tower(raw, grid), normalised, atol=1e-5, rtol=0)
    twice = tower(torch.cat((patches, patches)), VisionGrid.from_grids([(2, 4, 6)], V2))
    assert twice.shape == image.shape and (twice - image).abs().max() > 1e-2


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("eps", [1e-5, 2.0**-7])
def test_projector_v2_is_its_formula_with_an_eps_of_its_own(seed, eps):
    """Against torch's own rms_norm; a small last layer makes the eps matter, and the tower's wide 2^-7 in
    place of the released 1e-5 would be off by a factor."""
    changes = {} if eps == 1e-5 else {"projector_ln_eps": eps}
    projector = Projector(VisionConfig.preset("moonvit_v2", hidden_size=64, **changes), 40)
    lively(projector, seed).double()
    with torch.no_grad():
        projector.proj[2].weight *= 0.05
    torch.manual_seed(seed)
    features = torch.randn(5, 4, 64, dtype=torch.float64)
    state = projector.state_dict()
    hidden = F.gelu(F.linear(features.flatten(1), state["proj.0.weight"]))
    out = F.linear(hidden, state["proj.2.weight"])
    expected = F.rms_norm(out, (40,), state["post_norm.weight"], eps=eps)
    torch.testing.assert_close(projector(features), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("preset", ["v1", "v2"])
def test_without_images_every_parameter_still_gets_a_gradient_of_zeros(preset):
    cfg = VisionConfig.preset("tiny", projector=preset, bias=True)
    tower, projector = VisionTower(cfg), Projector(cfg, 48)
    modules = (tower, projector)
    features = tower(torch.empty(0, 3, 8, 8, dtype=torch.uint8), VisionGrid.from_grids([], cfg))
    assert features.shape == (0, 4, 64)

    def zero_gradients():
        return all(p.grad is not None and not p.grad.any() for m in modules for p in m.parameters())

    # Through the blocks themselves: every block runs, so the collectives of sharded training stay in step.
    projector(features).sum().backward()
    assert zero_gradients()
    for module in modules:
        module.zero_grad()
    # Through the anchor; a parameter that overflowed must not turn a text-only loss into NaN.
    with torch.no_grad():
        tower.patch_embed.proj.weight.fill_(float("inf"))
    loss = zero_anchor(tower) + zero_anchor(projector)
    assert loss.item() == 0
    loss.backward()
    assert zero_gradients()


def test_presets_are_named_and_checked():
    assert VisionConfig() == VisionConfig.preset("moonvit_v2")
    assert VisionConfig().norm_eps == torch.finfo(torch.float32).eps
    with pytest.raises(ValueError, match="'moonvit_v2'"):
        VisionConfig.preset("moonvitv2")
    wrong = dict(head_dim=30, patchsize=8, max_patches_per_side=33, alpha_background=(0, 0, 256))
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            VisionConfig.preset("tiny", **{name: value})


class HalfTower(VisionTower):
    """A tower of a user's own: the registered one with features halved."""

    def forward(self, patches, grid):
        return super().forward(patches, grid) / 2


def test_a_tower_of_ones_own_is_named_by_its_place_and_a_model_directory_imports_nothing():
    place = f"{__name__}:HalfTower"
    own = VisionConfig.preset("tiny", tower=place)
    with pytest.raises(TowerError, match="may not bring along"):
        build_tower(own)
    import_tower(place)
    half = build_tower(own)
    whole = VisionTower(own)
    whole.load_state_dict(half.state_dict())
    patches = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8)
    grid = VisionGrid.from_grids([(1, 2, 4)], own)
    assert torch.equal(half(patches, grid), whole(patches, grid) / 2)
    with pytest.raises(TowerError, match="did you mean 'moonvit'"):
        build_tower(VisionConfig.preset("tiny", tower="moonvitt"))
    with pytest.raises(UserError, match="cannot be imported"):
        import_tower("earlyfusion.vision.encoder:Nothing")


def test_what_does_not_belong_together_and_impossible_grids_are_refused(make_pack):
    tower = VisionTower(V2)
    patches, grid = make_pack([(1, 4, 4)], V2)
    other = VisionGrid.from_grids([(1, 4, 4)], VisionConfig.preset("tiny", rope_theta=100.0))
    for given, message in (((patches[:-1], grid), "do not fit"), ((patches, other), "built for")):
        with pytest.raises(ValueError, match=message):
            tower(*given)
    wrong = {(1, 3, 4): "multiples", (1, 0, 4): "multiples", (5, 2, 2): "frames", (1, 2, 514): "a side"}
    for grid, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            VisionGrid.from_grids([grid], V2)
