"""MuonClip's step against references that work on one matrix at a time."""

import math

import pytest
import torch
from tiny_mla import TinyModel, fill_gradients
from torch import nn

from earlyfusion.pipeline.optim import muonclip
from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.routing import build_param_groups

FP64_TOL = (
    1e-9  # the reference does the same arithmetic in another order; slopes of 8 a step amplify the last bits
)
TORCH_MUON_TOL = 0.03  # share of one update: both iterate in bf16, but round the normalised input differently
ADAMW_TOL = 2e-6  # relative, fp32: fused and unfused kernels associate differently

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


def reference_orthogonal(G: torch.Tensor, steps=(KELLER_JORDAN,) * 5) -> torch.Tensor:
    X = G / G.norm()
    for a, b, c in steps:
        A = X @ X.T
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def reference_blocks(fqn: str, shape: torch.Size, group: int) -> list[list[int]]:
    """Row indices of every block of a 2-D weight of TinyModel; heads counted by hand."""

    def heads(count, rows, offset, stride):
        g = group or count
        return [
            [h * stride + offset + r for h in range(s, s + g) for r in range(rows)]
            for s in range(0, count, g)
        ]

    if fqn.startswith("layers.0.self_attn.") and fqn.split(".")[3] in {"q_proj", "k_proj", "v_proj"}:
        return heads(4, 6, 0, 6)
    if fqn == "layers.1.self_attn.q_proj.weight":
        return heads(4, 12, 0, 12)
    if fqn == "layers.1.self_attn.kv_b_proj.weight" and group:
        value = shape[0] // 4 - 8
        return heads(4, 8, 0, 8 + value) + heads(4, value, 8, 8 + value)
    if fqn == "mlp.gate_up_proj.weight":
        return [list(range(18)), list(range(18, 36))]
    return [list(range(shape[0]))]


def reference_muon(weights: dict, momenta: dict, grads: dict, group: int, lr: float, wd: float, mu=0.95):
    """One Muon step in place on dicts of fp64 tensors."""
    for fqn, weight in weights.items():
        momenta[fqn] = mu * momenta[fqn] + (1 - mu) * grads[fqn]
        update = (1 - mu) * grads[fqn] + mu * momenta[fqn]
        stack = weight if weight.ndim == 3 else weight[None]
        for e, matrix in enumerate(stack):
            u = update if weight.ndim == 2 else update[e]
            blocks = reference_blocks(fqn, matrix.shape, group)
            if fqn.endswith("experts.gate_up_proj"):
                blocks = [list(range(10)), list(range(10, 20))]
            for rows in blocks:
                scale = 0.2 * math.sqrt(max(len(rows), matrix.shape[1]))
                matrix[rows] = matrix[rows] * (1 - lr * wd) - lr * scale * reference_orthogonal(u[rows])


def muon_names(groups) -> list[str]:
    return [fqn for group in groups if group["family"] == "muon" for fqn in group["fqns"]]


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("value", [5, 8])
def test_step_equals_the_per_matrix_reference_for_every_kind_of_block(group, value):
    torch.manual_seed(group)
    model = TinyModel(value=value).double()
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1, head_group_size=group or None)
    names = muon_names(groups)
    params = dict(model.named_parameters())
    weights = {n: params[n].detach().clone() for n in names}
    momenta = {n: torch.zeros_like(weights[n]) for n in names}
    opt = MuonClip(groups, model, ns="keller_jordan")
    for seed in range(3):
        fill_gradients(model, seed)
        reference_muon(weights, momenta, {n: params[n].grad for n in names}, group, 0.02, 0.1)
        opt.step()
    for name in names:
        torch.testing.assert_close(
            params[name].detach(), weights[name], rtol=FP64_TOL, atol=FP64_TOL, msg=name
        )
    assert {"layers.1.self_attn.kv_b_proj.weight", "layers.0.block_sparse_moe.experts.gate_up_proj"} <= set(
        names
    )


def test_slicing_into_small_chunks_changes_nothing(monkeypatch):
    results, stacks = [], []
    whole = MuonClip._update
    monkeypatch.setattr(MuonClip, "_update", lambda self, *given: stacks.append(1) or whole(self, *given))
    for limit in (2**26, 400):  # 400 elements cut even one parameter's experts and heads into several calls
        monkeypatch.setattr(muonclip, "CHUNK_ELEMENTS", {"cpu": limit})
        torch.manual_seed(0)
        model = TinyModel().double()
        fill_gradients(model, 0)
        MuonClip(build_param_groups(model, lr=0.02, weight_decay=0.1, head_group_size=2), model).step()
        results.append((model.state_dict(), len(stacks)))
    (one, few), (other, many) = results
    assert many > 3 * few
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=FP64_TOL, atol=FP64_TOL)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_agrees_with_torch_muon_on_a_plain_matrix(shape, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(shape[1], shape[0], bias=False)
    theirs = nn.Parameter(linear.weight.detach().clone())
    mine = MuonClip(
        build_param_groups(linear, lr=0.02, weight_decay=0.1),
        linear,
        ns="keller_jordan",
        ns_dtype=torch.bfloat16,
    )
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = theirs.detach().clone()
    for step in range(4):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + step))
        linear.weight.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        reference.step()
    moved = (theirs - start).norm()
    assert (linear.weight - theirs).norm() <= TORCH_MUON_TOL * moved
    # the momentum buffers are interchangeable
    torch.testing.assert_close(
        mine.state[linear.weight]["momentum_buffer"], reference.state[theirs]["momentum_buffer"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_family_equals_torch_adamw(dtype):
    torch.manual_seed(0)
    model = TinyModel().to(dtype)
    groups = build_param_groups(model, lr=3e-3, weight_decay=0.1)
    params = dict(model.named_parameters())
    copies, theirs = {}, []
    for group in groups:
        if group["family"] == "adamw":
            copies |= {n: nn.Parameter(params[n].detach().clone()) for n in group["fqns"]}
            theirs.append(
                {"params": [copies[n] for n in group["fqns"]], "weight_decay": group["weight_decay"]}
            )
    assert {g["weight_decay"] for g in theirs} == {0.0, 0.1}
    opt = MuonClip(groups, model)
    reference = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(5):
        fill_gradients(model, seed)
        for name, copy in copies.items():
            copy.grad = params[name].grad.clone()
        if seed == 2:  # parameters keep their own step counts
            params["embed_tokens.weight"].grad = copies["embed_tokens.weight"].grad = None
        opt.step()
        reference.step()
    for name, copy in copies.items():
        torch.testing.assert_close(params[name], copy, rtol=ADAMW_TOL, atol=ADAMW_TOL * 1e-2, msg=name)


def test_16_bit_parameters_keep_fp32_state_and_round_once():
    torch.manual_seed(0)
    model = TinyModel().to(torch.bfloat16)
    wide = TinyModel().double()
    wide.load_state_dict(model.state_dict())
    options = {"ns_dtype": torch.float32, "ns": "deepseek_v4"}
    opts = [MuonClip(build_param_groups(m, lr=0.05, weight_decay=0.1), m, **options) for m in (model, wide)]
    fill_gradients(model, 0)
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.grad = p.grad.double()
    for opt in opts:
        opt.step()
    for (name, p), q in zip(model.named_parameters(), wide.parameters(), strict=True):
        # half a spacing of bf16 (8 bits), and what fp32 Newton-Schulz adds before the rounding
        assert ((p.double() - q).abs() <= 2**-8 * q.abs() * 1.01 + 1e-6).all(), name
        state = opts[0].state[p]
        assert all(value.dtype == torch.float32 for value in state.values())


def test_parameters_without_gradient_are_left_alone_and_counted():
    torch.manual_seed(0)
    model = TinyModel()
    opt = MuonClip(build_param_groups(model, lr=0.02, weight_decay=0.1), model)
    fill_gradients(model, 0)
    opt.step()
    skipped = ["projector.proj.weight", "layers.1.self_attn.q_proj.weight", "embed_tokens.weight"]
    params = dict(model.named_parameters())
    before = {
        n: (params[n].detach().clone(), {k: v.clone() for k, v in opt.state[params[n]].items()})
        for n in skipped
    }
    others = params["mlp.down_proj.weight"].detach().clone()
    fill_gradients(model, 1)
    for name in skipped:
        params[name].grad = None
    opt.step()
    for name, (weight, state) in before.items():
        assert torch.equal(params[name], weight)
        assert all(torch.equal(opt.state[params[name]][k], v) for k, v in state.items())
    assert not torch.equal(params["mlp.down_proj.weight"], others)
