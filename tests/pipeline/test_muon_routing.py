"""Which parameter goes where, what is refused, and what survives checkpoints."""

import copy

import pytest
import torch
from tiny_mla import TinyModel, fill_gradients
from tiny_run import tiny_text
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from earlyfusion.model.decoder import Decoder
from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.routing import RoutingError, build_param_groups


def families(groups) -> dict[str, str]:
    return {fqn: group["family"] for group in groups for fqn in group["fqns"]}


def blocks(groups) -> dict[str, list[int]]:
    return {
        f: b for group in groups if group["family"] == "muon" for f, b in zip(group["fqns"], group["blocks"])
    }


def optimizer(model, **options) -> MuonClip:
    return MuonClip(build_param_groups(model, lr=0.02, weight_decay=0.1), model, **options)


def test_the_real_decoder_is_routed_as_designed():
    with torch.device("meta"):
        model = Decoder(tiny_text())
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1)
    muon = blocks(groups)
    assert not any(
        w in n for n in muon for w in ("embed", "norm", "conv", "res_query", "A_log", "dt_bias", ".b_proj")
    )
    assert muon["layers.0.self_attn.q_proj.weight"] == [2, 1, 8]
    assert muon["layers.2.self_attn.q_proj.weight"] == [2, 1, 12]
    assert muon["layers.2.self_attn.kv_b_proj.weight"] == [2, 1, 8, 12]
    assert muon["layers.1.block_sparse_moe.experts.gate_up_proj"] == [1, 1, 24, 24]
    assert muon["layers.1.block_sparse_moe.gate.weight"] == [1, 1, 4]
    left = [n for n, p in model.named_parameters() if p.ndim >= 2 and n not in muon]
    assert all("embed_tokens" in n or "conv1d" in n or ".b_proj" in n for n in left), left
    with pytest.raises(RoutingError, match="does not divide 2 heads"):
        build_param_groups(model, lr=0.02, weight_decay=0.1, head_group_size=3)


def test_vision_tower_goes_to_muon_only_on_request_and_its_lookups_never():
    name = "vision_tower.blocks.0.wqkv.weight"
    assert families(build_param_groups(TinyModel(), 0.02, 0.1))[name] == "adamw"
    on = build_param_groups(TinyModel(), 0.02, 0.1, muon_vision=True)
    assert blocks(on)[name] == [6, 1, 6]  # q, k, v of two heads
    assert blocks(build_param_groups(TinyModel(), 0.02, 0.1, muon_vision=True, head_group_size=None))[
        name
    ] == [
        3,
        1,
        12,
    ]
    assert (
        families(on)["vision_tower.patch_embed.weight"]
        == families(on)["vision_tower.pos_emb.weight"]
        == "adamw"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_continues_bit_for_bit(dtype):
    torch.manual_seed(0)
    model = TinyModel().to(dtype)
    opt = optimizer(model)
    for seed in range(2):
        fill_gradients(model, seed)
        opt.step()
    saved_model, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    twin = TinyModel().to(dtype)
    twin.load_state_dict(saved_model)
    fresh = optimizer(twin)
    fresh.load_state_dict(saved)
    for m, o in ((model, opt), (twin, fresh)):
        for seed in (5, 6):
            fill_gradients(m, seed)
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    for a, b in zip(model.parameters(), twin.parameters()):
        assert all(
            torch.equal(opt.state[a][k], v) and v.dtype == opt.state[a][k].dtype
            for k, v in fresh.state[b].items()
        )


def test_loading_takes_lr_and_refuses_another_model():
    model = TinyModel()
    opt = optimizer(model)
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.5
    state["param_groups"][0]["fqns"][0] = "another.weight"
    with pytest.raises(RoutingError, match="of another model"):
        opt.load_state_dict(state)


def test_torch_distributed_checkpoint_state_round_trips():
    torch.manual_seed(0)
    model = TinyModel()
    opt = optimizer(model)
    fill_gradients(model, 0)
    opt.step()
    state = copy.deepcopy(get_optimizer_state_dict(model, opt))
    assert set(state["state"]) == set(dict(model.named_parameters()))
    assert "momentum_buffer" in state["state"]["mlp.down_proj.weight"]
    twin = TinyModel()
    twin.load_state_dict(model.state_dict())
    fresh = optimizer(twin)
    get_optimizer_state_dict(
        twin, fresh
    )  # initialises the state with a zero step, which must not move the weights
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    set_optimizer_state_dict(twin, fresh, state)
    for m, o in ((model, opt), (twin, fresh)):
        fill_gradients(m, 4)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
