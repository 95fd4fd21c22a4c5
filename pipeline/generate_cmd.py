"""`earlyfusion generate`: ask a trained model about pictures, or let it continue a text.

    earlyfusion generate --model DIR [--image FILE]... \\
        --question "what color is the circle?"
    earlyfusion generate --model DIR --prompt "The import statement"

A question is put in the form the model was trained on: as in pretraining, or as a chat message after a chat
stage. Pictures stand before the prompt, in the order given. The text goes to standard output, everything else
to standard error, so the answer can be piped.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.options import SamplingOptions, verb
from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Sample, Segment, Text, question_text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.runtime import keep_freed_memory


class GenerateOptions(SamplingOptions):
    prompt: str | None = None
    """text to continue"""
    question: str | None = None
    """ask in the form the model was trained on, in place of --prompt"""


def params_of(options: SamplingOptions) -> SamplingParams:
    """How to sample; raises RequestError for what cannot be."""
    return SamplingParams(options.max_new_tokens, options.temperature, options.top_p, seed=options.seed)


@verb
def generate(options: GenerateOptions) -> None:
    """Print the answer."""
    folder, prompt, question = model_folder(options.model), options.prompt, options.question
    if prompt is not None and question is not None:
        raise UserError("--prompt and --question: give one of them")
    chat = bool(question) and template_of(folder) == "chat"
    if question and not chat:
        prompt = question_text(question)
    if not (prompt or chat or options.image):
        raise UserError("nothing to continue: give --prompt TEXT, --question TEXT or --image FILE")

    # Pictures are decoded before the model is loaded: what is wrong with them is told at once.
    segments: list[Segment] = []
    for path in options.image:
        try:
            segments.append(Image(open_picture(path)))
        except BadSample as error:
            raise UserError(f"--{str(error).split(';')[0]}") from None
    # Answers are made of many short-lived buffers.
    keep_freed_memory()
    model, tokenizer = model_on(folder, options.device), Tokenizer.load(folder)

    if chat:
        message = Message("user", (*segments, Text(question or "")))
        encoded = encode_chat([message], tokenizer, model.config.vision)
    else:
        segments += [Text(prompt)] if prompt else []
        encoded = encode(Sample(segments, "prompt", "0"), tokenizer, model.config.vision, eos=False)

    engine = engine_for(model, tokenizer, [encoded], options.max_new_tokens)
    (done,) = engine.generate([Request("0", encoded, params_of(options))])
    print(answer(done.ids, tokenizer) if chat else done.text.strip())


def answer(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What the assistant says; its calls where it says nothing. Thoughts go to standard error."""
    message = parse_assistant(ids, tokenizer).message
    if message.thinking:
        print(f"(thinking) {message.thinking}", file=sys.stderr)
    # A message that only calls would print nothing.
    calls = [f"{call.tool}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.calls]
    return "\n".join([part for part in (message.text.strip(), *calls) if part])


def model_on(folder: Path, name: str) -> NativeFusion:
    """A model directory on the device of that name, as `dtype_on` says."""
    device = device_of(name)
    return load_model(folder, device, dtype_on(device))


def dtype_on(device: torch.device) -> torch.dtype | None:
    """float32 on a CPU, where products of bfloat16 are slower and the compiled engine has none; else None, as
    it is stored."""
    return torch.float32 if device.type == "cpu" else None


def device_of(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one. Raises UserError when it cannot be
    used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # A name may be right and the device still not there: only use tells.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: not usable here ({str(error).splitlines()[0]}); try cpu") from None
    return device
