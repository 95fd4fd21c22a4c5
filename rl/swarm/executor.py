"""The swarm: an orchestrator that makes sub-agents and gives them work; what it says in one message runs side
by side.

    swarm = Swarm(speaker, library, SwarmLimits(agents=8, concurrent=4))
    answer = await conduct(orchestrator, question, swarm)

Tools of the orchestrator, in the chat form (Kimi K2.5, section 3):

    create_subagent(name, system_prompt)     a sub-agent that can be given work
    assign_task(agent, prompt)               work for it; all of one message are one parallel group
    search(query), read(place)               the library, by itself

Sub-agents have the library alone: they make no agents. A group runs as coroutines, `concurrent` at a time;
what fails, is too late or beyond a limit is told to the orchestrator as the output of its call, and the run
goes on. Its answer takes in a report whole by its number, {report 2}: so it can be longer than what one agent
writes, and nothing has to be copied. As an environment ("swarm") the orchestrator is what reinforcement
learning trains; sub-agents are frozen, and what they write stands in tool messages, which no loss sees.
"""

import asyncio
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from earlyfusion.data.chat.declare import declaration
from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.gather import longest_way
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record, function_at
from earlyfusion.model.hub.config import model_folder, model_name
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.swarm.agents import (
    Endpoint,
    Limits,
    Local,
    Report,
    Scripted,
    Speaker,
    call_tool,
    shown,
    work,
)
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.reader import Reader
from earlyfusion.rl.swarm.spans import Trace

MOST_ASSIGNMENTS = 64
"""Assignments of one message that are run, and own look-ups; the others are told so."""
TOO_MANY = f"not run: at most {MOST_ASSIGNMENTS} in one message"
MOST_NAME = 64
"""Characters of an agent's name."""


@dataclass(frozen=True)
class SwarmLimits:
    """Budgets. agents: made in all; concurrent: that work at a time; turns: messages of the orchestrator;
    steps: critical steps, 0 for no limit; tokens: written by all sub-agents together; sub: those of one
    assignment."""

    agents: int = 32
    concurrent: int = 4
    turns: int = 16
    steps: int = 0
    tokens: int = 200_000
    sub: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if min(self.agents, self.concurrent, self.turns, self.tokens) < 1 or self.steps < 0:
            raise DataError(f"{self}: limits are at least 1 (steps: 0 for none)")


def library_tools(library: Library | None) -> dict[str, Any]:
    """The tools of everybody."""
    if library is None:
        return {}

    def search(query: str) -> str:
        """Find parts of the documents that hold these words."""
        return library.search(query)

    def read(place: str) -> Any:
        """Read the part of a document, or see a picture, by the place that search gave."""
        return library.read(place)

    return {"search": search, "read": read}


class Swarm:
    """The sub-agents of one question, and what was spent on it."""

    def __init__(
        self,
        speaker: Speaker,
        library: Library | None = None,
        limits: SwarmLimits | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.speaker, self.limits = speaker, limits or SwarmLimits()
        self.trace = trace or Trace()
        self.own = library_tools(library)
        self.declared = [declaration(tool) for tool in self.own.values()]
        self.systems: dict[str, str] = {}
        self.turn = self.critical_steps = self.total_steps = self.tokens = 0
        self.assigned = self.finished = self.largest_group = 0
        self.reports: dict[int, Report] = {}
        """Number of an assignment, from 1 -> what came of it."""

    def create_subagent(self, name: str, system_prompt: str) -> str:
        """Make a sub-agent that can be given work by its name."""
        if not name or len(name) > MOST_NAME:
            return f"a name of {len(name)} characters; expected 1 to {MOST_NAME}"
        if name in self.systems:
            return f"{name} is there already"
        if len(self.systems) >= self.limits.agents:
            return f"not made: at most {self.limits.agents} sub-agents"
        self.systems[name] = system_prompt
        return f"{name} is ready"

    def assign_task(self, agent: str, prompt: str) -> str:
        """Give a sub-agent work. All assignments of one message run side by side."""
        raise NotImplementedError  # declared for the model; a group is run by `act`

    @property
    def tools(self) -> list[Record]:
        """Declarations of the orchestrator's tools."""
        return [declaration(self.create_subagent), declaration(self.assign_task), *self.declared]

    @property
    def system(self) -> str:
        """What the orchestrator is told first, the budget in it."""
        steps = self.limits.steps
        return ORCHESTRATOR + (f" You have {steps} critical steps." if steps else "")

    @property
    def spent(self) -> str:
        """Why nothing more may be assigned; "" while it may."""
        limits = self.limits
        if limits.steps and self.critical_steps >= limits.steps:
            return f"the budget of {limits.steps} critical steps is used up"
        if self.tokens >= limits.tokens:
            return f"the budget of {limits.tokens:,} tokens is used up"
        return f"{limits.turns} messages are all there are" if self.turn >= limits.turns else ""

    @property
    def counts(self) -> dict[str, int]:
        """What was spent, and what came of it."""
        return {
            "sub_agents": len(self.systems),
            "assigned": self.assigned,
            "finished": self.finished,
            "largest_group": self.largest_group,
            "critical_steps": self.critical_steps,
            "total_steps": self.total_steps,
            "tokens_of_sub_agents": self.tokens,
        }

    async def act(self, message: Message, parent: int | None = None) -> list[Message]:
        """Run the calls of an orchestrator's message; one tool message for every call, in their order."""
        self.turn += 1
        self._step()
        answers: dict[int, Message] = {}
        looked = 0
        group: list[tuple[int, ToolCall]] = []
        direct = {"create_subagent": self.create_subagent, **self.own}
        for number, call in enumerate(message.calls, 1):
            refused: str | None = None
            if call.tool in self.own:
                # What it looks up itself is done one after the other, a step each.
                refused = self.spent or (looked >= MOST_ASSIGNMENTS and TOO_MANY) or None
                if looked and refused is None:
                    self._step()
                looked += 1
            elif call.tool == "assign_task":
                refused = self._refused(call, [given for _, given in group])

            # Agents of this message can be given work in it.
            if refused is not None:
                answers[number] = Message("tool", shown(refused), tool=call.tool, index=number)
            elif call.tool != "assign_task":
                answers[number] = await call_tool(direct, call, number, self.trace, parent)
            else:
                group.append((number, call))

        room, first = asyncio.Semaphore(self.limits.concurrent), self.assigned + 1
        self.assigned += len(group)
        work_of = (self._assignment(i, call, room, parent) for i, (_, call) in enumerate(group, first))
        reports = await asyncio.gather(*work_of)
        for i, ((number, _), report) in enumerate(zip(group, reports), first):
            text = f"report {i}: {report.text}" if report.finished else f"not finished: {report.why}"
            answers[number] = Message("tool", shown(text), tool="assign_task", index=number)
        if group:
            self.critical_steps += longest_way([one.steps for one in reports], self.limits.concurrent)
            self.largest_group = max(self.largest_group, len(group))
        return [answers[number] for number in sorted(answers)]

    def _step(self) -> None:
        self.critical_steps += 1
        self.total_steps += 1

    def _refused(self, call: ToolCall, ahead: Sequence[ToolCall]) -> str | None:
        """Why an assignment is not run."""
        try:
            inspect.signature(self.assign_task).bind(**call.arguments)
        except TypeError as error:
            return f"assign_task: {error}"
        agent = str(call.arguments["agent"])
        if agent not in self.systems:
            return f"there is no sub-agent {agent!r}; {did_you_mean(agent, self.systems)}"
        if call in ahead:
            return f"not run: assignment {ahead.index(call) + 1} of this message is the same"
        if len(ahead) >= MOST_ASSIGNMENTS:
            return TOO_MANY
        return self.spent or None

    def whole(self, answer: str) -> str:
        """An answer with the reports that it takes in, each of them once."""
        left = {i: report.text for i, report in self.reports.items() if report.finished}
        return _REPORT.sub(lambda found: left.pop(int(found[1]), found[0]), answer)

    async def _assignment(
        self, number: int, call: ToolCall, room: asyncio.Semaphore, parent: int | None
    ) -> Report:
        agent, prompt = str(call.arguments["agent"]), str(call.arguments["prompt"])
        async with room:
            with self.trace.span("invoke_agent", agent, parent, **{"swarm.turn": self.turn}) as span:
                span.about["gen_ai.input.messages"] = prompt[:500]
                system = self.systems[agent]
                limits = self.limits.sub
                report = await work(
                    self.speaker, system, prompt, self.own, self.declared, limits, self.trace, span.number
                )
                span.about |= {"swarm.finished": report.finished, "swarm.steps": report.steps}
                span.about |= {"gen_ai.usage.output_tokens": report.tokens, "swarm.why": report.why}
        self.total_steps += report.steps
        self.tokens += report.tokens
        self.finished += report.finished
        self.reports[number] = report
        return report


ORCHESTRATOR = (
    "Answer the question from the documents and name the places that you took it from, as [place]. You may"
    " make sub-agents and give them work; all work that you give in one message is done at the same time. In"
    " your answer {report 2} stands for the whole of report 2."
)
_REPORT = re.compile(r"\{report (\d{1,6})\}")


async def conduct(orchestrator: Speaker, question: str, swarm: Swarm, most_tokens: int = 2048) -> str:
    """The orchestrator's last word on a question; what it said so far where its limits end it."""
    messages = [Message("system", (Text(swarm.system, 0.0),)), Message("user", (Text(question, 0.0),))]
    trace = swarm.trace
    with trace.span(
        "invoke_agent", "orchestrator", None, **{"gen_ai.request.model": orchestrator.name}
    ) as span:
        last = ""
        while True:
            with trace.span("chat", orchestrator.name, span.number) as one:
                said = await orchestrator.say(messages, swarm.tools, most_tokens)
                one.about["gen_ai.usage.input_tokens"] = said.read
                one.about["gen_ai.usage.output_tokens"] = said.written
            last = swarm.whole(said.message.text) or last
            if not said.message.calls:
                return last
            if swarm.spent:
                span.about["swarm.why"] = swarm.spent
                return last or f"(no answer: {swarm.spent})"
            messages.append(said.message)
            messages += await swarm.act(said.message, span.number)


def speaker_of(agents: str, model: str | None = None) -> Speaker:
    """Who speaks: a URL, "package.module:function" of a script, a model directory, or "reader"
    (reader.py)."""
    if agents == "reader":
        return Reader()
    if agents.startswith(("http://", "https://")):
        return Endpoint(agents, model)
    if ":" in agents and not agents.startswith("embedded:"):
        return Scripted(function_at(agents, "agents"), agents)
    # Float32 on this machine's CPU, whatever the weights are kept in.
    folder = model_folder(agents)
    net = load_model(folder, dtype=torch.float32)
    return Local(net, Tokenizer.load(folder), name=model_name(folder))


def cited(answer: str, library: Library) -> Sequence[str]:
    """The places of the library that an answer names in brackets."""
    return [place for place in library.places if f"[{place}]" in answer]
