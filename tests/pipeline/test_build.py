"""Learning-rate factors by parameter name."""

import pytest
import torch

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.build import scale_lr
from earlyfusion.pipeline.optim.groups import build_param_groups
from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.update import set_lr


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slow = torch.nn.Linear(8, 6, bias=False)
        self.quick = torch.nn.Linear(6, 4, bias=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_factor_scales_exactly_the_updates_of_the_parameters_it_names(seed):
    """Without decay an update is proportional to its learning rate, so factor 0.25 must give a quarter of
    it."""
    moved = []
    for factors in ({}, {"slow.*": 0.25}):
        torch.manual_seed(seed)
        model = Two().double()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        groups = scale_lr(build_param_groups(model, 1.0, 0.0), factors)
        optimizer = MuonClip(groups, model=model, ns_dtype=torch.float64)
        set_lr(optimizer, 0.01)
        model.quick(model.slow(torch.randn(5, 8, dtype=torch.float64))).square().sum().backward()
        optimizer.step()
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    torch.testing.assert_close(moved[1]["slow.weight"], 0.25 * moved[0]["slow.weight"], rtol=1e-9, atol=1e-12)
    for name in ("quick.weight", "quick.bias"):
        assert torch.equal(moved[0][name], moved[1][name])


def test_every_parameter_stays_in_exactly_one_group():
    model = Two()
    groups = scale_lr(build_param_groups(model, 1.0, 0.1), {"quick.*": 2.0, "*": 3.0})
    assert sorted(n for g in groups for n in g["fqns"]) == sorted(n for n, _ in model.named_parameters())
    assert all(len(g["params"]) == len(g["fqns"]) == len(g["blocks"]) for g in groups)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match="'nowhere' matches no parameter"):
        scale_lr(build_param_groups(Two(), 1.0, 0.1), {"nowhere": 2.0})
