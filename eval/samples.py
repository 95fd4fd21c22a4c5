"""Captioned sample pictures: what the model says of a few fixed held-out samples, as JSON and pictures.

    records = answer_samples(model, tokenizer, samples)  # [{"prompt", "answer", "reference", "picture"}]
    save_samples(run_dir, step, records)                 # run/samples/step_0000123.json and its pictures

A sample's last text is the reference; what stands before it is the prompt. JSON of a step: `{"step": int,
"samples": [{"source", "image": path relative to the run folder or null, "prompt", "answer", "reference"}]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image as PilImage

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text, Video, VideoFile, open_picture
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video.read import decode_video
from earlyfusion.eval.results import STEP_DIGITS
from earlyfusion.kernels.files import write_json
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import generate
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import unpatchify

THUMBNAIL = 256  # longest side of a saved picture, pixels
OPENING, GOES_ON = 160, 160
"""Characters of a text alone: what is shown of its beginning, what it is compared with."""


def split_reference(sample: Sample) -> tuple[Sample, str]:
    """(the sample without its last text, that text). Raises ValueError when it does not end in text."""
    last = sample.segments[-1] if sample.segments else None
    if not isinstance(last, Text) or len(sample.segments) < 2:
        raise ValueError(
            f"sample {sample.key!r} of {sample.source!r} does not end in a text after its prompt"
        )
    return Sample(segments=sample.segments[:-1], source=sample.source, key=sample.key), last.text


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
    temperature: float = 0.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Continue every sample's prompt; records with prompt, answer, reference (str) and picture (PIL image or
    None)."""
    split = [split_reference(sample) for sample in samples]
    prompts = [encode(prompt, tokenizer, model.config.vision, eos=False) for prompt, _ in split]
    answers = generate(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    records = []
    for (prompt, reference), answer in zip(split, answers):
        record = {"source": prompt.source, "prompt": prompt.text.strip(), "answer": answer.strip()}
        record["reference"] = reference.strip()
        records.append({**record, "picture": first_picture(prompt)})
    return records


def first_picture(sample: Sample) -> PilImage.Image | None:
    """The first picture, or the first frame of the first video; None without one."""
    for segment in sample.segments:
        if isinstance(segment, Image):
            return segment.open()
        if isinstance(segment, Video):
            return open_picture(segment.frames[0])
        if isinstance(segment, VideoFile):
            patches, grid = decode_video(segment, VisionConfig.preset("moonvit_v2")).items[0]
            return PilImage.fromarray(unpatchify(patches, grid)[0])
    return None


def save_samples(run_dir: str | Path, step: int, records: Sequence[dict[str, Any]]) -> Path:
    """Write the JSON of a step and one PNG per picture; returns the JSON's path.

    Pictures are saved once (the samples are fixed), under the name of their place in the list.
    """
    folder = Path(run_dir) / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    plain = []
    for index, record in enumerate(records):
        name = None
        if record["picture"] is not None:
            name = f"samples/picture_{index:03d}.png"
            if not (Path(run_dir) / name).exists():
                thumbnail(record["picture"]).save(Path(run_dir) / name)
        shown = {key: value for key, value in record.items() if key != "picture"}
        plain.append({**shown, "image": name})

    path = folder / f"step_{int(step):0{STEP_DIGITS}d}.json"
    return write_json(path, {"step": int(step), "samples": plain})


def thumbnail(picture: PilImage.Image) -> PilImage.Image:
    """RGB copy, at most THUMBNAIL pixels a side; tiny pictures are enlarged by whole factors so pixels stay
    sharp."""
    copy = picture.convert("RGB")
    if max(copy.size) * 2 <= THUMBNAIL:
        factor = THUMBNAIL // max(copy.size)
        return copy.resize((copy.width * factor, copy.height * factor), PilImage.Resampling.NEAREST)
    copy.thumbnail((THUMBNAIL, THUMBNAIL))
    return copy
