"""Before and after: length and accuracy of the answers to held-out problems, paired by problem.

before = look(config, model, tokenizer, rewards)  # a row for every problem, and for samples if asked for
rows = compared(before, after)                    # accuracy and tokens, difference, 95 % interval
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Answer, ask
from earlyfusion.eval.measured import solved
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.kernels.files import read_jsonl
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.report.data import read_run
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rewards import Rewards

# The two that shortening trades.
METRICS = ("accuracy", "tokens")
Row = dict[str, Any]


def look(config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, rewards: Rewards) -> list[Row]:
    """Answer eval.problems held-out problems of every entry, judged by the run's own reward."""
    section, rollout = config.eval, config.rollout
    asked = ask(
        model,
        tokenizer,
        config.measured,
        problems=section.problems,
        seed=section.seed,
        samples=section.samples,
        max_new_tokens=rollout.max_new_tokens,
        slots=rollout.slots,
    )
    # Greedy answers may all be short already where samples are not.
    found = judged(asked.questions, [[one] for one in asked.greedy], "greedy", rewards)
    if section.samples:
        found += judged(asked.questions, asked.samples, "sampled", rewards)
    return found


def judged(
    questions: Sequence[Any], answers: Sequence[Sequence[Answer]], way: str, rewards: Rewards
) -> list[Row]:
    """A row for every question: accuracy and tokens of its answer, or means over its samples."""
    rows = []
    for question, own in zip(questions, answers):
        # One call a question keeps the judgements beside their answers.
        scored = rewards([(question.problem, one.judged) for one in own])
        right = [solved(question.problem.task, rewards.span.share(one.value)) for one in scored]
        row: Row = {"label": question.entry.label, "key": question.problem.key, "way": way}
        row |= {"accuracy": float(np.mean(right)), "tokens": float(np.mean([len(one.ids) for one in own]))}
        rows.append({**row, "answer": own[0].text.strip()})
    return rows


def pairs_of(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """What was measured both times."""
    first = {(one["label"], one["key"], one["way"]): one for one in before}
    return [(first[key], one) for one in after if (key := (one["label"], one["key"], one["way"])) in first]


def compared(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """A row for every entry (and "all"), way and metric: n, means before and after, the mean paired
    difference `value` and its 95 % Student t interval."""
    pairs = pairs_of(before, after)
    # Problems count alike in the mean over all entries.
    labels = dict.fromkeys(one["label"] for _, one in pairs)
    rows = []
    for way in dict.fromkeys(one["way"] for _, one in pairs):
        for label in [*labels, "all"]:
            own = [pair for pair in pairs if pair[1]["way"] == way and label in (pair[1]["label"], "all")]
            for metric in METRICS:
                ab = np.array([[a[metric], b[metric]] for a, b in own])
                row = {"label": label, "way": way, "metric": metric}
                row |= {"before": ab[:, 0].mean(), "after": ab[:, 1].mean()}
                rows.append({**row, **mean_estimate(ab[:, 1] - ab[:, 0]).to_dict()})
    return rows


def write_report(out: Path, summary: Mapping[str, Any]) -> Path:
    """OUT/report.html: the table before and after, the curves, and greedy answers that changed, the largest
    changes of length first. One file that loads nothing from elsewhere."""
    before, after = (read_jsonl(out / "heldout" / f"{name}.jsonl") for name in ("before", "after"))
    greedy = [(a, b) for a, b in pairs_of(before, after) if b["way"] == "greedy"]
    moved = [(a, b) for a, b in greedy if a["answer"] != b["answer"]]
    moved.sort(key=lambda pair: -abs(pair[1]["tokens"] - pair[0]["tokens"]))
    run = read_run(out) | {"title": f"long2short · {out.resolve().name}", "summary": summary}
    page = run | {"rows": summary["heldout"], "compared": len(greedy), "moved": moved}
    return write_page(out / "report.html", "long2short.html", page)
