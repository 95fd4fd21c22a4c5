"""Conversations with a Python tool: zero-vision SFT and its arm with pictures.

    zero_vision   the picture is described in words, or typed as an array; no picture is in the document
    chat_scenes   the same conversations (same seed and number: same picture, questions, programs) over the
                  picture itself

Purpose (Kimi K2.5 §2.2): image operations are learned as programs, in words; pretraining on both carries
them to pixels. Tool outputs are what the programs really give; they have no loss weight. Every call is a
program of its own, as in eval/sandbox/host.py, where the picture is stored under the same name.
"""

from dataclasses import dataclass, replace
from random import Random

from PIL import Image as PILImage
from pydantic import Field, PositiveInt

from earlyfusion.data.chat.template import Message, ToolCall, chat_sample
from earlyfusion.data.programs import run_own
from earlyfusion.data.sample import Image, Sample, Segment, Text
from earlyfusion.data.sources.base import Generated, source
from earlyfusion.data.sources.embedded import PictureOptions
from earlyfusion.data.synth.graph import Scene
from earlyfusion.data.tool_tasks import FILE, SYSTEM, Subject, Task, make_grid, make_task


@dataclass(frozen=True)
class Talk:
    """A conversation and what it is made of; `files` is what the tool's directory holds."""

    subject: Subject
    turns: tuple[Task, ...]
    files: dict[str, PILImage.Image]
    messages: tuple[Message, ...]


class ToolTalkOptions(PictureOptions):
    count: PositiveInt = 50_000
    """Conversations of one epoch; the next epoch makes new ones."""
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


@source("zero_vision", ToolTalkOptions, pictures=False, chat=True)
class ZeroVision(Generated):
    """Scenes and arrays in words."""

    shown = False
    """Whether the user's first message holds the picture (else its description)."""

    def talk(self, number: int, heldout: bool = False) -> Talk:
        """Conversation `number` (epoch * count + index), by (seed, number) alone."""
        options = self.options
        # Not named by the arm: both arms of a study draw the same conversations.
        rng = Random(f"{'heldout' if heldout else self.seed}/tool_talk/{number}")
        subject: Subject
        if rng.random() < options.arrays:
            subject, described = make_grid(rng, heldout), ""
        else:
            sides = {name: getattr(options, name) for name in ("min_side", "max_side", "max_objects")}
            subject, described = Scene.make(rng, **sides, heldout=heldout), f"The picture {FILE}:\n"
        picture = subject.draw()

        # No question twice: the second would be answered by the first.
        turns: dict[str, Task] = {}
        for _ in range(rng.randint(1, options.questions)):
            task = make_task(subject, rng, stored=self.shown)
            if task.question not in turns:
                # What the tool says is what the program gives, never what we think it gives.
                turns[task.question] = replace(task, output=run_own(task.code, {FILE: picture}))

        first: Segment = Image(picture) if self.shown else Text(f"{described}{subject.words()}\n")
        messages = [Message("system", (Text(SYSTEM),))]
        # The subject stands before the first question only.
        shown: tuple[Segment, ...] = (first,)
        for task in turns.values():
            call = ToolCall("python", {"code": task.code})
            concluded = f"The program gives {task.output.splitlines()[-1]}."
            messages += [
                Message("user", (*shown, Text(task.question))),
                Message("assistant", (), thinking=task.plan, calls=(call,)),
                Message("tool", (Text(task.output),), tool="python"),
                Message("assistant", (Text(task.answer),), thinking=concluded),
            ]
            shown = ()
        return Talk(subject, tuple(turns.values()), {FILE: picture}, tuple(messages))

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        return chat_sample(self.talk(number, heldout).messages, source=self.name, key=key)


@source("chat_scenes", ToolTalkOptions, pictures=True, chat=True)
class ChatScenes(ZeroVision):
    """The same conversations over real pictures."""

    shown = True
