"""The stage of a transfer study that asks all models of one pretraining seed the same held-out problems.

    python -m earlyfusion.rl.study.transfer.measure OUT SEED

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
from earlyfusion.rl.study.probe import probe
from earlyfusion.rl.study.transfer.plan import (
    StudyConfig,
    matched_file,
    measured_file,
    probe_file,
    read_study,
    run_folder,
    start_of,
)

SLOTS = 512
"""Answers written at a time: these are short."""


def asked_of(folder: Path, labels: Sequence[str], config: StudyConfig) -> tuple[Asked, Asked | None]:
    """A model directory asked the registered labels, with samples for pass@k, and all others without."""
    measure = config.measure
    model, tokenizer = load_model(folder, device=device_of("auto")), Tokenizer.load(folder)

    def asked(part: Sequence[str], samples: int) -> Asked:
        return ask(
            model,
            tokenizer,
            [entry_of(label) for label in part],
            problems=measure.problems,
            seed=measure.seed,
            samples=samples,
            max_new_tokens=measure.max_new_tokens,
            slots=SLOTS,
        )

    first = [label for label in labels if config.registered(label)]
    rest = [label for label in labels if label not in first]
    return asked(first, measure.samples), asked(rest, 0) if rest else None


def probed(folder: Path, file: Path, config: StudyConfig) -> None:
    """Probe a model directory, unless the study wants none or it is done."""
    measure = config.measure
    if not measure.probe or file.is_file():
        return
    model, tokenizer = load_model(folder, device=device_of("auto")), Tokenizer.load(folder)
    forms = list(dict.fromkeys(["picture", config.primary]))
    found = probe(
        model, tokenizer, config.skill, forms, fit=measure.probe, test=measure.problems, seed=measure.seed
    )
    write_json(file, found)


def written(file: Path, parts: tuple[Asked, Asked | None]) -> None:
    """Write the answers of both parts to one file."""
    write_measured(file, [one for part in parts if part is not None for one in part.measured()])


def matched(start: Asked, file: Path) -> dict[str, Any]:
    """Registered label -> the start at the entropy of a measured run: temperature, entropy, reached, p_target
    by problem."""
    found: dict[str, Any] = {}
    known = {question.entry.label for question in start.questions}
    for label, records in by_problem(load_measured(file)).items():
        if label not in known:
            continue
        wanted = sum(one.entropy for one in records.values()) / len(records)
        result = match_entropy(start.only(label), wanted)
        found[label] = {
            "temperature": result.temperature,
            "entropy": result.entropy,
            "wanted": wanted,
            "reached": result.reached,
            "p_target": {one.key: one.p_target for one in result.measured},
        }
    return found


def measure_seed(out: Path, seed: int) -> None:
    """Measure the start and every finished run of a pretraining seed that is not measured yet."""
    config = read_study(str(out / "study.toml"))
    runs = [(arm, r) for arm in config.arms for r in range(config.rl_seeds)]
    here = [
        (arm, r)
        for arm, r in runs
        if (run_folder(out, seed, arm.name, r) / "model" / "config.json").is_file()
    ]
    files = [matched_file(out, seed, arm.name, r) for arm, r in here]
    start: Asked | None = None
    if not measured_file(out, seed).is_file() or not all(file.is_file() for file in files):
        parts = asked_of(start_of(config, out, seed), config.labels(), config)
        start = parts[0]
        written(measured_file(out, seed), parts)
    probed(start_of(config, out, seed), probe_file(measured_file(out, seed)), config)
    for arm, r in here:
        file = measured_file(out, seed, arm.name, r)
        if not file.is_file():
            folder = run_folder(out, seed, arm.name, r) / "model"
            written(file, asked_of(folder, config.labels(arm), config))
            print(f"measured {folder}", flush=True)
        probed(run_folder(out, seed, arm.name, r) / "model", probe_file(file), config)
        target = matched_file(out, seed, arm.name, r)
        if start is not None and not target.is_file():
            write_json(target, matched(start, file))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`."""
    out, seed = sys.argv[1:] if argv is None else argv
    measure_seed(Path(out), int(seed))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(None)))
