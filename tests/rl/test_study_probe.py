"""The linear probe: exact where the answer is planted, at chance where there is none, the states those of
measuring."""

import json

import numpy as np
import pytest
import torch
from rl_cases import model_directory
from scipy.special import stdtrit
from study_world import study

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.requests import ScoreRequest
from earlyfusion.model.generate import engine_for
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt
from earlyfusion.rl.study.analysis import read_probes
from earlyfusion.rl.study.plan import beside, measured_file
from earlyfusion.rl.study.probe import RIDGE, Reader, probe, states_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_answer_is_read_and_noise_is_not(seed):
    torch.manual_seed(seed)
    answers_N = torch.randint(4, (600,))
    direction_CD = torch.randn(4, 24)
    states_ND = direction_CD[answers_N] + 0.1 * torch.randn(600, 24)
    states_ND[:, 5] = 3.0  # a dead unit has no spread
    reader = Reader(states_ND[:400], answers_N[:400], 4)
    assert bool((reader(states_ND[400:]) == answers_N[400:]).all())
    blind = Reader(torch.randn(400, 24), answers_N[:400], 4)
    hit = float((blind(torch.randn(200, 24)) == answers_N[400:]).double().mean())
    assert hit < 0.25 + 5 * (0.25 * 0.75 / 200) ** 0.5  # five standard deviations above chance


def test_the_regression_is_the_least_of_its_objective():
    """Oracle: no step in any direction lowers mean |x w + b - y|^2 + RIDGE |w|^2."""
    torch.manual_seed(2)
    states_ND, answers_N = torch.randn(50, 7), torch.randint(3, (50,))
    reader = Reader(states_ND, answers_N, 3)
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
    found = probe(model, tokenizer, "odd_one_out/0", ["picture", "twin"], fit=24, test=12, seed=3)
    assert set(found) == {"picture", "twin"}
    depths = model.config.text.num_hidden_layers + 1
    assert all(len(found[a][b]) == depths for a in found for b in found)
    assert all(0 <= x <= 1 for a in found for b in found for x in found[a][b])
    assert found == probe(model, tokenizer, "odd_one_out/0", ["picture", "twin"], fit=24, test=12, seed=3)
    assert not any(module._forward_pre_hooks for module in model.modules())  # nothing listens any longer
    with pytest.raises(DataError, match="at least 2"):
        probe(model, tokenizer, "counting/0", ["picture"], fit=1, test=12, seed=3)


def test_changes_are_means_over_runs_and_starts_with_their_interval(tmp_path):
    config = study()
    rng = np.random.default_rng(0)
    values = {}
    for p in range(config.seeds):
        for arm, runs in [("none", 1), ("vision", 2)]:
            for r in range(runs):
                values[p, arm, r] = rng.random(3)
                file = beside(measured_file(tmp_path, p, arm, r), "probe")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"picture": {"twin": list(values[p, arm, r])}}))
    found = read_probes(config, tmp_path)
    deltas = np.array(
        [
            np.mean([values[p, "vision", r] for r in range(2)], axis=0) - values[p, "none", 0]
            for p in range(config.seeds)
        ]
    )
    vision = found["arms"]["vision"]["picture>twin"]
    np.testing.assert_allclose(vision["change"], deltas.mean(0))
    half = stdtrit(config.seeds - 1, 0.975) * deltas.std(0, ddof=1) / config.seeds**0.5
    np.testing.assert_allclose(vision["high"], deltas.mean(0) + half)
    assert list(found["arms"]) == ["vision"]
    assert read_probes(config, tmp_path / "empty") == {}
    alone = read_probes(config.model_copy(update={"seeds": 1}), tmp_path)
    assert np.isnan(alone["arms"]["vision"]["picture>twin"]["low"]).all()
