"""`earlyfusion generate`: ask a trained model about pictures, or let it continue a text.

    earlyfusion generate --model DIR [--image FILE]... --prompt "Q: what color is the circle? A:"

Pictures stand before the prompt, in the order given. The text goes to standard output, everything else to standard
error, so the answer can be piped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image as PilImage
from PIL import UnidentifiedImageError

from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.eval.prompts import encode_prompt
from earlyfusion.model.generate import generate
from earlyfusion.model.hub import load_model, load_tokenizer
from earlyfusion.model.hub_config import ModelDirectoryError
from earlyfusion.pipeline.errors import EXIT_OK, UserError


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion generate",
        description="Continue a prompt, with pictures in front of it, by a model directory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", metavar="DIR", required=True, help="model directory (config.json, model.safetensors)")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="picture file; may be given again")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="text after the pictures")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest mass P")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code. Raises UserError (exit code 2) for input that cannot work."""
    options = build_parser().parse_args(argv)
    if not options.prompt and not options.image:
        raise UserError("nothing to continue: give --prompt TEXT, --image FILE or both")
    pictures = [read_picture(path) for path in options.image]
    try:
        model = load_model(options.model, device=_device(options.device))
        tokenizer = load_tokenizer(options.model)
    except ModelDirectoryError as error:
        raise UserError(str(error)) from None
    segments = [*(Image(picture) for picture in pictures), *([Text(options.prompt)] if options.prompt else [])]
    prompt = encode_prompt(Sample(segments=segments, source="prompt", key="0"), tokenizer, model.config.vision)
    try:
        (text,) = generate(
            model,
            tokenizer,
            [prompt],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    print(text.strip())
    return EXIT_OK


def read_picture(path: str | Path) -> PilImage.Image:
    """A fully decoded picture. Raises UserError for a file that is missing, no picture, or damaged."""
    try:
        with PilImage.open(path) as picture:
            picture.load()
            return picture.copy()
    except FileNotFoundError:
        raise UserError(f"--image {path}: no such file") from None
    except UnidentifiedImageError:
        raise UserError(f"--image {path}: not a picture that Pillow can read (PNG, JPEG, WebP, GIF, ...)") from None
    except (OSError, SyntaxError, ValueError, PilImage.DecompressionBombError) as error:
        raise UserError(f"--image {path}: cannot be read ({error})") from None


def _device(name: str) -> torch.device:
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
