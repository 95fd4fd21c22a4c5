"""What a rule that reads no meaning solves: the k-th answer word of a problem's words, the first of line k,
or any.

A model that learns such a rule gains on problems in words without the skill, so a study tells the best of
them beside its starts. Answer words of a problem are the targets of its category, wherever they stand in its
words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from earlyfusion.eval.measured import Measured


def shortcut(records: Iterable[Measured]) -> dict[str, Any] | None:
    """The best rule of place on these problems; None where no answer stands in the words (pictures, most
    counts).

    rule: "answer word 2", "first answer word of line 2"; the last one where there are fewer. solves,
    at_random: shares of problems that it solves, and that an answer word drawn evenly solves.
    """
    known = list(records)
    targets: dict[str, set[str]] = defaultdict(set)
    for one in known:
        targets[one.category].add(one.target)

    # Every rule's votes, one a problem; at random a word counts as often as it is named.
    right: dict[str, int] = defaultdict(int)
    lines = [[named(line, targets[one.category]) for line in one.prompt.splitlines()] for one in known]
    words = [[word for line in told for word in line] for told in lines]
    most_words, most_lines = max(map(len, words)), max(map(len, lines))
    drawn = 0.0
    for one, told, said in zip(known, lines, words):
        for k in range(most_words):
            right[f"answer word {k + 1}"] += said[: k + 1][-1:] == [one.target]
        for k in range(1, most_lines):
            right[f"first answer word of line {k + 1}"] += (told[: k + 1][-1:] or [[]])[0][:1] == [one.target]
        drawn += (one.target in said) / max(1, len(set(said)))
    # Pictures, and words that do not hold the answer, leave no rule of place.
    if not most_words:
        return None
    best = max(right, key=lambda rule: right[rule])
    return {"rule": best, "solves": right[best] / len(known), "at_random": drawn / len(known)}


def named(words: str, targets: set[str]) -> list[str]:
    """The targets that stand in the words, in their order."""
    # The longest first: "dark red" is not "red".
    either = "|".join(sorted(map(re.escape, targets), key=len, reverse=True))
    return re.findall(rf"(?<!\w)(?:{either})(?!\w)", words)
