"""`earlyfusion generate`: ask a trained model about pictures, or let it continue a text.

    earlyfusion generate --model DIR [--image FILE]... --question "what color is the circle?"
    earlyfusion generate --model DIR --prompt "The import statement"

A question is put in the form the model was trained on: as in pretraining, or as a chat message after a chat
stage. Pictures stand before the prompt, in the order given. The text goes to standard output, everything else
to standard error, so the answer can be piped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Segment, Text, open_picture, question_text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.generate import engine_for
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.runtime import keep_freed_memory


def generate(
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="model directory (config.json, model.safetensors), or embedded:NAME"
        ),
    ],
    image: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="picture file; may be given again")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="text to continue")] = None,
    question: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="ask in the form the model was trained on, in place of --prompt"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="most tokens of the answer")] = 64,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="sample from the likeliest mass P")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """Continue a prompt, with pictures in front of it, by a model directory.

    earlyfusion generate --model DIR --image FILE --question "what is it?"
    earlyfusion generate --model DIR --prompt "The import statement"
    """
    folder = model_folder(model)
    if prompt is not None and question is not None:
        raise UserError("--prompt and --question: give one of them")
    chat = bool(question) and template_of(folder) == "chat"
    if question and not chat:
        prompt = question_text(question)
    if not prompt and not chat and not image:
        raise UserError("nothing to continue: give --prompt TEXT, --question TEXT or --image FILE")

    # Pictures are decoded before the model is loaded: what is wrong with them is told at once.
    segments: list[Segment] = [_picture(path) for path in image or ()]
    keep_freed_memory()
    trained = load_model(folder, device=device_of(device))
    tokenizer = Tokenizer.load(folder)

    if chat:
        message = Message("user", (*segments, Text(question or "")))
        encoded = encode_chat([message], tokenizer, trained.config.vision)
    else:
        segments += [Text(prompt)] if prompt else []
        encoded = encode(Sample(segments, "prompt", "0"), tokenizer, trained.config.vision, eos=False)

    params = SamplingParams(max_new_tokens, temperature, top_p, seed=seed)
    engine = engine_for(trained, tokenizer, [encoded], max_new_tokens)
    (done,) = engine.generate([Request("0", encoded, params)])
    print(_answer(done.ids, tokenizer) if chat else done.text.strip())


def _answer(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What the assistant says; its calls where it says nothing. Thoughts go to standard error."""
    message = parse_assistant(ids, tokenizer).message
    if message.thinking:
        print(f"(thinking) {message.thinking}", file=sys.stderr)
    calls = [f"{call.tool}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.calls]
    return "\n".join([part for part in (message.text.strip(), *calls) if part])


def _picture(path: str) -> Image:
    """A picture decoded now, before the model is loaded. Raises UserError for a file that is no readable
    picture."""
    try:
        return Image(open_picture(path))
    except BadSample as error:
        raise UserError(f"--{str(error).split(';')[0]}") from None


def device_of(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one. Raises UserError when it cannot be
    used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]}); try cpu") from None
    return device
