"""What an evaluation during training leaves for the report: results, answers to samples, AttnRes weights.

A result is one JSON object per measurement, `<run>/eval/<name>_<step>.json`, complete or absent. Keys common
to all: `name` (str, which measurement), `step` (int, optimizer step of the weights measured); the rest is the
measurement's own. Sample pictures show what the model says of a few fixed held-out samples:

    records = answer_samples(model, tokenizer, samples)  # [{"prompt", "answer", "reference", "picture"}]
    save_samples(run_dir, step, records)                 # run/samples/step_0000123.json and its pictures

A sample's last text is the reference; what stands before it is the prompt. JSON of a step: `{"step": int,
"samples": [{"source", "image": path relative to the run folder or null, "prompt", "answer", "reference"}]}`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as PilImage
from PIL import ImageOps

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Sample, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video import decode_video
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.engine.engine import evaluating, generate
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import unpatchify

STEP_DIGITS = 7
THUMBNAIL = 256  # longest side of a saved picture, pixels
OPENING, GOES_ON = 160, 160
"""Characters of a text alone: what is shown of its beginning, what it is compared with."""


def save_result(run_dir: str | Path, name: str, step: int, payload: Record) -> Path:
    """Save one measurement; `payload` may hold numbers, strings, lists and dicts. Returns the file's path."""
    path = Path(run_dir) / "eval" / f"{name}_{step:0{STEP_DIGITS}d}.json"
    return write_json(path, {"name": name, "step": step, **payload})


def prompted(sample: Sample) -> Sample | None:
    """The sample up to its last learned text, a text alone cut in two; None when nothing is asked or nothing
    stands before.

    So a caption is asked for by its picture, an answer by its question, and a text goes on from its opening.
    """
    segments = list(sample.segments)
    # What follows the last learned text was never an answer.
    while segments and not (
        isinstance(segments[-1], Text) and segments[-1].loss > 0 and segments[-1].text.strip()
    ):
        segments.pop()
    if len(segments) == 1:
        text = sample.text
        # Between words: half a word would be a riddle of its own.
        cut = text.rfind(" ", 1, OPENING) if len(text) > OPENING else text.rfind(" ")
        if cut < 1:
            return None
        segments = [Text(text[:cut], 0.0), Text(text[cut : cut + GOES_ON])]
    return Sample(segments, sample.source, sample.key) if segments else None


def has_media(sample: Sample) -> bool:
    """Whether the sample shows a picture or video."""
    return any(isinstance(segment, Image | Video | VideoFile) for segment in sample.segments)


def answer_samples(
    model: NativeFusion,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    *,
    max_new_tokens: int = 32,
) -> list[Record]:
    """Continue every sample's prompt; records with prompt, answer, reference (str) and picture (PIL image or
    None). A sample ends in the text that is its reference (see `prompted`)."""
    # The reference never reaches the model.
    prompts = [Sample(sample.segments[:-1], sample.source, sample.key) for sample in samples]
    encoded = [encode(prompt, tokenizer, model.config.vision, eos=False) for prompt in prompts]
    answers = generate(model, tokenizer, encoded, max_new_tokens=max_new_tokens)

    records = []
    for sample, prompt, answer in zip(samples, prompts, answers):
        texts = {
            "prompt": prompt.text,
            "answer": answer,
            "reference": Sample(sample.segments[-1:], "", "").text,
        }
        record: Record = {name: text.strip() for name, text in texts.items()}
        records.append({"source": sample.source, **record, "picture": first_picture(prompt)})
    return records


def first_picture(sample: Sample) -> PilImage.Image | None:
    """The first picture, or the first frame of the first video; None without one."""
    for segment in sample.segments:
        if isinstance(segment, Image):
            return segment.open()
        if isinstance(segment, Video):
            return open_picture(segment.frames[0])
        if isinstance(segment, VideoFile):
            # Decoded as training would, so that the frame shown is one that the model has seen.
            patches, grid = decode_video(segment, VisionConfig.preset("moonvit_v2")).items[0]
            return PilImage.fromarray(unpatchify(patches, grid)[0])
    return None


def save_samples(run_dir: str | Path, step: int, records: Sequence[Record]) -> Path:
    """Write the JSON of a step and one PNG per picture; returns the JSON's path.

    Pictures stand under the name of their place in the list (the samples are fixed).
    """
    folder = Path(run_dir) / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for index, record in enumerate(records):
        plain = {**record, "image": None}
        if (picture := plain.pop("picture")) is not None:
            plain["image"] = f"samples/picture_{index:03d}.png"
            thumbnail(picture).save(Path(run_dir) / plain["image"])
        shown.append(plain)
    return write_json(folder / f"step_{step:0{STEP_DIGITS}d}.json", {"step": step, "samples": shown})


def thumbnail(picture: PilImage.Image) -> PilImage.Image:
    """RGB copy whose longer side is THUMBNAIL pixels; pixels of tiny pictures stay sharp."""
    # Pictures of the tests and of easy-VQA are 64 pixels wide.
    method = PilImage.Resampling.BICUBIC
    if max(picture.size) * 2 <= THUMBNAIL:
        method = PilImage.Resampling.NEAREST
    return ImageOps.contain(picture.convert("RGB"), (THUMBNAIL, THUMBNAIL), method)


def attnres_weights(model: NativeFusion, batch: Any) -> Record | None:
    """Mean mixing weights over the tokens of one packed batch; None for a model without Attention Residuals.

    batch: a PackedBatch on the model's device. Returns, for `save_result` under the name
    "attnres": `sublayers` (names of the mixes, in order), `sources` ("embedding", "block 1", ..., and "own
    block" for the running sum of the sub-layer's own block), `image` and `text`: one row per sub-layer with a
    weight per source, None where the sub-layer does not read that source. Rows sum to 1. A kind of token the
    batch does not hold is left out.
    """
    if model.config.text.attn_res == "none":
        return None
    # Tokens of pictures are told from those of texts by their places.
    image_T = torch.zeros_like(batch.ids, dtype=torch.bool)
    image_T[batch.media_positions] = True
    masks = {"image": image_T, "text": ~image_T & (batch.source_ids >= 0)}  # filler is neither
    with evaluating(model):
        recorder = model.decoder.attnres_weights(model.embed(batch), batch.segments, masks)

    # A mix reads the finished blocks, and the running sum of its own block where that has begun.
    width = 1 + max(len(means["text"]) - own for (_, means), own in zip(recorder.rows, recorder.has_partial))
    result: Record = {
        "sublayers": [name.removeprefix("layers.") for name, _ in recorder.rows],
        "sources": ["embedding", *(f"block {number}" for number in range(1, width - 1)), "own block"],
    }
    for kind, mask_T in masks.items():
        # A kind of token that the batch lacks has no mean.
        if mask_T.any():
            result[kind] = rows = []
            for (_, means), own in zip(recorder.rows, recorder.has_partial):
                # Finished sources from the left, the own block's running sum in the last column.
                weights: list[float | None] = means[kind].tolist()
                last = weights.pop() if own else None
                rows.append([*weights, *[None] * (width - 1 - len(weights)), last])
    return result
