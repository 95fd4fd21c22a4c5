"""Open answers as MMMU's published evaluation reads them: key phrases, numbers, containment.

A response is cut into its sentences; what follows the last of the words that announce a result (so, is,
answer, =, ...) is a candidate, and so is every number in it. The response is right when a gold string stands
in a candidate, or a gold number equals one of the numbers after rounding to two places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ANNOUNCE = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?\.\d+")


def as_number(text: str) -> float | None:
    """The whole text as a number, commas between thousands allowed, rounded to two places; None for anything
    else."""
    try:
        return round(float(text.strip().replace(",", "")), 2)
    except ValueError:
        return None


def numbers_in(text: str) -> list[float]:
    """All numbers of a text, rounded to two places."""
    found = (as_number(match) for match in _NUMBERS.findall(text))
    return [value for value in found if value is not None]


def candidates(response: str) -> list[str]:
    """The phrases of a response that may be its answer, in lower case; the whole response when none is
    announced."""
    text = response.strip().strip(".").lower()
    sentences = [part for part in re.split(r"\.\s(?=[a-z])|\n", text) if part.strip()]
    found: list[str] = []
    for index, sentence in enumerate(sentences):
        words = (*_ANNOUNCE, "=") if index == len(sentences) - 1 else _ANNOUNCE
        tails = [sentence.split(word)[-1].strip() for word in words if word in sentence]
        shortest = min(tails, key=len, default="")
        if shortest.strip(" ,.!?;:'"):
            found.append(shortest)
    return found or [text]


def open_match(response: str, golds: Sequence[str]) -> bool:
    """Whether one of the accepted answers is said."""
    said = candidates(response)
    values = [
        value for phrase in said for value in [*numbers_in(phrase), as_number(phrase)] if value is not None
    ]
    for gold in golds:
        number = as_number(gold)
        if number is not None:
            if number in values:
                return True
        elif any(gold.strip().lower() in phrase for phrase in said):
            return True
    return False
