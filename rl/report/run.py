"""The report of a reinforcement learning run: OUT/report.html, one file that loads nothing from elsewhere.

    write_rl_report(out) -> Path        reads what is there, leaves out what is not, needs no model

Reads metrics.jsonl (events "train", keys as in pipeline/progress.py), eval/update-*.jsonl, rollouts.jsonl with its
pictures, and the recipe.toml, versions.json and facts.json that every run writes.
"""

from __future__ import annotations

import html
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.progress import duration
from earlyfusion.pipeline.report.charts import Series, line_chart
from earlyfusion.pipeline.report.run import STYLE as HOUSE_STYLE
from earlyfusion.pipeline.report.run import Run, diary_part, image_source, read_run, recipe_part
from earlyfusion.rl.report.gallery import STYLE, data_uri, gallery_part
from earlyfusion.rl.report.measured import (
    ALL,
    TOGETHER,
    Record,
    changes,
    charts_by_task,
    measured_part,
    read_measured,
    redraw,
)
from earlyfusion.rl.rollouts.log import read_rollouts

PHASES = ("rollout", "score", "train", "other")
_SPLIT_COLOURS = {"rollout": "#3aa6c2", "score": "#8b5cc7", "train": "#2a9d6e", "other": "#8a93a5"}
CHARTS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Length of an answer, tokens", "tokens", ("length", "length_max"), False),
    ("Share of answers cut off, which earn nothing", "share", ("cut", "cut/"), False),
    ("Entropy of the next token", "nats", ("entropy",), False),
    ("Mismatch of engine and trainer, KL", "nats a token", ("mismatch_kl", "mismatch_max"), True),
    ("Share of tokens clipped or masked", "share", ("clip_share",), False),
    ("KL to the sampling policy (k3)", "nats a token", ("k3",), False),
    ("Groups with something to teach", "share", ("informative",), False),
    ("Staleness of the answers", "updates", ("staleness",), False),
    ("Gradient norm before clipping", "norm", ("grad_norm",), True),
    ("Learning rate", "lr", ("lr",), False),
    ("Sampling temperature", "temperature", ("temperature",), False),
    ("Answers carried over to the next update", "answers", ("carried",), False),
    ("Loss on curated data (PTX)", "nats a token", ("ptx_loss",), False),
)
SPEED: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Tokens written a second", "tokens/s", ("tokens_per_s",), False),
    ("Answers a second", "answers/s", ("samples_per_s",), False),
    ("Share of the time the engine idles", "share", ("engine_idle",), False),
    ("Memory", "GiB", ("memory_gib",), False),
)


def write_rl_report(out: str | Path, *, each: int = 3) -> Path:
    """Write OUT/report.html and return its path. each: pictures of one sort and kind of prompt in the
    gallery.

    Raises FileNotFoundError when OUT is no folder.
    """
    run = read_run(out)
    measured, rollouts = read_measured(run.directory), read_rollouts(run.directory)
    options = task_options(run.recipe)
    redrawn = lambda record: None if (picture := redraw(record, options)) is None else data_uri(picture)
    logged = lambda record: image_source(run, record.get("image")) or redrawn(record)
    gallery = gallery_part(rollouts, measured, logged=logged, redrawn=redrawn, each=each)
    parts = [rewards_part(run), measured_part(measured), answers_part(run), time_part(run), gallery]
    parts += [diary_part(run), recipe_part(run)]
    title = html.escape(str(run.facts.get("name", run.directory.resolve().name)))
    facts = [f"{key.replace('_', ' ')}: {value}" for key, value in run.facts.items() if key != "name"]
    subtitle = html.escape(" · ".join(facts) or "Reinforcement learning run")
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{title} · earlyfusion</title>'
        f"<style>{HOUSE_STYLE}{STYLE}</style></head><body><main><h1>{title}</h1>"
        f'<p class="note">{subtitle}</p>{cards_part(run, measured)}{"".join(parts)}</main></body></html>\n'
    )
    target = run.directory / "report.html"
    temporary = target.with_name(f".report.html.{os.getpid()}.tmp")
    temporary.write_bytes(page.encode("utf-8", "replace"))  # what a model says may hold half a character
    os.replace(temporary, target)
    return target


def task_options(recipe: str) -> dict[str, dict[str, Any]]:
    """Task name -> options, from the text of a recipe; {} when it cannot be read."""
    try:
        tree = tomllib.loads(recipe)
    except tomllib.TOMLDecodeError:
        return {}
    section = tree.get("eval")
    measured = section.get("tasks") if isinstance(section, dict) else None
    found: dict[str, dict[str, Any]] = {}
    for entries in (tree.get("tasks"), measured):
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("options"), dict):
                found.setdefault(str(entry.get("name")), entry["options"])
    return found


def cards_part(run: Run, measured: Mapping[int, Sequence[Record]]) -> str:
    """What the run came to, in a few numbers."""
    cards: list[tuple[str, str]] = []
    if len(measured) > 1:
        whole = changes(measured[min(measured)], measured[max(measured)])
        for row in [row for row in whole if row.label == ALL or len(whole) == 1]:
            cards.append((f"{100 * row.before:.1f} → {100 * row.after:.1f}", "held-out score, points of 100"))
        gains = [row.verdict for row in whole if row.label != ALL]
        cards.append(
            (f"{gains.count('gain')} / {gains.count('loss')}", f"gains / losses of {len(gains)} kinds")
        )
    updates, rewards = run.series("reward")
    if rewards:
        tenth = max(1, len(rewards) // 10)
        start, end = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
        cards.append((f"{start:.2f} → {end:.2f}", "training reward, first and last tenth"))
        cards.append((f"{max(updates):,.0f}", "updates"))
    seconds = phase_seconds(run)
    if seconds:
        cards.append((_told(sum(seconds.values())), "rollouts, scoring and training"))
    idle = run.series("engine_idle")[1]
    if idle:
        cards.append((f"{100 * sum(idle) / len(idle):.1f} %", "engine idle, mean"))
    boxes = "".join(
        f'<div class="card"><b>{html.escape(v)}</b><span>{html.escape(l)}</span></div>' for v, l in cards
    )
    return f'<div class="cards">{boxes}</div>' if boxes else ""


def phase_seconds(run: Run) -> dict[str, float]:
    """Phase -> seconds of the whole run: the mean of the logged updates times the number of updates. Phases
    that were not measured are left out."""
    updates = max((record["step"] for record in run.events("train")), default=0)
    logged = {phase: run.series(f"time/{phase}_s")[1] for phase in PHASES}
    return {phase: updates * sum(values) / len(values) for phase, values in logged.items() if values}


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _marks(run: Run) -> list[float]:
    """Updates that the guard spoke of or refused."""
    refused = [step for step, count in zip(*run.series("refused")) if count]
    return sorted({*(record["step"] for record in run.events("guard")), *refused})


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{body}</section>' if body else ""


def _figure(title: str, drawing: str) -> str:
    return f"<div><h3>{html.escape(title)}</h3>{drawing}</div>"


def rewards_part(run: Run) -> str:
    """Reward and score of each kind of prompt over updates."""
    marks = _marks(run)
    figures = []
    for key, title in (("reward", "Reward"), ("score", "Score of the task alone")):
        series = {name.removeprefix(f"{key}/"): run.series(name) for name in run.keys(f"{key}/")}
        if run.series(key)[0] and len(series) != 1:
            series[ALL] = run.series(key)  # last, so that a kind of prompt keeps its colour in both charts
        if not series or (key == "score" and _same(run, series)):
            continue
        for heading, curves in charts_by_task(series, title):
            size = (8.8, 3.1) if len(series) <= TOGETHER else (4.8, 2.3)
            drawing = line_chart(
                curves,
                ylabel=key,
                smoothing=True,
                marks=marks,
                size=size,
                description=f"{title} over updates",
            )
            figures.append(_figure(heading, drawing))
    note = (
        "Mean over the sampled answers of each update; pale: as logged, bold: moving average. Score: the"
        " task's own verdict; reward: after length, overlong and repetition terms."
    )
    body = "".join(figures) if len(figures) <= 2 else f'<div class="row">{"".join(figures)}</div>'
    return _section("Reward by kind of prompt", note, body)


def _same(run: Run, scores: Mapping[str, Series]) -> bool:
    """Whether scores are the rewards: then one chart tells all."""
    return all(
        curve == run.series("reward" if label == ALL else f"reward/{label}")
        for label, curve in scores.items()
    )


def _number_charts(run: Run, charts: Sequence[tuple[str, str, tuple[str, ...], bool]]) -> list[str]:
    figures = []
    marks = _marks(run)
    for title, ylabel, keys, log in charts:
        names = [name for key in keys for name in (run.keys(key) if key.endswith("/") else [key])]
        series = {name: run.series(name) for name in names if run.series(name)[0]}
        values = [value for _, ys in series.values() for value in ys]
        if not series or len(set(values)) == 1:  # what never changes is told in words
            continue
        drawing = line_chart(
            series,
            ylabel=ylabel,
            smoothing=True,
            log=log and max(values) > 0,
            marks=marks,
            size=(4.8, 2.3),
            description=f"{title} over updates",
        )
        figures.append(_figure(title, drawing))
    return figures


def _constants(run: Run, charts: Sequence[tuple[str, str, tuple[str, ...], bool]]) -> str:
    told = []
    for title, _, keys, _ in charts:
        values = {value for key in keys for value in run.series(key)[1]}
        if len(values) == 1:
            told.append(f"{title.lower()} {values.pop():.4g}")
    return f'<p class="note">Constant throughout: {html.escape("; ".join(told))}.</p>' if told else ""


def answers_part(run: Run) -> str:
    """Length, entropy, mismatch, clipping and the rest of what tells a healthy run from a sick one."""
    figures = _number_charts(run, CHARTS)
    body = f'<div class="row">{"".join(figures)}</div>' if figures else ""
    note = "Entropy that falls to 0, or a mismatch that grows, are the usual first signs of trouble."
    return _section("Inside the training", note, body + _constants(run, CHARTS) + _trouble(run))


def _trouble(run: Run) -> str:
    """What went wrong and was contained: counts of the whole run."""
    told = []
    for prefix, title in (("rewards/", "reward calls that failed"), ("prompts/", "prompts left out")):
        counts = {key.removeprefix(prefix): run.last(key) or 0.0 for key in run.keys(prefix)}
        if counts:
            told.append(title + ": " + ", ".join(f"{name} {count:,.0f}" for name, count in counts.items()))
    return f'<p class="note">Contained and counted: {html.escape("; ".join(told))}.</p>' if told else ""


def time_part(run: Run) -> str:
    """Where the time went, over the whole run and by update; speed and memory."""
    seconds = phase_seconds(run)
    body = ""
    if sum(seconds.values()) > 0:
        whole = sum(seconds.values())
        strips = "".join(
            f'<div style="width:{100 * value / whole:.2f}%;background:{_SPLIT_COLOURS[phase]}"'
            f' title="{phase}">'
            f"{phase if value > 0.08 * whole else ''}</div>"
            for phase, value in seconds.items()
        )
        told = " · ".join(
            f"{phase} {100 * value / whole:.1f} % ({_told(value)})" for phase, value in seconds.items()
        )
        body = f'<div class="split">{strips}</div><p class="note">{told}</p>'
    series = {phase: run.series(f"time/{phase}_s") for phase in seconds}
    figures = []
    if series:
        drawing = line_chart(
            series,
            ylabel="seconds",
            smoothing=True,
            size=(4.8, 2.3),
            description="seconds of an update by phase",
        )
        figures.append(_figure("Seconds of an update", drawing))
    figures += _number_charts(run, SPEED)
    body += f'<div class="row">{"".join(figures)}</div>' if figures else ""
    note = (
        "The whole run, from the logged updates; engine idle: share of the rollout's time in which it had"
        " nothing to do."
    )
    return _section("Time and memory", note, body + _constants(run, SPEED))
