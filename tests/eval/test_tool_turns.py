"""From the ids of an assistant's message to the tool's answer: the loop that a rollout with tools goes
through."""

import sys

import numpy as np
import pytest

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.eval.sandbox.host import Limits, Sandbox
from earlyfusion.eval.tool_talks import MAX_CALLS, answer_calls, picture_files
from earlyfusion.vision.config import VisionConfig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def box():
    with Sandbox(Limits(wall_s=20)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("kind", ["zero_vision", "chat_scenes"])
def test_a_recorded_conversation_replays_through_ids_parser_and_sandbox(box, kind):
    vision = VisionConfig.preset("tiny")
    talks = build_source(SourceConfig(name=kind, kind=kind))
    tokenizer = train_bpe(["how many pixels, import numpy as np, message role user assistant tool"] * 4, 300)
    for number in range(8):
        messages = talks.talk(number).messages
        files = picture_files(messages) or talks.talk(number).files
        for at, message in enumerate(messages):
            if not message.calls:
                continue
            before = encode_chat(messages[:at], tokenizer, vision)
            after = encode_chat(messages[: at + 1], tokenizer, vision, add_generation_prompt=False)
            written = after.ids[len(before) : -1].tolist()  # what a model would write after the prompt
            parsed = parse_assistant(written, tokenizer)
            assert parsed.well_formed
            answers, results = answer_calls(parsed.message, box, files)
            assert answers == [messages[at + 1]] and results[0].ok


def test_pictures_are_named_in_order():
    one, two, three = (Image(np.full((9, 9 + i, 3), i, np.uint8)) for i in range(3))
    files = picture_files([Message("user", (one, Text("a"), two)), Message("user", (three,))])
    sizes = {name: picture.size for name, picture in files.items()}
    assert sizes == {"image.png": (9, 9), "image2.png": (10, 9), "image3.png": (11, 9)}


def test_calls_that_cannot_be_run_are_answered_in_a_line(box):
    given = [ToolCall("look", {}), ToolCall("python", {"code": 3})]
    given += [ToolCall("python", {"code": str(i)}) for i in range(2, MAX_CALLS + 1)]
    answers, results = answer_calls(Message("assistant", (), calls=tuple(given)), box, {})
    no_tool, no_code, *texts, one_too_many = [answer.text for answer in answers]
    assert "no tool 'look'" in no_tool and "code, a string" in no_code and "at most" in one_too_many
    assert texts == [str(i) for i in range(2, MAX_CALLS)]
    assert [result is None for result in results] == [True, True] + [False] * (MAX_CALLS - 2) + [True]
