"""The stage of a transfer study that asks all models of one pretraining seed the same held-out problems.

    python -m earlyfusion.rl.study.measure OUT SEED

What is there already is kept, so a stopped stage goes on with the next model. For every run the start is
measured again at the temperature that gives it the run's entropy, label by label (eval/measure.py). A
linear probe reads the answer from the middle of every model (probe.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Asked, ask, match_entropy
from earlyfusion.eval.measured import by_problem, load_measured, write_measured
from earlyfusion.kernels.files import write_json
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.cli import guarded
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.rl.entries import entry_of
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

    def asked(labels: Sequence[str], samples: int) -> Asked:
        return ask(
            model,
            tokenizer,
            [entry_of(label) for label in labels],
            problems=measure.problems,
            seed=measure.seed,
            samples=samples,
            max_new_tokens=measure.max_new_tokens,
            slots=SLOTS,
        )

    labels = config.labels(arm)
    # Only the label that an arm is judged on needs samples: they cost most.
    first = asked([label for label in labels if config.registered(label)], measure.samples)
    rest = [label for label in labels if not config.registered(label)]
    write_measured(file, first.measured() + (asked(rest, 0).measured() if rest else []))

    place = beside(file, "probe")
    if measure.probe and not place.is_file():
        forms = list(dict.fromkeys(["picture", config.primary]))
        sizes = {"fit": measure.probe, "test": measure.problems, "seed": measure.seed}
        write_json(place, probe(model, tokenizer, config.skill, forms, **sizes))
    print(f"measured {folder}", flush=True)
    return first


def matched(start: Asked, file: Path) -> dict[str, Any]:
    """Registered label -> the start at the entropy of a measured run: temperature, entropy, reached, p_target
    by problem."""
    found: dict[str, Any] = {}
    known = {question.entry.label for question in start.questions}
    for label, records in by_problem(load_measured(file)).items():
        # The start was asked every registered label, in whatever way any arm is.
        if label in known:
            wanted = sum(one.entropy for one in records.values()) / len(records)
            result = match_entropy(start.only(label), wanted)
            found[label] = {
                "temperature": result.temperature,
                "entropy": result.entropy,
                "reached": result.reached,
                "p_target": {one.key: one.p_target for one in result.measured},
            }
    return found


def measure_seed(out: Path, seed: int) -> None:
    """Measure the start and every finished run of a pretraining seed that is not measured yet."""
    config = read_study(str(out / "study.toml"), {})
    # Hidden states of the start serve every run, as long as one is left to measure.
    start: Asked | None = None
    if not measured_file(out, seed).is_file():
        start = examine(config, start_of(config, out, seed), measured_file(out, seed))
    for arm, run in config.runs():
        folder = run_folder(out, seed, arm.name, run) / "model"
        file = measured_file(out, seed, arm.name, run)
        # The start at the run's entropy is written last: with it, all of a run is there.
        if beside(file, "matched").is_file() or not (folder / "config.json").is_file():
            continue
        examine(config, folder, file, arm)
        # Stopped between two runs: the start is asked again, with the same answers.
        if start is None:
            start = examine(config, start_of(config, out, seed), measured_file(out, seed))
        write_json(beside(file, "matched"), matched(start, file))


if __name__ == "__main__":
    sys.exit(guarded(lambda: measure_seed(Path(sys.argv[1]), int(sys.argv[2]))))
