"""Tools at the endpoint: declared as the model was trained on them, called in the OpenAI form, answered by
id; the orchestrator that travels with the package, asked by the official openai client and by a swarm."""

import json

import pytest
from serve_model import Server, write_model

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
