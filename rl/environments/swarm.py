"""The swarm as an environment: the orchestrator is what reinforcement learning trains; sub-agents are frozen,
and what they write stands in tool messages, which no loss sees.

    environment = "swarm"
    environment_options = { agents = "runs/sft/model", docs = "docs", steps = 12 }

Rewards beside the task's, for `reward.name`, of what the executor counted (Kimi K2.5, section 3; its forms
are not published):

    earlyfusion.rl.environments.swarm:parallel    r_parallel, against serial collapse
    earlyfusion.rl.environments.swarm:finish      r_finish, against work for its own sake
"""

from collections.abc import Mapping, Sequence
from typing import Any

from earlyfusion.data.chat.template import Message, tools_message
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.collection import claims_of
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment
from earlyfusion.rl.swarm.agents import Limits, Speaker
from earlyfusion.rl.swarm.executor import Swarm, SwarmLimits, speaker_of
from earlyfusion.rl.swarm.library import Library


@environment("swarm")
class SwarmEnvironment(Environment):
    """See the module. agents: who sub-agents are (`speaker_of`); docs: a folder, "" for that of the problem,
    if it has one; the rest: SwarmLimits, with steps, tokens and seconds of one assignment as sub_steps,
    sub_tokens, sub_seconds. The question is the problem's; where `steps` is a budget, the prompt says how
    many critical steps there are."""

    answers = True

    def __init__(
        self,
        agents: str,
        docs: str = "",
        *,
        sub_steps: int = 8,
        sub_tokens: int = 4096,
        sub_seconds: float = 60.0,
        **limits: Any,
    ) -> None:
        try:
            self.limits = SwarmLimits(**limits, sub=Limits(sub_steps, sub_tokens, sub_seconds))
        except TypeError as error:
            raise EnvironmentFault(f"swarm: {error}") from None
        self.speaker, self.docs = shared_speaker(agents), docs

    def reset(self, problem: Problem) -> list[Message]:
        """The tools, the budget, the question."""
        library = shared_library(self.docs or problem.meta.get("docs", ""))
        self.swarm = Swarm(self.speaker, library, self.limits)
        system = Message("system", (Text(self.swarm.system, 0.0),))
        return [tools_message(self.swarm.tools), system, *problem.chat()]

    async def step(self, message: Message) -> Step:
        """Run the calls of a message."""
        before = self.swarm.counts
        messages = await self.swarm.act(message)
        spent = {name: count - before[name] for name, count in self.swarm.counts.items() if name in COUNTS}
        return Step(messages, counts={"calls": len(message.calls), **spent})

    def answer(self, text: str) -> str:
        """With the reports that it takes in."""
        return self.swarm.whole(text)


COUNTS = ("assigned", "finished", "critical_steps", "total_steps")
"""Of the executor, for metrics and rewards."""


def parallel(problem: Problem, counts: Mapping[str, int]) -> float:
    """r_parallel: the share of all steps that are not on the critical path; 0 for a serial one."""
    total = counts.get("total_steps", 0)
    return 1 - counts["critical_steps"] / total if total else 0.0


def finish(problem: Problem, messages: Sequence[Message], counts: Mapping[str, int]) -> float:
    """r_finish: assignments that reported something asked for, that no earlier one had, as a share of all; of
    problems that do not say what is asked for (meta items, values), those that were finished."""
    assigned, useful = counts.get("assigned", 0), counts.get("finished", 0)
    if "items" in problem.meta:
        useful = 0
        left = {(subject, value) for subject, value in [*problem.meta["items"], *problem.meta["on_the_way"]]}
        for message in messages:
            if message.tool == "assign_task" and message.text.startswith("report "):
                found = left & claims_of(message.text, *map(set, zip(*left))) if left else set()
                useful, left = useful + bool(found), left - found
    return useful / assigned if assigned else 0.0


def critical(problem: Problem, counts: Mapping[str, int]) -> float:
    """Critical steps, to be counted at weight 0."""
    return float(counts.get("critical_steps", 0))


_SPEAKERS: dict[str, Speaker] = {}
_LIBRARIES: dict[str, Library] = {}


def shared_speaker(agents: str) -> Speaker:
    """One speaker for all answers of a process: their sub-agents share its batch."""
    if agents not in _SPEAKERS:
        _SPEAKERS[agents] = speaker_of(agents)
    return _SPEAKERS[agents]


def shared_library(docs: str) -> Library | None:
    """One index of a folder for all answers of a process."""
    if docs and docs not in _LIBRARIES:
        _LIBRARIES[docs] = Library(docs)
    return _LIBRARIES.get(docs)
