"""What a study is: its schema, its runs, and where they lie.

OUT/study.toml                       the plan as it was run
OUT/tuning/SIZE/ARM/VALUE/           a run that tries a value of an arm's tuned key
OUT/runs/SIZE/ARM/x1-s0/             one run: share of the steps, seed; arm.toml its recipe
OUT/runs/.../measured/NAME/          what a further command found out about its model
OUT/study.json, OUT/report.html      what came out (findings.py)

A run is done when its model is there; nothing else is remembered.
"""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, write_atomic
from earlyfusion.pipeline.cli import load
from earlyfusion.pipeline.config.compose import compose, merge, read_toml, recipe_names, to_toml, validate
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.pipeline.study.records import Metric, Run
from earlyfusion.pipeline.study.runner import Stage
from earlyfusion.pipeline.verbs import VERBS

FOLDER = Path(__file__).parent
TUNING_SEED = 1000
"""Seed of the runs that choose a value: no comparison uses it."""
NAME = r"^[a-z0-9_.]+$"
Program = Literal["pretrain", "sft", "rl"]
BEST_OF = "|"
"""Between arms in `against`: the best of them, seed by seed."""


class Size(Section):
    name: str = Field("one", pattern=NAME)
    """Of the size, in files and tables."""
    overrides: Record = {}
    """Dotted key of a recipe -> value."""


class Start(Section):
    """A model that arms begin with: one run for each seed, not compared."""

    name: str = Field(pattern=NAME)
    """In files and tables."""
    about: str
    """One line for the report."""
    program: Program = "pretrain"
    """Verb that runs it."""
    start: str = ""
    """Start or arm whose model of the same seed it begins with; empty: from scratch."""
    recipes: list[str] = []
    """Recipes behind those of the study."""
    config: Record = {}
    """Tables laid over the recipes."""
    overrides: Record = {}
    """Dotted key of a recipe -> value."""
    steps: PositiveInt | None = None
    """Optimizer steps, or updates of RL; if not given those of the study for an arm, of its recipe for a
    start."""


class StudyArm(Start):
    """What is compared: it differs in one thing from what it is compared with."""

    expect: Literal["", "same", "worse", "better", "nothing"] = ""
    """What the study must find for its other findings to count: no difference to the base; worse or better
    than the base; by itself nothing better than 0. Empty: it is asked."""
    against: list[str] = []
    """Arms that it is compared with, the base if none is named; "a|b": the better of the two, seed by
    seed."""
    tune: str = ""
    """Key that is chosen for every size by the first metric."""
    values: list[Any] = []
    """What is tried of it."""
    like: str = ""
    """Arm whose choice of that key it takes over."""
    tokens: PositiveFloat = 1.0
    """Share of the steps that the others take."""
    shift: int = 0
    """Added to its seeds: other weights and other data."""


class Measure(Section):
    """A further command on the models of some arms."""

    name: str = Field(pattern=NAME)
    """Of the measurement: the `source` of metrics."""
    arms: list[str] = []
    """Starts and arms whose models are measured; all arms if none is named."""
    words: list[str] = Field(min_length=1)
    """Words of `earlyfusion`; {model} is the model, {start} that which its run began with, {out} the
    folder."""
    result: str = "summary.json"
    """JSON that it writes into that folder."""


class Gate(Section):
    """What a start must be able to do; seeds whose start is not are left out, and named."""

    key: str
    """Figure of the first evaluation of the base arm."""
    least: float = -math.inf
    """Smallest value."""
    most: float = math.inf
    """Largest value."""


class Within(Section):
    """Learned items against those that were not, inside each run."""

    trained: str
    """Metric of what is trained."""
    asked: str
    """Metric of what is asked."""


class StudyConfig(Section):
    """A study."""

    title: str
    """What is asked."""
    claim: str
    """What was published, and where."""
    recipes: list[str] = []
    """Recipes of `earlyfusion pretrain`, composed left to right."""
    overrides: Record = {}
    """Dotted key -> value, of all pretraining."""
    base: dict[Program, Record] = {}
    """Verb -> recipe that all its runs share, over `recipes`."""
    stage: str = "joint"
    """Stage whose steps are set."""
    steps: PositiveInt
    """Optimizer steps of a run, or updates of RL."""
    tuning_steps: PositiveInt = 100
    """Optimizer steps of a run that chooses a value."""
    seeds: PositiveInt = 3
    """Seeds of every arm and size."""
    base_tokens: list[PositiveFloat] = []
    """Further lengths of the base, as multiples of the steps."""
    cluster: Literal["", "problem", "category"] = ""
    """What held-out problems are grouped by, where they are a sample too: intervals are then of new seeds and
    of new groups. Empty: of new seeds alone."""
    metrics: dict[str, Metric] = Field(min_length=1)
    """What is compared; the first is registered."""
    measures: list[Measure] = []
    gates: list[Gate] = []
    within: Within | None = None
    sizes: list[Size] = Field([Size()], min_length=1)
    """Models, smallest first."""
    starts: list[Start] = []
    arms: list[StudyArm] = Field(min_length=2)
    """The base first."""

    @model_validator(mode="after")
    def _check(self) -> "StudyConfig":
        # Names, and what they name.
        every = [one.name for one in self.trained]
        for kind, names in (("arms", every), ("sizes", [size.name for size in self.sizes])):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind} {names}: each needs a name of its own")
        named = [("arms", arm.name, "like", arm.like, every) for arm in self.arms if arm.like]
        for arm in self.arms:
            rivals = [name for one in arm.against for name in one.split(BEST_OF)]
            named += [("arms", arm.name, "against", name, every) for name in rivals]
        for place, one in enumerate(self.trained):
            # What it begins with is run before it.
            named += [("arms", one.name, "start", one.start, every[:place])] if one.start else []
        for measure in self.measures:
            named += [("measures", measure.name, "arms", name, every) for name in measure.arms]
        sources = ["eval", "train", *(one.name for one in self.measures)]
        for name, metric in self.metrics.items():
            named += [("metrics", name, "source", metric.source, sources)]
            named += [("metrics", name, "arms", arm_name, every) for arm_name in metric.arms]
        for word in (self.within.trained, self.within.asked) if self.within else ():
            named.append(("within", "", "metric", word, list(self.metrics)))
        for kind, name, key, value, known in named:
            if value not in known:
                raise ValueError(f"{kind} {name}: {key} {value!r}; {did_you_mean(value, known)}")
        for arm in self.arms:
            if bool(arm.tune) != bool(arm.values):
                raise ValueError(f"arm {arm.name}: tune and values go together")
        # A mistake in a key is told before hours of training, not after.
        for size, one in product(self.sizes, self.trained):
            try:
                self.check(size, one)
            except UserError as error:
                raise ValueError(f"size {size.name}, arm {one.name}: {error}") from None
        return self

    @property
    def base_arm(self) -> StudyArm:
        """What the others are compared with where they say nothing else."""
        return self.arms[0]

    @property
    def trained(self) -> list[Start | StudyArm]:
        """Everything that is run, in an order in which it can be."""
        return [*self.starts, *self.arms]

    @property
    def registered(self) -> str:
        """The metric that the arms are judged on."""
        return next(iter(self.metrics))

    def tuned_as(self, arm: Start) -> StudyArm | None:
        """The arm whose choice this one takes: its own, or that of `like`; None where nothing is chosen."""
        if not isinstance(arm, StudyArm):
            return None
        source = next((other for other in self.arms if other.name == arm.like), arm)
        return source if source.tune else None

    def tree(self, arm: Start) -> Record:
        """The tables that its runs are written with, over the recipes."""
        return merge(self.base.get(arm.program, {}), arm.config)

    def recipes_of(self, arm: Start) -> list[str]:
        """Recipes below those tables."""
        return [*(self.recipes if arm.program == "pretrain" else []), *arm.recipes]

    def keys(self, size: Size, arm: Start, seed: int, length: float = 1.0, steps: int = 0) -> Record:
        """Every key that a run changes, but the tuned one. steps: in place of the arm's."""
        shared = self.overrides | size.overrides if arm.program == "pretrain" else {}
        ours: Record = {"run.seed": seed}
        steps = steps or arm.steps or (self.steps if isinstance(arm, StudyArm) else 0)
        if steps:
            key = "train.updates" if arm.program == "rl" else f"stages.{self.stage}.steps"
            ours[key] = round(steps * length)
        if arm.program != "rl" or "data" in self.tree(arm):
            ours["data.seed"] = seed
        return shared | arm.overrides | ours

    def check(self, size: Size, arm: Start) -> None:
        """Raises UserError for a recipe that its verb would not take."""
        keys = self.keys(size, arm, 0)
        # Fine-tuning has its model from the start; here any one will do.
        whole = compose(self.recipes) if arm.program == "sft" else {}
        below: Record = {
            section: whole[section] for section in ("tokenizer", "vision", "model") if section in whole
        }
        recipe = compose([below, *self.recipes_of(arm), self.tree(arm)], [*keys.items()])
        validate(recipe, load(VERBS[arm.program].schema))

    def lengths(self, arm: Start) -> list[float]:
        """Shares of the steps at which an arm is trained."""
        if not isinstance(arm, StudyArm):
            return [1.0]
        return sorted({arm.tokens, *(self.base_tokens if arm is self.base_arm else [])})


def read_study(given: str, changes: Record) -> StudyConfig:
    """A study by its shipped name, or a TOML file. changes: top keys that the command line sets. Raises
    UserError, one line, for what is wrong."""
    # A name without an ending is a shipped study.
    path = Path(given)
    if path.suffix != ".toml":
        path = FOLDER / f"{given}.toml"
        if not path.is_file():
            raise UserError(f"study {given!r} is not shipped; {did_you_mean(given, recipe_names(FOLDER))}")
    config: StudyConfig = validate({**read_toml(path, "study"), **changes}, StudyConfig)
    return config


def run_of(out: Path, size: str, arm: str, length: float, seed: int) -> Path:
    """The folder of one run."""
    return out / "runs" / size / arm / f"x{length:g}-s{seed}"


def trial_of(out: Path, size: str, arm: str, value: Any) -> Path:
    """The folder of a run that tries a value."""
    return out / "tuning" / size / arm / f"{value}".replace("/", "_")


def tried(config: StudyConfig, out: Path, size: str, arm: StudyArm) -> dict[Any, float]:
    """Value of the tuned key -> the first metric; nan where a run left none."""
    metric = config.metrics[config.registered]
    runs = ((value, Run(trial_of(out, size, arm.name, value))) for value in arm.values)
    return {value: run.value(metric) for value, run in runs if run.done}


def chosen(config: StudyConfig, out: Path, size: str, arm: Start) -> Record:
    """The tuned key with the value that did best, {} for an arm without one.

    Raises UserError when no run of the tuning ended with a figure.
    """
    source = config.tuned_as(arm)
    if source is None:
        return {}
    found = {value: one for value, one in tried(config, out, size, source).items() if one == one}
    if not found:
        raise UserError(f"size {size}, arm {source.name}: no value of {source.tune} left a figure")
    best = max if config.metrics[config.registered].better == "higher" else min
    return {source.tune: best(found, key=lambda value: found[value])}


def command(program: str, *words: str) -> tuple[str, ...]:
    """A verb as a process."""
    return sys.executable, "-m", "earlyfusion.pipeline.cli", program, *words


def literal(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {literal(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(literal, value))}]" if isinstance(value, list) else json.dumps(value)


def stages(config: StudyConfig, out: Path) -> list[Stage]:
    """Every run, in an order in which they could be made one after the other."""
    made: list[Stage] = []

    def add(
        arm: Start, folder: Path, keys: Callable[[], Record], after: tuple[str, ...], begin: Path | None
    ) -> str:
        def words() -> tuple[str, ...]:
            # Text stands as it is.
            told = [f"--{key}={v if isinstance(v, str) else literal(v)}" for key, v in keys().items()]
            told += ["--init-from", str(begin / "model")] if begin else []
            recipe = [str(folder / "arm.toml")] if config.tree(arm) else []
            return command(arm.program, *config.recipes_of(arm), *recipe, *told, "--out", str(folder))

        name = str(folder.relative_to(out))
        made.append(Stage(name, words, folder / "model" / "config.json", folder, after))
        return name

    def keys_of(size: Size, arm: Start, length: float, seed: int) -> Record:
        return config.keys(size, arm, seed, length) | chosen(config, out, size.name, arm)

    for size in config.sizes:
        trials: dict[str, tuple[str, ...]] = {}
        for tuned in config.arms:
            names = []
            for value in tuned.values:
                keys = config.keys(size, tuned, TUNING_SEED, steps=config.tuning_steps) | {tuned.tune: value}
                folder = trial_of(out, size.name, tuned.name, value)
                names.append(add(tuned, folder, partial(dict, keys), (), None))
            trials[tuned.name] = tuple(names)
        for seed, arm in product(range(config.seeds), config.trained):
            source = config.tuned_as(arm)
            begin = start_of(config, out, size.name, arm, seed)
            after = trials[source.name] if source else ()
            after += (str(begin.relative_to(out)),) if begin else ()
            for length in config.lengths(arm):
                folder = run_of(out, size.name, arm.name, length, seed)
                own = seed + (arm.shift if isinstance(arm, StudyArm) else 0)
                name = add(arm, folder, partial(keys_of, size, arm, length, own), after, begin)
                made += measurements(config, arm, folder, name, begin)
    return made


def start_of(config: StudyConfig, out: Path, size: str, arm: Start, seed: int) -> Path | None:
    """The folder of the run whose model a run begins with."""
    for one in config.trained:
        if one.name == arm.start:
            length = one.tokens if isinstance(one, StudyArm) else 1.0
            return run_of(out, size, one.name, length, seed)
    return None


def measurements(
    config: StudyConfig, arm: Start, folder: Path, name: str, begin: Path | None
) -> Iterator[Stage]:
    """The further commands on the model of a run."""
    for one in config.measures:
        if arm.name in (one.arms or [arm.name for arm in config.arms]):
            place = folder / "measured" / one.name
            named = {"model": folder / "model", "start": (begin or folder) / "model", "out": place}
            words = command(*(word.format(**named) for word in one.words))
            yield Stage(f"{name}/{one.name}", partial(tuple, words), place / one.result, place, (name,))


def write_plan(config: StudyConfig, out: Path) -> None:
    """Write study.toml and every arm's recipe. Raises UserError when OUT holds another study."""
    text, path = to_toml(config.model_dump(mode="json")), out / "study.toml"
    # Results of two plans in one folder would be compared as if they were one.
    if path.is_file():
        old, new = (tomllib.loads(one) for one in (path.read_text(encoding="utf-8"), text))
        if changed := sorted(key for key in {*old, *new} - {"seeds"} if old.get(key) != new.get(key)):
            raise UserError(
                f"{out} holds a study with other {', '.join(changed)}: name another folder with --out; only"
                " seeds may change"
            )
    write_atomic(path, text)
    for size, arm, seed in product(config.sizes, config.trained, range(config.seeds)):
        if tree := config.tree(arm):
            folders = [run_of(out, size.name, arm.name, x, seed) for x in config.lengths(arm)]
            values = arm.values if isinstance(arm, StudyArm) else []
            folders += [trial_of(out, size.name, arm.name, value) for value in values]
            for folder in folders:
                write_atomic(folder / "arm.toml", to_toml(tree))
