"""Before and after: length and accuracy of the answers to held-out problems, paired by problem.

before = look(config, model, tokenizer, rewards)  # a Held for every problem, and for samples if asked for
rows = compared(before, after)                    # accuracy and tokens, difference, 95 % interval
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Answer, ask
from earlyfusion.eval.measured import solved
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rewards import Rewards

ALL = "all"
DIGITS = {"accuracy": 3, "tokens": 2}
"""What is compared, and the decimals that are shown."""
SHORT = {"accuracy": "acc", "tokens": "tokens"}


@dataclass(frozen=True)
class Held:
    """One held-out problem. way: "greedy" or "sampled". tokens, right: of the greedy answer, or means over
    the samples."""

    label: str
    key: str
    way: str
    tokens: float
    right: float
    answer: str


def look(config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, rewards: Rewards) -> list[Held]:
    """Answer eval.problems held-out problems of every entry, judged by the run's own reward."""
    section = config.eval
    asked = ask(
        model,
        tokenizer,
        config.measured,
        problems=section.problems,
        seed=section.seed,
        samples=section.samples,
        max_new_tokens=config.rollout.max_new_tokens,
        slots=config.rollout.slots,
    )
    found: list[Held] = []
    for way, answers in (("greedy", [[one] for one in asked.greedy]), ("sampled", asked.samples)):
        if way == "sampled" and not section.samples:
            continue
        found += _judged(asked.questions, answers, way, rewards)
    return found


def _judged(
    questions: Sequence[Any], answers: Sequence[Sequence[Answer]], way: str, rewards: Rewards
) -> list[Held]:
    items = [(question.problem, one.judged) for question, own in zip(questions, answers) for one in own]
    scored = iter(rewards(items))
    out = []
    for question, own in zip(questions, answers):
        right = [float(solved(question.problem.task, rewards.span.share(next(scored).value))) for _ in own]
        out.append(
            Held(
                question.entry.label,
                question.problem.key,
                way,
                sum(len(one.ids) for one in own) / len(own),
                sum(right) / len(right),
                own[0].text.strip(),
            )
        )
    return out


def write_held(path: Path, held: Sequence[Held]) -> Path:
    """One JSON line a problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in held))
    return path


def read_held(path: Path) -> list[Held]:
    """What `write_held` wrote. Raises UserError for something else."""
    try:
        return [Held(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: no measurement of held-out problems ({error}); remove it to measure anew"
        ) from None


def compared(before: Sequence[Held], after: Sequence[Held]) -> list[dict[str, Any]]:
    """A row for every entry and way, and one for all entries when there are several: n, and for accuracy and
    tokens the means before and after, the mean paired difference and its 95 % Student t interval (null for
    fewer than 2 problems)."""
    first = {(one.label, one.key, one.way): one for one in before}
    pairs = [(first[key], one) for one in after if (key := (one.label, one.key, one.way)) in first]
    labels = list(dict.fromkeys(one.label for _, one in pairs))
    rows = []
    for way in dict.fromkeys(one.way for _, one in pairs):
        for label in [*labels, ALL] if len(labels) > 1 else labels:
            own = [(a, b) for a, b in pairs if b.way == way and label in (b.label, ALL)]
            if own:
                rows.append({"label": label, "way": way, "n": len(own), **_row(own)})
    return rows


def _row(pairs: Sequence[tuple[Held, Held]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for metric, name in (("accuracy", "right"), ("tokens", "tokens")):
        a, b = ([float(getattr(pair[side], name)) for pair in pairs] for side in (0, 1))
        estimate = mean_estimate([y - x for x, y in zip(a, b)])
        span = (
            {"low": estimate.low, "high": estimate.high}
            if estimate.se == estimate.se
            else {"low": None, "high": None}
        )
        row[metric] = {"before": sum(a) / len(a), "after": sum(b) / len(b), "delta": estimate.value, **span}
    return row


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    made = Table(title="held-out problems, before and after", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "n", "answers", "", "before", "after", "change, 95 %"):
        made.add_column(name, no_wrap=True, justify="left" if name in ("task", "answers", "") else "right")
    for row in rows:
        for number, (metric, digits) in enumerate(DIGITS.items()):
            part = row[metric]
            cells = [f"{part['before']:.{digits}f}", f"{part['after']:.{digits}f}", difference(part, digits)]
            about = (row["label"], str(row["n"]), row["way"]) if number == 0 else ("", "", "")
            made.add_row(*about, SHORT[metric], *cells)
    return made


def fallen(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Labels (with the way of answering) whose interval of the accuracy's change lies below 0."""
    return [
        f"{row['label']} ({row['way']})"
        for row in rows
        if row["accuracy"]["high"] is not None and row["accuracy"]["high"] < 0
    ]


def shown(part: dict[str, Any], digits: int) -> str:
    """ "0.410 > 0.430"."""
    return f"{part['before']:.{digits}f} > {part['after']:.{digits}f}"


def difference(part: dict[str, Any], digits: int) -> str:
    """ "+0.020 [-0.010, +0.050]"."""
    span = "" if part["low"] is None else f" [{part['low']:+.{digits}f}, {part['high']:+.{digits}f}]"
    return f"{part['delta']:+.{digits}f}{span}"
