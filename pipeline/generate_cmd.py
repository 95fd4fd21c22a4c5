"""`earlyfusion generate`: ask a trained model about pictures, or let it continue a text.

    earlyfusion generate --model DIR [--image FILE]... --question "what color is the circle?"
    earlyfusion generate --model DIR --prompt "The import statement"

A question is put in the form the model was trained on: as in pretraining, or as a chat message after a chat
stage. Pictures stand before the prompt, in the order given. The text goes to standard output, everything else
to standard error, so the answer can be piped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from earlyfusion.data.chat.template import Message, template_of
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Segment, Text, open_picture, question_text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.request import Request, SamplingParams
from earlyfusion.model.generate import engine_for
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.runtime import keep_freed_memory


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion generate",
        description="Continue a prompt, with pictures in front of it, by a model directory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        required=True,
        help="model directory (config.json, model.safetensors), or embedded:NAME",
    )
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="picture file; may be given again"
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", default="", help="text after the pictures, taken as it is")
    text.add_argument(
        "--question", metavar="TEXT", default="", help="the same, put as questions are put in training"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="longest answer, in tokens"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest mass P"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code. Errors with an `exit_code` of 2 are for input that cannot work."""
    options = build_parser().parse_args(argv)
    options.model = model_folder(options.model)
    chat = bool(options.question) and template_of(options.model) == "chat"
    prompt_text = question_text(options.question) if options.question and not chat else options.prompt
    if not prompt_text and not chat and not options.image:
        raise UserError("nothing to continue: give --prompt TEXT, --question TEXT or --image FILE")
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}: give at least 1")
    segments: list[Segment] = [_picture(path) for path in options.image]
    if prompt_text:
        segments.append(Text(prompt_text))
    keep_freed_memory()
    model = load_model(options.model, device=device_of(options.device))
    tokenizer = Tokenizer.load(options.model)
    if chat:
        said = Message("user", (*segments, Text(options.question)))
        prompt = encode_chat([said], tokenizer, model.config.vision)
    else:
        prompt = encode(Sample(segments, "prompt", "0"), tokenizer, model.config.vision, eos=False)
    try:
        params = SamplingParams(options.max_new_tokens, options.temperature, options.top_p, seed=options.seed)
        engine = engine_for(model, tokenizer, [prompt], options.max_new_tokens)
        (done,) = engine.generate([Request("0", prompt, params)])
    except ValueError as error:
        raise UserError(str(error)) from None
    print(_answer(done.ids, tokenizer) if chat else done.text.strip())
    return EXIT_OK


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


if __name__ == "__main__":
    sys.exit(main())
