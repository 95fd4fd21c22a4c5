"""Verbs of the swarm: a question over a folder of documents, answered by an orchestrator and its sub-agents.

earlyfusion swarm run "which recipes train on one GPU?" --docs docs --model http://localhost:8000/v1
earlyfusion swarm run "Where do Ann and Bo live?" --docs runs/collection/docs --model embedded:orchestrator
earlyfusion swarm collection runs/collection        a folder to try it on, and questions with their answers
earlyfusion swarm measure embedded:orchestrator     held-out questions, beside the two bounds

A tree of agents shows who works on what. OUT gets trace.jsonl (the names of OpenTelemetry's conventions),
timeline.html and answer.md with the places that the answer names.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from earlyfusion.data.chat.template import Message
from earlyfusion.data.options import Options, verb
from earlyfusion.data.tables import print_table
from earlyfusion.data.tasks.collection import HELDOUT_WORLD, KINDS, Collection, world_of
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.errors import UserError, one_line
from earlyfusion.kernels.files import Record, write_atomic, write_json
from earlyfusion.rl.environments.swarm import finish, shared_library, shared_speaker
from earlyfusion.rl.swarm.agents import Limits, Speaker, shown
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits, cited, conduct, speaker_of
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.plans import Alone, Planner
from earlyfusion.rl.swarm.spans import Trace

SHIPPED = "embedded:orchestrator"
SHOWN = 60
"""Characters of a piece of work in the tree."""


class RunOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("question",)
    question: str
    """what is asked"""
    docs: Path
    """folder of text, Markdown, HTML and pictures"""
    model: str
    """orchestrator: URL of an OpenAI-compatible server that takes tools, model directory, or
    package.module:function"""
    agents: str = ""
    """sub-agents, named alike, or `reader`, which quotes documents; if not given the orchestrator's model,
    for embedded:orchestrator `reader`, with which it was trained"""
    endpoint_model: str | None = None
    """name of the model at the URL; its first one if not given"""
    max_agents: PositiveInt = 16
    """sub-agents in all"""
    concurrent: PositiveInt = 4
    """sub-agents at work at a time"""
    budget: NonNegativeInt = 0
    """critical steps; 0 for no limit"""
    turns: PositiveInt = 16
    """messages of the orchestrator"""
    steps: PositiveInt = 8
    """messages of one assignment"""
    seconds: PositiveFloat = 120.0
    """of one assignment, by the clock"""
    out: Path = Path("runs/swarm")
    """folder for the trace, the timeline and the answer"""


def tree_of(trace: Trace, question: str) -> Tree:
    """Who works on what: agents under those that gave them work."""
    root = Tree(escape(question[:SHOWN]))
    nodes: dict[int | None, Tree] = {None: root}
    for span in list(trace.spans):
        if span.operation != "invoke_agent":
            continue
        task = str(span.about.get("gen_ai.input.messages", ""))[:SHOWN]
        seconds = (span.end if span.end is not None else trace.now()) - span.start
        mark = "…" if span.end is None else "✓" if span.about.get("swarm.finished", True) else "✗"
        line = f"{mark} [bold]{escape(span.agent)}[/bold] {seconds:.1f} s {escape(' '.join(task.split()))}"
        nodes[span.number] = nodes.get(span.parent, root).add(line)
    return root


@verb
def run(options: RunOptions) -> None:
    """Entry of `earlyfusion swarm run`."""
    library = Library(options.docs)
    orchestrator = speaker_of(options.model, options.endpoint_model)
    agents = options.agents or ("reader" if options.model == SHIPPED else "")
    speaker = speaker_of(agents, options.endpoint_model) if agents else orchestrator
    limits = SwarmLimits(
        agents=options.max_agents,
        concurrent=options.concurrent,
        turns=options.turns,
        steps=options.budget,
        sub=Limits(steps=options.steps, seconds=options.seconds),
    )
    console = Console(stderr=True)
    try:
        with Live(console=console, refresh_per_second=8, transient=not console.is_terminal) as live:
            trace = Trace(lambda one: live.update(tree_of(one, options.question)))
            swarm = Swarm(speaker, library, limits, trace)
            answer = asyncio.run(conduct(orchestrator, options.question, swarm))
    except Exception as error:
        # What was done until then is not lost.
        why = f"(no answer: {one_line(error, 300)})"
        page = trace.write(options.out, options.question, why, swarm.counts)
        print(f"ended early; written: {page}, {options.out / 'trace.jsonl'}")
        raise
    finally:
        for one in {id(each): each for each in (orchestrator, speaker)}.values():
            close = getattr(one, "close", None)
            if close is not None:
                close()

    page = trace.write(options.out, options.question, answer, swarm.counts)
    places = cited(answer, library)
    sources = "\n".join(f"- {place}" for place in places) or "(the answer names no place)"
    write_atomic(options.out / "answer.md", f"{answer}\n\nSources:\n{sources}\n")
    print(answer)
    print(f"sources: {', '.join(places) or 'none named'}")
    print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in swarm.counts.items()))
    print(f"written: {page}, {options.out / 'trace.jsonl'}, {options.out / 'answer.md'}")


class CollectionOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("out",)
    out: Path
    """folder to write: docs/ and questions.jsonl"""
    seed: NonNegativeInt = HELDOUT_WORLD
    """which collection; the default is the first that nothing was trained on"""
    questions: PositiveInt = 20
    """questions with their answers"""


@verb
def collection(options: CollectionOptions) -> None:
    """Entry of `earlyfusion swarm collection`."""
    if (options.out / "docs").exists():
        raise UserError(f"{options.out} holds docs already; name another folder")
    world_of(options.seed).write(options.out / "docs")
    task, rng, rows = Collection(), Random(options.seed), []
    for number in range(options.questions):
        one = task.ask(options.seed, rng, KINDS[number % len(KINDS)], task.levels[0])
        rows.append({"question": one.question, "kind": one.category, "items": one.answer})
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_atomic(options.out / "questions.jsonl", "".join(f"{line}\n" for line in lines))
    print(f"written: {options.out / 'docs'}, {options.out / 'questions.jsonl'}")


class MeasureOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("model",)
    model: str
    """orchestrator, as of `swarm run`"""
    agents: str = "reader"
    """sub-agents, named alike"""
    kinds: list[str] = list(KINDS)
    """kinds of questions"""
    difficulty: NonNegativeInt = 0
    """level of the task `collection`: 0 asks for 2 to 5 items, 1 for 6 to 8"""
    problems: PositiveInt = 60
    """held-out questions"""
    concurrent: PositiveInt = 8
    """sub-agents at work at a time"""
    out: Path = Path("runs/swarm/measured.json")
    """file for the figures"""


AT_A_TIME = 8
"""Questions that are measured at a time."""


async def played(
    options: MeasureOptions, problems: Sequence[Problem], speaker_for: Callable[[Problem], Speaker]
) -> list[Record]:
    """What an orchestrator made of each problem."""
    room, task = asyncio.Semaphore(AT_A_TIME), Collection()

    async def one(problem: Problem) -> Record:
        async with room:
            limits = SwarmLimits(concurrent=options.concurrent, turns=64)
            library = shared_library(problem.meta["docs"])
            swarm = Swarm(shared_speaker(options.agents), library, limits)
            try:
                answer = await conduct(speaker_for(problem), problem.question, swarm)
            except Exception as error:  # a conversation that is longer than the engine's memory
                answer = f"(no answer: {one_line(error, 200)})"
            reports = [
                Message("tool", shown(f"report {i}: {one.text}"), tool="assign_task")
                for i, one in swarm.reports.items()
            ]
            return {
                "kind": problem.category,
                "items": task.reward(problem, answer),
                "finished": finish(problem, reports, swarm.counts),
                "alone": float(not swarm.assigned),
                "critical_steps": swarm.critical_steps,
                "total_steps": swarm.total_steps,
            }

    return await asyncio.gather(*map(one, problems))


@verb
def measure(options: MeasureOptions) -> None:
    """Entry of `earlyfusion swarm measure`."""
    task = Collection(options.kinds)
    task.name = "collection"
    problems = task.test_problems(options.problems, 0, options.difficulty)
    model, reader = speaker_of(options.model), shared_speaker("reader")
    sides: dict[str, Callable[[Problem], Speaker]] = {
        options.model: lambda problem: model,
        "oracle": Planner,
        "alone": lambda problem: Alone(problem, reader),
    }
    figures: Record = {}
    table = Table(title=f"{len(problems)} held-out questions", title_justify="left")
    for head in (
        "orchestrator",
        "kind",
        "questions",
        "item F1",
        "finished",
        "alone",
        "critical steps",
        "total",
    ):
        table.add_column(head)
    for name, side in sides.items():
        rows = asyncio.run(played(options, problems, side))
        for kind in ("all", *options.kinds):
            own = [row for row in rows if kind in ("all", row["kind"])]
            means = (
                {key: sum(row[key] for row in own) / len(own) for key in own[0] if key != "kind"}
                if own
                else {}
            )
            if means:
                figures.setdefault(name, {})[kind] = {"questions": len(own), **means}
                table.add_row(name, kind, str(len(own)), *(f"{value:.2f}" for value in means.values()))
    print_table(table)
    print(f"saved {write_json(options.out, figures)}")
    for one in (model, reader):
        close = getattr(one, "close", None)
        if close is not None:
            close()
