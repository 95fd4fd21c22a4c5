"""Synthetic measurements of a study, with effects planted where a test wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from earlyfusion.eval.measured import Measured, write_measured
from earlyfusion.rl.study.plan import START, StudyConfig, beside, measured_file

Effects = Mapping[tuple[str, str], float]
"""(arm, label) -> change of accuracy; ("sharp", arm) is not one of them: see `sharpen`."""


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
        "seeds": 5,
        "rl_seeds": 3,
        "pretrain": {"recipes": ["skills"]},
        "measure": {"problems": 150, "samples": 4, "forms": ["twin", "picture"], "unrelated": False},
        "arms": arms,
    }
    return StudyConfig.model_validate({**tree, **changes})


def records(
    rng, label: str, right: np.ndarray, p: np.ndarray, entropy: float, samples: int
) -> list[Measured]:
    """One model's answers to one label. right: bool [I]; p: probability of the target [I]."""
    task, level, form = label.split("/")[:3]
    return [
        Measured(
            task=task,
            form=form,
            key=f"{task}/test/{level}/{i}",
            category="all",
            prompt="",
            target="1",
            answer="1" if ok else "2",
            score=float(ok),
            solved=bool(ok),
            p_target=float(q),
            confidence=float(q if ok else 1 - q),
            entropy=entropy,
            sampled=tuple(float(x) for x in rng.random(samples) < q),
            label=label,
        )
        for i, (ok, q) in enumerate(zip(right, p))
    ]


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
        start = [r for label in hard for r in records(rng, label, base[label], sure[label], 0.6, samples)]
        write_measured(measured_file(out, p, START), start)
        for arm in config.arms:
            for r in range(config.rl_seeds):
                if arm.name == missing and p == config.seeds - 1:
                    continue
                made, matched = [], {}
                for label in config.labels(arm):
                    right, q = _after(rng, base[label], effects.get((arm.name, label), 0.0))
                    cold = np.where(base[label], 0.9, 0.25)
                    if arm.name == sharpen:
                        right, q = base[label], cold
                    made += records(rng, label, right, q, 0.3 if arm.name == sharpen else 0.6, samples)
                    other = cold if arm.name == sharpen else sure[label]
                    targets = {one.key: float(x) for one, x in zip(made[-items:], other)}
                    matched[label] = {
                        "temperature": 0.5,
                        "entropy": 0.3,
                        "reached": True,
                        "p_target": targets,
                    }
                file = write_measured(measured_file(out, p, arm.name, r), made)
                beside(file, "matched").write_text(json.dumps(matched))


def _after(rng, base: np.ndarray, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """(right, p) after a run: a tenth of the answers change at random, and `effect` of them for good."""
    right = np.where(rng.random(len(base)) < 0.1, rng.random(len(base)) < base.mean(), base)
    moved = rng.random(len(base)) < abs(effect) / max(
        1e-9, (1 - right.mean()) if effect > 0 else right.mean()
    )
    right = np.where(moved, effect > 0, right)
    return right, np.where(right, 0.6, 0.3)
