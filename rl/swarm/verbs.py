"""Verbs of the swarm: a question over a folder of documents, answered by an orchestrator and its sub-agents.

earlyfusion swarm run "which recipes train on one GPU?" --docs docs --model http://localhost:8000/v1
earlyfusion swarm run "how many red shapes are there?" --docs pictures --model runs/sft/model --max-agents 8

A tree of agents shows who works on what. OUT gets trace.jsonl (the names of OpenTelemetry's conventions),
timeline.html and answer.md with the places that the answer names.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.tree import Tree

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import write_atomic
from earlyfusion.rl.swarm.agents import Limits
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits, cited, conduct, speaker_of
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.spans import Trace

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
    """sub-agents, named alike; the orchestrator's model if not given"""
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
    speaker = speaker_of(options.agents, options.endpoint_model) if options.agents else orchestrator
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
