"""Layer plan, configuration errors, construction on the meta device, initialisation."""

import math

import pytest
import torch

from earlyfusion.model.config import FusionConfig, LinearAttnConfig, ModelConfig
from earlyfusion.model.fusion import NativeFusion
from tests.model.tiny import MEDIA_TOKEN, tiny_text, tiny_vision


def test_the_plan_is_the_published_one_and_ends_with_mla():
    mla = [i + 1 for i, kind in enumerate(ModelConfig().plan()) if kind == "mla"]
    assert mla == [4, 8, 12, 16, 20, 24, 27]
    for layers, expected in ((1, "m"), (2, "km"), (6, "kkkmkm"), (8, "kkkmkkkm")):
        assert "".join(kind[0] for kind in tiny_text(num_hidden_layers=layers).plan()) == expected
    for given in ({"kda_layers": [1, 3]}, {"full_attn_layers": [2, 4]}):
        assert tiny_text(linear_attn_config=given).plan() == ("kda", "mla", "kda", "mla")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"linear_attn_config": {"kda_layers": [0, 9]}}, r"\[0, 9\].*share out the layers 1\.\.4"),
        ({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 4]}}, "share out the layers"),
        ({"num_experts_per_token": 7}, "exceeds num_experts=6"),
        ({"num_experts_per_token": 6, "router_balance": "quantile"}, "below num_experts"),
        ({"pad_token_id": 97}, "pad_token_id=97 lies outside the vocabulary of 97"),
        ({"hiden_size": 8}, "hiden_size"),
    ],
)
def test_contradictory_configurations_are_refused_with_the_reason(change, says):
    with pytest.raises(ValueError, match=says):
        tiny_text(**change)
    with pytest.raises(ValueError, match="media_token_id=97"):
        FusionConfig(text=tiny_text(), vision=tiny_vision(), media_token_id=97)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_model_built_on_meta_initialises_to_the_table(bounded):
    linear = LinearAttnConfig(num_heads=16, head_dim=16, gate_lower_bound=-5.0 if bounded else None)
    text = tiny_text(hidden_size=128, attn_res="block", router_balance="quantile", initializer_range=0.03)
    text = text.model_copy(update={"linear_attn_config": linear})
    generation = dict(projector="v1", norm="layer", bias=True) if bounded else {}
    config = FusionConfig(text=text, vision=tiny_vision(**generation), media_token_id=MEDIA_TOKEN)
    with torch.device("meta"):
        model = NativeFusion(config)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    torch.manual_seed(0)
    for module in reversed(list(model.modules())):  # children before their parents
        getattr(module, "reset_parameters", lambda: None)()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("max_logit"):
            assert torch.equal(tensor, torch.full_like(tensor, float("-inf")))
        elif name.endswith(("_res_query", "bias", ".load", ".histogram")) and "dt_bias" not in name:
            assert not tensor.any(), name
        elif "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.endswith("A_log"):
            assert not tensor.any() if bounded else (tensor >= 0).all() and (tensor <= math.log(16)).all()
            assert bounded or tensor.std() > 0.3
        elif name.endswith("dt_bias"):
            step = torch.nn.functional.softplus(tensor)
            assert step.min() >= 0.99e-3 and step.max() <= 0.101
        else:
            assert torch.isfinite(tensor).all(), name
        if tensor.ndim >= 2 and tensor.numel() > 1500 and "histogram" not in name:
            std = 0.03 if name.startswith("decoder") else 0.02
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
