"""What a rule that reads no meaning solves: the k-th answer word of a problem's words, the first of line k,
or any.

A model that learns such a rule gains on problems in words without the skill, so a study tells the best of
them beside its starts. Answer words of a problem are the targets of its category, wherever they stand in its
words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from earlyfusion.eval.measured import Measured


@dataclass(frozen=True)
class Shortcut:
    """The best rule of place ("answer word 2", "first answer word of line 2"; the last one where there are
    fewer), the share of problems in [0, 1] that it solves, and the share that one of the answer words, drawn
    evenly, solves."""

    rule: str
    solves: float
    at_random: float


def shortcut(records: Iterable[Measured]) -> Shortcut | None:
    """The best rule on these problems; None where no answer stands in the words (pictures, most counts)."""
    known = list(records)
    targets: dict[str, set[str]] = defaultdict(set)
    for one in known:
        targets[one.category].add(one.target)
    lines = [[_named(line, targets[one.category]) for line in one.prompt.splitlines()] for one in known]
    words = [[word for line in told for word in line] for told in lines]
    if not any(words):
        return None
    goals = [one.target for one in known]
    rules = {f"answer word {k + 1}": _words_at(words, k) for k in range(max(map(len, words)))}
    for k in range(1, max(map(len, lines))):
        firsts = [told[min(k, len(told) - 1)] if told else [] for told in lines]
        rules[f"first answer word of line {k + 1}"] = _words_at(firsts, 0)
    solves = {rule: sum(map(str.__eq__, said, goals)) / len(goals) for rule, said in rules.items()}
    best = max(solves, key=lambda rule: solves[rule])
    drawn = sum(1 / len(set(named)) for named, goal in zip(words, goals) if goal in named)
    return Shortcut(best, solves[best], drawn / len(goals))


def _words_at(rows: Sequence[Sequence[str]], k: int) -> list[str]:
    """The k-th word of every row, from 0; the last where there are fewer, "" where there is none."""
    return [row[min(k, len(row) - 1)] if row else "" for row in rows]


def _named(words: str, targets: set[str]) -> list[str]:
    """The targets that stand in the words, in their order."""
    either = "|".join(sorted(map(re.escape, targets), key=len, reverse=True))
    return re.findall(rf"(?<!\w)(?:{either})(?!\w)", words)
