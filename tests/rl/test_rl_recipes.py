"""What ships: recipes that validate, and a small pretrained model to start from."""

import pytest

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import measure
from earlyfusion.eval.measured import summary
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.compose import compose, recipe_names, validate
from earlyfusion.rl.recipe import RECIPES, RLConfig, TaskEntry, start_directory


@pytest.mark.parametrize("name", recipe_names(RECIPES))
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


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_the_limit_of_a_shipped_recipe_leaves_room_for_every_target_and_its_end(name):
    """What a limit cuts off earns nothing, so a right answer that does not fit could never be learned."""
    config, tokens = validate(compose([name]), RLConfig), Tokenizer.load(model_folder("embedded:skills"))
    for entry in config.tasks:
        task = make_task(entry.name, **entry.options)
        told = [
            task.sample(seed, "train", entry.difficulty).solution(entry.thought).text for seed in range(60)
        ]
        assert max(len(tokens.encode(text)) + 1 for text in told) <= config.rollout.max_new_tokens, (
            entry.label
        )


def test_the_embedded_model_half_knows_its_skills():
    """Far above the chance of 1 in 4 cells and 1 in 3 counts, far below 1: room for reinforcement
    learning."""
    config = validate(compose(["vision-rl"]), RLConfig)
    folder = start_directory(config)
    model, tokens = load_model(folder), Tokenizer.load(folder)
    entries = [TaskEntry(name="odd_one_out"), TaskEntry(name="counting")]
    found = summary(measure(model, tokens, entries, problems=120, seed=5, max_new_tokens=12))
    assert 0.5 < found["odd_one_out/0/picture"]["accuracy"] < 0.85
    assert 0.55 < found["counting/0/picture"]["accuracy"] < 0.9
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
