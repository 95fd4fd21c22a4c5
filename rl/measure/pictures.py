"""What is shown in a picture's place when a figure of pictures gets its control.

    true      the problem's own picture
    grey      a grey picture of the same size: as many image tokens, which tell the size alone
    swapped   the picture of the next problem asked; the last one shows the first's
    none      no picture at all

A skill that reads pictures falls to what the words of the question give away. Programs of a tool find the
true picture under its name whatever is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Segment
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.eval.benchmarks.questions import grey
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.rl.recipe import TaskEntry

Pictures: TypeAlias = Literal["true", "grey", "swapped", "none"]
PICTURES: tuple[Pictures, ...] = get_args(Pictures)


def parse_pictures(given: str) -> tuple[Pictures, ...]:
    """The kinds in "true,grey". Raises DataError for an unknown one."""
    named = tuple(part.strip() for part in given.split(","))
    for one in named:
        if one not in PICTURES:
            raise DataError(f"pictures {one!r}; {did_you_mean(one, PICTURES)}")
    return tuple(dict.fromkeys(named))  # type: ignore[arg-type]


def ways(entry: TaskEntry, pictures: Sequence[Pictures]) -> Sequence[Pictures]:
    """The kinds that an entry is asked with: told in words there is nothing to replace."""
    return ("true",) if entry.form == "twin" else pictures


def suffix_of(pictures: Pictures) -> str:
    """What its rows' labels end in."""
    return "" if pictures == "true" else f"/{pictures}"


def pictures_of(
    entry: TaskEntry, problems: Sequence[Problem], pictures: Pictures
) -> list[Sequence[Image] | None]:
    """For every problem what stands in its picture's place: None leaves it as it is."""
    own = [segment for p in problems for segment in p.prompt(entry.form) if isinstance(segment, Image)]
    if pictures == "true" or not own:
        return [None] * len(problems)
    if pictures == "none":
        return [()] * len(own)
    if pictures == "grey":
        return [(grey(image),) for image in own]  # type: ignore[misc]
    return [(image,) for image in own[1:] + own[:1]]


def replaced(segments: Sequence[Segment], shown: Sequence[Image] | None) -> list[Segment]:
    """The segments with `shown` in the place of every picture."""
    if shown is None:
        return list(segments)
    return [new for old in segments for new in (shown if isinstance(old, Image) else (old,))]
