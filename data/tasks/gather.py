"""Wide search under a budget, in a plan of one line: what to look up oneself, and what to give to sub-agents.

    find: c f k m, budget 7            a question: items, critical steps
     c (f k) (m) !                     c oneself, two assignments that run side by side

A letter is looked up by the one who plans, at its cost of 2 to 4 steps; "(f k)" is an assignment, "!" runs
all that stand before it as one group. A sub-agent takes one step and the costs of its items, and finds
nothing beyond its cap. A group costs one step and its longest way over eight places (Kimi K2.5, section 3).
What is not done when the budget ends is not found. Costs belong to letters and are told to nobody.

Rewards (`earlyfusion.data.tasks.gather:parallel`, ...): perf is the task's own, F1 of items; parallel,
assignments, of use or not; finish, the share of assignments that brought something new that was asked for;
steps are counted, at weight 0.
"""

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from earlyfusion.data.tasks.problem import Problem, Task, task

ITEMS = "abcdefghijklmnop"
COSTS = {item: Random(f"gather/{item}").randint(2, 4) for item in ITEMS}
PLACES, CAP, MOST = 8, 6, 16
"""Sub-agents at work at a time; steps after which one of them has found nothing; assignments that r_parallel
pays for, twice as many as there are items or places."""
SPAWNS = 0.25
"""Share of the documents of pretraining whose plan has random assignments."""
_WORD = re.compile(r"[a-p]|[()!]|\S")


@dataclass(frozen=True)
class Outcome:
    """What a plan came to. assigned, finished: assignments; steps: critical ones until it ended, with its
    budget at the latest; total: of everybody, were there no budget."""

    found: frozenset[str]
    assigned: int = 0
    finished: int = 0
    steps: int = 0
    total: int = 0
    valid: bool = True


def begins(steps: Sequence[int], places: int) -> list[int]:
    """When each of the assignments begins, taking the place that is free first, in their order."""
    free = [0] * places
    return [heapq.heapreplace(free, free[0] + one) for one in steps]


def longest_way(steps: Sequence[int], places: int) -> int:
    """Steps until all assignments are done."""
    return max((begun + one for begun, one in zip(begins(steps, places), steps)), default=0)


def played(
    plan: str, wanted: frozenset[str], budget: int, told: Callable[[str, int, int], None] | None = None
) -> Outcome:
    """A plan, step by step; one that cannot be read finds nothing. told: of every piece of work that begins
    in the budget, its items ("!" after those of a group, for giving it out), the step in which it begins and
    its steps."""
    found: set[str] = set()
    steps = total = assigned = finished = 0
    group: list[list[str]] = []
    inside: list[str] | None = None
    for word in _WORD.findall(plan):
        if word == "(" and inside is None:
            inside = []
        elif word == ")" and inside is not None:
            group.append(inside)
            inside = None
        elif word in COSTS and inside is not None:
            inside.append(word)
        elif word in COSTS:
            if told and steps < budget:
                told(word, steps, COSTS[word])
            steps, total = steps + COSTS[word], total + COSTS[word]
            if steps <= budget:
                found.add(word)
        elif word == "!" and inside is None:
            spent = [min(CAP, 1 + sum(COSTS[item] for item in items)) for items in group]
            if told and steps < budget:
                for items, begun, took in zip(group, begins(spent, PLACES), spent):
                    told(f"({' '.join(items)})", steps + 1 + begun, took)
                told("!", steps, 1)
            steps, total = steps + 1 + longest_way(spent, PLACES), total + 1 + sum(spent)
            for items in group:
                assigned += 1
                able = 1 + sum(COSTS[item] for item in items) <= CAP and steps <= budget
                new = {item for item in items if item in wanted} - found
                finished += bool(able and new and len(new) == len(items))
                found |= set(items) if able else set()
            group = []
        else:
            return Outcome(frozenset(), valid=False)
    # What was assigned and never run is work for its own sake.
    return Outcome(frozenset(found), assigned + len(group), finished, min(steps, budget), total)


def f1(found: frozenset[str], wanted: frozenset[str]) -> float:
    """Of items."""
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def serial(wanted: str) -> str:
    """Everything oneself, in the order asked for."""
    return " ".join(wanted)


def scheduled(wanted: str) -> str:
    """The longest items first, each to the assignment with the fewest steps, as many as there are places."""
    parts: list[list[str]] = [[] for _ in range(PLACES)]
    for item in sorted(wanted, key=lambda item: -COSTS[item]):
        min(parts, key=lambda part: sum(COSTS[one] for one in part)).append(item)
    return " ".join(f"({' '.join(part)})" for part in parts if part) + " !"


@task("gather")
class Gather(Task):
    """See the file's head. Knobs: items (least, most), budget."""

    levels = (
        {"items": (2, 8), "budget": 7},
        {"items": (6, 8), "budget": 7},
        {"items": (8, 8), "budget": 7},
    )

    def draw(self, rng: Random, heldout, knobs):
        """See Task."""
        wanted = "".join(rng.sample(ITEMS, rng.randint(*knobs["items"])))
        budget = knobs["budget"]
        plan = serial(wanted)
        if rng.random() < SPAWNS:
            # The form of assignments, and no strategy: their sizes are those of chance, and one is junk.
            cut, parts = rng.randint(1, len(wanted)), [rng.sample(ITEMS, rng.randint(1, 3))]
            given, own = wanted[:cut], wanted[cut:]
            while given:
                size = rng.randint(1, 3)
                parts.append([*given[:size]])
                given = given[size:]
            rng.shuffle(parts)
            plan = " ".join([*(f"({' '.join(part)})" for part in parts), "!", *own])
        words = f"find: {' '.join(wanted)}, budget {budget}"
        meta = {"wanted": wanted, "budget": budget}
        return Problem(
            "the plan?", None, words, wanted, plan, f"gather/{wanted}", f"{len(wanted)} items", meta
        )

    def score(self, problem, answer):
        """F1 of the items found."""
        return f1(outcome(problem, answer).found, frozenset(problem.meta["wanted"]))


def outcome(problem: Problem, response: str) -> Outcome:
    """What a response to a problem comes to."""
    return played(response, frozenset(problem.meta["wanted"]), problem.meta["budget"])


# Rewards beside the task's own, for `reward.name`.


def parallel(problem: Problem, response: str) -> float:
    """r_parallel: assignments as a share of MOST, 1 at most; against serial collapse. It asks for no use of
    them."""
    return min(1.0, outcome(problem, response).assigned / MOST)


def finish(problem: Problem, response: str) -> float:
    """r_finish: finished assignments as a share of all, 0 without any; against work for its own sake."""
    came = outcome(problem, response)
    return came.finished / came.assigned if came.assigned else 0.0


def collapsed(problem: Problem, response: str) -> float:
    """Whether nothing is assigned."""
    return float(not outcome(problem, response).assigned)


def steps(problem: Problem, response: str) -> float:
    """Critical steps, as a share of the budget."""
    return outcome(problem, response).steps / problem.meta["budget"]
