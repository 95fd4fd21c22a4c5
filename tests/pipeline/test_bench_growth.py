"""What a token costs as a model grows: every case has the shape that its name says, and is measured."""

import pytest

from earlyfusion.model.config import ModelConfig
from earlyfusion.model.flops import decoder_flops
from earlyfusion.pipeline.bench.frame import GROWTH, save_record
from earlyfusion.pipeline.bench.growth import GrowthOptions, cases, step_side
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.plan import nearest_growth, time_line
from earlyfusion.pipeline.progress import duration


def test_cases_are_what_they_are_called():
    found = cases(GrowthOptions(lengths="512,4096", factors="2"))
    text = {name: ModelConfig.model_validate(shape) for name, (shape, _) in found.items()}
    base = text["512 tokens"]
    assert found["4,096 tokens, KDA alone"][1] == 4096
    assert set(text["512 tokens, KDA alone"].plan()) == {"kda"} and "mla" in base.plan()
    wide = text["2 times as wide"]
    assert (wide.hidden_size, wide.num_hidden_layers) == (2 * base.hidden_size, base.num_hidden_layers)
    more = text["2 times the experts"]
    assert more.num_experts == 2 * base.num_experts
    assert more.num_experts_per_token == base.num_experts_per_token


def test_a_share_is_useful_work_over_what_products_do(monkeypatch):
    shape, _ = cases(GrowthOptions(lengths="64"))["64 tokens"]
    # A machine of one FLOP a second: the share is the work over the time that was taken.
    monkeypatch.setattr("earlyfusion.pipeline.bench.growth.peak_flops", lambda device, dtype: 1.0)
    found = step_side(shape, 64, 128, 1)
    flops = 3 * sum(decoder_flops(ModelConfig.model_validate(shape), [64, 64]).values())
    assert found["share of the roofline"] * found["us a token"] == pytest.approx(flops * 1e6 / 128)


def test_a_plan_takes_the_nearest_case_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["nano"])
    model = meta_model(config)
    assert "unknown" in time_line(config, model)
    # A record from before the peak was kept, and one of a device whose peak is unknown.
    unknown = {"length": 512, "hidden_size": 128, "num_experts": 8, "roofline, GFLOP/s": float("nan")}
    for case in ({"share of the roofline": 0.3}, unknown):
        save_record(GROWTH, {}, cases={"a": case})
        assert "unknown" in time_line(config, model)
    shape = {"hidden_size": 128, "num_experts": 8, "share of the roofline": 0.5, "roofline, GFLOP/s": 2.0}
    slow = shape | {"share of the roofline": 0.25}
    save_record(
        GROWTH, {}, cases={"a": slow | {"length": 4096}, "b": slow | {"num_experts": 64, "length": 512}}
    )
    assert nearest_growth(model.config.text, 1024)["num_experts"] == 8
    assert nearest_growth(model.config.text, 512)["num_experts"] == 8
    save_record(GROWTH, {}, cases={"a": shape | {"length": 500}, "b": slow | {"length": 4096}})
    # A GFLOP a second: as many seconds as the decoder's work has GFLOPs.
    documents = 640 * 4096 / 512
    work = 3 * documents * sum(decoder_flops(model.config.text, [512]).values()) / 1e9
    assert f"time: {duration(work)} " in time_line(config, model)
