"""The channels of a message while it comes, against the parser of the whole message."""

import random

import pytest

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import ChatStream, encode_chat, parse_assistant
from earlyfusion.data.sample import Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.vision.config import VisionConfig

VISION = VisionConfig.preset("tiny")
MESSAGES = {
    "plain": Message("assistant", (Text("red, ö and 漢字 🙂"),)),
    "thinking": Message("assistant", (Text("three"),), thinking="I count: 1, 2, 3 ✓"),
    "tools": Message(
        "assistant", (Text("wait"),), thinking="a", calls=(ToolCall("python", {"code": "1 + 1"}),)
    ),
    "empty": Message("assistant", (), thinking=""),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["what color is it? red message role user assistant"] * 4, 290)


def written(message: Message, tokenizer: Tokenizer) -> list[int]:
    """What a model writes after the opening of its message."""
    opening = 3 + len(
        tokenizer.encode('message role="assistant"')
    )  # [BOS], <|open|> and <|sep|> around the header
    return encode_chat([message], tokenizer, VISION, add_generation_prompt=False).ids.tolist()[opening:]


def read(ids: list[int], tokenizer: Tokenizer) -> dict[str, str]:
    stream, channels = ChatStream(tokenizer), {}
    for token in ids:
        for channel, text in stream.push(token):
            channels[channel] = channels.get(channel, "") + text
    for channel, text in stream.finish():
        channels[channel] = channels.get(channel, "") + text
    return channels


@pytest.mark.parametrize("name", MESSAGES)
def test_the_channels_hold_the_words_of_the_message_and_no_markup(tokenizer, name):
    ids = written(MESSAGES[name], tokenizer)
    parsed = parse_assistant(ids, tokenizer)
    assert parsed.well_formed
    channels = read(ids, tokenizer)
    assert channels.get("content", "") == parsed.message.text
    assert channels.get("thinking", "") == (parsed.message.thinking or "")
    assert channels.get("tools", "") == "".join(str(c.arguments["code"]) for c in parsed.message.calls)


@pytest.mark.parametrize("seed", [0, 1])
def test_broken_markup_never_raises_and_shows_no_special_token(tokenizer, seed):
    rng = random.Random(seed)
    whole = written(MESSAGES["tools"], tokenizer)
    for _ in range(200):
        ids = [rng.choice(whole) if rng.random() < 0.2 else token for token in whole][
            : rng.randint(0, len(whole))
        ]
        assert all("<|" not in text for text in read(ids, tokenizer).values())


def test_nothing_comes_after_the_end_of_the_message(tokenizer):
    ids = written(MESSAGES["plain"], tokenizer)
    assert read([*ids, *tokenizer.encode("more")], tokenizer)["content"] == MESSAGES["plain"].text
