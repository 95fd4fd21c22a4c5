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
from earlyfusion.eval.tool_turns import MAX_CALLS, answer_calls, picture_files
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
    pictures = [Image(np.full((9, 9 + i, 3), i, np.uint8)) for i in range(3)]
    messages = [Message("user", (pictures[0], Text("a"), pictures[1])), Message("user", (pictures[2],))]
    files = picture_files(messages)
    assert list(files) == ["image.png", "image2.png", "image3.png"]
    assert [f.size for f in files.values()] == [(9, 9), (10, 9), (11, 9)]


def test_calls_that_cannot_be_run_are_answered_in_a_line(box):
    given = [("look", {}), ("python", {}), ("python", {"code": 3}), ("python", {"code": "6*7"})]
    calls = tuple(ToolCall(*call) for call in given)
    answers, results = answer_calls(Message("assistant", (), calls=calls), box, {})
    wrong = "python needs one argument: code, a string"
    assert [a.text for a in answers] == ["no tool 'look'; there is python(code)", wrong, wrong, "42"]
    assert [a.index for a in answers] == [1, 2, 3, 4]
    assert results[:3] == [None] * 3 and results[3].ok


def test_a_message_runs_a_bounded_number_of_programs(box):
    calls = tuple(ToolCall("python", {"code": str(i)}) for i in range(MAX_CALLS + 2))
    answers, results = answer_calls(Message("assistant", (), calls=calls), box, {})
    assert [a.text for a in answers[:MAX_CALLS]] == [str(i) for i in range(MAX_CALLS)]
    assert all("at most" in a.text for a in answers[MAX_CALLS:]) and results[MAX_CALLS:] == [None, None]
