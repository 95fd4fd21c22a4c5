"""Playing conversations with the tool: marks of messages whose worth is known, and the summary's shares."""

import json
import sys
from dataclasses import replace

import pytest
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import Parsed
from earlyfusion.data.sample import Text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.eval.sandbox.host import Limits, Sandbox
from earlyfusion.eval.tool_talks import MEASURES, Played, play_talks, summary, transcript

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
