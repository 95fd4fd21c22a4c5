"""Conversations about pages: what is shown, then the page; or first a draft of it and how the draft looks.

    [[data.sources]]
    name = "talks"
    kind = "page_talks"
    options = { path = "runs/pages", revised = 0.4 }

The draft is the assistant's and has no loss weight: mistakes are read, never learned.
"""

from dataclasses import replace
from random import Random

from pydantic import Field

from earlyfusion.data.chat.template import Message, chat_sample
from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.data.sources.base import Generated, GeneratedOptions, source
from earlyfusion.data.tasks.pages import REVISE, Pages
from earlyfusion.data.tasks.problem import Split


class PageTalksOptions(GeneratedOptions):
    path: str
    """Folder that `earlyfusion website pages` wrote."""
    difficulty: int = Field(2, ge=0, le=2)
    """0: the whole page as a picture; 1: a clip; 2: either."""
    revised: float = Field(0.4, ge=0, le=1)
    """Share of the conversations that hold a draft, of pages that have one."""
    shown: float = Field(1.0, ge=0, le=1)
    """Share of the drafts that are shown back as they look; the others, as `shown = false` of the
    environment `website` has it, in words alone."""


@source("page_talks", PageTalksOptions, pictures=True, chat=True)
class PageTalks(Generated):
    """See the file's head. Raises TaskError for a folder without pages."""

    def open(self) -> None:
        self.task = Pages(self.options.path)

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        rng = Random(f"{'heldout' if heldout else self.seed}/page_talks/{number}")
        split: Split = "test" if heldout else "train"
        problem = self.task.sample(rng.getrandbits(48), split, self.options.difficulty)
        messages = problem.chat()
        draft = ""
        if "draft" in problem.meta and rng.random() < self.options.revised:
            draft = problem.meta["draft"]
            messages.append(Message("assistant", (Text(draft),)))
            looks = [Image(problem.meta["drafted"])] if rng.random() < self.options.shown else []
            messages.append(Message("user", (*looks, Text(REVISE, 0.0))))
        messages.append(Message("assistant", (Text(problem.target),)))
        sample = chat_sample(messages, source=self.name, key=key)
        parts = [*sample.segments]
        for place, part in enumerate(parts):
            if isinstance(part, Text) and part.text == draft:
                parts[place] = replace(part, loss=0.0)
        return replace(sample, segments=parts)
