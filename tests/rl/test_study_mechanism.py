"""Where what was taught lies. The linear probe: exact where the answer is planted, at chance where there is
none, the states those of measuring."""

import json

import pytest
import torch
from rl_cases import model_directory

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import ScoreRequest
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import cli
from earlyfusion.rl.recipe import entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt
from earlyfusion.rl.study.mechanism import RIDGE, Reader, cosines, probe, states_of


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


def test_gradients_of_one_form_agree_with_themselves_and_whole_exchanges_are_the_two_models(
    folder, tmp_path, monkeypatch
):
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    monkeypatch.setattr("earlyfusion.rl.study.mechanism.FORMS", ("twin", "twin"))
    found = cosines(model, tokenizer, "rule/1", 40, 3)
    # fp32 norms over some 10^5 weights
    assert found["same"] == pytest.approx(1.0, abs=1e-4) and found["other"] < 0.999
    monkeypatch.undo()

    # Another model: the start with its upper layers scaled.
    other = load_model(folder)
    half = len(other.decoder.layers) // 2
    with torch.no_grad():
        for layer in other.decoder.layers[half:]:
            for weight in layer.parameters():
                weight.mul_(1.5)
    save_model(other, tokenizer, tmp_path / "other", {})
    models = f"--start {folder} --model {tmp_path / 'other'}"
    words = f"study mechanism {models} --out {tmp_path} --problems 20 --fit 20"
    assert cli.main(words.split()) == 0
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["exchange"]["lower"] == told["exchange"]["none"]
    assert told["exchange"]["upper"] == told["exchange"]["all"]
