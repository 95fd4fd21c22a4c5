"""Conversations with a Python tool: zero-vision SFT and its arm with pictures.

    zero_vision   the picture is described in words, or typed as an array; no picture is in the document
    chat_scenes   the same conversations (same seed and number: same picture, questions, programs) over the
                  picture itself

Purpose (Kimi K2.5 §2.2): image operations are learned as programs, in words; pretraining on both carries them
to pixels. Tool outputs are what the programs really give; they have no loss weight. Every call is a program
of its own, as in eval/sandbox/host.py, where the picture is stored under the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from PIL import Image as PILImage
from pydantic import Field, PositiveInt, model_validator

from earlyfusion.data.chat.template import Message, ToolCall, chat_sample
from earlyfusion.data.programs import run_own
from earlyfusion.data.sample import Image, Sample, Segment, Text
from earlyfusion.data.sources.base import Options, Source, SourceConfig, source
from earlyfusion.data.synth.scene import Scene
from earlyfusion.data.tool_tasks import FILE, Subject, Task, describe, draw, make_grid, make_task

SYSTEM = f"Answer with the tool python(code). The picture is the file {FILE}."
_VERSION = 1
"""Part of the fingerprint: raise it when other conversations are made than before."""


@dataclass(frozen=True)
class Turn:
    """One question with its program, the text of the tool turn, and the answer."""

    task: Task
    output: str
    answer: str


@dataclass(frozen=True)
class Talk:
    """A conversation and what it is made of; `files` is what the tool's directory holds."""

    subject: Subject
    turns: tuple[Turn, ...]
    files: dict[str, PILImage.Image]
    messages: tuple[Message, ...]


class ToolTalkOptions(Options):
    count: PositiveInt = 50_000
    """Conversations of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Conversations held out."""
    min_side: int = Field(32, ge=32)
    """Shortest picture side in pixels."""
    max_side: PositiveInt = 64
    """Longest picture side in pixels."""
    max_objects: int = Field(4, ge=1, le=9)
    """Most objects of one scene."""
    arrays: float = Field(0.5, ge=0, le=1)
    """Share of conversations about a small array of grey values; the others are about scenes."""
    questions: PositiveInt = 2
    """Most questions asked about one picture."""

    @model_validator(mode="after")
    def _check(self) -> ToolTalkOptions:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side {self.min_side} is more than max_side {self.max_side}")
        return self


@source("zero_vision", ToolTalkOptions, pictures=False, chat=True)
class ZeroVision(Source):
    """Scenes and arrays in words."""

    shown = False
    """Whether the user's first message holds the picture (else its description)."""

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        super().__init__(config, seed=seed, val_fraction=val_fraction)
        self.options = config.typed

    def __len__(self) -> int:
        return int(self.options.count)

    def heldout_len(self) -> int:
        return int(self.options.heldout_count)

    def contents(self) -> Iterator[object]:
        yield _VERSION
        yield len(self)

    def talk(self, number: int, heldout: bool = False) -> Talk:
        """Conversation `number` (epoch * count + index), by (seed, number) alone."""
        options = self.options
        rng = Random(f"{'heldout' if heldout else self.seed}/tool_talk/{number}")
        sides = {
            "min_side": options.min_side,
            "max_side": options.max_side,
            "max_objects": options.max_objects,
        }
        grid = rng.random() < options.arrays
        subject = make_grid(rng, heldout) if grid else Scene.make(rng, **sides, heldout=heldout)
        picture = draw(subject)

        # No question twice: the second would be answered by the first.
        turns: dict[str, Turn] = {}
        for _ in range(rng.randint(1, options.questions)):
            task = make_task(subject, rng, stored=self.shown)
            if task.question not in turns:
                output = run_own(task.code, {FILE: picture})
                turns[task.question] = Turn(task, output, task.answer_from(output))
        said = tuple(turns.values())
        return Talk(subject, said, {FILE: picture}, self._messages(subject, picture, said))

    def _messages(
        self, subject: Subject, picture: PILImage.Image, turns: tuple[Turn, ...]
    ) -> tuple[Message, ...]:
        first: list[Segment] = [Image(picture)] if self.shown else [Text(describe(subject) + "\n")]
        messages = [Message("system", (Text(SYSTEM),))]
        for turn in turns:
            messages += [
                Message("user", (*first, Text(turn.task.question))),
                Message(
                    "assistant",
                    (),
                    thinking=turn.task.plan,
                    calls=(ToolCall("python", {"code": turn.task.code}),),
                ),
                Message("tool", (Text(turn.output),), tool="python"),
                Message(
                    "assistant",
                    (Text(turn.answer),),
                    thinking=f"The program gives {turn.output.splitlines()[-1]}.",
                ),
            ]
            first = []
        return tuple(messages)

    def get(self, index: int, epoch: int) -> Sample:
        number = epoch * len(self) + index
        return chat_sample(self.talk(number).messages, source=self.name, key=str(number))

    def heldout(self, index: int) -> Sample:
        return chat_sample(self.talk(index, heldout=True).messages, source=self.name, key=f"heldout/{index}")


@source("chat_scenes", ToolTalkOptions, pictures=True, chat=True)
class ChatScenes(ZeroVision):
    """The same conversations over real pictures."""

    shown = True
