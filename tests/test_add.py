"""The examples of docs/add.md do what the document says: each is run as it stands there."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

from earlyfusion.data.sources.base import KINDS, SourceConfig, build_source
from earlyfusion.data.tasks.problem import TASKS
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.kernels import dispatch
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.cli import main
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.optim.registry import find_optimizer
from earlyfusion.rl.objectives.losses import ObjectiveConfig, policy_loss
from earlyfusion.vision.encoder import import_tower

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "add.md").read_text(encoding="utf-8")


def example(title, language="python"):
    """The code under a heading."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return code


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(title, place): the example as a module of a package that the project knows nothing of."""
    monkeypatch.syspath_prepend(tmp_path)
    # What the example registers is gone after the test.
    monkeypatch.setitem(KINDS, "squares", None)
    monkeypatch.setitem(TASKS, "double", None)

    def write(title, place):
        package, name = place.split(".")
        (tmp_path / package).mkdir()
        (tmp_path / package / f"{name}.py").write_text(example(title), encoding="utf-8")
        return importlib.import_module(place)

    return write


def test_a_recipe_names_data_of_an_existing_kind():
    (table,) = tomllib.loads(example("Data of an existing kind", "toml"))["data"]["sources"]
    config = SourceConfig(**table)
    assert config.kind in KINDS and config.has_pictures and config.weight == 0.5


def test_a_source_of_ones_own_gives_documents_by_its_place(module):
    module("A source", "my_sources.squares")
    source = build_source(SourceConfig(name="mine", kind="my_sources.squares:Squares"))
    assert "squares" in KINDS and len(source) == 100 and source.fingerprint()
    assert source.get(7, 0).text == "7 squared is 49." and source.get(7, 0).source == "mine"
    held = {sample.text for sample in source.heldout_samples()}
    assert held and held.isdisjoint(source.get(i, 0).text for i in range(len(source)))


def test_a_task_of_ones_own_is_known_to_its_users(module):
    module("A task of reinforcement learning", "my_tasks.double")
    task = make_task("double")
    for level in range(len(task.levels)):
        train, test = (
            {task.sample(seed, split, level).description for seed in range(20)} for split in ("train", "test")
        )
        assert train and test and not train & test
    problem = task.sample(3, "test", 1)
    assert task.reward(problem, f"It is {problem.answer}.") == 1.0
    assert task.reward(problem, f"{problem.answer + 1}") == 0.0

    options = {"tasks": {"double": 1.0}}
    document = build_source(SourceConfig(name="skills", kind="problems", options=options)).get(0, 0)
    number = int(re.match(r"the number (\d+)\nQ: what is twice that\?\nA: ", document.text)[1])
    assert document.text.endswith(f"\nA: {2 * number}")


def test_an_objective_of_ones_own_gives_a_loss_by_its_place(module):
    module("An objective of reinforcement learning", "my_losses.terms")
    config = ObjectiveConfig(name="k2.5", loss="my_losses.terms:cautious", tau=0.0)
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    log_ratio = torch.tensor([0.0, 0.1, 9.0, 0.0])
    logp = (old + log_ratio).requires_grad_()
    out = policy_loss(config, logp, old, torch.tensor([1.0, -0.5]), Segments((3, 1)))
    out.loss.backward()
    # -A log pi over four tokens; the third is outside and teaches nothing.
    torch.testing.assert_close(logp.grad, torch.tensor([-0.25, -0.25, 0.0, 0.125]))
    assert out.loss.isfinite() and out.outside == 1


def test_an_optimizer_of_ones_own_trains_by_its_place(module):
    module("An optimizer", "my_optim.plain")
    config = load_config(["nano"], [("optim.name", "my_optim.plain:plain")])
    model = meta_model(config)
    made = find_optimizer(config.optim.name).build(config.optim, model)
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["lr"] == config.optim.lr
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(model.parameters()))


def test_a_size_and_a_stage_of_ones_own_are_a_recipe():
    config = load_config([tomllib.loads(example("A model size, a stage", "toml"))])
    assert (config.model.hidden_size, config.model.num_hidden_layers, config.model.num_experts) == (
        448,
        12,
        32,
    )
    assert [stage.name for stage in config.stages] == ["joint", "long"]
    lines = re.findall(r"^    earlyfusion plan (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2 and all(main(["plan", *line.split()]) == 0 for line in lines)


def test_files_and_names_of_the_project_are_there():
    words = {word for line in PAGE.splitlines() for word in re.findall(r"`([\w./<>]+)", line)}
    files = [word for word in words if "/" in word and not re.match(r"(double|shards|my_)", word)]
    assert len(files) > 8
    assert not [file for file in files if not list(ROOT.glob(file.replace("<op>", "*")))]
    for place in (
        "pipeline.track.read_metrics",
        "data.loading.loader.read_skipped",
        "vision.patches.prepare_image",
    ):
        name, _, attribute = place.rpartition(".")
        assert place in PAGE and hasattr(importlib.import_module(f"earlyfusion.{name}"), attribute)
    assert "vision.encoder.import_tower" in PAGE and callable(import_tower) and callable(dispatch.register)
