"""The options of every kind of source, one pydantic model each; OPTIONS maps a kind to its model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Options(BaseModel):
    """Base of the options of one kind of source."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EasyVqaOptions(Options):
    questions_per_image: int = Field(6, ge=0)
    """Questions drawn for one image each epoch, in random order; 0 takes all (19 or 20 for most images)."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""


class PydocOptions(Options):
    pass


class StdlibCodeOptions(Options):
    total_bytes: PositiveInt = 4_000_000
    """Files are taken in a fixed random order until they hold this many bytes."""
    chunk_bytes: PositiveInt = 8_192
    """A file becomes documents of about this size, cut at line ends."""


class SynthOptions(Options):
    count: PositiveInt = 100_000
    """Samples of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Samples held out."""
    min_side: int = Field(40, ge=32)
    """Shortest picture side in pixels."""
    max_side: PositiveInt = 96
    """Longest picture side in pixels."""
    questions: int = Field(3, ge=0)
    """Most questions asked about one picture."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of the question text; answers have 1."""

    @model_validator(mode="after")
    def _check(self) -> SynthOptions:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side {self.min_side} is more than max_side {self.max_side}")
        return self


class SynthScenesOptions(SynthOptions):
    text_twin: float = Field(0.15, ge=0, le=1)
    """Share of the samples in which a written list of the objects takes the picture's place."""
    max_objects: int = Field(4, ge=1, le=9)
    """Most objects of one scene."""


class SynthClipsOptions(SynthOptions):
    frames: int = Field(6, ge=5, le=16)
    """Frames of one clip."""
    fps: float = Field(2.0, gt=0)
    """Frames in a second; sets the timestamps."""


class FolderOptions(Options):
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of the text."""


class ShardsOptions(Options):
    shards: list[str] = []
    """Shards one by one, in place of `path`: paths, globs, braces, URLs, pipe:command."""
    format: Literal[
        "auto", "caption", "qa", "conversation", "interleaved", "grounding", "ocr", "video", "code", "text"
    ] = "auto"
    """What the samples are; "auto" tells it for each by its members (data/formats/build.py)."""
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of captions, answers, regions and documents."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of questions and of what the system says."""
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
    video_backend: Literal["decord", "pyav", "torchcodec"] | None = None
    """Video reader; "null" leaves it to data.decode."""
    remote: Literal["cache", "ranges"] = "cache"
    """Remote shards: stream each once into the cache, or fetch byte ranges (needs plain .tar with an index
    beside it)."""
    cache_dir: str | None = None
    """Where streamed shards and indexes lie; "null" takes $EF_CACHE/shards."""


class TextFilesOptions(Options):
    text_field: str = "text"
    """Field of a JSON line or column of a parquet file that holds the text."""
    chunk_bytes: int = Field(0, ge=0)
    """Plain text: cut at line ends into documents of about this size; 0 makes every file one document."""
    text_loss: float = Field(1.0, ge=0)
    """Loss weight of the text."""
    cache_dir: str | None = None
    """Where unpacked files and line positions lie; "null" takes $EF_CACHE/text."""


class ChatFilesOptions(Options):
    media: str | None = None
    """Folder that pictures and videos are named in; "null" takes the folder of the file that names them."""
    max_frames: PositiveInt | None = None
    """Most frames of a video; "null" means no limit."""
    fps: float = Field(2.0, gt=0)
    """Frames taken in a second of video, at most the native rate."""
    cache_dir: str | None = None
    """Where unpacked files and line positions lie; "null" takes $EF_CACHE/text."""
    template: Literal["chat", "qa", "plain"] = "chat"
    """How messages stand in a document: in the chat form, with the marks "Q:" and "A:" of pretraining, or as
    they are, one after the other (for rows that hold the marks themselves)."""


class ToolTalkOptions(Options):
    count: PositiveInt = 50_000
    """Conversations of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Conversations held out."""
    min_side: int = Field(32, ge=32)
    """Shortest picture side in pixels."""
    max_side: PositiveInt = 64
    """Longest picture side in pixels."""
    max_objects: int = Field(4, ge=1, le=9)
    """Most objects of one scene."""
    arrays: float = Field(0.5, ge=0, le=1)
    """Share of conversations about a small array of grey values; the others are about scenes."""
    questions: PositiveInt = 2
    """Most questions asked about one picture."""

    @model_validator(mode="after")
    def _check(self) -> ToolTalkOptions:
        if self.min_side > self.max_side:
            raise ValueError(f"min_side {self.min_side} is more than max_side {self.max_side}")
        return self


class ProblemsOptions(Options):
    tasks: dict[str, float] = Field(min_length=1)
    """Task -> weight: verifiable tasks of data/tasks, such as { counting = 2, relation = 1 }."""
    difficulty: int | dict[str, int] = 0
    """Level of all tasks, or by task (0 where not named)."""
    forms: dict[Literal["picture", "twin", "rendered"], float] = {"picture": 1.0}
    """Form -> weight: the picture, its description in words, or that description drawn as a picture."""
    thought: float = Field(0.0, ge=0, le=1)
    """Share of the documents whose answer tells what there is before it answers."""
    count: PositiveInt = 100_000
    """Problems of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Problems held out."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of descriptions and questions; answers have 1."""

    @model_validator(mode="after")
    def _check(self) -> ProblemsOptions:
        for name, weights in (("tasks", self.tasks), ("forms", self.forms)):
            if not weights or min(weights.values()) < 0 or not any(weights.values()):
                raise ValueError(f"{name} {dict(weights)}: expected no weight below 0 and at least one above")
        return self


OPTIONS: dict[str, type[Options]] = {
    "easy_vqa": EasyVqaOptions,
    "pydoc": PydocOptions,
    "stdlib_code": StdlibCodeOptions,
    "synth_scenes": SynthScenesOptions,
    "synth_charts": SynthOptions,
    "synth_words": SynthOptions,
    "synth_grid": SynthOptions,
    "synth_clips": SynthClipsOptions,
    "zero_vision": ToolTalkOptions,
    "chat_scenes": ToolTalkOptions,
    "problems": ProblemsOptions,
    "folder": FolderOptions,
    "webdataset": ShardsOptions,
    "text_files": TextFilesOptions,
    "chat_files": ChatFilesOptions,
}
"""Every kind of source with the options it takes."""

PATH_KINDS = {"folder": "directory", "webdataset": "shards", "text_files": "files", "chat_files": "files"}
"""Kinds that read what `path` names, with a word for it."""
