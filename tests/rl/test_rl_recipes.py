"""What ships: recipes that validate, keys that somebody needs, and a small pretrained model to start from."""

import re
import tomllib
from pathlib import Path

import pytest

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import measure
from earlyfusion.eval.measured import summary
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.arguments import describe
from earlyfusion.pipeline.config.compose import SHIPPED, compose, recipe_names, validate
from earlyfusion.pipeline.config.schema import RunConfig
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


ROOT = Path(__file__).resolve().parents[2]
# Keys that neither a shipped recipe sets nor a document names, and why they stay; "x." is all below x.
NEEDED = {
    "model.": "config.json of public checkpoints",
    "vision.": "config.json of public checkpoints",
    "data.decode.": "limits against hostile files; the errors name them",
    "reward.": "walls around reward functions of others",
    "data.": "held by laws of the loader: resume, order, mixture",
    "optim.": "qk_clip of a shipped family; ns of the presets in support.md; the rest switches it off",
    "track.trackers": "the extra `track`",
    "tasks.": "the form of a question, and the data of text_math",
    "eval.": "held-out problems: entries as those of tasks",
    "train.frozen": "stages that train a part of the model",
    "stages.weights": "a mixture that changes by stage",
    "stages.mix.weights": "a mixture that changes within a stage",
    "stages.max_vision_flops": "a law of the packing: no micro-batch costs more",
    "stages.mix.ramp": "a law of the mixture: a ramp is followed to within one document",
    "rollout.tool_output_tokens": "tools with long outputs",
    "train.epochs": "k1.5 takes several updates an iteration; the errors name it",
    "train.minibatches": "k1.5 takes several updates an iteration; the errors name it",
    "ptx.": "size of the curated batch",
    "stale.": "partial rollouts",
}


def leaves(schema):
    """Dotted keys of a schema without the numbers of list items."""
    return [key.replace(".<i>", "") for key, *_ in describe(schema)]


def said_by(tree, above=""):
    """Dotted keys that a recipe sets, tables included."""
    found = {above}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        place = f"{above}.{key}".lstrip(".")
        for item in value if isinstance(value, list) else [value]:
            found |= said_by(item, place)
    return found


def test_every_recipe_key_is_set_by_a_shipped_recipe_or_named_in_a_document():
    """What nobody sets and nobody tells of is a constant."""
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md")]
    words = re.findall(r"`([^`\n]+)`", "\n".join(page.read_text() for page in pages))
    named = set(re.findall(r"[\w.*]+", " ".join(words)))
    said = set()
    for folder in SHIPPED:
        for path in folder.glob("*.toml"):
            said |= said_by(tomllib.loads(path.read_text()))

    lost, used = [], set()
    for key in {*leaves(RunConfig), *leaves(RLConfig)}:
        section, _, last = key.rpartition(".")
        if said & {key} or named & {key, last, f"{section}.*"}:
            continue
        reasons = {start for start in NEEDED if key == start or (start[-1] == "." and key.startswith(start))}
        used |= reasons
        lost += [] if reasons else [key]
    assert not lost, f"make these a constant, or write down who needs them: {sorted(lost)}"
    assert used == set(NEEDED), "a reason for keys that are gone"
