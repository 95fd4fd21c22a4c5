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
# "none" and "no circles" count to 0.
_WORD_VALUE = {**{word: value for value, word in enumerate(NUMBER_WORDS)}, "none": 0, "no": 0}
# Twelve digits at most: Python refuses to read a number of thousands of them.
_COUNT = re.compile(rf"(?<![\w.])(-?\d{{1,12}})(?![\w]|\.\d)|\b({'|'.join(_WORD_VALUE)})\b", re.IGNORECASE)
# ST-VQA: worse than that is another word, not a misread one.
ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05


def squeeze(text: str) -> str:
    """Runs of blanks become one blank, those around go."""
    return " ".join(text.split())


def tame(text: str) -> str:
    """Squeezed, decimals after the sixth go, and runs of more than 12 digits become an x, so that no
    expression of ours backtracks for long over a hostile text."""
    return re.sub(r"\d{13,}", "x", re.sub(r"(\.\d{6})\d+", r"\1", squeeze(text)))


def normalise(text: str) -> str:
    """Lower case, single spaces, without a leading article and closing punctuation: "The red circle." -> "red
    circle"."""
    return re.sub(r"^(a|an|the) ", "", squeeze(text.lower()).strip(" .,!?:;\"'"))


def first_line(text: str) -> str:
    """The first line with anything on it, without blanks around; "" when there is none."""
    return (text.strip().splitlines() or [""])[0].strip()


def parse_count(text: str) -> int | None:
    """The first whole number said: digits, or none ... twenty in words. None when there is none ("3.5" is
    none)."""
    found = _COUNT.search(text)
    if found is None:
        return None
    return int(found[1]) if found[1] else _WORD_VALUE[found[2].lower()]


def levenshtein(a: Sequence, b: Sequence) -> int:
    """Fewest insertions, deletions and substitutions that turn `a` into `b`. O(len(a) * len(b)) time, one
    row."""
    # One row of the table at a time.
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rate(said: Sequence, gold: Sequence) -> float:
    """Levenshtein distance over the length of gold: of characters for strings, of words for lists of them.

    May exceed 1. For an empty gold: 0 if said is empty, else 1.
    """
    return levenshtein(said, gold) / len(gold) if gold else float(bool(said))


def similarity(said: str, gold: str) -> float:
    """1 - distance / longer length, blanks squeezed; 1 when both are empty."""
    said, gold = squeeze(said), squeeze(gold)
    return 1.0 - levenshtein(said, gold) / max(len(said), len(gold), 1)


def anls(said: str, gold: str) -> float:
    """`similarity` of the lower-case texts; 0 for what is half wrong or worse."""
    share = similarity(said.lower(), gold.lower())
    return share if share > 1 - ANLS_THRESHOLD else 0.0


def contains(said: str, gold: str) -> bool:
    """Whether gold stands in the answer, both in lower case and with single spaces (OCRBench)."""
    return squeeze(gold.lower()) in squeeze(said.lower())


def exact_match(said: str, gold: str) -> bool:
    """Whether the first line of the answer is gold, after `normalise`."""
    return normalise(first_line(said)) == normalise(gold)


def relaxed_match(said: str, gold: str) -> bool:
    """ChartQA's relaxed correctness: both numbers and within 5 % of gold, else equal without case."""
    value, target = _as_float(said), _as_float(gold)
    # A gold 0 has no relative error: it is compared as text, as published.
    if value is not None and target:
        return abs(value - target) / abs(target) <= RELAXED_TOLERANCE
    return said.lower() == gold.lower()


def _as_float(text: str) -> float | None:
    """Published reading of a number: a closing "%" divides by 100; None for anything float() refuses."""
    try:
        value = float(text.rstrip("%"))
    except ValueError:
        return None
    return value / 100.0 if text.endswith("%") else value
