"""Kinds of questions of an exam: which of a graph's questions are asked, and which answers are taken.

    kinds = {
        "color": Kind(r"^what color"),                 of the questions that training also asks, those that
                                                       fit
        "exists": Kind(r"^is there", balanced=True),   yes and no in balance
        "objects": Kind(r"^how many objects", lowest=1),   answers spread evenly from 1 to 4
        "sorting": Kind(ask=sorted_objects),           a question of its own, or None where there is none
    }

Answers are spread so that a constant one earns little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from earlyfusion.data.synth.graph import Graph, Question

# Pictures looked at before another answer is drawn.
TRIES = 2000
HIGHEST = 4
"""Largest answer of a question of number."""


@dataclass(frozen=True)
class Kind:
    """One kind of question.

    pattern: what its wording begins with (a regular expression). ask: makes the question, in place of a
    choice among the graph's own. balanced: yes and no are equally likely. lowest: the answer is drawn first,
    from `lowest` to HIGHEST.
    """

    pattern: str = ""
    ask: Callable[[Any, Random], Question | None] | None = None
    balanced: bool = False
    lowest: int | None = None

    def draw(self, rng: Random, make: Callable[[Random], Graph], listed: int) -> tuple[Graph, Question]:
        """A graph and its question. listed: how many questions a graph is asked to list.

        Raises RuntimeError when no graph has one: the generator has changed.
        """
        # The answer first, then a picture that has it: pictures drawn first have mostly small answers.
        number = None
        for attempt in range(10 * TRIES):
            # Some answers are rare: after many pictures without one another is drawn.
            if self.lowest is not None and attempt % TRIES == 0:
                number = str(rng.randint(self.lowest, HIGHEST))

            graph = make(rng)
            asked = self.ask(graph, rng) if self.ask else self._choose(graph, rng, listed, number)
            # A coin decides before the picture whether yes or no is wanted.
            if asked is None or (self.balanced and asked[1] != ("yes", "no")[rng.random() < 0.5]):
                continue
            return graph, asked
        raise RuntimeError(f"no question {self.pattern!r} in {attempt} generated pictures")

    def _choose(self, graph: Graph, rng: Random, listed: int, number: str | None) -> Question | None:
        fitting = []
        for question, answer in graph.questions(rng, listed):
            if re.search(self.pattern, question) and number in (None, answer):
                fitting.append((question, answer))
        return rng.choice(fitting) if fitting else None
