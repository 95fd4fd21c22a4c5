"""The swarm as an environment: the orchestrator is what reinforcement learning trains; sub-agents are frozen,
and what they write stands in tool messages, which no loss sees.

    environment = "swarm"
    environment_options = { agents = "runs/sft/model", docs = "docs", steps = 12 }
"""

from typing import Any

from earlyfusion.data.chat.template import Message, tools_message
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.rl.environments.base import Environment, EnvironmentFault, Step, environment
from earlyfusion.rl.swarm.agents import Limits, Speaker
from earlyfusion.rl.swarm.executor import ORCHESTRATOR, Swarm, SwarmLimits, speaker_of
from earlyfusion.rl.swarm.library import Library


@environment("swarm")
class SwarmEnvironment(Environment):
    """See the module. agents: who sub-agents are (`speaker_of`); docs: a folder, "" for no documents; the
    rest: SwarmLimits, with steps, tokens and seconds of one assignment as sub_steps, sub_tokens, sub_seconds.
    The question is the problem's; where `steps` is a budget, the prompt says how many critical steps there
    are."""

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
        self.speaker, self.library = shared_speaker(agents), shared_library(docs)
        self.swarm = Swarm(self.speaker, self.library, self.limits)

    def reset(self, problem: Problem) -> list[Message]:
        """The tools, the budget, the question."""
        budget = f" You have {self.limits.steps} critical steps." if self.limits.steps else ""
        system = Message("system", (Text(ORCHESTRATOR + budget, 0.0),))
        return [tools_message(self.swarm.tools), system, *problem.chat()]

    async def step(self, message: Message) -> Step:
        """Run the calls of a message."""
        return Step(await self.swarm.act(message), counts={"calls": len(message.calls)})


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
