"""Pictures, clips and text as an exported earlyfusion model reads them.

    mark = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    processor(text=f"{mark}what is it?", images=picture)

A chat template writes the marks; here every <|media_pad|> becomes as many as its picture has tokens, and a
clip as many items as it has groups of frames, each behind its time. Pictures keep their resolution: they are
shrunk only where they have more patches than the model takes, and padded to whole tokens (the "navit" rule of
Kimi K2.5).
"""

import json
import re
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin

PAD = "<|media_pad|>"
IMAGE, VIDEO = (f"<|media_begin|>{kind}<|media_content|>{PAD}<|media_end|>" for kind in ("image", "video"))
MARKS = f"({re.escape(IMAGE)}|{re.escape(VIDEO)})"
FILE = "preprocessor_config.json"


class EarlyFusionProcessor(ProcessorMixin):
    """tokenizer: of the model; media: `media_proc_cfg` of preprocessor_config.json."""

    attributes = ["tokenizer"]
    tokenizer_class = "PreTrainedTokenizerFast"
    model_input_names = ["input_ids", "attention_mask", "pixel_values", "image_grid_thw"]

    def __init__(self, tokenizer, media, chat_template=None):
        self.tokenizer, self.media = tokenizer, media
        self.chat_template = chat_template or tokenizer.chat_template

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        folder = Path(pretrained_model_name_or_path)
        if folder.is_dir():
            media = folder / FILE
        else:
            from huggingface_hub import hf_hub_download

            media = Path(hf_hub_download(str(pretrained_model_name_or_path), FILE))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path)
        return cls(tokenizer, json.loads(media.read_text())["media_proc_cfg"])

    def save_pretrained(self, save_directory, **kwargs):
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = type(self).__name__
        auto = {"AutoProcessor": f"{Path(__file__).stem}.{name}"}
        (folder / FILE).write_text(
            json.dumps({"auto_map": auto, "processor_class": name, "media_proc_cfg": self.media}, indent=2)
        )
        (folder / Path(__file__).name).write_text(Path(__file__).read_text())
        return self.tokenizer.save_pretrained(folder)

    def rgb(self, image):
        """Upright 8-bit RGB; transparency on a background, 16-bit grey scaled."""
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image))
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257.0).round().astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            behind = (*self.media.get("alpha_background", (255, 255, 255)), 255)
            image = Image.alpha_composite(Image.new("RGBA", image.size, behind), image)
        return image.convert("RGB")

    def prepare(self, frames, limit):
        """Frames of one size -> patches [t h w, 3, p, p] in -1..1, and (t, h, w)."""
        media, patch = self.media, self.media["patch_size"]
        width, height = frames[0].size
        longest = media["patch_limit_on_one_side"] * patch
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, sqrt(limit / patches), longest / width, longest / height)
        new = tuple(min(max(1, int(side * scale)), longest) for side in (width, height))
        token = patch * media["merge_kernel_size"]
        cols, rows = (-(-side // token) * token for side in new)
        pixels = np.zeros((len(frames), rows, cols, 3), np.float32)
        for canvas, frame in zip(pixels, frames):
            if frame.size != new:
                frame = frame.resize(new, Image.Resampling.BICUBIC)
            canvas[: new[1], : new[0]] = np.asarray(frame)
        pixels = (pixels / 255.0 - media["image_mean"]) / media["image_std"]
        t, h, w = len(frames), rows // patch, cols // patch
        cut = pixels.reshape(t, h, patch, w, patch, 3).transpose(0, 1, 3, 5, 2, 4)
        return torch.from_numpy(cut.reshape(-1, 3, patch, patch).astype(np.float32)), (t, h, w)

    def clip(self, frames, fps):
        """Text of a clip, and its items: (patches, grid) for every group of frames."""
        text, items, size = "", [], self.media["temporal_merge_kernel_size"]
        frames = [self.rgb(frame) for frame in frames]
        for start in range(0, len(frames), size):
            patches, grid = self.prepare(
                frames[start : start + size], self.media["in_patch_limit_each_frame"]
            )
            minutes, seconds = divmod(round(start / fps * 1000), 60_000)
            hours, minutes = divmod(minutes, 60)
            text += f"{hours:02d}:{minutes:02d}:{seconds // 1000:02d}.{seconds % 1000:03d}"
            text += VIDEO.replace(PAD, PAD * self.tokens(grid))
            items.append((patches, grid))
        return text, items

    def tokens(self, grid):
        return grid[1] * grid[2] // self.media["merge_kernel_size"] ** 2

    def __call__(self, text=None, images=None, videos=None, fps=None, return_tensors="pt", **kwargs):
        """text: a string or a list of them. images: pictures (PIL) in the order of their marks, flat or a
        list for each text; videos: the same, each a list of frames. fps: frames a second of the clips.
        kwargs: of the tokenizer (padding, ...). Raises ValueError where marks and media are not as many."""
        texts = [text] if isinstance(text, str) else list(text)
        pictures, clips = flat(images, 1), flat(videos, 2)
        marks = [sum(each.count(mark) for each in texts) for mark in (IMAGE, VIDEO)]
        if marks != [len(pictures), len(clips)]:
            raise ValueError(
                f"{len(pictures)} images and {len(clips)} videos for {marks[0]} and {marks[1]} places in the"
                f" text; write {IMAGE} (or use a chat template) where each of them stands"
            )
        rate, items, written = fps or self.media["sample_fps"], [], []
        pictures, clips = iter(pictures), iter(clips)
        for each in texts:
            parts = []
            for piece in re.split(MARKS, each):
                if piece == IMAGE:
                    item = self.prepare([self.rgb(next(pictures))], self.media["in_patch_limit"])
                    piece = IMAGE.replace(PAD, PAD * self.tokens(item[1]))
                    items.append(item)
                elif piece == VIDEO:
                    piece, found = self.clip(next(clips), rate)
                    items += found
                parts.append(piece)
            written.append("".join(parts))

        # A chat template has written [BOS] already.
        bos = self.tokenizer.bos_token
        if written and written[0].startswith(bos):
            kwargs["add_special_tokens"] = False
        found = self.tokenizer(written, return_tensors=return_tensors, **kwargs)
        if items:
            found["pixel_values"] = torch.cat([patches for patches, _ in items])
            found["image_grid_thw"] = torch.tensor([grid for _, grid in items])
        return BatchFeature(dict(found))


def flat(given, depth):
    """A list of media, whatever lists it came in; depth: lists that one of them is inside its own."""
    if given is None:
        return []
    if depth == 1:
        given = given if isinstance(given, list | tuple) else [given]
        return [one for each in given for one in (each if isinstance(each, list | tuple) else [each])]
    if given and not isinstance(given[0], list | tuple):
        return [given]
    deeper = given and isinstance(given[0][0], list | tuple)
    return [clip for each in given for clip in each] if deeper else list(given)


EarlyFusionProcessor.register_for_auto_class()
