"""A sub-agent without a language model: it searches for the words of its task, reads the part that fits best
and quotes the sentences that fit best, with their place. Of a picture it asks a small model that travels with
the package.

    Where does Marlo live?  ->  search, read  ->  "Marlo lives in Lyon. [people/marlo.md#1]"

It answers what a sentence of the documents says in nearly the same words, and nothing else: it neither infers
nor adds up. Named as `reader` wherever agents are named.
"""

import re
from collections.abc import Sequence

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.swarm.agents import Local, Said

PLACE = re.compile(r"[\w./-]+\.\w{2,4}(?:#\d+)?")
MOST_QUOTED = 12
"""Sentences of one report."""
STEM = 4
"""Letters by which words are compared: guest and guests."""
PICTURES = "embedded:skills"
"""The model that is asked about pictures, in the form of its pretraining."""
ASKED = "how many objects are there?"
"""What it is asked: of all that it was trained on this needs no name of a colour or shape."""


def stems(text: str) -> set[str]:
    """Beginnings of the words of a text; a name keeps its capital letter, so that it counts by itself."""
    found = set()
    for word in re.findall(r"\w+", PLACE.sub(" ", text)):
        found.add(word if word[0].isupper() or word[0].isdigit() else word[:STEM])
    return found


def fitting(asked: str, text: str) -> list[str]:
    """The sentences of a text that share most with a question, in their order; none where none shares a word
    of more than three letters."""
    wanted = {stem for stem in stems(asked) if len(stem) >= STEM or stem[0].isupper()}
    # A long line without an end goes on in the next one.
    text = re.sub(r"(?<=[^\n]{60})(?<![.!?:])\n(?=\S)", " ", text)
    sentences = [one.strip() for one in re.split(r"\n+|(?<=[.!?])\s+", text)]
    shared = [len(wanted & stems(one)) for one in sentences]
    most = max(shared, default=0)
    return [one for one, count in zip(sentences, shared) if count == most > 0][:MOST_QUOTED]


class Reader:
    """See the module. A speaker: what it did so far stands in the messages."""

    name = "reader"

    def __init__(self) -> None:
        self._eye: Local | None = None

    async def say(self, messages: Sequence[Message], tools: Sequence[Record], most_tokens: int) -> Said:
        """See Speaker."""
        last = max(i for i, one in enumerate(messages) if one.role == "user")
        asked, since = messages[last].text, messages[last + 1 :]
        calls = [call for one in since for call in one.calls]
        if not calls:
            named = PLACE.search(asked)
            return self._call("read", place=named[0]) if named else self._call("search", query=asked)
        found = since[-1]
        if calls[-1].tool == "search":
            hit = PLACE.match(found.text)
            return self._call("read", place=hit[0]) if hit else self._report(found.text)

        # A part was read, or a picture.
        place, said = str(calls[-1].arguments["place"]), found.text.partition("\n(goes on in")[0]
        if any(isinstance(part, Image) for part in found.content):
            pointing = fitting(asked, since[-3].text) if len(calls) > 1 else [""]
            return self._report(f"{pointing[0]} {await self._look(found)} [{place}]".strip())
        quoted = fitting(asked, said)
        picture = PLACE.search(quoted[0]) if quoted and "picture" in asked else None
        if picture:
            return self._call("read", place=picture[0].rstrip("."))
        return self._report(f"{' '.join(quoted)} [{place}]" if quoted else f"nothing fits in {place}")

    @staticmethod
    def _call(tool: str, **given: str) -> Said:
        return Said(Message("assistant", (), calls=(ToolCall(tool, given),)))

    @staticmethod
    def _report(text: str) -> Said:
        return Said(Message("assistant", (Text(text),)), 0, len(text.split()))

    async def _look(self, found: Message) -> str:
        """What the small model says of a picture; loaded when the first one is seen."""
        if self._eye is None:
            folder = model_folder(PICTURES)
            self._eye = Local(load_model(folder), Tokenizer.load(folder), name="eye", template="qa")
        said = await self._eye.say([Message("user", (*found.content, Text(ASKED)))], (), 8)
        return said.message.text

    def close(self) -> None:
        """Stop the small model."""
        if self._eye is not None:
            self._eye.close()
