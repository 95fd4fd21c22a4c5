"""Planners that know the answer's plan: bounds for an orchestrator, and the conversations that one begins
with.

    Planner(problem)                    side by side what can be: the oracle
    Planner(problem, together=False)    one assignment at a time
    Alone(problem, reader)              no sub-agent: searches and reads by itself, the serial bound

    [[data.sources]]
    name = "plans"
    kind = "earlyfusion.rl.swarm.plans:Plans"

A document is a conversation with the environment `swarm` as it really went: its tools, budget, question, the
planner's messages, what the executor answered. Only the planner's messages are learned.
"""

import asyncio
import re
from collections.abc import Sequence
from random import Random

from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Message, ToolCall, chat_sample
from earlyfusion.data.sample import Sample, Text
from earlyfusion.data.sources.base import Generated, GeneratedOptions, source
from earlyfusion.data.tasks.collection import KINDS, Collection
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.kernels.files import Record
from earlyfusion.rl.environments.swarm import SwarmEnvironment
from earlyfusion.rl.swarm.agents import Said, Speaker

AGENT, SYSTEM = "reader", "Search the documents and quote them, with the place."
"""The sub-agent of all plans; it may have any number of assignments at a time."""


class Planner:
    """A speaker that assigns what the problem's plan says, and answers with the reports."""

    name = "planner"

    def __init__(self, problem: Problem, together: bool = True) -> None:
        self.groups = problem.meta["plan"]
        if not together:
            self.groups = [[asked] for group in self.groups for asked in group]
        self.chain = problem.category == "deep"

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker."""
        told = [one.text for one in messages if one.tool == "assign_task"]
        turn = sum(bool(one.calls) for one in messages)
        if turn < len(self.groups) and not any("used up" in text for text in told):
            calls = [ToolCall("assign_task", {"agent": AGENT, "prompt": one}) for one in self.groups[turn]]
            if not turn:
                calls.insert(0, ToolCall("create_subagent", {"name": AGENT, "system_prompt": SYSTEM}))
            return Said(Message("assistant", (), calls=tuple(calls)))
        reports = [found[1] for text in told if (found := re.match(r"report (\d+):", text))]
        # Of a chain the end is the answer.
        taken = reports[-1:] if self.chain else reports
        answer = "\n".join(f"{{report {number}}}" for number in taken) or "I found nothing."
        return Said(Message("assistant", (Text(answer),)))


class Alone:
    """A speaker that does all of a problem's plan by itself, as `reader` would."""

    name = "alone"

    def __init__(self, problem: Problem, reader: Speaker) -> None:
        self.left = [asked for group in problem.meta["plan"] for asked in group]
        self.reader, self.lines, self.talk = reader, list[str](), list[Message]()

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker."""
        if self.talk:
            self.talk.append(messages[-1])
        while True:
            if not self.talk:
                if not self.left:
                    return Said(Message("assistant", (Text("\n".join(self.lines)),)))
                self.talk = [Message("user", (Text(self.left.pop(0)),))]
            said = await self.reader.say(self.talk, tools, most_tokens)
            if said.message.calls:
                self.talk.append(said.message)
                return said
            self.lines.append(said.message.text)
            self.talk = []


class PlansOptions(GeneratedOptions):
    kinds: list[str] = list(KINDS)
    """Kinds of questions of the task `collection`."""
    difficulty: int = 0
    """Its level."""
    worlds: PositiveInt = 64
    """Its collections."""
    one_by_one: float = Field(0.5, ge=0, le=1)
    """Share of plans with one assignment at a time."""
    budgets: tuple[int, int] = (8, 24)
    """Critical steps (least, most) that half of the prompts name."""
    agents: str = "reader"
    """Who the sub-agents are."""
    in_words: bool = False
    """The plan as lines of text and nothing else: to learn to write names again, of which a conversation with
    its markup has few."""


@source("swarm_plans", PlansOptions, pictures=False, chat=True)
class Plans(Generated):
    """See the file's head."""

    def open(self) -> None:
        self.task = Collection(self.options.kinds, self.options.worlds)
        self.task.name = "collection"

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        options = self.options
        rng = Random(f"{'heldout' if heldout else self.seed}/plans/{number}")
        problem = self.task.sample(rng.getrandbits(48), "test" if heldout else "train", options.difficulty)
        steps = rng.randint(*options.budgets) if rng.random() < 0.5 else 0
        planner = Planner(problem, together=rng.random() >= options.one_by_one)

        async def played() -> list[Message]:
            place = SwarmEnvironment(options.agents, steps=steps, concurrent=16)
            messages = place.reset(problem)
            while True:
                said = (await planner.say(messages, (), 0)).message
                messages.append(said)
                if not said.calls:
                    return messages
                messages += (await place.step(said)).messages

        if options.in_words:
            lines = "\n".join(asked for group in problem.meta["plan"] for asked in group)
            messages = [Message("user", (Text(problem.question, 0.0),)), Message("assistant", (Text(lines),))]
        else:
            messages = asyncio.run(played())
        return chat_sample(messages, source=self.name, key=key)
