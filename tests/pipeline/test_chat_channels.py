"""What users of a chat model see: words without markup, thoughts and calls by themselves, in the endpoint and
the chat."""

import io
import json
import sys

import pytest
from PIL import Image as PILImage
from serve_model import write_model

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.sandbox.host import Sandbox
from earlyfusion.model.engine.requests import Completion, Event, SamplingParams, Token
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.chat import Conversation
from earlyfusion.vision.config import VisionConfig

THOUGHT = Message("assistant", (Text("It is three. ✓"),), thinking="I count 3 🙂")
CALLED = Message("assistant", (), thinking="run it", calls=(ToolCall("python", {"code": "1 + 1", "n": 2}),))
PLAIN = Message("assistant", (Text("red"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("channels") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def written(message, tokenizer):
    """Ids of a message as a model writes it: from behind the opening to its end."""
    whole = encode_chat(
        [message], tokenizer, VisionConfig.preset("tiny"), add_generation_prompt=False
    ).ids.tolist()
    return whole[3 + len(tokenizer.encode('message role="assistant"')) : -1]


def completion(ids, tokenizer):
    text = tokenizer.decode(ids, skip_special=True)
    zeros = [0.0] * len(ids)
    return Completion("r", 0, ids, zeros, zeros, [0] * len(ids), text, "stop", 5, 0)


@pytest.fixture(scope="module")
def answer(folder, tokenizer):
    """An HTTP answer without a server around it."""
    protocol = pytest.importorskip("earlyfusion.pipeline.serve.protocol")

    def make(stop=None):
        body = protocol.ChatRequest(messages=[{"role": "user", "content": "x"}], stop=stop)
        return protocol.Answer(body, ["r"], tokenizer, "m", "chat")

    return make


@pytest.mark.parametrize("message", [THOUGHT, CALLED, PLAIN], ids=["thought", "called", "plain"])
def test_the_endpoint_gives_words_thoughts_and_calls_whole_and_in_pieces(answer, tokenizer, message):
    ids, joined, calls = written(message, tokenizer), {"content": "", "reasoning_content": ""}, []
    one = answer()
    for number, token in enumerate(ids):
        last = completion(ids, tokenizer) if number == len(ids) - 1 else None
        event = Event("r", 0, (Token(token, 0.0, 0.0, 0),), "ignored", last)
        delta = json.loads(one.piece(event).removeprefix("data: "))["choices"][0]["delta"]
        for key in joined:
            joined[key] += delta.get(key, "")
        calls += delta.get("tool_calls", [])

    whole = answer().choice(0, completion(ids, tokenizer))["message"]
    assert whole["content"] == message.text == joined["content"]
    assert whole.get("reasoning_content") == message.thinking == (joined["reasoning_content"] or None)
    assert whole.get("tool_calls", []) == calls
    told = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    assert told == [(c.tool, dict(c.arguments)) for c in message.calls]


def test_a_stop_string_ends_what_is_said(answer, tokenizer):
    choice = answer(stop=["th"]).choice(0, completion(written(THOUGHT, tokenizer), tokenizer))["message"]
    assert choice["content"] == "It is " and choice["reasoning_content"] == THOUGHT.thinking


TURNS = r"""[
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": null, "reasoning_content": "run it", "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "python", "arguments": "{\"code\": \"1 + 1\", \"n\": 2}"}}]},
    {"role": "tool", "name": "python", "tool_call_id": "call_1", "content": "2"}
]"""


def test_tool_turns_that_a_client_sends_are_the_document_of_training(tokenizer):
    schema = pytest.importorskip("earlyfusion.pipeline.serve.protocol")
    sent = schema.ChatRequest(messages=json.loads(TURNS)).conversation(schema.Limits())[0]
    assert sent == [Message("user", (Text("x"),)), CALLED, Message("tool", (Text("2"),), tool="python")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_the_chat_runs_the_programs_it_is_asked_to_run_and_goes_on(folder, tokenizer, monkeypatch):
    """The model's part is played: a call about the attached picture, then the answer."""
    code = "from PIL import Image\nImage.open('image.png').size"
    played = [Message("assistant", (), thinking="look", calls=(ToolCall("python", {"code": code}),)), PLAIN]
    seen = []

    def scripted(self, messages, out):
        seen.append(list(messages))
        return played[len(seen) - 1]

    monkeypatch.setattr(Conversation, "_answer", scripted)
    out = io.StringIO()
    with Sandbox() as sandbox:
        talk = Conversation(
            load_model(folder), tokenizer, SamplingParams(), template="chat", context=256, sandbox=sandbox
        )
        talk.attached = [Image(PILImage.new("RGB", (31, 17)))]
        assert talk.say("how large?", out) == "red"
    assert "[python] (31, 17)" in out.getvalue()
    assert [m.role for m in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert seen[1][-1].text == "(31, 17)"
