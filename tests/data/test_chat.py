"""Messages as documents: the special tokens, what is learned, and the public jinja form of the same."""

import json
import random
from pathlib import Path

import pytest
from jinja2 import Template as Jinja

from earlyfusion.data.chat.template import Media, Message, ToolCall, messages_of
from earlyfusion.data.chat.tokens import ChatStream, Parsed, encode_chat, parse_assistant
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Region, Regions, Sample, Special, Text
from earlyfusion.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.vision.config import VisionConfig

VISION = VisionConfig.preset("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["what color is it? red message role user assistant"] * 4, 290)


def picture(width: int = 60, height: int = 40):
    import numpy as np

    return Image(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def messages_from(turns, tools=()):
    return messages_of({"messages": turns, "tools": list(tools)}, "turns", Media(Path()))


TURNS = json.loads("""[
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "what color is it? <|close|>"},
  {"role": "assistant", "content": "red"},
  {"role": "user", "content": "sure?"}
]""")


def test_the_qa_form_is_that_of_the_pretraining_documents(tokenizer):
    messages = [Message("user", (Text("sure?"), picture()))]
    encoded = encode_chat(messages, tokenizer, VISION, template="qa")
    text = tokenizer.decode(
        [i for i in encoded.ids.tolist() if i != tokenizer.media_pad_id], skip_special=True
    )
    assert text == "image\nQ: sure?\nA:"
    twice = encode_chat(
        [*messages, Message("assistant", (Text("red"),)), *messages], tokenizer, VISION, template="qa"
    )
    assert twice.ids[: len(encoded)].tolist() == encoded.ids.tolist()  # a conversation grows at its end


def test_the_qa_form_wants_a_users_message_last(tokenizer):
    with pytest.raises(DataError, match="role 'assistant'"):
        encode_chat(messages_from(TURNS[:3]), tokenizer, VISION, template="qa")


# ---- thinking and tools

TOOL_TURNS = json.loads(r"""[
  {"role": "user", "content": "how many? <|open|>"},
  {"role": "assistant", "content": null, "reasoning_content": "I count. <|close|>think<|sep|>",
   "tool_calls": [
    {"type": "function",
     "function": {"name": "python", "arguments": {"code": "print(1)\n<|sep|>", "n": 2.5}}},
    {"function": {"name": "look", "arguments": {"deep": true, "box": [1, 2], "of": {"a": null}, "x": null}}}
  ]},
  {"role": "tool", "name": "python", "content": "1 <|end_of_msg|>"},
  {"role": "tool", "name": "look", "index": 2, "content": "nothing"},
  {"role": "assistant", "content": "One.", "reasoning_content": ""},
  {"role": "user", "content": "thanks"},
  {"role": "assistant", "content": "bye"}
]""")


@pytest.mark.parametrize("turns", [TURNS, TOOL_TURNS[:4], TOOL_TURNS[:6], TOOL_TURNS])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_ids_of_a_chat_are_what_the_jinja_template_writes(tokenizer, turns, prompt):
    ids = encode_chat(messages_from(turns), tokenizer, VISION, add_generation_prompt=prompt).ids.tolist()
    words = {"messages": turns, "bos_token": tokenizer.bos_token, "add_generation_prompt": prompt}
    assert tokenizer.decode(ids) == Jinja(CHAT_TEMPLATE).render(words) + tokenizer.eos_token * (not prompt)


def test_a_tool_call_is_written_as_kimi_k3_writes_it(tokenizer):
    """Literally the form of K3's encoder, as its public parsers expect it."""
    call = ToolCall("get_weather", {"city": "Beijing"})
    ids = encode_chat(
        [Message("assistant", (), "t", (call,))], tokenizer, VISION, add_generation_prompt=False
    ).ids
    assert tokenizer.decode(ids.tolist()) == (
        '[BOS]<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>t<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Beijing<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>[EOS]"
    )


def test_what_tools_and_users_say_is_never_learned_and_all_of_the_assistants_is(tokenizer):
    encoded = encode_chat(messages_from(TOOL_TURNS), tokenizer, VISION, add_generation_prompt=False)
    ids, weights = encoded.ids.tolist(), encoded.loss_weights.tolist()
    header = [tokenizer.open_id, *tokenizer.encode('message role="assistant"'), tokenizer.sep_id]
    inside, expected, at = False, [], 0
    while at < len(ids):
        if ids[at : at + len(header)] == header:
            expected += [0.0] * len(header)
            at, inside = at + len(header), True
            continue
        expected.append(float(inside))
        inside = inside and ids[at] != tokenizer.end_of_msg_id
        at += 1
    expected[-1] = 1.0  # [EOS], after an assistant's message
    assert weights == expected and 0 < sum(weights) < len(weights)


def test_an_assistants_message_is_read_back_from_its_ids(tokenizer):
    for message in messages_from(TOOL_TURNS):
        if message.role == "assistant":
            parsed = parse_assistant(written(message, tokenizer), tokenizer)
            assert parsed.well_formed and parsed.message.text == message.text
            assert (parsed.message.thinking, parsed.message.calls) == (message.thinking, message.calls)


@pytest.mark.parametrize("seed", [0, 1])
def test_broken_markup_is_read_as_text_and_never_raises(tokenizer, seed):
    rng, broken = random.Random(seed), 0
    whole = written(messages_from(TOOL_TURNS)[1], tokenizer)
    for _ in range(300):
        ids = list(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(ids))
            ids[at : at + 1] = rng.choice([[], [rng.choice(whole)], ids[at : at + 1] * 2])
        ids = ids[: rng.randint(0, len(ids))]
        broken += not parse_assistant(ids, tokenizer).well_formed
    assert broken > 150
    nested = [tokenizer.open_id, *tokenizer.encode("x"), tokenizer.sep_id] * 3000
    assert not parse_assistant(nested, tokenizer).well_formed


def test_an_element_left_open_is_not_well_formed(tokenizer):
    header = [tokenizer.open_id, *tokenizer.encode("response"), tokenizer.sep_id]
    end = [tokenizer.close_id, *tokenizer.encode("message"), tokenizer.sep_id, tokenizer.end_of_msg_id]
    red = tokenizer.encode("red")
    # The last is cut at the token limit.
    for ids, text, good in (
        ([*header, *red, *end], "responsered", False),
        ([*red, *end], "red", True),
        (red, "red", False),
    ):
        assert parse_assistant(ids, tokenizer) == Parsed(Message("assistant", (Text(text),)), good)


def test_regions_of_a_later_message_lie_in_its_own_picture(tokenizer):
    small, large = picture(28, 28), picture(140, 84)
    there = Regions([Region("x", box=(100, 50, 130, 80))], media=0)
    asked = Message("user", (small,))
    with pytest.raises(BadSample):
        encode_chat([asked, Message("assistant", (there,))], tokenizer, VISION)
    messages = [asked, Message("assistant", (Text("ok"),)), Message("user", (large, there))]
    encoded = encode_chat(messages, tokenizer, VISION, add_generation_prompt=False)
    at = tokenizer.decode(encoded.ids[encoded.loss_weights > 0].tolist())
    assert '"x"' in tokenizer.decode(encoded.ids.tolist()) and '"x"' not in at  # a user's are not learned


def test_only_named_tokens_that_are_not_of_media_can_be_asked_for(tokenizer):
    for name, said in (("<|media_pad|>", "no special token"), ("<|opne|>", "did you mean '<|open|>'")):
        with pytest.raises(BadSample, match=said.replace("|", r"\|")):
            encode(Sample([Special(name)], "s", "k"), tokenizer, VISION)
    ids = encode(Sample([Text("a"), Special("<|sep|>", 0.5)], "s", "k"), tokenizer, VISION)
    assert ids.ids.tolist() == [tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.sep_id, tokenizer.eos_id]
    assert ids.loss_weights.tolist()[-2:] == [0.5, 0.5]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Message("user", (), thinking="x"), "only an assistant's"),
        (lambda: Message("tool", (), calls=(ToolCall("f"),)), "only an assistant's"),
        (lambda: Message("user", (), tool="python"), "expected role 'tool'"),
        (lambda: ToolCall('a" b'), "tool call with the name"),
        (lambda: ToolCall("f", {"a b": 1}), "tool call with the name"),
    ],
)
def test_impossible_tool_turns_are_named(make, said):
    with pytest.raises(DataError, match=said):
        make()


# ---- the channels of a message while it comes, against the parser of the whole message

MESSAGES = {
    "plain": Message("assistant", (Text("red, ö and 漢字 🙂"),)),
    "thinking": Message("assistant", (Text("three"),), thinking="I count: 1, 2, 3 ✓"),
    "tools": Message("assistant", (Text("wait"),), "a", (ToolCall("python", {"code": "1 + 1"}),)),
    "empty": Message("assistant", (), thinking=""),
}


def written(message, tokenizer):
    """What a model writes after the opening of its message."""
    header = [tokenizer.open_id, *tokenizer.encode('message role="assistant"'), tokenizer.sep_id]
    ids = encode_chat([message], tokenizer, VISION, add_generation_prompt=False).ids.tolist()
    return ids[1 + len(header) :]


def streamed(ids, tokenizer):
    stream, channels = ChatStream(tokenizer), {"content": "", "thinking": "", "tools": ""}
    for channel, text in [piece for token in ids for piece in stream.push(token)] + stream.finish():
        channels[channel] += text
    return channels


@pytest.mark.parametrize("name", MESSAGES)
def test_the_channels_hold_the_words_of_the_message_and_no_markup(tokenizer, name):
    ids, message = written(MESSAGES[name], tokenizer), MESSAGES[name]
    code = "".join(call.arguments["code"] for call in message.calls)
    expected = {"content": message.text, "thinking": message.thinking or "", "tools": code}
    # Nothing comes after the end of the message.
    assert streamed(ids, tokenizer) == streamed([*ids, *tokenizer.encode("more")], tokenizer) == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_a_stream_of_broken_markup_never_raises_and_shows_no_special_token(tokenizer, seed):
    rng, whole = random.Random(seed), written(MESSAGES["tools"], tokenizer)
    for _ in range(200):
        ids = [rng.choice(whole) if rng.random() < 0.2 else token for token in whole]
        told = streamed(ids[: rng.randint(0, len(ids))], tokenizer)
        assert "<|" not in "".join(told.values())
