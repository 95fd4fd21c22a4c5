"""Reading an answer out of a model's words. Every function returns None when there is nothing to read.

MMLU-Pro: the three levels of the official script (TIGER-AI-Lab/MMLU-Pro, evaluate_from_local.py). GPQA:
simple-evals' line "Answer: X" and lm-evaluation-harness' "(X)". GSM8K: the number after "####" or the last
number.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase

_MMLU_PRO = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b([A-J])\b"),
)
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*:[ \t]*\$?\(?([A-Z])\)?\$?(?![A-Za-z])")
_PARENTHESES = re.compile(r"\(([A-Z])\)")
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def mmlu_pro_letter(text: str, levels: int = 3) -> tuple[str, int] | None:
    """(letter A-J, level that found it). Level 1: the first "answer is (X)"; 2: "answer: X", the last one of
    the first line that has one; 3: the last capital A-J that stands alone. `levels` = 1 or 2 stops earlier.
    """
    for level in (1, 2):
        if level <= levels and (match := _MMLU_PRO[level - 1].search(text)):
            return match.group(1), level
    if levels >= 3 and (found := _MMLU_PRO[2].findall(text)):
        return found[-1], 3
    return None


def published_guess(options: int, seed: int = 12345) -> int:
    """Index the official MMLU-Pro script draws for a question without an extracted answer: it seeds the
    generator anew for each one, so the guess depends on the number of options alone."""
    return random.Random(seed).randint(0, options - 1)


def answer_line_letter(text: str, options: int = 4, *, which: str = "last") -> str | None:
    """Letter of the "Answer: X" lines; which = "last", or "first" as in simple-evals. Markup (** and $) is
    ignored."""
    found = [letter.upper() for letter in _ANSWER_LINE.findall(text.replace("**", ""))]
    found = [letter for letter in found if letter in LETTERS[:options]]
    return None if not found else found[-1 if which == "last" else 0]


def parenthesised_letter(text: str, options: int = 4) -> str | None:
    """The last "(X)" with X among the options (lm-evaluation-harness' flexible extraction)."""
    found = [letter for letter in _PARENTHESES.findall(text) if letter in LETTERS[:options]]
    return found[-1] if found else None


def gsm8k_number(text: str, *, flexible: bool = True) -> str | None:
    """The number after "####"; without one and with `flexible`, the last number of the text. Normalised."""
    if match := _HASHES.search(text):
        return normal_number(match.group(1))
    if not flexible:
        return None
    found = [a or b for a, b in _NUMBER.findall(text)]
    values = [value for value in map(normal_number, found) if value is not None]
    return values[-1] if values else None


def normal_number(text: str) -> str | None:
    """ "$1,200." -> "1200", "3.50" -> "3.5", "-0" -> "0"; None for what is no number."""
    cleaned = text.replace(",", "").replace("$", "").strip().rstrip(".")
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", cleaned):
        return None
    if "." in cleaned:
        cleaned = cleaned.rstrip("0").rstrip(".")
    whole, _, part = cleaned.lstrip("-").partition(".")
    sign = "-" if cleaned.startswith("-") and (whole.strip("0") or part) else ""
    return sign + (whole.lstrip("0") or "0") + (f".{part}" if part else "")


def best_choice(values: Sequence[float]) -> int:
    """Index of the largest value, the first of equals."""
    return max(range(len(values)), key=lambda index: (values[index], -index))
