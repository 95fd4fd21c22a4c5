"""The linear probe: exact where the answer is planted, at chance where there is none, the states those of
measuring."""

import numpy as np
import pytest
import torch
from rl_cases import model_directory
from scipy.special import stdtrit

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import ScoreRequest
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.recipe import entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt
from earlyfusion.rl.study.analysis import Model, probes
from earlyfusion.rl.study.measure import RIDGE, Reader, probe, states_of
from earlyfusion.rl.study.plan import START


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


def test_the_regression_is_the_least_of_its_objective():
    """Oracle: no step in any direction lowers mean |x w + b - y|^2 + RIDGE |w|^2."""
    torch.manual_seed(2)
    answers_N = torch.randint(3, (50,))
    states_ND = torch.randn(3, 7)[answers_N] + 0.1 * torch.randn(50, 7)
    states_ND[:, 5] = 3.0  # a dead unit has no spread
    reader = Reader(states_ND, answers_N, 3)
    assert torch.equal(reader(states_ND), answers_N)
    x_ND = (states_ND.double() - reader.mean_D) / reader.scale_D
    y_NC = torch.nn.functional.one_hot(answers_N, 3).double()

    def cost(weight_DC, bias_C):
        return ((x_ND @ weight_DC + bias_C - y_NC) ** 2).sum() / 50 + RIDGE * (weight_DC**2).sum()

    least = cost(reader.weight_DC, reader.bias_C)
    for _ in range(20):
        step_DC, step_C = 1e-3 * torch.randn(7, 3).double(), 1e-3 * torch.randn(3).double()
        assert cost(reader.weight_DC + step_DC, reader.bias_C + step_C) > least


def test_states_are_those_of_each_prompt_alone_and_the_last_chooses_the_first_token(folder):
    """Oracles: every prompt in a pass of its own, and the states from which `measure` answers."""
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    task = make_task("counting")
    problems = [task.sample(seed, "train", 0) for seed in range(5)]
    for form in ("picture", "twin"):
        entry = entry_of(f"counting/0/{form}")
        together = states_of(model, tokenizer, problems, entry)
        assert len(together) == model.config.text.num_hidden_layers + 1
        for n, problem in enumerate(problems):
            alone = states_of(model, tokenizer, [problem], entry)
            for left, right in zip(together, alone):
                # fp32 sums of packed and single prompts in another order
                torch.testing.assert_close(left[n], right[0], atol=1e-4, rtol=1e-4)
        prompts = [encode_prompt(problem, entry, tokenizer, model.config.vision) for problem in problems]
        # the states that measuring answers from
        engine = engine_for(model, tokenizer, prompts, 1)
        scores = engine.score([ScoreRequest(prompt, [[5]]) for prompt in prompts], states=True)
        last_ND = torch.cat([score.states for (score,) in scores])
        torch.testing.assert_close(together[-1], last_ND, atol=1e-4, rtol=1e-4)


def test_the_probe_of_a_model_gives_every_pair_of_forms_at_every_depth(folder):
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    given = (model, tokenizer, "odd_one_out/0", ["picture", "twin"])
    found = probe(*given, fit=24, test=12, seed=3)
    assert set(found) == {"picture>picture", "picture>twin", "twin>picture", "twin>twin"}
    assert {len(row) for row in found.values()} == {model.config.text.num_hidden_layers + 1}
    assert all(0 <= x <= 1 for row in found.values() for x in row)
    assert found == probe(*given, fit=24, test=12, seed=3)
    assert not any(module._forward_pre_hooks for module in model.modules())  # nothing listens any longer
    with pytest.raises(DataError, match="at least 2"):
        probe(*given, fit=1, test=12, seed=3)


def test_changes_are_means_over_runs_and_starts_with_their_interval():
    start_PL, runs_PRL = np.random.default_rng(0).random((5, 3)), np.random.default_rng(1).random((5, 2, 3))
    model = lambda depths: Model({}, {}, {"picture>twin": list(depths)})
    models = {START: {p: [model(depths)] for p, depths in enumerate(start_PL)}}
    models["vision"] = {p: [model(depths) for depths in runs] for p, runs in enumerate(runs_PRL)}
    changes = probes(models)["arms"]["vision"]["picture>twin"]
    deltas = runs_PRL.mean(1) - start_PL
    half = stdtrit(4, 0.975) * deltas.std(0, ddof=1) / 5**0.5
    np.testing.assert_allclose([one["value"] for one in changes], deltas.mean(0))
    np.testing.assert_allclose([one["high"] for one in changes], deltas.mean(0) + half)
    assert probes({START: {0: [Model({}, {}, {})]}}) == {}
