"""Why a score is nothing, in words: what could be read out of the answers, what the model said, what to do
about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earlyfusion.eval.protocol import Record, Task

EXAMPLES = 3
LONGEST = 60
"""Characters of an answer that are shown."""


def explain(task: Task, metrics: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    """Lines for beneath the table: what the task itself has to say, and why a score is 0. Of private tasks no
    answer."""
    own = getattr(task, "explain", None)
    lines: list[str] = list(own(metrics, records)) if callable(own) else []
    if task.kind == "generate" and metrics.get("score") == 0 and records:
        lines += _nothing(metrics, records, private=task.private)
    return lines


def _nothing(metrics: Mapping[str, Any], records: Sequence[Record], *, private: bool) -> list[str]:
    # Unread answers and wrong ones call for different remedies.
    unread = float(metrics.get("unextracted") or 0.0)
    lines = [
        f"score 0: none of {len(records)} answers is right; nothing could be read out of {unread:.0%} of them"
    ]
    if not private:
        lines.append(f"the model said {'; '.join(_examples(records)) or 'nothing'}")

    # What a score would have to beat.
    baselines = {
        "chance": "what guessing among the options earns",
        "majority": "what always giving the most frequent answer earns",
    }
    known = [
        f"{key} {metrics[key]:.3f} is {text}"
        for key, text in baselines.items()
        if metrics.get(key) is not None
    ]
    if known:
        lines.append(
            "; ".join(known)
            + ("; 1 means that questions have one option" if metrics.get("chance") == 1 else "")
        )

    if unread > 0.5:
        lines.append(
            "what to do: the model does not answer in the form that is asked for; take a form that compares"
            " log-likelihoods (--form mcf or cf) where the task has one, a model that was tuned on such"
            " answers, or --chat"
        )
    else:
        lines.append(
            "what to do: the answers are in the right form and wrong; compare them with the targets in"
            " records.jsonl (--out), and the data's answers with what the model was taught to say"
        )
    return lines


def _examples(records: Sequence[Record]) -> list[str]:
    """Different answers with what was expected."""
    found: dict[str, str] = {}
    for record in records:
        said = record.get("output")
        said = str(said[0] if isinstance(said, list) and said else said or "").strip()
        shown = repr(said[:LONGEST] + ("..." if len(said) > LONGEST else ""))
        found.setdefault(shown, f"{shown} where {record.get('target')!r} was expected")
    return list(found.values())[:EXAMPLES]
