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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from earlyfusion.data.errors import DataError
from earlyfusion.data.sources.base import SourceConfig
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline.config.compose import merge, to_toml, validate
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.recipe import RLConfig, TaskEntry

FOLDER = Path(__file__).parents[1]
START = "none"
"""Name of the arm without training: the start itself."""
Form = Literal["picture", "twin", "rendered"]


class PretrainSection(Section):
    recipes: list[str] = Field(min_length=1)
    """Recipes of `earlyfusion pretrain`, composed left to right."""
    overrides: dict[str, Any] = {}
    """Dotted key -> value."""
    models: list[str] = []
    """Model directories to start from instead of pretraining, one for each seed."""


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
    unrelated: bool = True
    """Measure the unrelated skill too."""
    probe: NonNegativeInt = 300
    """Problems that the linear probe is fitted on; 0: no probe."""


class Arm(Section):
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    about: str
    """One line for the report."""
    kind: Literal["treated", "control"] = "treated"
    """treated: what might earn a transfer; control: what else could explain one."""
    tasks: list[str] = Field(min_length=1)
    """Labels of the prompts: "{skill}/picture", "{skill}/twin", "{skill}/picture/thought",
    "{unrelated}/picture", ..."""
    documents: dict[str, float] = {}
    """Label -> weight of curated documents (kind "problems") in place of the replay."""
    replay: bool = False
    """Curated documents of the study's `replay`."""
    against: list[str] = []
    """Controls of this arm besides random, sft, text and unrelated."""
    power: float = Field(1.0, gt=0)
    """Power of its scores (TaskEntry.power), for skills that pay partial credit."""
    config: dict[str, Any] = {}
    """Laid over the study's [rl]."""

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
    rl: dict[str, Any] = {}
    """Recipe of `earlyfusion rl` without tasks, for all arms."""
    arms: list[Arm] = Field(min_length=1)
    replay: list[dict[str, Any]] = []
    """Data sources of the arms with `replay`."""

    @field_validator("skill", "unrelated")
    @classmethod
    def _label(cls, value: str) -> str:
        try:
            entry = entry_of(value)
        except DataError as error:
            raise ValueError(str(error)) from None
        return f"{entry.name}/{entry.difficulty}"

    @model_validator(mode="after")
    def _check(self) -> StudyConfig:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names) or START in names:
            raise ValueError(f'arms {names}: every arm needs a name of its own, and not "{START}"')
        if self.skill == self.unrelated:
            raise ValueError(f"skill and unrelated are both {self.skill}; name two different skills")
        if self.primary not in self.measure.forms:
            raise ValueError(f"primary {self.primary!r} is not among measure.forms {self.measure.forms}")
        if self.pretrain.models and len(self.pretrain.models) < self.seeds:
            raise ValueError(f"pretrain.models: {len(self.pretrain.models)} folders for seeds = {self.seeds}")
        for arm in self.arms:
            for other in arm.against:
                if other not in names:
                    raise ValueError(f"arm {arm.name}: against {other!r}; {did_you_mean(other, names)}")
            if arm.replay and not self.replay:
                raise ValueError(f"arm {arm.name}: replay without [[replay]] sources")
            self.recipe(arm)
        return self

    def label(self, text: str) -> str:
        """A label with the skills filled in, as TaskEntry.label writes it."""
        return entry_of(text.replace("{skill}", self.skill).replace("{unrelated}", self.unrelated)).label

    @property
    def primary_label(self) -> str:
        return f"{self.skill}/{self.primary}"

    def registered(self, label: str) -> bool:
        """Whether an arm may be judged on this label."""
        return label in (self.primary_label, self.primary_label + "/thought")

    def labels(self, arm: Arm | None = None) -> list[str]:
        """What is measured of an arm; None: of the start, which is measured in every way any arm is."""
        found = [f"{self.skill}/{form}" for form in self.measure.forms]
        if self.measure.unrelated:
            found += [f"{self.unrelated}/picture", f"{self.unrelated}/twin"]
        if arm.thought if arm is not None else any(one.thought for one in self.arms):
            found += [f"{self.skill}/{form}/thought" for form in ("twin", "picture")]
        return found

    def recipe(self, arm: Arm) -> dict[str, Any]:
        """The reinforcement learning recipe of an arm, as a plain dict. Raises ValueError for one that is not
        valid."""
        tree = merge(self.rl, arm.config)
        tree["tasks"] = [_entry(entry_of(self.label(text))) | {"power": arm.power} for text in arm.tasks]
        sources = [dict(source) for source in self.replay] if arm.replay else []
        for number, (text, weight) in enumerate(arm.documents.items()):
            entry = entry_of(self.label(text))
            options = {
                "tasks": {entry.name: 1},
                "difficulty": {entry.name: entry.difficulty},
                "forms": {entry.form: 1},
            }
            options["thought"] = float(entry.thought)
            sources.append(
                {"name": f"documents{number}", "kind": "problems", "weight": weight, "options": options}
            )
        if sources:
            tree["data"] = {"seed": 0, **tree.get("data", {}), "sources": sources}
            for source in sources:
                SourceConfig.model_validate(source)
        tree = merge({"eval": {"problems": 0}}, tree)
        if "tasks" not in tree["eval"] and tree["eval"]["problems"]:
            shown = dict.fromkeys([f"{self.skill}/picture", f"{self.skill}/twin"])
            tree["eval"]["tasks"] = [_entry(entry_of(label)) for label in shown]
        tree = merge({"run": {"name": arm.name}}, tree)
        try:
            validate(tree, RLConfig)
        except UserError as error:
            raise ValueError(f"arm {arm.name}: {error}") from None
        return tree


def _entry(entry: TaskEntry) -> dict[str, Any]:
    return {"name": entry.name, "difficulty": entry.difficulty, "form": entry.form, "thought": entry.thought}


def read_study(given: str, changes: Mapping[str, Any] | None = None) -> StudyConfig:
    """A study by the name of a shipped one, or a TOML file. changes: top keys that the command line sets.

    Raises UserError, one line, for what is wrong.
    """
    path = Path(given)
    if not given.endswith(".toml") and path.parent == Path("."):
        path = FOLDER / f"{given}.toml"
        if not path.is_file():
            raise UserError(
                f"study {given!r} is not shipped here;"
                f" {did_you_mean(given, [p.stem for p in FOLDER.glob('*.toml')])}"
            )
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"study {given}: cannot be read ({error.strerror}); give a shipped name or a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"study {path}: not valid TOML: {error}") from None
    try:
        return StudyConfig.model_validate({**tree, **(changes or {})})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"study {given}: {where + ': ' if where else ''}{first['msg']}") from None


@dataclass(frozen=True)
class Stage:
    """One piece of work. results: what exists when it is done; after: names of the stages it needs; folder:
    its own."""

    name: str
    command: tuple[str, ...]
    results: tuple[Path, ...]
    folder: Path
    after: tuple[str, ...] = ()
    resumable: bool = False
    """Its command takes --resume when the folder holds a complete checkpoint."""
    partial: bool = False
    """Does what it can when stages it needs have failed."""

    @property
    def done(self) -> bool:
        """Whether all its results are there."""
        return all(path.is_file() for path in self.results)


def start_of(config: StudyConfig, out: Path, seed: int) -> Path:
    """The model directory that the runs of a pretraining seed start from."""
    given = config.pretrain.models
    return model_folder(given[seed]) if given else out / "pretrain" / f"p{seed}" / "model"


def run_folder(out: Path, seed: int, arm: str, rl_seed: int) -> Path:
    """The folder of one reinforcement learning run."""
    return out / "runs" / f"p{seed}" / arm / f"r{rl_seed}"


def measured_file(out: Path, seed: int, arm: str = START, rl_seed: int = 0) -> Path:
    """The answers of the start, or of a run, to the held-out problems."""
    return out / "measured" / f"p{seed}" / (f"{START}.jsonl" if arm == START else f"{arm}-r{rl_seed}.jsonl")


def matched_file(out: Path, seed: int, arm: str, rl_seed: int) -> Path:
    """The start at a run's entropy."""
    return out / "measured" / f"p{seed}" / f"{arm}-r{rl_seed}-matched.json"


def probe_file(measured: Path) -> Path:
    """What a linear probe read from the model whose answers lie in `measured`."""
    return measured.with_name(f"{measured.stem}-probe.json")


def stages(config: StudyConfig, out: Path) -> list[Stage]:
    """Every stage, in an order in which they could be run one after the other."""
    python = (sys.executable, "-m")
    made: list[Stage] = []
    for seed in range(config.seeds):
        start, needs = start_of(config, out, seed), []
        if not config.pretrain.models:
            folder = out / "pretrain" / f"p{seed}"
            extra = [f"--{key}={_text(value)}" for key, value in config.pretrain.overrides.items()]
            command = (
                *python,
                "earlyfusion.pipeline.pretrain",
                *config.pretrain.recipes,
                "--out",
                str(folder),
                f"--run.seed={seed}",
                f"--data.seed={seed}",
                *extra,
            )
            made.append(Stage(f"pretrain/p{seed}", command, (start / "config.json",), folder, (), True))
            needs = [made[-1].name]
        runs = []
        for rl_seed in range(config.rl_seeds):
            for arm in config.arms:
                folder = run_folder(out, seed, arm.name, rl_seed)
                command = (
                    *python,
                    "earlyfusion.rl.train",
                    str(folder / "arm.toml"),
                    "--init-from",
                    str(start),
                    "--out",
                    str(folder),
                    f"--run.seed={1000 * seed + rl_seed + 1}",
                )
                if arm.replay or arm.documents:
                    command += (f"--data.seed={1000 * seed + rl_seed + 1}",)
                name = f"run/p{seed}/{arm.name}/r{rl_seed}"
                made.append(
                    Stage(name, command, (folder / "model" / "config.json",), folder, tuple(needs), True)
                )
                runs.append(name)
        folder = out / "measured" / f"p{seed}"
        command = (*python, "earlyfusion.rl.study.transfer.measure", str(out), str(seed))
        results = [measured_file(out, seed)]
        for arm in config.arms:
            for rl_seed in range(config.rl_seeds):
                results += [
                    measured_file(out, seed, arm.name, rl_seed),
                    matched_file(out, seed, arm.name, rl_seed),
                ]
        if config.measure.probe:
            results += [probe_file(file) for file in results if file.suffix == ".jsonl"]
        made.append(Stage(f"measure/p{seed}", command, tuple(results), folder, (*needs, *runs), partial=True))
    return made


def _text(value: Any) -> str:
    """A value as it stands on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_recipes(config: StudyConfig, out: Path) -> None:
    """Write study.toml and every run's arm.toml. Raises UserError when OUT holds another study."""
    out.mkdir(parents=True, exist_ok=True)
    text, path = to_toml(config.model_dump(mode="json")), out / "study.toml"
    if path.is_file():
        old = tomllib.loads(path.read_text(encoding="utf-8"))
        changed = differing(old, tomllib.loads(text))
        if changed:
            raise UserError(
                f"{out} holds a study with other {', '.join(changed)}: name another folder with --out; only"
                " seeds, rl_seeds and further arms may change"
            )
    path.write_text(text, encoding="utf-8")
    for arm in config.arms:
        recipe = to_toml(config.recipe(arm))
        for seed in range(config.seeds):
            for rl_seed in range(config.rl_seeds):
                folder = run_folder(out, seed, arm.name, rl_seed)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "arm.toml").write_text(recipe, encoding="utf-8")


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys in which two plans differ so that their results must not be mixed."""
    keys = [
        key
        for key in {*old, *new}
        if key not in ("seeds", "rl_seeds", "arms") and old.get(key) != new.get(key)
    ]
    trained = lambda arm: {
        key: value for key, value in arm.items() if key not in ("about", "kind", "against")
    }
    known = {arm["name"]: trained(arm) for arm in old.get("arms", [])}
    keys += [
        f"arms.{arm['name']}"
        for arm in new.get("arms", [])
        if known.get(arm["name"], trained(arm)) != trained(arm)
    ]
    return sorted(keys)
