"""Tools at the endpoint: declared as the model was trained on them, called in the OpenAI form, answered by
id; the orchestrator that travels with the package, asked by the official openai client and by a swarm."""

import asyncio
import json

import pytest
from serve_model import KEY, Server, write_model

from earlyfusion.data.tasks.collection import HELDOUT_WORLD, folder_of, world_of
from earlyfusion.rl.swarm.executor import Swarm, cited, conduct, speaker_of
from earlyfusion.rl.swarm.library import Library
from earlyfusion.rl.swarm.reader import Reader

openai = pytest.importorskip("openai")
protocol = pytest.importorskip("earlyfusion.pipeline.serve.protocol")
pytest.importorskip("uvicorn")

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "1 + 1?"}


def conversation(*messages, **fields):
    """What the model is told."""
    body = protocol.read(protocol.ChatRequest, json.dumps({"messages": [USER, *messages], **fields}).encode())
    return body.conversation(protocol.Limits())[0]


def test_declarations_stand_first_and_outputs_find_their_call_by_its_id():
    call = lambda i: {"id": i, "type": "function", "function": {"name": f"tool_{i[-1]}", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call("call_x8a"), call("call_x8b")]}
    told = [
        {"role": "tool", "tool_call_id": i, "content": i} for i in ("call_x8b", "call_x8a", "call_2", "?")
    ]
    first, _, _, *outputs = conversation(said, *told, tools=[TOOL], tool_choice="auto")
    assert first.role == "system" and first.text == f"# Tools\n{json.dumps(TOOL)}"
    assert [(one.tool, one.index) for one in outputs] == [("tool_b", 2), ("tool_a", 1), ("", 2), ("", 1)]
    # Ids of this server come again in every message: the last one counts.
    again = {"role": "assistant", "content": None, "tool_calls": [call("call_x8a")]}
    assert conversation(said, told[0], again, told[1])[-1].index == 1
    assert [one.role for one in conversation(tools=[TOOL], tool_choice="none")] == ["user"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": ["add"]}, "tools"),
        ({"tools": [{}] * 10_000}, "tools"),
    ],
)
def test_what_cannot_be_held_to_is_refused(fields, said):
    with pytest.raises(protocol.Refused, match=said):
        conversation(**fields)
    with pytest.raises(protocol.Refused, match="characters"):
        long = protocol.ChatRequest(messages=[USER], tools=[{"x": "y" * 100}])
        long.conversation(protocol.Limits(characters=50))


def test_a_model_without_the_chat_form_takes_no_tools(tmp_path):
    server = Server(write_model(tmp_path / "model"))
    try:
        with pytest.raises(openai.BadRequestError, match="not trained on the chat form"):
            server.client.chat.completions.create(model="model", messages=[USER], tools=[TOOL])
    finally:
        server.close()


def test_the_shipped_orchestrator_calls_and_answers_through_openais_client(monkeypatch):
    """A list of names becomes calls side by side, whole and streamed; their outputs, by id, an answer; and a
    swarm over HTTP finds what the documents say, with its sources."""
    server = Server("embedded:orchestrator", "--context 4096")
    try:
        world = world_of(HELDOUT_WORLD)
        one, two = world.people[:2]
        swarm = Swarm(Reader(), Library(folder_of(HELDOUT_WORLD)))
        system = {"role": "system", "content": swarm.system}
        asked = [system, {"role": "user", "content": f"Where do {one} and {two} live?"}]
        options = dict(model="model", tools=swarm.tools, max_tokens=2000, temperature=0)
        choice = server.client.chat.completions.create(messages=asked, **options).choices[0]
        calls = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and calls[0].function.name == "create_subagent"
        prompts = [json.loads(call.function.arguments)["prompt"] for call in calls[1:]]
        # It may ask for more than it was asked for, and more than once.
        assert {f"Where does {name} live?" for name in (one, two)} <= set(prompts)

        streamed, reason = [], None
        told_of = lambda one: (one.id, one.function.name, one.function.arguments)
        for chunk in server.client.chat.completions.create(messages=asked, stream=True, **options):
            streamed += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason or reason
        assert reason == "tool_calls" and [*map(told_of, streamed)] == [*map(told_of, calls)]

        outputs = ["reader is ready"] + [f"report {n}: told" for n in range(1, len(calls))]
        told = [{"role": "tool", "tool_call_id": c.id, "content": o} for c, o in zip(calls, outputs)]
        messages = [*asked, choice.message.model_dump(exclude_none=True), *told]
        last = server.client.chat.completions.create(messages=messages, **options).choices[0]
        assert last.finish_reason == "stop" and "{report 1}" in last.message.content

        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        speaker = speaker_of(server.url)
        answer = asyncio.run(conduct(speaker, asked[1]["content"], swarm))
        assert swarm.largest_group >= 2 and cited(answer, Library(folder_of(HELDOUT_WORLD)))
    finally:
        server.close()
