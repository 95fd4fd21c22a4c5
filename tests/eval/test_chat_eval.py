"""A model directory of a chat stage is asked as it was taught: the prompt is the user's message, thoughts do
not count."""

import numpy as np
import pytest
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.data.chat.template import ChatTokenizer, Message
from earlyfusion.data.chat.tokens import ChatStream, encode_chat
from earlyfusion.data.sample import Image, Text, question_text
from earlyfusion.eval.models.base import open_model
from earlyfusion.eval.models.engine import as_message
from earlyfusion.eval.protocol import GenerateRequest
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.hub.folder import save_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tiny_config(tokenizer), 0)
    return save_model(model, ChatTokenizer(tokenizer), tmp_path_factory.mktemp("chat") / "model")


PICTURE = Image(np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "prompt",
    ["Name a color.", [PICTURE, Text(question_text("what color?"))], [Text("one "), PICTURE, Text("two")]],
)
def test_an_answer_is_what_the_engine_gives_for_the_users_message(directory, prompt):
    """Against the engine on the chat document; a random model writes no markup, so all it writes is said."""
    model = open_model(str(directory), device="cpu")
    assert model.chat and model.identity()["chat"] is True
    message = Message("user", as_message(prompt))
    document = encode_chat([message], model.tokenizer, model.model.config.vision)
    engine = engine_for(model.model, model.tokenizer, [document], 9)
    (done,) = engine.generate([Request("0", document, SamplingParams(9, 0.0, ignore_eos=False))])
    (answer,) = model.generate([GenerateRequest(prompt, 9)])
    assert answer.text == ChatStream(model.tokenizer).content(done.ids)


def test_a_question_loses_the_form_of_pretraining_and_nothing_else_does():
    assert as_message([PICTURE, Text(question_text("what color?"))]) == (PICTURE, Text("what color?"))
    assert as_message("\nQ: a\nA:") == (Text("a"),)
    assert as_message("plain\nQ: a\nA:") == (Text("plain\nQ: a\nA:"),)
