"""The stage of a transfer study that asks all models of one pretraining seed the same held-out problems.

    python -m earlyfusion.rl.study.measure OUT SEED

What is there already is kept, so a stopped stage goes on with the next model. For every run the start is
measured again at the temperature that gives it the run's entropy, label by label (eval/measure.py). A
linear probe reads the answer from the middle of every model (probe.py).
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Asked, ask, match_entropy
from earlyfusion.eval.measured import by_problem, load_measured, write_measured
from earlyfusion.kernels.files import write_json
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.cli import guarded
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.study.plan import (
    Arm,
    StudyConfig,
    beside,
    measured_file,
    read_study,
    run_folder,
    start_of,
)
from earlyfusion.rl.study.probe import probe

SLOTS = 512
"""Answers written at a time: these are short."""


def examine(config: StudyConfig, folder: Path, file: Path, arm: Arm | None = None) -> Asked:
    """Ask a model directory the registered labels, with samples for pass@k, and all others without; write
    both to the file, and probe the model. Returns the first."""
    measure = config.measure
    model, tokenizer = load_model(folder, device=device_of("auto")), Tokenizer.load(folder)
    # Only the label that an arm is judged on needs samples: they cost most.
    kinds: dict[int, list[TaskEntry]] = {measure.samples: [], 0: []}
    for label in config.labels(arm):
        kinds[measure.samples if config.registered(label) else 0].append(entry_of(label))
    sizes: dict[str, Any] = {
        "problems": measure.problems,
        "seed": measure.seed,
        "max_new_tokens": measure.max_new_tokens,
    }
    asked = []
    for samples, entries in kinds.items():
        if entries:
            asked.append(ask(model, tokenizer, entries, samples=samples, slots=SLOTS, **sizes))
    write_measured(file, [one for part in asked for one in part.measured()])

    place = beside(file, "probe")
    if measure.probe and not place.is_file():
        forms = list(dict.fromkeys(["picture", config.primary]))
        numbers = {"fit": measure.probe, "test": measure.problems, "seed": measure.seed}
        write_json(place, probe(model, tokenizer, config.skill, forms, **numbers))
    print(f"measured {folder}", flush=True)
    return asked[0]


def matched(start: Asked, file: Path) -> dict[str, Any]:
    """Registered label -> the start at the entropy of a measured run: temperature, entropy, reached, p_target
    by problem."""
    found: dict[str, Any] = {}
    known = {question.entry.label for question in start.questions}
    for label, records in by_problem(load_measured(file)).items():
        # The start was asked every registered label, in whatever way any arm is.
        if label in known:
            result = match_entropy(start.only(label), fmean(one.entropy for one in records.values()))
            found[label] = {key: getattr(result, key) for key in ("temperature", "entropy", "reached")}
            found[label]["p_target"] = {one.key: one.p_target for one in result.measured}
    return found


def measure_seed(out: Path, seed: int) -> None:
    """Measure the start and every finished run of a pretraining seed that is not measured yet."""
    config = read_study(str(out / "study.toml"), {})
    own = measured_file(out, seed)
    # Asked at most once: hidden states of the start serve every run that is left to measure.
    start = cache(lambda: examine(config, start_of(out, seed), own))
    if not own.is_file():
        start()
    for arm, run in config.runs():
        folder = run_folder(out, seed, arm.name, run) / "model"
        file = measured_file(out, seed, arm.name, run)
        # The start at the run's entropy is written last: with it, all of a run is there.
        if (folder / "config.json").is_file() and not beside(file, "matched").is_file():
            examine(config, folder, file, arm)
            write_json(beside(file, "matched"), matched(start(), file))


if __name__ == "__main__":
    sys.exit(guarded(lambda: measure_seed(Path(sys.argv[1]), int(sys.argv[2]))))
