"""What ships: recipes that validate, keys that somebody needs, and a small pretrained model to start from."""

import re
import tomllib
from pathlib import Path

import pytest

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import ask
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
    if name == "website-rl":  # its start is fine-tuned on pages that are rendered first
        assert config.run.init_from == f"runs/{validate(compose(['website-sft'])).run.name}/model"
    elif config.has_tools:  # a start that speaks the chat form comes from `earlyfusion sft`
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
        if entry.name == "pages":  # needs pages that are rendered first
            continue
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
    found = summary(ask(model, tokens, entries, problems=120, seed=5, max_new_tokens=12).measured())
    assert 0.5 < found["odd_one_out/0/picture"]["accuracy"] < 0.85
    assert 0.55 < found["counting/0/picture"]["accuracy"] < 0.9
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


ROOT = Path(__file__).resolve().parents[2]
# Keys that neither a shipped recipe sets nor a document names, and why they stay; "x." is all below x.
NEEDED = """
config.json of public checkpoints: model.kv_norm_eps model.linear_attn_config.kda_layers model.moe_layer_freq
  model.moe_renormalize model.moe_router_activation_func model.rms_norm_eps
  model.router_bias_update_rate model.vocab_size vision.alpha_background vision.bias vision.in_channels
  vision.max_patches_per_side vision.merge_kernel_size
  vision.norm vision.norm_eps vision.pos_emb_interpolation vision.pos_emb_time vision.projector
  vision.projector_ln_eps
limits against hostile files, which the errors name: data.decode.animation_max_pixels
  data.decode.video_max_frames data.decode.video_max_patches data.decode.video_max_pixels
  data.decode.video_max_seconds
the reader that a machine has: data.decode.video_backend
laws of the loader hold them, resume, order, mixture: data.lookahead data.sources.max_epochs data.val_fraction
  data.workers
walls around reward functions of others: reward.memory_mb
  reward.timeout_s
"null" switches them off, or another preset of support.md: optim.clip_grad_norm optim.eps optim.momentum
  optim.ns optim.qk_clip
the form of a question: tasks.thought
entries of held-out problems are those of tasks: eval.seed eval.tasks.difficulty
  eval.tasks.options eval.tasks.power eval.tasks.thought
a mixture that changes within a stage: stages.mix.ramp
k1.5 takes several updates an iteration: train.epochs train.minibatches
"""
"""Who needs a key that no recipe sets and no document names: reason, then keys."""


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
    # The page of all keys is written from the schemas: it names what nobody needs as well.
    docs = [page for page in (ROOT / "docs").glob("*.md") if page.name not in ("log.md", "config.md")]
    pages = [ROOT / "README.md", *docs]
    words = re.findall(r"`([^`\n]+)`", "\n".join(page.read_text() for page in pages))
    named = set(re.findall(r"[\w.*]+", " ".join(words)))
    said = set()
    for folder in SHIPPED:
        for path in folder.glob("*.toml"):
            said |= said_by(tomllib.loads(path.read_text()))

    lost = set()
    for key in {*leaves(RunConfig), *leaves(RLConfig)}:
        section, _, last = key.rpartition(".")
        if not (said & {key} or named & {key, last, f"{section}.*"}):
            lost.add(key)
    # Key by key: a reason for a whole section would let every new key of it pass.
    needed = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", NEEDED)) - {"config.json", "support.md"}
    assert not lost - needed, f"make these a constant, or write down who needs them: {sorted(lost - needed)}"
    assert not needed - lost, f"reasons for keys that are gone or set by now: {sorted(needed - lost)}"
