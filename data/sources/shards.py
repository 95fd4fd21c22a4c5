"""Webdataset shards as a source: any sample at once by its number, whatever was read before.

`path` names the shards (data/shards/fetch.py: folder, glob, braces, URL, pipe:command), or the option
`shards` lists them. Held-out samples are spread evenly over every shard (data/sources/base.py).
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats import build, chosen_format
from earlyfusion.data.sample import Sample
from earlyfusion.data.shards.read import Shards
from earlyfusion.data.sources.base import InFiles, Options, Split, source


class ShardsOptions(Options):
    shards: list[str] = []
    """Shards one by one, in place of `path`: paths, globs, braces, URLs, pipe:command."""
    format: Literal[
        "auto", "caption", "qa", "conversation", "interleaved", "grounding", "ocr", "video", "code", "text"
    ] = "auto"
    """What the samples are; "auto" tells it for each by its members (data/formats.py)."""
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of captions, answers, regions and documents."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of questions and of what the system says."""
    ask: str = ""
    """A question before every caption of a picture or video, so that a model of captions answers it; "" puts
    them behind the picture as they are."""
    text_fields: list[str] = ["caption", "text"]
    """Fields of a .json that may hold the text; the first that is there counts, before a .txt."""
    boxes: Literal["absolute", "normalized", "both"] = "both"
    """How regions are written for the model: pixels, shares of the sides, or both."""
    box_format: Literal["xyxy", "xywh"] = "xyxy"
    """Corners, or corner and size (COCO); a .json may say it by "box_format"."""
    box_input: Literal["auto", "absolute", "normalized"] = "auto"
    """Units in the files; "auto" takes numbers that are all within 0..1 as shares. A .json may say
    "coordinates"."""
    max_images: PositiveInt | None = None
    """An interleaved document ends before the picture that is one too many; "null" keeps all."""
    max_frames: PositiveInt | None = None
    """Most frames of a video; "null" means no limit."""
    fps: float = Field(2.0, gt=0)
    """Frames taken in a second of video, at most the native rate."""
    video_backend: Literal["decord", "pyav"] | None = None
    """Video reader; "null" leaves it to data.decode."""
    byte_ranges: bool = False
    """Read samples of an object store by byte ranges in place of copying each shard into the cache once: for
    data larger than the disk. Needs the indexes that prepare wrote beside the shards."""
    cache_dir: str | None = None
    """Where streamed shards and indexes lie; "null" takes $EF_CACHE/shards."""


@source("webdataset", ShardsOptions, pictures=True, path="shards")
class WebDataset(InFiles):
    """The samples of all shards in the order of the tar files."""

    def open(self) -> None:
        options = self.options
        self.shards = Shards(
            self.config.path, listed=options.shards, cache=options.cache_dir, ranges=options.byte_ranges
        )
        # What prepare --format chose holds, unless the recipe names another.
        if options.format == "auto":
            self.options = options.model_copy(update={"format": chosen_format(self.shards.manifest)})
        self.names = self.shards.names
        self.split = Split(self.names, self.shards.counts, self.val_fraction)

    def locate(self, index: int) -> tuple[str, str]:
        shard, position = self.split.train(index)
        try:
            return self.names[shard], self.shards.key(shard, position)
        except BadSample:
            # The missing end of a shard has no key.
            return self.names[shard], f"sample {position}"

    def read(self, file: int, position: int, epoch: int) -> Sample:
        group = self.shards.group(file, position)
        return Sample(build(group, self.options, epoch), self.name, f"{self.names[file]}/{group.key}")

    def contents(self) -> Iterator[object]:
        manifest = self.shards.manifest
        # The manifest knows every shard; without one each index tells its own.
        listed = manifest["shards"] if manifest else self.shards.headers
        for name, count, known in zip(self.names, self.shards.counts, listed):
            yield f"{name} {count} {known['bytes']} {known.get('sha256')}"
