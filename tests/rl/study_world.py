"""Synthetic measurements of a study, with effects planted where a test wants them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from earlyfusion.eval.measured import Measured, write_measured
from earlyfusion.rl.study.plan import START, StudyConfig, beside, measured_file

Effects = Mapping[tuple[str, str], float]
"""(arm, label) -> change of accuracy."""
TWIN, PICTURE = "counting/0/twin", "counting/0/picture"
ARMS = {"vision": "picture", "random": "picture", "text": "twin", "sft": "picture"}


def study(**changes) -> StudyConfig:
    """A small study with four arms."""
    arms = []
    for name, form in ARMS.items():
        kind = "treated" if name == "vision" else "control"
        arms.append({"name": name, "about": name, "kind": kind, "tasks": [f"{{skill}}/{form}"]})
    tree = {
        "skill": "counting/0",
        "unrelated": "relation/0",
        "pretrain": {"recipes": ["skills"]},
        "measure": {"problems": 150, "samples": 4, "forms": ["twin", "picture"]},
        "arms": arms,
    }
    return StudyConfig.model_validate({**tree, **changes})


def records(rng, label: str, right: np.ndarray, p: np.ndarray, samples: int) -> list[Measured]:
    """One model's answers to one label. right: bool [I]; p: probability of the target [I]."""
    task, level, form = label.split("/")[:3]
    found = []
    for i, (ok, q) in enumerate(zip(right.tolist(), p.tolist())):
        drawn = tuple((rng.random(samples) < q).astype(float))
        about = (task, form, f"{task}/test/{level}/{i}", "all", "", "1", "1" if ok else "2")
        sure = q if ok else 1 - q
        found.append(Measured(*about, float(ok), ok, q, sure, 0.6, sampled=drawn, label=label))
    return found


def plant(
    config: StudyConfig, out: Path, effects: Effects, *, seed: int = 0, sharpen: str = "", missing: str = ""
) -> None:
    """Write the measurements of every arm. An arm named by `sharpen` only becomes surer: p(correct) rises to
    what the start has at its entropy, its greedy answers stay. Runs of the arm `missing` from the last start
    are left out."""
    rng = np.random.default_rng(seed)
    items, samples = config.measure.problems, config.measure.samples
    hard = {label: rng.random(items) for label in config.labels()}
    for p in range(config.seeds):
        base = {label: hard[label] + rng.normal(0, 0.1, items) < 0.5 for label in hard}
        sure = {label: np.where(base[label], 0.6, 0.3) for label in hard}
        start = [r for label in hard for r in records(rng, label, base[label], sure[label], samples)]
        write_measured(measured_file(out, p, START), start)
        for arm, run in config.runs():
            if arm.name == missing and p == config.seeds - 1:
                continue
            made, matched = [], {}
            for label in config.labels(arm):
                right, other = changed(rng, base[label], effects.get((arm.name, label), 0.0)), sure[label]
                q = np.where(right, 0.6, 0.3)
                if arm.name == sharpen:
                    right, q = base[label], np.where(base[label], 0.9, 0.25)
                    other = q
                made += records(rng, label, right, q, samples)
                targets = {one.key: x for one, x in zip(made[-items:], other.tolist())}
                about = {"temperature": 0.5, "entropy": 0.3, "reached": True}
                matched[label] = {**about, "p_target": targets}
            file = write_measured(measured_file(out, p, arm.name, run), made)
            beside(file, "matched").write_text(json.dumps(matched))


def changed(rng, base: np.ndarray, effect: float) -> np.ndarray:
    """Right answers after a run: a tenth change at random, and `effect` of them for good."""
    right = np.where(rng.random(len(base)) < 0.1, rng.random(len(base)) < base.mean(), base)
    open_ = 1 - right.mean() if effect > 0 else right.mean()
    return np.where(rng.random(len(base)) < abs(effect) / open_, effect > 0, right)
