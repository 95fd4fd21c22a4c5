"""Scores of free answers against one gold answer: numbers, text read from pictures, charts, plain words.

    counting   the number said, as digits or as a word; exact, absolute error, within one
    reading    CER = Levenshtein distance / length of gold; ANLS = 1 - distance / longer length, 0 from half
               wrong on (threshold 0.5, ST-VQA); containment as OCRBench has it (inflates long answers: look
               at CER beside it)
    charts     relaxed accuracy of ChartQA: numbers within 5 %, all else equal without case; as published, so
               "12" is wrong for "12%" (a percent sign divides by 100) and a gold 0 is compared as text

Nothing here guesses: an answer that cannot be read is wrong and counts as unextracted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty"
).split()
_WORD_VALUE = {**{word: value for value, word in enumerate(NUMBER_WORDS)}, "none": 0, "no": 0}
_COUNT = re.compile(rf"(?<![\w.])(-?\d+)(?![\w]|\.\d)|\b({'|'.join(_WORD_VALUE)})\b", re.IGNORECASE)
ANLS_THRESHOLD = 0.5


def first_line(text: str) -> str:
    """The first line with anything on it, without blanks around; "" when there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def parse_count(text: str) -> int | None:
    """The first whole number said: digits, or none ... twenty in words. None when there is none ("3.5" is
    none)."""
    found = _COUNT.search(text)
    if found is None:
        return None
    return int(found[1]) if found[1] is not None else _WORD_VALUE[found[2].lower()]


def levenshtein(a: Sequence, b: Sequence) -> int:
    """Fewest insertions, deletions and substitutions that turn `a` into `b`. O(len(a) * len(b)) time, one
    row."""
    if len(a) < len(b):
        a, b = b, a
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def character_error_rate(said: str, gold: str) -> float:
    """Levenshtein distance over the length of gold; may exceed 1. For an empty gold: 0 if said is empty, else
    1."""
    if not gold:
        return float(bool(said))
    return levenshtein(said, gold) / len(gold)


def word_error_rate(said: str, gold: str) -> float:
    """The same over words."""
    if not gold.split():
        return float(bool(said.split()))
    return levenshtein(said.split(), gold.split()) / len(gold.split())


def anls(said: str, golds: Sequence[str], threshold: float = ANLS_THRESHOLD) -> float:
    """Best 1 - NL over the gold answers, NL = distance / longer length of lower-case stripped text; 0 for NL
    >= threshold."""
    best = 0.0
    said = " ".join(said.lower().split())
    for gold in golds:
        gold = " ".join(gold.lower().split())
        longer = max(len(said), len(gold))
        distance = levenshtein(said, gold) / longer if longer else 0.0
        best = max(best, 1 - distance if distance < threshold else 0.0)
    return best


def contains(said: str, gold: str) -> bool:
    """Whether gold stands in the answer, both in lower case and with single spaces (OCRBench)."""
    return " ".join(gold.lower().split()) in " ".join(said.lower().split())


def normalise(text: str) -> str:
    """Lower case, single spaces, without a leading article and closing punctuation: "The red circle." -> "red
    circle"."""
    text = " ".join(text.lower().split()).strip(" .,!?:;\"'")
    return re.sub(r"^(a|an|the) ", "", text)


def exact_match(said: str, gold: str) -> bool:
    """Whether the first line of the answer is gold, after `normalise`."""
    return normalise(first_line(said)) == normalise(gold)


def relaxed_match(said: str, gold: str, tolerance: float = 0.05) -> bool:
    """ChartQA's relaxed correctness: both numbers and within `tolerance` of gold relative, else equal without
    case."""
    value, target = _as_float(said), _as_float(gold)
    if value is not None and target:
        return abs(value - target) / abs(target) <= tolerance
    return said.lower() == gold.lower()


def _as_float(text: str) -> float | None:
    """Published reading of a number: a closing "%" divides by 100; None for anything float() refuses."""
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None
