"""`earlyfusion swarm plans`: plans of the task `gather` as a model writes them, beside two that bound them.

serial looks up everything by itself, oracle gives the longest items out first. Greedy plans on held-out
questions; metrics of `study swarm` (summary.json), and who works when of the first one. speed_up: critical
steps in which the serial plan, without a budget, has found as many items, over those of the plan; by_clock:
the same in seconds, of both in the real executor with sub-agents that wait STEP_S a step.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from earlyfusion.data.chat.template import Message
from earlyfusion.data.options import Options, verb
from earlyfusion.data.tasks.gather import (
    CAP,
    COSTS,
    PLACES,
    collapsed,
    f1,
    finish,
    outcome,
    played,
    scheduled,
    serial,
)
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import ask
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.figures import show
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.swarm.agents import Scripted
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits, conduct
from earlyfusion.rl.swarm.spans import Span, Trace

LEVELS = {"six_to_eight": 1, "eight": 2}
"""Name in the figures -> level of the task."""
MOST_TOKENS = 56
STEP_S, CLOCKED = 0.02, 4
"""Seconds of a step, and questions that are timed."""


class PlansOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("model",)
    model: str
    """model directory, trained on `gather`"""
    problems: PositiveInt = 160
    """held-out questions of each level"""
    seed: NonNegativeInt = 4242
    """which"""
    out: Path = Path("runs/swarm/plans")
    """folder for summary.json and, a folder a plan, timeline.html"""


def figures(problems: Sequence[Problem], plan_of: Callable[[Problem], str]) -> Record:
    """Means over the problems; steps and speed_up over the plans that find something."""
    found: Record = {"items": 0.0, "finished": 0.0, "collapsed": 0.0}
    steps = in_series = 0
    for problem in problems:
        plan, wanted = plan_of(problem), problem.meta["wanted"]
        came = outcome(problem, plan)
        right = len(came.found & frozenset(wanted))
        found["items"] += f1(came.found, frozenset(wanted)) / len(problems)
        found["finished"] += finish(problem, plan) / len(problems)
        found["collapsed"] += collapsed(problem, plan) / len(problems)
        # A serial plan takes the items in the order in which they are asked for.
        steps += came.steps
        in_series += sum(COSTS[item] for item in wanted[:right])
    return found | {"steps": steps / len(problems), "speed_up": in_series / steps if steps else 0.0}


def timeline(problem: Problem, plan: str, folder: Path) -> None:
    """Write who works when in a plan; a step is drawn as a second."""
    trace, groups = Trace(), 0

    def told(items: str, begun: int, took: int) -> None:
        nonlocal groups
        groups += items == "!"
        # A group waits for the last of it; for what the orchestrator does itself everybody waits.
        together = items[0] == "("
        agent, turn = ("sub-agent", groups) if together else ("orchestrator", -1 - len(trace.spans))
        about = {"swarm.turn": turn, "items": items}
        span = Span(len(trace.spans), None, "invoke_agent", f"{agent} {items}", begun, begun + took, about)
        trace.spans.append(span)

    came = played(plan, frozenset(problem.meta["wanted"]), problem.meta["budget"], told)
    counts = {"critical steps": came.steps, "total steps": came.total, "items": len(came.found)}
    trace.write(folder, f"{problem.description}: a second is a step", plan, counts)


async def seconds(plan: str, wanted: str, budget: int) -> float:
    """What a plan takes in the executor, by the clock."""
    pieces: list[str] = []
    played(plan, frozenset(wanted), budget, lambda items, begun, took: pieces.append(items))

    async def looked_up(messages: Sequence[Message]) -> str:
        found = messages[-1].text.split()
        await asyncio.sleep(STEP_S * min(CAP, 1 + sum(COSTS[one] for one in found)))
        return " ".join(found)

    async def planned(messages: Sequence[Message]) -> str | list[tuple[str, Record]]:
        calls: list[tuple[str, Record]] = []
        while pieces and pieces[0] != "!":
            piece = pieces.pop(0)
            if piece[0] == "(":
                calls.append(("assign_task", {"agent": "a", "prompt": piece[1:-1]}))
            else:
                await asyncio.sleep(STEP_S * COSTS[piece])
        if not pieces:
            return "done"
        pieces.pop(0)
        await asyncio.sleep(STEP_S)
        return [("create_subagent", {"name": "a", "system_prompt": "look up"}), *calls]

    swarm = Swarm(Scripted(looked_up), None, SwarmLimits(concurrent=PLACES))
    begun = time.perf_counter()
    await conduct(Scripted(planned), "?", swarm)
    return time.perf_counter() - begun


async def by_clock(problems: Sequence[Problem], plan_of: Callable[[Problem], str]) -> float:
    """speed_up in seconds; 0 where nothing is found."""
    took = in_series = 0.0
    for problem in problems:
        plan, wanted, budget = plan_of(problem), problem.meta["wanted"], problem.meta["budget"]
        right = len(outcome(problem, plan).found & frozenset(wanted))
        took += await seconds(plan, wanted, budget)
        if right:
            in_series += await seconds(serial(wanted[:right]), wanted, 99)
    return in_series / took


@verb
def plans(options: PlansOptions) -> None:
    """Entry of `earlyfusion swarm plans`."""
    folder = model_folder(options.model)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    told: Record = {}
    for name, level in LEVELS.items():
        entry = TaskEntry(name="gather", difficulty=level, form="twin")
        count, seed = options.problems, options.seed
        asked = ask(model, tokenizer, [entry], problems=count, seed=seed, max_new_tokens=MOST_TOKENS)
        said = {one.problem.key: answer.judged for one, answer in zip(asked.questions, asked.greedy)}
        problems = [one.problem for one in asked.questions]
        sides: dict[str, Callable[[Problem], str]] = {
            "model": lambda problem: said[problem.key],  # noqa: B023
            "serial": lambda problem: serial(problem.meta["wanted"]),
            "oracle": lambda problem: scheduled(problem.meta["wanted"]),
        }
        told[name] = {side: figures(problems, plan_of) for side, plan_of in sides.items()}
        for side, plan_of in sides.items():
            told[name][side]["by_clock"] = asyncio.run(by_clock(problems[:CLOCKED], plan_of))
            timeline(problems[0], plan_of(problems[0]), options.out / name / side)
        show(f"{len(problems)} held-out questions, {name.replace('_', ' ')} items", told[name])
    print(f"saved {write_json(options.out / 'summary.json', told)}")
