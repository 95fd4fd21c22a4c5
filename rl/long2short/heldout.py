"""Before and after: length and accuracy of the answers to held-out problems, paired by problem.

before = look(config, model, tokenizer, rewards)  # a row for every problem, and for samples if asked for
rows = compared(before, after)                    # accuracy and tokens, difference, 95 % interval
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
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
    ways = {"greedy": [[one] for one in asked.greedy], "sampled": asked.samples if section.samples else []}
    rows = []
    for way, answers in ways.items():
        rows += [judged(question, own, way, rewards) for question, own in zip(asked.questions, answers)]
    return rows


def judged(question: Any, own: Sequence[Answer], way: str, rewards: Rewards) -> Row:
    """The row of a question: accuracy and tokens of its answer, or means over its samples."""
    # One call a question keeps the judgements beside their answers.
    scored = rewards([(question.problem, one.judged) for one in own])
    right = [solved(question.problem.task, rewards.span.share(one.value)) for one in scored]
    row: Row = {"label": question.entry.label, "key": question.problem.key, "way": way}
    row |= {"accuracy": fmean(right), "tokens": fmean(len(one.ids) for one in own)}
    return row | {"answer": own[0].text.strip()}


def pairs_of(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """What was measured both times."""
    name = itemgetter("label", "key", "way")
    first = {name(one): one for one in before}
    return [(first[name(one)], one) for one in after if name(one) in first]


def compared(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """A row for every entry (and "all"), way and metric: n, means before and after, the mean paired
    difference `value` and its 95 % Student t interval."""
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = defaultdict(list)
    for pair in pairs_of(before, after):
        # Problems count alike in the mean over all entries.
        for label in (pair[1]["label"], "all"):
            groups[label, pair[1]["way"]].append(pair)
    rows = []
    for (label, way), own in groups.items():
        for metric in METRICS:
            a, b = (np.array([one[metric] for one in side]) for side in zip(*own))
            row = {"label": label, "way": way, "metric": metric, "before": a.mean(), "after": b.mean()}
            rows.append(row | mean_estimate(b - a).to_dict())
    return rows


def write_report(out: Path, summary: Mapping[str, Any]) -> Path:
    """OUT/report.html: the table before and after, the curves, and greedy answers that changed, the largest
    changes of length first. One file that loads nothing from elsewhere."""
    pairs = pairs_of(*(read_jsonl(out / "heldout" / f"{name}.jsonl") for name in ("before", "after")))
    pairs.sort(key=lambda pair: -abs(pair[1]["tokens"] - pair[0]["tokens"]))
    page = {"title": f"long2short · {out.resolve().name}", "summary": summary, "pairs": pairs}
    return write_page(out / "report.html", "long2short.html", read_run(out) | page)
