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
