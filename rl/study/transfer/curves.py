"""Curves, pictures of rollouts and costs of a study's runs, read from the runs' own folders."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.report.charts import Series, line_chart
from earlyfusion.rl.study.transfer.plan import StudyConfig, run_folder

SHOWN_GROUPS = 3
"""Groups of answers shown of an arm's first run, at its first and its last record."""


def folders(config: StudyConfig, out: Path, arm: str) -> list[Path]:
    """Folders of an arm's runs that exist."""
    every = [run_folder(out, p, arm, r) for p in range(config.seeds) for r in range(config.rl_seeds)]
    return [folder for folder in every if folder.is_dir()]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file; torn lines are left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def mean_curve(runs: list[dict[int, float]]) -> Series:
    """Mean over the runs at every step that all of them have."""
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return steps, [sum(run[step] for run in runs) / len(runs) for step in steps]


def reward_curves(config: StudyConfig, out: Path, key: str = "score") -> dict[str, Series]:
    """Arm -> mean over its runs of a number of metrics.jsonl."""
    found: dict[str, Series] = {}
    for arm in config.arms:
        runs = []
        for folder in folders(config, out, arm.name):
            values = {
                int(r["step"]): float(r[key])
                for r in read_lines(folder / "metrics.jsonl")
                if isinstance(r.get(key), int | float) and r.get("event") == "train"
            }
            if values:
                runs.append(values)
        found[arm.name] = mean_curve(runs)  # empty ones too: every arm keeps its colour in all charts
    return found if any(steps for steps, _ in found.values()) else {}


def accuracy_curves(config: StudyConfig, out: Path, label: str) -> dict[str, Series]:
    """Arm -> mean over its runs of the greedy accuracy measured during training."""
    found: dict[str, Series] = {}
    for arm in config.arms:
        runs = []
        for folder in folders(config, out, arm.name):
            values: dict[int, float] = {}
            for file in sorted((folder / "eval").glob("update-*.jsonl")):
                hits = [float(r["solved"]) for r in read_lines(file) if r.get("label") == label]
                if hits:
                    values[int(file.stem.removeprefix("update-"))] = sum(hits) / len(hits)
            if len(values) > 1:
                runs.append(values)
        found[arm.name] = mean_curve(runs)  # empty ones too: every arm keeps its colour in all charts
    return found if any(steps for steps, _ in found.values()) else {}


def curves_part(config: StudyConfig, out: Path) -> str:
    """The section with the curves."""
    drawn = []
    for title, ylabel, series in (
        ("Score of the task on the arm's own prompts", "score", reward_curves(config, out)),
        ("Reward trained on (random in the random arm)", "reward", reward_curves(config, out, "reward")),
        (
            f"Greedy accuracy, {config.skill}/picture",
            "accuracy",
            accuracy_curves(config, out, f"{config.skill}/picture"),
        ),
        (
            f"Greedy accuracy, {config.skill}/twin",
            "accuracy",
            accuracy_curves(config, out, f"{config.skill}/twin"),
        ),
        ("Entropy of the next token", "nats", reward_curves(config, out, "entropy")),
    ):
        if series:
            points = ylabel == "accuracy"
            drawing = line_chart(series, description=title, ylabel=ylabel, smoothing=True, points=points)
            drawn.append(f"<div><h3>{html.escape(title)}</h3>{drawing}</div>")
    if not drawn:
        return ""
    note = (
        "Means over all runs of an arm, at the updates that all of them logged. Accuracy: a small held-out"
        " set of its own."
    )
    return (
        f'<section><h2>Curves</h2><p class="note">{note}</p><div class="row">{"".join(drawn)}</div></section>'
    )


def rollouts_part(config: StudyConfig, out: Path) -> str:
    """What was shown and answered, early and late, in the first run of every arm."""
    parts = []
    for arm in config.arms:
        for folder in folders(config, out, arm.name)[:1]:
            records = list(read_lines(folder / "rollouts.jsonl"))
            if not records:
                continue
            first, last = records[0]["update"], records[-1]["update"]
            for update in dict.fromkeys((first, last)):
                cards = [_card(folder, r) for r in records if r["update"] == update][:SHOWN_GROUPS]
                title = f"{arm.name}, update {update}"
                parts.append(f'<h3>{html.escape(title)}</h3><div class="pictures">{"".join(cards)}</div>')
    if not parts:
        return ""
    note = "Prompt, target, and how often each answer was given, with its score."
    return (
        "<section><h2>Rollouts</h2><p"
        f' class="note">{note}</p><details><summary>show</summary>{"".join(parts)}</details></section>'
    )


def _card(folder: Path, record: Mapping[str, Any]) -> str:
    shown = ""
    image = record.get("image")
    if (
        isinstance(image, str)
        and (file := folder / image).is_file()
        and file.resolve().is_relative_to(folder.resolve())
    ):
        data = base64.b64encode(file.read_bytes()).decode()
        shown = f'<img style="image-rendering:pixelated" alt="prompt" src="data:image/png;base64,{data}">'
    counts: dict[tuple[str, float], int] = {}
    for answer in record.get("answers", []):
        key = (str(answer.get("text", "")).strip()[:80], float(answer.get("score", 0.0)))
        counts[key] = counts.get(key, 0) + 1
    lines = "".join(
        f'<div class="{"good" if score > 0.5 else "bad"}">{n} × {html.escape(text) or "(nothing)"}'
        f" <small>{score:.2f}</small></div>"
        for (text, score), n in sorted(counts.items(), key=lambda item: -item[1])[:5]
    )
    asked = html.escape(str(record.get("prompt", ""))[-200:])
    return (
        f'<div class="picture">{shown}<div'
        f' class="q">{asked}</div><b>{html.escape(str(record.get("target", "")))}</b>{lines}</div>'
    )


def cost_table(config: StudyConfig, out: Path) -> str:
    """What every arm cost: updates, seconds, answers and tokens of one run, as medians."""
    seconds: dict[str, list[float]] = {}
    for record in read_lines(out / "study.jsonl"):
        if record.get("event") == "done" and str(record.get("stage", "")).startswith("run/"):
            seconds.setdefault(str(record["stage"]).split("/")[2], []).append(float(record["seconds"]))
    rows = []
    for arm in config.arms:
        updates, answers, step_s = [], [], []
        for folder in folders(config, out, arm.name):
            train = [r for r in read_lines(folder / "metrics.jsonl") if r.get("event") == "train"]
            if train:
                updates.append(int(train[-1]["step"]))
                answers.append(statistics.median(float(r.get("answers") or 0) for r in train))
                step_s.append(statistics.median(float(r.get("step_s") or 0) for r in train))
        if updates or arm.name in seconds:
            took = f"{statistics.median(seconds[arm.name]):.0f}" if arm.name in seconds else "–"
            middle = [f"{statistics.median(v):g}" if v else "–" for v in (updates, answers)]
            step = f"{statistics.median(step_s):.2f}" if step_s else "–"
            rows.append([f"<b>{arm.name}</b>", str(len(updates)), *middle, step, took])
    if not rows:
        return ""
    head = "".join(
        f"<th>{c}</th>" for c in ("arm", "runs", "updates", "answers an update", "s an update", "s a run")
    )
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    note = "Medians over the runs; a run's seconds hold its start, its measurements and its own report."
    return (
        "<section><h2>What it cost</h2><p"
        f' class="note">{note}</p><table><tr>{head}</tr>{body}</table></section>'
    )
