"""Conversations with the tool: from ids to the tool's answer, and marks of messages whose worth is known."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import Parsed, encode_chat, parse_assistant
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.eval.sandbox.host import Limits, Sandbox
from earlyfusion.eval.tool_talks import (
    MAX_CALLS,
    MEASURES,
    Played,
    answer_calls,
    picture_files,
    play_talks,
    summary,
    transcript,
)
from earlyfusion.vision.config import VisionConfig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def box():
    with Sandbox(Limits(wall_s=20)) as sandbox:
        yield sandbox


def talks(kind, count):
    source = build_source(SourceConfig(name=kind, kind=kind))
    return [source.talk(index, heldout=True) for index in range(count)]


def play(talk, box, *messages, formed=True, ended=True):
    game = Played(talk)
    for message in messages:
        if not game.done:
            game.take(Parsed(message, formed), box, ended)
    return game


def call(code):
    return Message("assistant", (), thinking="", calls=(ToolCall("python", {"code": code}),))


@pytest.mark.parametrize("kind", ["zero_vision", "chat_scenes"])
def test_the_right_messages_get_every_mark_for_every_kind_of_question(box, kind):
    seen = set()
    for talk in talks(kind, 24):
        game = play(talk, box, talk.messages[2], talk.messages[4])
        assert game.marks == dict.fromkeys(MEASURES, True), talk.turns[0]
        assert [m.role for m in game.said] == ["assistant", "tool", "assistant"]
        assert game.said[1].text == talk.messages[3].text, "the sandbox says what the conversation says"
        seen.add(talk.turns[0].kind)
    assert seen >= {"crop", "count", "binarise"}


def test_each_mark_falls_where_it_should(box):
    talk = talks("zero_vision", 1)[0]
    answer = Message("assistant", (Text(talk.turns[0].answer),))
    wrong = Message("assistant", (Text("no idea"),))
    cases = {
        "right": ((talk.messages[2], answer), (1, 1, 1, 1, 1)),
        "right program, wrong answer": ((talk.messages[2], wrong), (1, 1, 1, 1, 0)),
        "a program of another result": ((call("'other'"), wrong), (1, 1, 1, 0, 0)),
        "a program that fails": ((call("1 / 0"), wrong), (1, 1, 0, 0, 0)),
        "a program that escapes": ((call("open('/etc/passwd').read()"), wrong), (1, 1, 0, 0, 0)),
        "another tool": ((Message("assistant", (), "", (ToolCall("look", {}),)), wrong), (1, 0, 0, 0, 0)),
        "no call, right by luck": ((answer,), (1, 0, 0, 0, 1)),
        "calls for ever": ((talk.messages[2],) * 3, (1, 1, 1, 1, 0)),
    }
    for name, (messages, marks) in cases.items():
        assert play(talk, box, *messages).marks == dict(zip(MEASURES, map(bool, marks))), name
    assert not play(talk, box, answer, ended=False).marks["answered"], "the limit ended it"
    broken = play(talk, box, replace(talk.messages[2], calls=()), formed=False)
    assert broken.marks == dict.fromkeys(MEASURES, False) and broken.done


def test_the_summary_counts_by_kind_and_the_transcript_is_json(box):
    given = talks("chat_scenes", 3)
    played = [play(talk, box, talk.messages[2], talk.messages[4]) for talk in given]
    played.append(play(given[0], box, Message("assistant", (Text("x"),))))
    found = summary(played)
    assert found["talks"] == 4 == sum(kind["talks"] for kind in found["by_kind"].values())
    assert found["well_formed"] == 1.0 and found["called"] == found["answered"] == 0.75
    shown = json.loads(json.dumps(transcript(played[0])))
    assert [m["role"] for m in shown["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert shown["messages"][1]["pictures"] == 1


def test_a_random_model_is_played_to_the_end_without_marks(box):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(tokenizer), 0)
    played = play_talks(model, tokenizer, talks("chat_scenes", 3), box, max_new_tokens=12, slots=2)
    assert len(played) == 3 and all(game.said and game.done for game in played)
    assert summary(played)["well_formed"] == 0.0 and not model.training


# from the ids of a message to the tool's answer


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
