"""Lets the pipeline tests share modules such as tiny_mla.py (pytest's importlib mode adds no directory
itself).

And runs of tiny_run.py: its tokenizer and recipe as files, made once.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Runs are compared to seven digits: an iteration in bf16, which some CPUs get, has three.
os.environ["EF_MUON_FP32"] = "1"

import tiny_run
from tiny_run import forget_processes, run_here

from earlyfusion.pipeline import pretrain
from earlyfusion.pipeline.config.compose import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer directory with 320 entries."""
    return tiny_run.make_tokenizer(tmp_path_factory.mktemp("tokenizer"), 320)


@pytest.fixture(scope="session")
def recipe(tokenizer) -> Path:
    """The recipe of tiny_run.py as a file."""
    return tiny_run.write_recipe(tokenizer.parent / "tiny.toml", tiny_run.tiny_recipe(tokenizer))


@pytest.fixture
def run(monkeypatch):
    """`earlyfusion pretrain` in this process: run(recipe, out, *words) -> exit code."""
    return lambda recipe, out, *words, **options: run_here(
        recipe, out, *words, monkeypatch=monkeypatch, **options
    )


@pytest.fixture
def training(recipe, tmp_path):
    """Makes a Pretraining of the tiny recipe to look into; closed at the end."""
    made = []

    def make(
        *words: tuple[str, object], resume: bool = False, out: Path | None = None
    ) -> pretrain.Pretraining:
        forget_processes()
        config = load_config([str(recipe)], [("run.out", str(out or tmp_path / "run")), *words])
        made.append(pretrain.Pretraining(config, resume))
        return made[-1]

    yield make
    for each in made:
        each.close()
