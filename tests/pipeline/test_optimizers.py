"""Optimizers by name, by a registration of one's own, and by their place."""

import pytest
import torch

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.registry import OPTIMIZERS, optimizer, param_groups


def plain(options, model):
    groups = [{"params": group["params"], "lr": options.lr} for group in param_groups(options, model)]
    return torch.optim.SGD(groups)


def test_a_function_of_one_s_own_is_found_by_its_place_and_by_its_registration(monkeypatch):
    monkeypatch.setattr("earlyfusion.pipeline.optim.registry.OPTIMIZERS", dict(OPTIMIZERS))
    assert optimizer("plain", matrices="adamw")(plain) is plain
    model = torch.nn.Linear(3, 2)
    for name in (f"{__name__}:plain", "plain"):
        made = build.optimizer(OptimSection(name=name, lr=0.5, qk_clip=None), model)
        assert isinstance(made, torch.optim.SGD)
        trained = [param for group in made.param_groups for param in group["params"]]
        assert {id(param) for param in trained} == {id(param) for param in model.parameters()}


@pytest.mark.parametrize(
    ("name", "message"), [("muonclp", "did you mean 'muonclip'"), ("nowhere:at_all", "cannot be imported")]
)
def test_an_optimizer_that_does_not_exist_is_told_with_the_nearest_name(name, message):
    with pytest.raises(UserError, match=message):
        build.optimizer(OptimSection(name=name), torch.nn.Linear(3, 2))
