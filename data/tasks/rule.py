"""A rule that pictures and words share: patches of colour, each of which leads from one state to another.

f(colour, state) -> state is one table for all problems, so what is learned of it through pictures can be used
in words, unless the words are asked by another one (`table = "b"`). Some of its entries, the new facts, are
in no problem of the levels that a model is pretrained on.

The question tells the first state; a row of patches leads to the last one. The thought says every step:
"red: a>d, teal: d>b". The words of a row, "red door 57" for one patch, hold nothing that the picture does
not.

Held out: of one step, the number, which says nothing of the answer; of more, the colours with the first
state.

Source: the studies of docs/claims.md; a text twin of every picture is that of arXiv 2501.02669.
"""

from functools import cache
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS
from earlyfusion.data.tasks.problem import Problem, Task, TaskError, task

STATES = "abcdefghijkl"
NEW_FACTS = 36
"""Entries of the table that are new: 84 are known."""
SIDE = 32
"""Of a patch's place, in pixels."""


@cache
def facts_of(name: str) -> dict[tuple[str, str], str]:
    """(colour, state) -> the state it leads to, never the same; the colours of a state lead to different
    ones."""
    rng = Random(f"rule/{name}")
    found: dict[tuple[str, str], str] = {}
    for state in STATES:
        # One answer of a state is as good as any other to who does not see the colour.
        others = rng.sample([other for other in STATES if other != state], len(COLOURS))
        found |= {(colour, state): other for colour, other in zip(COLOURS, others)}
    return found


@cache
def new_facts() -> frozenset[tuple[str, str]]:
    """The (colour, state) pairs that known problems leave out, as many of every colour as can be."""
    rng = Random("rule/new")
    found: list[tuple[str, str]] = []
    for number, colour in enumerate(COLOURS):
        many = (NEW_FACTS * (number + 1)) // len(COLOURS) - (NEW_FACTS * number) // len(COLOURS)
        found += [(colour, state) for state in rng.sample(STATES, many)]
    return frozenset(found)


@task("rule")
class Rule(Task):
    """See the file's head. The category of a problem of one step is its fact.

    table: "a" or "b". blind: pictures without their patches. Raises TaskError for another table. Knobs: facts
    (known, new, any), steps (least, most), naming (the colour is asked).
    """

    levels = (
        {"facts": "known", "steps": (1, 1)},
        {"facts": "new", "steps": (1, 1)},
        {"facts": "any", "steps": (1, 1)},
        {"facts": "known", "steps": (1, 2)},
        {"facts": "known", "steps": (3, 4)},
        {"facts": "known", "steps": (1, 1), "naming": True},
        {"facts": "known", "steps": (1, 4), "naming": True},
    )

    def __init__(self, table: str = "a", blind: bool = False, verbose: int = 0) -> None:
        if table not in ("a", "b"):
            raise TaskError(f"rule: table {table!r}; expected a or b")
        self.table, self.blind, self.verbose = facts_of(table), blind, verbose

    def draw(self, rng, heldout, knobs):
        """See Task."""
        steps = rng.randint(*knobs["steps"])
        # A first fact of the wanted kind; the way goes on by known ones.
        wanted = knobs["facts"]
        fits = lambda fact: wanted == "any" or (fact in new_facts()) == (wanted == "new")
        first = rng.choice([*filter(fits, self.table)])
        way, here = [first], self.table[first]
        for _ in range(steps - 1):
            colour = rng.choice([c for c in COLOURS if (c, here) not in new_facts()])
            way.append((colour, here))
            here = self.table[way[-1]]

        # What tells nothing: a number, sizes, places, the background.
        number = rng.randint(10, 99)
        picture = Image.new("RGB", (SIDE * steps, SIDE), BACKGROUNDS[rng.choice(tuple(BACKGROUNDS))])
        pen = ImageDraw.Draw(picture)
        for place, (colour, _) in enumerate(way):
            width, height = rng.randint(12, SIDE - 4), rng.randint(12, SIDE - 4)
            x, y = place * SIDE + rng.randint(1, SIDE - 1 - width), rng.randint(1, SIDE - 1 - height)
            if not self.blind:
                pen.rectangle((x, y, x + width - 1, y + height - 1), fill=COLOURS[colour])
        colours, state = [colour for colour, _ in way], first[1]
        words = f"{', '.join(colours)} door {number}"
        told = ", ".join(f"{colour}: {start}>{self.table[colour, start]}" for colour, start in way)
        if self.verbose:
            told = f"{words}; " * rng.randint(0, self.verbose) + told

        if knobs.get("naming"):
            asked, answer, told = f"{number}: what color?", ", ".join(colours), ", ".join(colours)
        else:
            asked, answer = f"{number}: from {state} you come to?", here
        # One step: its fact is learned in one form and asked in the other, so it cannot be held out.
        key = f"rule/door {number}" if steps == 1 else f"rule/{' '.join(colours)}/{state}"
        category = f"{colours[0]} {state}" if steps == 1 else f"{steps} steps"
        return Problem(asked, picture, words, answer, answer, key, category, {"thought": told})
