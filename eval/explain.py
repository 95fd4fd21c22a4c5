"""Why a score is nothing, in words: what could be read out of the answers, what the model said, what to do
about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earlyfusion.eval.benchmarks.base import BaseTask
from earlyfusion.eval.protocol import Record

EXAMPLES = 3
BASELINES = {
    "chance": "what guessing among the options earns",
    "majority": "what always giving the most frequent answer earns",
}
UNREAD = (
    "what to do: the model does not answer in the form that is asked for; take a form that compares"
    " log-likelihoods (--form mcf or cf) where the task has one, a model that was tuned on such answers, or"
    " --chat"
)
WRONG = (
    "what to do: the answers are in the right form and wrong; compare them with the targets in records.jsonl"
    " (--out), and the data's answers with what the model was taught to say"
)


def explain(task: BaseTask, metrics: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """Lines for beneath the table: what the task itself has to say, and why a score is 0. Of private tasks no
    answer."""
    lines = task.explain(metrics)
    if task.kind != "generate" or metrics.get("score") != 0:
        return lines

    # Unread answers and wrong ones call for different remedies.
    unread = metrics["unextracted"]
    lines.append(
        f"score 0: none of {len(records)} answers is right; nothing could be read out of {unread:.0%} of them"
    )
    if not task.private:
        lines.append(f"the model said {'; '.join(_examples(records))}")
    for key, text in BASELINES.items():
        if metrics.get(key) is not None:
            lines.append(f"{key} {metrics[key]:.3f} is {text}")
    return [*lines, UNREAD if unread > 0.5 else WRONG]


def _examples(records: Sequence[Record]) -> list[str]:
    """Different answers with what was expected."""
    # A model that says nothing says it often; one of each is enough.
    found: dict[str, str] = {}
    for record in records:
        output = record["output"]
        text = output if isinstance(output, str) else output[0]
        found.setdefault(text, f"{text.strip()[:60]!r} where {record.get('target')!r} was expected")
    return list(found.values())[:EXAMPLES]
