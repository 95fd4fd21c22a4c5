"""Which parameter goes where, what is refused, and what survives parameter swaps and checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_mla import TinyModel, fill_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.decoder import Decoder
from earlyfusion.pipeline.optim.blocks import RoutingError
from earlyfusion.pipeline.optim.muonclip import MuonClip, build_param_groups

TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "attn_res": "block",
    "attn_res_block_size": 1,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4},
}


def families(groups) -> dict[str, str]:
    return {fqn: group["family"] for group in groups for fqn in group["fqns"]}


def blocks(groups) -> dict[str, list[int]]:
    return {
        f: b for group in groups if group["family"] == "muon" for f, b in zip(group["fqns"], group["blocks"])
    }


def optimizer(model, **options) -> MuonClip:
    return MuonClip(build_param_groups(model, lr=0.02, weight_decay=0.1), model=model, **options)


def test_every_parameter_is_routed_exactly_once_and_tied_weights_once():
    model = TinyModel()
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1)
    names = [fqn for group in groups for fqn in group["fqns"]]
    assert sorted(names) == sorted(dict(model.named_parameters())) and len(names) == len(set(names))
    assert "lm_head.weight" not in names  # tied to embed_tokens
    for group in groups:
        assert all(isinstance(v, (str, float, list)) for k, v in group.items())
        assert len(group["params"]) == len(group["fqns"]) == len(group["blocks"])


def test_semantic_rules_route_the_tiny_model():
    groups = build_param_groups(TinyModel(), lr=0.02, weight_decay=0.1)
    family = families(groups)
    muon = {name for name, f in family.items() if f == "muon"}
    kda = {f"layers.0.self_attn.{n}_proj.weight" for n in ("q", "k", "v", "f_a", "f_b", "o")}
    mla = {f"layers.1.self_attn.{n}.weight" for n in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    moe = {
        f"layers.{i}.block_sparse_moe.{n}"
        for i in (0, 1)
        for n in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    assert muon == kda | mla | moe | {
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "projector.proj.weight",
    }
    undecayed = {fqn for group in groups if group["weight_decay"] == 0 for fqn in group["fqns"]}
    assert {
        "layers.0.self_attn.A_log",
        "layers.0.self_attn.dt_bias",
        "layers.0.input_layernorm.weight",
    } <= undecayed
    assert {"mlp_res_proj.weight", "layers.0.self_attention_res_query", "projector.proj.bias"} <= undecayed
    for decayed in (
        "embed_tokens.weight",
        "layers.0.self_attn.b_proj.weight",
        "layers.0.self_attn.q_conv1d.weight",
    ):
        assert family[decayed] == "adamw" and decayed not in undecayed


def test_the_real_decoder_is_routed_as_designed():
    with torch.device("meta"):
        model = Decoder(ModelConfig(**TINY_TEXT))
    groups = build_param_groups(model, lr=0.02, weight_decay=0.1)
    muon = blocks(groups)
    assert not any(
        w in n for n in muon for w in ("embed", "norm", "conv", "res_query", "A_log", "dt_bias", ".b_proj")
    )
    assert muon["layers.0.self_attn.q_proj.weight"] == [2, 1, 16]
    assert muon["layers.3.self_attn.q_proj.weight"] == [2, 1, 24]
    assert muon["layers.3.self_attn.kv_b_proj.weight"] == [4, 1, 16]
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


def test_overrides_win_by_pattern_in_order():
    overrides = {"mlp.down_proj.weight": "muon", "mlp.*": "adamw", "layers.?.self_attn.b_proj.weight": "muon"}
    family = families(build_param_groups(TinyModel(), 0.02, 0.1, overrides=overrides))
    assert family["mlp.down_proj.weight"] == "muon" and family["mlp.gate_up_proj.weight"] == "adamw"
    assert family["layers.0.self_attn.b_proj.weight"] == "muon"


def test_adamw_for_everything_suits_torch_adamw():
    model = TinyModel()
    groups = build_param_groups(model, 0.02, 0.1, matrices="adamw")
    assert set(families(groups).values()) == {"adamw"}
    torch.optim.AdamW(groups)
    with pytest.raises(RoutingError, match="AdamW"):
        MuonClip(groups, model=model)


def test_wrapper_prefixes_do_not_change_names_or_routes():
    model = TinyModel()
    want = families(build_param_groups(model, 0.02, 0.1))
    model.layers[1] = torch.compile(model.layers[1])
    wrapped = build_param_groups(model, 0.02, 0.1)
    assert families(wrapped) == want
    assert blocks(wrapped)["layers.1.self_attn.kv_b_proj.weight"] == [8, 1, 8]


def bare(**parameters) -> nn.Module:
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


@pytest.mark.parametrize(
    "overrides,message",
    [
        ({"embed_tokens.weight": "muon"}, "embedding or output head"),
        ({"layers.0.self_attn.A_log": "muon"}, "FSDP1"),
        ({"vision_tower.patch_embed.weight": "muon"}, "takes matrices"),
        ({"mlp.down_proj": "muon"}, "did you mean"),
        ({"mlp.*": "adam"}, "expected one of muon, adamw"),
    ],
)
def test_wrong_overrides_are_refused(overrides, message):
    with pytest.raises(RoutingError, match=message):
        build_param_groups(TinyModel(), 0.02, 0.1, overrides=overrides)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(RoutingError, match="no parameter of Module is routed to Muon"):
        build_param_groups(bare(scale=torch.ones(4)), 0.02, 0.1)
    with pytest.raises(UserError, match="is empty"):
        build_param_groups(bare(weight=torch.ones(0, 4)), 0.02, 0.1)


def test_bad_groups_and_options_are_refused():
    model = TinyModel()
    groups = build_param_groups(model, 0.02, 0.1)
    with pytest.raises(RoutingError, match="needs family"):
        MuonClip([{"params": list(model.parameters())}])
    with pytest.raises(ValueError, match="polar_express"):
        MuonClip(groups, ns="polar")
    with pytest.raises(ValueError, match="qk_clip needs the model"):
        MuonClip(groups, qk_clip=100.0)
    with pytest.raises(ValueError, match="momentum"):
        MuonClip(groups, momentum=1.0)


def test_names_that_the_model_does_not_have_are_refused_at_the_first_step():
    model = TinyModel()
    groups = build_param_groups(model, 0.02, 0.1)
    groups[0]["fqns"][0] += "x"
    opt = MuonClip(groups, model=model)
    with pytest.raises(RoutingError, match="which the model does not have"):
        opt.step()


@pytest.mark.parametrize(
    "value,message",
    [(torch.ones(12), "FSDP1"), (torch.ones(0, 3), "is empty"), (torch.ones(5, 3), "cover 4 rows")],
)
def test_shards_that_are_no_matrix_are_refused_at_the_step(value, message):
    """FSDP1 and DeepSpeed put flat pieces into the optimizer after it was built."""
    linear = nn.Linear(3, 4, bias=False)
    opt = MuonClip(build_param_groups(linear, 0.02, 0.1))
    opt.param_groups[0]["params"][0] = nn.Parameter(value)
    opt.param_groups[0]["params"][0].grad = torch.ones_like(value)
    with pytest.raises(RoutingError, match=message):
        opt.step()


def test_routing_table_has_a_row_for_every_parameter():
    model = TinyModel(value=5)
    opt = optimizer(model)
    table = {row.fqn: row for row in opt.routing_table()}
    assert set(table) == set(dict(model.named_parameters()))
    kv = table["layers.1.self_attn.kv_b_proj.weight"]
    assert (kv.shape, kv.family, kv.blocks) == ((52, 12), "muon", "4 x (8x12 + 5x12)")
    assert kv.scale == pytest.approx((0.2 * 12**0.5, 0.2 * 12**0.5))
    assert table["layers.0.block_sparse_moe.experts.down_proj"].blocks == "3 x 24x10"
    assert table["embed_tokens.weight"][2:] == ("adamw", "", ())


def replace_parameters(model: nn.Module, opt: MuonClip, in_groups: bool) -> None:
    """New parameter objects with the same values, in the model and, as accelerate does, in the groups."""
    fresh = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                fresh.setdefault(param, nn.Parameter(param.detach().clone()))
                module._parameters[name] = fresh[param]
    if in_groups:
        for group in opt.param_groups:
            group["params"] = [fresh[p] for p in group["params"]]


@pytest.mark.parametrize("in_groups", [True, False])
def test_swapped_parameters_are_the_ones_that_train(in_groups):
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = TinyModel()
        opt = optimizer(model)
        opt.routing_table()  # a plan for the old parameters
        if swap:
            replace_parameters(model, opt, in_groups)
        for seed in range(2):
            fill_gradients(model, seed)
            opt.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_momentum_follows_a_swap_in_the_model_and_storage_changes_are_noticed():
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = TinyModel()
        opt = optimizer(model)
        for seed in range(3):
            fill_gradients(model, seed)
            opt.step()
            if swap and seed == 0:
                replace_parameters(model, opt, in_groups=False)
            if swap and seed == 1:
                for param in model.parameters():
                    param.data = param.data.clone()  # same object, other storage
        results.append(model.state_dict())
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_groups_survive_accelerates_dummy_swap():
    """accelerate puts one-element dummies into the groups before sharding, and loads an empty state."""
    model = TinyModel()
    opt = optimizer(model)
    opt.load_state_dict(opt.state_dict())
    kept = [group["params"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["params"] = [torch.empty(1) for _ in group["params"]]
    for group, params in zip(opt.param_groups, kept):
        group["params"] = list(params)
    fill_gradients(model, 0)
    before = model.mlp.down_proj.weight.detach().clone()
    opt.step()
    assert not torch.equal(before, model.mlp.down_proj.weight)


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


def test_loading_keeps_own_structure_takes_lr_and_refuses_another_model():
    model = TinyModel()
    state = copy.deepcopy(optimizer(model).state_dict())
    state["param_groups"][0]["lr"] = 0.5
    whole = MuonClip(build_param_groups(model, 0.02, 0.1, head_group_size=0), model=model)
    whole.load_state_dict(state)
    assert whole.param_groups[0]["lr"] == 0.5
    assert blocks(whole.param_groups)["layers.0.self_attn.q_proj.weight"] == [1, 1, 24]
    state["param_groups"][0]["fqns"][0] = "another.weight"
    with pytest.raises(RoutingError, match="of another model"):
        whole.load_state_dict(state)


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
