"""Reading an answer out of a model's words, as the published scripts read it. None: there is nothing to read.

MMLU-Pro: the three levels of the official script (TIGER-AI-Lab/MMLU-Pro, evaluate_from_local.py). GPQA:
simple-evals' line "Answer: X" and lm-evaluation-harness' "(X)". GSM8K: the number after "####" or the last
number. MMMU: key phrases, numbers, containment.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase

# The three of the official script, one for each level.
_ANSWER_IS = re.compile(r"answer is \(?([A-J])\)?")
_ANSWER_COLON = re.compile(r".*[aA]nswer:\s*([A-J])")
_ALONE = re.compile(r"\b([A-J])\b")
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*:[ \t]*\$?\(?([A-Z])\)?\$?(?![A-Za-z])")
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?\.\d+")
_ANNOUNCE = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def mmlu_pro_letter(text: str, levels: int = 3) -> tuple[str, int] | None:
    """(letter A-J, level that found it). Level 1: the first "answer is (X)"; 2: "answer: X", the last one of
    the first line that has one; 3: the last capital A-J that stands alone. `levels` = 1 or 2 stops earlier.
    """
    for level, pattern in enumerate((_ANSWER_IS, _ANSWER_COLON, _ALONE)[:levels], 1):
        # The first announcement counts, but the last letter that merely stands there.
        found = pattern.findall(text)
        if found:
            return found[-1 if pattern is _ALONE else 0], level
    return None


def published_guess(options: int) -> int:
    """Index the official MMLU-Pro script draws for a question without an extracted answer: it seeds the
    generator anew for each one, so the guess depends on the number of options alone."""
    # The seed is the script's own, and the score is compared with published ones.
    return random.Random(12345).randint(0, options - 1)


def answer_line_letter(text: str, options: int = 4, *, which: str = "last") -> str | None:
    """Letter of the "Answer: X" lines; which = "last", or "first" as in simple-evals. Markup (** and $) is
    ignored."""
    found = _listed(_ANSWER_LINE.findall(text.replace("**", "")), options)
    # simple-evals takes the first line, which pays a model for guessing early.
    if which == "first":
        found.reverse()
    return found[-1] if found else None


def parenthesised_letter(text: str, options: int = 4) -> str | None:
    """The last "(X)" with X among the options (lm-evaluation-harness' flexible extraction)."""
    found = _listed(re.findall(r"\(([A-Z])\)", text), options)
    return found[-1] if found else None


def _listed(letters: Sequence[str], options: int) -> list[str]:
    return [letter.upper() for letter in letters if letter.upper() in LETTERS[:options]]


def gsm8k_number(text: str) -> str | None:
    """The number after "####"; without one, the last number of the text. Normalised."""
    if match := _HASHES.search(text):
        return normal_number(match[1])
    # The last of them: a solution ends with its result.
    values = [normal_number(found) for found in _NUMBER.findall(text)]
    return next((value for value in reversed(values) if value is not None), None)


def normal_number(text: str) -> str | None:
    """ "$1,200." -> "1200", "3.50" -> "3.5", "-0" -> "0"; None for what is no number."""
    # Commas between thousands and a dollar sign are how the number is written.
    cleaned = text.replace(",", "").replace("$", "").strip().rstrip(".")
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", cleaned):
        return None
    whole, _, part = cleaned.lstrip("-").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    # Zero has no sign: "-0.0" and "0" are one answer.
    return f"-{value}" if cleaned.startswith("-") and value != "0" else value


def best_choice(values: Sequence[float]) -> int:
    """Index of the largest value, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def open_match(response: str, golds: Sequence[str]) -> bool:
    """Whether one of the accepted answers is said, as MMMU's published evaluation reads it.

    A gold string must stand in a candidate phrase, a gold number must equal one of the numbers there after
    rounding to two places.
    """
    phrases = candidates(response)
    # A number may be the phrase itself or stand in it.
    values = set()
    for phrase in phrases:
        values |= {as_number(found) for found in [phrase, *_DECIMAL.findall(phrase)]}
    for gold in golds:
        number = as_number(gold)
        if number is not None and number in values:
            return True
        if number is None and any(gold.strip().lower() in phrase for phrase in phrases):
            return True
    return False


def candidates(response: str) -> list[str]:
    """The phrases of a response that may be its answer, in lower case: what follows the last of the words
    that announce a result, in each sentence; the whole response when none is announced."""
    text = response.strip().strip(".").lower()
    sentences = [part for part in re.split(r"\.\s(?=[a-z])|\n", text) if part.strip()]
    found = []
    for index, sentence in enumerate(sentences):
        # Only at the end does an equals sign give the result; before, it is a step.
        words = (*_ANNOUNCE, "=") if index == len(sentences) - 1 else _ANNOUNCE
        # What follows the announcement that comes last is shortest.
        tails = [sentence.split(word)[-1].strip() for word in words if word in sentence]
        shortest = min(tails, key=len, default="")
        if shortest.strip(" ,.!?;:'"):
            found.append(shortest)
    return found or [text]


def as_number(text: str) -> float | None:
    """The whole text as a number, commas between thousands allowed, rounded to two places; None for anything
    else."""
    try:
        return round(float(text.strip().replace(",", "")), 2)
    except ValueError:
        return None
