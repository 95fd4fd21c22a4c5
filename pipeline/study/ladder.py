"""A study of pretraining: its schema, its runs, and where they lie.

OUT/study.toml                       the plan as it was run
OUT/tuning/SIZE/ARM/VALUE/           a run that tries a value of an arm's tuned key
OUT/runs/SIZE/ARM/x1-s0/             one run: share of the tokens, seed
OUT/study.json, OUT/report.html      what came out (findings.py)
"""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, read_jsonl
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.pipeline.study.runner import Stage, read_shipped

FOLDER = Path(__file__).parent
TUNING_SEED = 1000
"""Seed of the runs that choose a value: no comparison uses it."""
NAME = r"^[a-z0-9_.]+$"


class Size(Section):
    name: str = Field(pattern=NAME)
    """Of the size, in files and tables."""
    overrides: Record = {}
    """Dotted key of a recipe -> value."""


class LadderArm(Section):
    name: str = Field(pattern=NAME)
    """Of the arm, in files and tables."""
    about: str
    """One line for the report."""
    expect: Literal["", "same", "worse"] = ""
    """What the study must find for its other findings to count: no difference to the base, or a loss above
    it; empty: it is asked."""
    recipes: list[str] = []
    """Recipes behind those of the study."""
    overrides: Record = {}
    """Dotted key of a recipe -> value."""
    tune: str = ""
    """Key that is chosen for every size by the first metric."""
    values: list[Any] = []
    """What is tried of it."""
    like: str = ""
    """Arm whose choice of that key it takes over."""
    tokens: PositiveFloat = 1.0
    """Share of the tokens that the others are trained on."""
    shift: int = 0
    """Added to its seeds: other weights and other data."""


class LadderConfig(Section):
    """A study of pretraining."""

    title: str
    """What is asked."""
    claim: str
    """What was published, and where."""
    recipes: list[str] = Field(min_length=1)
    """Recipes of `earlyfusion pretrain`, composed left to right."""
    overrides: Record = {}
    """Dotted key -> value, of all arms."""
    stage: str = "joint"
    """Stage whose steps are set."""
    steps: PositiveInt
    """Optimizer steps of a run."""
    tuning_steps: PositiveInt = 100
    """Optimizer steps of a run that chooses a value."""
    seeds: PositiveInt = 3
    """Seeds of every arm and size."""
    base_tokens: list[PositiveFloat] = []
    """Further lengths of the base, as multiples of the steps."""
    metrics: dict[str, str] = Field(min_length=1)
    """What is compared, lower being better: name -> key of the last evaluation, or max_logit, the largest of
    the run; the first is registered."""
    sizes: list[Size] = Field(min_length=1)
    """Models, smallest first."""
    arms: list[LadderArm] = Field(min_length=2)
    """The base first."""

    @model_validator(mode="after")
    def _check(self) -> "LadderConfig":
        for kind, names in (("arms", [a.name for a in self.arms]), ("sizes", [s.name for s in self.sizes])):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind} {names}: each needs a name of its own")
        known = [arm.name for arm in self.arms]
        for arm in self.arms:
            if arm.like and arm.like not in known:
                raise ValueError(f"arm {arm.name}: like {arm.like!r}; {did_you_mean(arm.like, known)}")
            if bool(arm.tune) != bool(arm.values):
                raise ValueError(f"arm {arm.name}: tune and values go together")
        # A mistake in a key is told before hours of training, not after.
        for size in self.sizes:
            for arm in self.arms:
                try:
                    keys = self.keys(size, arm, self.steps, 0)
                    load_config([*self.recipes, *arm.recipes], [*keys.items()])
                except UserError as error:
                    raise ValueError(f"size {size.name}, arm {arm.name}: {error}") from None
        return self

    @property
    def base(self) -> LadderArm:
        return self.arms[0]

    def tuned_as(self, arm: LadderArm) -> LadderArm:
        """The arm whose choice this one takes: its own, or that of `like`."""
        return next((other for other in self.arms if other.name == arm.like), arm)

    def keys(self, size: Size, arm: LadderArm, steps: int, seed: int) -> Record:
        """Every key that a run changes, but the tuned one."""
        ours = {f"stages.{self.stage}.steps": steps, "run.seed": seed, "data.seed": seed}
        return self.overrides | size.overrides | arm.overrides | ours

    def lengths(self, arm: LadderArm) -> list[float]:
        """Shares of the tokens at which an arm is trained."""
        return sorted({arm.tokens, *(self.base_tokens if arm is self.base else [])})


def read_ladder(given: str, changes: Record) -> LadderConfig:
    """A study by its shipped name, or a TOML file. Raises UserError."""
    config: LadderConfig = read_shipped(given, changes, FOLDER, LadderConfig)
    return config


def run_of(out: Path, size: str, arm: str, length: float, seed: int) -> Path:
    """The folder of one run."""
    return out / "runs" / size / arm / f"x{length:g}-s{seed}"


def trial_of(out: Path, size: str, arm: str, value: Any) -> Path:
    """The folder of a run that tries a value."""
    return out / "tuning" / size / arm / f"{value}".replace("/", "_")


def measured(folder: Path) -> Record | None:
    """The last evaluation of a run that is done, with its tokens, its seconds and the largest attention logit
    of the whole run; None for any other."""
    if not (folder / "model" / "config.json").is_file():
        return None
    found: Record = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        if line.get("event") == "eval":
            found |= line
        elif line.get("event") == "train":
            found |= {key: line[key] for key in ("tokens", "seconds") if key in line}
            logits = [value for heads in line.get("max_logit", {}).values() for value in heads]
            found["max_logit"] = max([found.get("max_logit", 0.0), *logits])
    return found


def tried(config: LadderConfig, out: Path, size: str, arm: LadderArm) -> dict[Any, float]:
    """Value of the tuned key -> the first metric; nan where a run left none."""
    key = next(iter(config.metrics.values()))
    found = ((value, measured(trial_of(out, size, arm.name, value))) for value in arm.values)
    return {value: float(run.get(key) or math.nan) for value, run in found if run is not None}


def chosen(config: LadderConfig, out: Path, size: str, arm: LadderArm) -> Record:
    """The tuned key with the value that did best, {} for an arm without one.

    Raises UserError when no run of the tuning ended with a loss.
    """
    source = config.tuned_as(arm)
    if not source.tune:
        return {}
    found = {value: loss for value, loss in tried(config, out, size, source).items() if loss == loss}
    if not found:
        raise UserError(f"size {size}, arm {source.name}: no value of {source.tune} left a loss")
    return {source.tune: min(found, key=lambda value: found[value])}


def stages(config: LadderConfig, out: Path) -> list[Stage]:
    """Every run, in an order in which they could be made one after the other."""
    made: list[Stage] = []

    def add(arm: LadderArm, folder: Path, keys: Callable[[], Record], after: tuple[str, ...] = ()) -> str:
        def words() -> tuple[str, ...]:
            # Text stands as it is; anything else as TOML reads it, which is JSON for these.
            told = [f"--{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in keys().items()]
            start = (sys.executable, "-m", "earlyfusion.pipeline.pretrain")
            return (*start, *config.recipes, *arm.recipes, *told, "--out", str(folder))

        name = str(folder.relative_to(out))
        made.append(Stage(name, words, (folder / "model" / "config.json",), folder, after))
        return name

    def keys_of(size: Size, arm: LadderArm, length: float, seed: int) -> Record:
        plain = config.keys(size, arm, round(config.steps * length), seed + arm.shift)
        return plain | chosen(config, out, size.name, arm)

    for size in config.sizes:
        trials: dict[str, tuple[str, ...]] = {}
        for arm in config.arms:
            names = []
            for value in arm.values:
                keys = config.keys(size, arm, config.tuning_steps, TUNING_SEED) | {arm.tune: value}
                folder = trial_of(out, size.name, arm.name, value)
                names.append(add(arm, folder, partial(dict, keys)))
            trials[arm.name] = tuple(names)
        for seed, arm in product(range(config.seeds), config.arms):
            for length in config.lengths(arm):
                folder = run_of(out, size.name, arm.name, length, seed)
                after = trials[config.tuned_as(arm).name]
                add(arm, folder, partial(keys_of, size, arm, length, seed), after)
    return made
