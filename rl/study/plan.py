"""What a transfer study is made of: its schema, its stages, and where their results lie.

    OUT/study.toml                     the plan as it was run
    OUT/study.jsonl                    the log of the runner, one event a line
    OUT/pretrain/p0/model              one start for every pretraining seed
    OUT/runs/p0/vision/r1/             one reinforcement learning run: arm.toml, metrics.jsonl, model, ...
    OUT/measured/p0/none.jsonl         the start on the held-out problems; vision-r1.jsonl a run;
                                       ...-matched.json the start at that run's entropy; ...-probe.json what a
                                       linear probe reads
    OUT/study.json, OUT/report.html    what came out

A stage is done when its result exists; nothing else is remembered.
"""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, write_atomic
from earlyfusion.pipeline.config.compose import merge, to_toml, validate
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.pipeline.study.runner import Stage, read_shipped
from earlyfusion.rl.recipe import RLConfig, entry_of

FOLDER = Path(__file__).parent
# In tables it stands among the arms, as the one that was not trained.
START = "none"
"""Name of the arm without training: the start itself."""
Form = Literal["picture", "twin", "rendered"]


class PretrainSection(Section):
    recipes: list[str] = Field(min_length=1)
    """Recipes of `earlyfusion pretrain`, composed left to right."""
    overrides: Record = {}
    """Dotted key -> value."""


class MeasureSection(Section):
    problems: PositiveInt = 200
    """Held-out problems of every label."""
    samples: NonNegativeInt = 8
    """Sampled answers to each problem of the primary label (pass@k)."""
    seed: NonNegativeInt = 777
    """Which problems."""
    max_new_tokens: PositiveInt = 8
    """Longest answer, in tokens."""
    forms: list[Form] = ["twin", "picture", "rendered"]
    """Forms of the skill that are measured; the unrelated skill is measured as picture and as twin."""
    probe: NonNegativeInt = 300
    """Problems that the linear probe is fitted on; 0: no probe."""


# Arms differ in one thing each; everything else comes from [rl].
class Arm(Section):
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Of the arm, in files and tables."""
    about: str
    """One line for the report."""
    kind: Literal["treated", "control"] = "treated"
    """treated: what might earn a transfer; control: what else could explain one."""
    tasks: list[str] = Field(min_length=1)
    """Labels of the prompts: "{skill}/picture", "{skill}/twin", "{skill}/picture/thought",
    "{unrelated}/picture", ..."""
    against: list[str] = []
    """Controls of this arm besides random, sft, text and unrelated."""
    power: float = Field(1.0, gt=0)
    """Power of its scores (TaskEntry.power), for skills that pay partial credit."""
    config: Record = {}
    """Laid over the study's [rl]; `data.sources` in it are curated documents."""

    @property
    def thought(self) -> bool:
        """Whether its answers follow a thought; they are then measured that way too."""
        return any(label.endswith("/thought") for label in self.tasks)


class StudyConfig(Section):
    """A whole study."""

    skill: str
    """The skill S as "task/difficulty"."""
    unrelated: str
    """Another skill."""
    seeds: PositiveInt = 5
    """Pretraining seeds."""
    rl_seeds: PositiveInt = 3
    """Reinforcement learning seeds from each start."""
    primary: Form = "twin"
    """Form whose greedy accuracy is the primary metric."""
    pretrain: PretrainSection
    measure: MeasureSection = MeasureSection()
    rl: Record = {}
    """Recipe of `earlyfusion rl` without tasks, for all arms."""
    arms: list[Arm] = Field(min_length=1)

    @field_validator("skill", "unrelated")
    @classmethod
    def _label(cls, value: str) -> str:
        try:
            entry = entry_of(value)
        # pydantic turns a ValueError into its report, and nothing else.
        except DataError as error:
            raise ValueError(str(error)) from None
        return f"{entry.name}/{entry.difficulty}"

    @model_validator(mode="after")
    def _check(self) -> StudyConfig:
        names = [arm.name for arm in self.arms]
        if len({*names, START}) <= len(names):
            raise ValueError(f'arms {names}: every arm needs a name of its own, and not "{START}"')
        if self.skill == self.unrelated:
            raise ValueError(f"skill and unrelated are both {self.skill}; name two different skills")
        if self.primary not in self.measure.forms:
            raise ValueError(f"primary {self.primary!r} is not among measure.forms {self.measure.forms}")
        for arm in self.arms:
            for other in arm.against:
                if other not in names:
                    raise ValueError(f"arm {arm.name}: against {other!r}; {did_you_mean(other, names)}")
            # A mistake in an arm is told before hours of pretraining, not after.
            try:
                validate(self.recipe(arm), RLConfig)
            except UserError as error:
                raise ValueError(f"arm {arm.name}: {error}") from None
        return self

    @property
    def primary_label(self) -> str:
        return f"{self.skill}/{self.primary}"

    def registered(self, label: str) -> bool:
        """Whether an arm may be judged on this label."""
        return label in (self.primary_label, self.primary_label + "/thought")

    def labels(self, arm: Arm | None = None) -> list[str]:
        """What is measured of an arm; None: of the start, which is measured in every way any arm is."""
        found = [f"{self.skill}/{form}" for form in self.measure.forms]
        found += [f"{self.unrelated}/picture", f"{self.unrelated}/twin"]
        if any(one.thought for one in ([arm] if arm else self.arms)):
            found += [f"{self.skill}/{form}/thought" for form in ("twin", "picture")]
        return found

    def runs(self) -> list[tuple[Arm, int]]:
        """Every arm with the number of its run, of one start."""
        return [(arm, run) for run in range(self.rl_seeds) for arm in self.arms]

    def recipe(self, arm: Arm) -> Record:
        """The reinforcement learning recipe of an arm, as a plain dict."""
        # Measuring during a run is for its curves: off unless the study asks for it.
        tree = merge({"run": {"name": arm.name}, "eval": {"problems": 0}}, merge(self.rl, arm.config))
        tree["tasks"] = [self.entry(text) | {"power": arm.power} for text in arm.tasks]
        tree["eval"].setdefault("tasks", [self.entry("{skill}/picture"), self.entry("{skill}/twin")])
        return tree

    def entry(self, text: str) -> Record:
        """A label as an entry of a recipe, with the skills filled in."""
        entry = entry_of(text.replace("{skill}", self.skill).replace("{unrelated}", self.unrelated))
        return entry.model_dump(include={"name", "difficulty", "form", "thought"})


def read_study(given: str, changes: Record) -> StudyConfig:
    """A study by its shipped name, or a TOML file. Raises UserError."""
    config: StudyConfig = read_shipped(given, changes, FOLDER, StudyConfig)
    return config


def start_of(out: Path, seed: int) -> Path:
    """The model directory that the runs of a pretraining seed start from."""
    return out / "pretrain" / f"p{seed}" / "model"


def run_folder(out: Path, seed: int, arm: str, run: int) -> Path:
    """The folder of one reinforcement learning run."""
    return out / "runs" / f"p{seed}" / arm / f"r{run}"


def measured_file(out: Path, seed: int, arm: str = START, run: int = 0) -> Path:
    """The answers of the start, or of a run, to the held-out problems."""
    name = START if arm == START else f"{arm}-r{run}"
    return out / "measured" / f"p{seed}" / f"{name}.jsonl"


def beside(measured: Path, kind: str) -> Path:
    """What else is known of the model whose answers lie in `measured`: "matched" (the start at its entropy)
    or "probe"."""
    return measured.with_name(f"{measured.stem}-{kind}.json")


def stages(config: StudyConfig, out: Path) -> list[Stage]:
    """Every stage, in an order in which they could be run one after the other."""
    made: list[Stage] = []

    def add(name: str, folder: Path, words: list[str], needs: list[str]) -> str:
        """A stage that ends with a model in its folder."""
        command = (sys.executable, "-m", *words, "--out", str(folder))
        made.append(Stage(name, lambda: command, (folder / "model" / "config.json",), folder, tuple(needs)))
        return name

    for seed in range(config.seeds):
        start = start_of(out, seed)
        words = ["earlyfusion.pipeline.pretrain", *config.pretrain.recipes]
        # Data and weights are drawn anew for every start.
        for key, value in {"run.seed": seed, "data.seed": seed, **config.pretrain.overrides}.items():
            words.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
        needs = [add(f"pretrain/p{seed}", start.parent, words, [])]

        # Runs of one number share their seed in all arms: they see the same prompts.
        runs, results = [], [measured_file(out, seed)]
        for arm, run in config.runs():
            folder, number = run_folder(out, seed, arm.name, run), 1000 * seed + run + 1
            words = ["earlyfusion.rl.train", str(folder / "arm.toml"), "--init-from", str(start)]
            words.append(f"--run.seed={number}")
            if "data" in arm.config:
                words.append(f"--data.seed={number}")
            runs.append(add(f"run/p{seed}/{arm.name}/r{run}", folder, words, needs))
            file = measured_file(out, seed, arm.name, run)
            results += [file, beside(file, "matched")]

        # A stage that wrote answers and no probes is not done.
        if config.measure.probe:
            results += [beside(file, "probe") for file in results if file.suffix == ".jsonl"]
        command = (sys.executable, "-m", "earlyfusion.rl.study.measure", str(out), str(seed))
        folder, after = measured_file(out, seed).parent, (*needs, *runs)
        made.append(
            Stage(f"measure/p{seed}", partial(tuple, command), tuple(results), folder, after, partial=True)
        )
    return made


def write_recipes(config: StudyConfig, out: Path) -> None:
    """Write study.toml and every run's arm.toml. Raises UserError when OUT holds another study."""
    text, path = to_toml(config.model_dump(mode="json")), out / "study.toml"
    # Results of two plans in one folder would be compared as if they were one.
    if path.is_file():
        changed = differing(tomllib.loads(path.read_text(encoding="utf-8")), tomllib.loads(text))
        if changed:
            raise UserError(
                f"{out} holds a study with other {', '.join(changed)}: name another folder with --out; only"
                " seeds, rl_seeds and further arms may change"
            )
    write_atomic(path, text)
    for arm, run in config.runs():
        for seed in range(config.seeds):
            write_atomic(run_folder(out, seed, arm.name, run) / "arm.toml", to_toml(config.recipe(arm)))


def differing(old: Record, new: Record) -> list[str]:
    """Keys in which two plans differ so that their results must not be mixed; seeds, runs and arms may be
    added."""
    free = ("seeds", "rl_seeds", "arms")
    keys = [key for key in {*old, *new} if key not in free and old.get(key) != new.get(key)]
    known = {arm["name"]: arm for arm in old.get("arms", [])}
    keys += [f"arms.{arm['name']}" for arm in new["arms"] if known.get(arm["name"], arm) != arm]
    return sorted(keys)
