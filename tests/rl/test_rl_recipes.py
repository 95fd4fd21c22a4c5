"""What ships: recipes that validate, and a small pretrained model to start from."""

import pytest

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub import load_model
from earlyfusion.pipeline.compose import RL_RECIPES, compose, recipe_names, validate
from earlyfusion.pipeline.errors import UserError
from earlyfusion.rl.measure import measure, summary
from earlyfusion.rl.parts import start_directory
from earlyfusion.rl.recipe import RLConfig, TaskEntry


@pytest.mark.parametrize("name", recipe_names(RL_RECIPES))
def test_shipped_recipes_validate_and_start_from_a_model_that_ships(name):
    config = validate(compose([name]), RLConfig)
    assert config.run.name == name
    if config.has_tools:  # a start that speaks the chat form comes from `earlyfusion sft`
        with pytest.raises(UserError, match="needs a model to start from"):
            start_directory(config)
    elif name == "vision-rl-small":  # its start is pretrained on a GPU
        assert str(start_directory(config)) == f"runs/{validate(compose(['skills-small'])).run.name}/model"
    else:
        assert (start_directory(config) / "model.safetensors").is_file()


def test_the_embedded_model_half_knows_its_skills():
    """Far above the chance of 1 in 4 cells and 1 in 3 counts, far below 1: room for reinforcement learning."""
    config = validate(compose(["vision-rl"]), RLConfig)
    folder = start_directory(config)
    model, tokens = load_model(folder), Tokenizer.load(folder)
    entries = [TaskEntry(name="odd_one_out"), TaskEntry(name="counting")]
    found = summary(measure(model, tokens, entries, problems=120, seed=5, max_new_tokens=12))
    assert 0.5 < found["odd_one_out/0/picture"]["accuracy"] < 0.85
    assert 0.55 < found["counting/0/picture"]["accuracy"] < 0.9
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
