"""What a recipe says about data: the sources, their shares, and how they are read.

[data]
seed = 0
[[data.sources]]
name = "vqa"
kind = "easy_vqa"
weight = 0.5
options = { questions_per_image = 6 }
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from earlyfusion.data.errors import did_you_mean


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


OPTIONS: dict[str, type[Options]] = {
    "easy_vqa": EasyVqaOptions,
    "pydoc": PydocOptions,
    "stdlib_code": StdlibCodeOptions,
    "synth_scenes": SynthScenesOptions,
    "synth_charts": SynthOptions,
    "synth_words": SynthOptions,
    "synth_grid": SynthOptions,
    "synth_clips": SynthClipsOptions,
    "folder": FolderOptions,
}
"""Every kind of source with the options it takes."""


class SourceConfig(BaseModel):
    """One source of documents."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """Name in reports, mixture weights and checkpoints."""
    kind: str
    """easy_vqa, pydoc, stdlib_code, synth_scenes, synth_charts, synth_words, synth_grid, synth_clips or folder."""
    path: str | None = None
    """Folder to read (kind = "folder")."""
    weight: float = Field(1.0, ge=0)
    """Share of the tokens, relative to the other sources; 0 keeps the source for evaluation only."""
    max_epochs: float | None = Field(None, gt=0)
    """Most passes over the source; "null" means no limit."""
    options: dict[str, Any] = {}
    """Options of the kind."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in OPTIONS:
            raise ValueError(f"unknown kind of source {kind!r}; {did_you_mean(kind, OPTIONS)}")
        return kind

    @model_validator(mode="after")
    def _check(self) -> SourceConfig:
        if (self.kind == "folder") != (self.path is not None):
            raise ValueError(
                f"source {self.name!r}: kind = 'folder' needs path = '<directory>'"
                if self.kind == "folder"
                else f"source {self.name!r}: path is for kind = 'folder'; {self.kind} takes none"
            )
        try:
            resolved = OPTIONS[self.kind].model_validate(self.options)
        except ValidationError as error:
            raise ValueError(f"source {self.name!r} ({self.kind}): {_explain(error, OPTIONS[self.kind])}") from None
        object.__setattr__(self, "options", resolved.model_dump())
        return self

    @property
    def typed(self) -> Any:
        """The options as the model of this kind (see OPTIONS)."""
        return OPTIONS[self.kind].model_validate(self.options)


def _explain(error: ValidationError, model: type[Options]) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "options"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown option {key!r}; {did_you_mean(key, model.model_fields)}")
        else:
            lines.append(f"option {key}: {item['msg'].removeprefix('Value error, ')} (given {item.get('input')!r})")
    return "; ".join(lines)


class DataConfig(BaseModel):
    """The `data` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sources: list[SourceConfig] = Field(min_length=1)
    """The mixture."""
    seed: int = Field(0, ge=0)
    """Order of the documents and content of the generated ones."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share held out for evaluation, by hash of the name, in sources without an official split."""
    lookahead: int = Field(4, ge=1)
    """Micro-batches of documents that the packer chooses from."""
    on_bad_sample: Literal["raise", "skip"] = "raise"
    """Unreadable picture, wrong encoding, image over the budget: stop, or leave it out and count it."""
    prefetch: Literal["none", "thread", "process"] = "thread"
    """Who prepares the next steps: nobody, a thread, or processes."""
    prefetch_steps: PositiveInt = 2
    """Steps prepared in advance."""
    workers: PositiveInt = 1
    """Processes of prefetch = "process", for each rank; more than its lanes are of no use."""

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {twice[0]!r}; give each its own name")
        if not any(source.weight > 0 for source in sources):
            raise ValueError("every source has weight 0; give at least one a positive weight")
        return sources
