"""A tiny chat model whose words are chosen by a script: the real engine, held to what a test wants to be
said."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fusion_cases import TEXTS, tiny_config, tiny_model
from rl_cases import training

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Text
from earlyfusion.data.tool_tasks import SYSTEM
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.model.hub.folder import save_model
from earlyfusion.vision.config import VisionConfig

PIXEL = 'from PIL import Image\nImage.open("image.png").convert("RGB").getpixel((0, 0))'
MARKUP = [
    'message role="tool" tool="python" index="1"',
    'message role="assistant"',
    "think response tools call argument",
    'call tool="python" index="1"',
    'argument key="code" type="string"',
    SYSTEM,
    PIXEL,
    "import numpy as np",
    "message",
]
TOKENIZER = train_bpe([*TEXTS, *MARKUP * 4], 440)
SHAPE = dict(
    num_attention_heads=4, linear_attn_config=dict(num_heads=4, head_dim=16, short_conv_kernel_size=4)
)
VISION = VisionConfig.preset("tiny")
Say = Callable[[str, str], Sequence[Sequence[int]]]
"""(name of the request, text of its prompt) -> the messages that may be said, as ids."""


def directory(folder: Path, seed: int = 0) -> Path:
    """A model directory with random weights."""
    return save_model(tiny_model(tiny_config(TOKENIZER, **SHAPE), seed), TOKENIZER, folder / f"tools-{seed}")


def ids_of(message: Message) -> list[int]:
    """What an assistant generates to say this message, its end included."""
    user = Message("user", (Text("?"),))
    start = len(encode_chat([user], TOKENIZER, VISION))
    return encode_chat([user, message], TOKENIZER, VISION, add_generation_prompt=False).ids.tolist()[start:-1]


def call(code: str, thinking: str | None = None, tool: str = "python", key: str = "code") -> list[int]:
    return ids_of(Message("assistant", (Text(""),), thinking=thinking, calls=(ToolCall(tool, {key: code}),)))


def answer(text: str, thinking: str | None = None) -> list[int]:
    return ids_of(Message("assistant", (Text(text),), thinking=thinking))


class Among:
    """One of several token sequences, as the model likes."""

    def __init__(self, choices: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.choices, self.vocabulary = [tuple(choice) for choice in choices], vocabulary

    def allowed(self, ids: Sequence[int]) -> torch.Tensor:
        mask, known = torch.zeros(self.vocabulary, dtype=torch.bool), tuple(ids)
        for choice in self.choices:
            if choice[: len(known)] == known and len(choice) > len(known):
                mask[choice[len(known)]] = True
        return mask


def hold(engine: Any) -> dict[str, Among]:
    """Requests whose ids are put into the returned dictionary may only say what is allowed there."""
    allowed: dict[str, Among] = {}
    free = engine.runner.banned_for
    # What is allowed changes with every token here, and drafts ask about several at once.
    engine.drafts = None

    def banned_for(samples, total):
        common, mask = (
            free(samples, total),
            torch.zeros(total, engine.rules.config.text.vocab_size, dtype=torch.bool),
        )
        mask |= common if common.dtype == torch.bool else mask.index_fill(1, common, True)
        for row, sample in zip(mask, samples):
            if sample.parent.request.id in allowed:
                row |= ~allowed[sample.parent.request.id].allowed(sample.ids)
        return mask

    engine.runner.banned_for = banned_for
    return allowed


def scripted(made: Any, say: Say) -> Any:
    """A run whose engine may only say what `say` allows; returns the run."""
    engine = made.engine
    submit, allowed = engine.submit, hold(engine)

    def held(request, after=None):
        choices = say(request.id, TOKENIZER.decode(request.prompt.ids.tolist()))
        if choices:
            allowed[request.id] = Among(choices, engine.rules.config.text.vocab_size)
        return submit(request, after)

    engine.submit = held
    return made


def tool_training(folder: Path, out: Path, say: Say, resume: bool = False, **changes: Any) -> Any:
    """A run with one entry with tools (unless `changes` say otherwise), held to a script."""
    base = {
        "tasks": [{"name": "counting", "tools": True}],
        "rollout": {
            "prompts": 4,
            "group_size": 2,
            "max_new_tokens": 400,
            "prefill_chunk": 256,
            "tool_timeout_s": 2.0,
        },
    }
    rollout = {**base["rollout"], **changes.pop("rollout", {})}
    return scripted(training(folder, out, resume, **{**base, **changes, "rollout": rollout}), say)


def last_output(prompt: str) -> str:
    """What the tool said last, from the text of a prompt; "" before its first turn."""
    _, mark, rest = prompt.rpartition('tool="python" index="1"<|sep|>')
    return rest.partition("<|close|>")[0] if mark else ""


def collected(made, update=0):
    """(groups, counters) of one iteration."""
    made.refresh_engine()
    groups = made.collector.collect(update, 1.0, made.config.rollout.prompts)
    return groups, made.collector.tool_metrics()


def look_then_tell(name, prompt):
    """Reads a pixel, then answers with what the program said."""
    return (
        [answer(last_output(prompt), "so")] if last_output(prompt) else [call(PIXEL, "I look."), call(PIXEL)]
    )
