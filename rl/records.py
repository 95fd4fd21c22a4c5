"""What a rollout and a measured answer are, as they are logged, shown and compared.

Rollouts are kept by group (one prompt, several answers); measurements hold one greedy answer for each
held-out problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image as PILImage


@dataclass(frozen=True)
class AnswerRecord:
    """One sampled answer. reward: after all shaping; score: of the task or the reward function alone;
    logprob: sum over its tokens under the policy that sampled it, nats; status: see rewards.STATUSES; finish:
    stop, length or cancelled."""

    text: str
    tokens: int
    score: float
    reward: float
    advantage: float
    logprob: float
    finish: str
    status: str = "ok"


@dataclass(frozen=True)
class GroupRecord:
    """All answers to one prompt at one update. prompt: the words of the prompt; picture: what was shown, or
    None."""

    update: int
    task: str
    form: str
    key: str
    difficulty: Any
    prompt: str
    target: str
    answers: Sequence[AnswerRecord]
    picture: PILImage.Image | None = None

    @property
    def mean_score(self) -> float:
        """Mean score of the answers."""
        return sum(answer.score for answer in self.answers) / max(1, len(self.answers))


@dataclass(frozen=True)
class Measured:
    """One held-out problem, answered greedily. score: the task's, in [0, 1]; solved: see measure.SOLVED_FROM;
    p_target: probability of the target answer's tokens and the end after them; confidence: probability of the
    greedy answer; entropy: mean over the greedy answer's tokens of the next-token entropy, nats; sampled:
    scores of the sampled answers, if any were asked for."""

    task: str
    form: str
    key: str
    category: str
    prompt: str
    target: str
    answer: str
    score: float
    solved: bool
    p_target: float
    confidence: float
    entropy: float
    sampled: tuple[float, ...] = ()
    picture: PILImage.Image | None = None
    label: str = ""
    """TaskEntry.label of what was measured."""
    ended: bool = True
    """Whether the greedy answer ended by itself within the limit; one that was cut off counts as no answer.
    """
    solved_4x: bool = False
    ended_4x: bool = True
    """The same with a limit four times as long: a policy that does not end its answers does not gain by the
    limit."""
    sandbox: str = ""
    """Of answers with tools: the walls of the sandbox that were missing and those that stood, where any was
    missing."""
