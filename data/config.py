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

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.sources.options import OPTIONS, PATH_KINDS, Options
from earlyfusion.kernels.errors import did_you_mean

TEXT_KINDS = frozenset({"pydoc", "stdlib_code", "text_files", "zero_vision"})
"""Kinds without pictures, unless a source says otherwise."""


class SourceConfig(BaseModel):
    """One source of documents."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """Name in reports, mixture weights and checkpoints."""
    kind: str
    """easy_vqa, pydoc, stdlib_code, synth_scenes, synth_charts, synth_words, synth_grid, synth_clips,
    zero_vision, chat_scenes, problems, folder, webdataset, text_files or chat_files."""
    path: str | None = None
    """What to read (kind = "folder", "webdataset", "text_files", "chat_files")."""
    weight: float = Field(1.0, ge=0)
    """Share of the tokens, relative to the other sources; 0 keeps the source for evaluation only."""
    max_epochs: float | None = Field(None, gt=0)
    """Most passes over the source; "null" means no limit."""
    vision: bool | None = None
    """Whether its documents hold pictures, for `vision_share`; "null" goes by the kind (all but text hold
    some)."""
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
        if self.kind in PATH_KINDS and self.path is None and not self.options.get("shards"):
            raise ValueError(
                f"source {self.name!r}: kind = {self.kind!r} needs path = '<{PATH_KINDS[self.kind]}>'"
            )
        if self.kind not in PATH_KINDS and self.path is not None:
            kinds = ", ".join(repr(kind) for kind in PATH_KINDS)
            raise ValueError(f"source {self.name!r}: path is for kind = {kinds}; {self.kind} takes none")
        try:
            resolved = OPTIONS[self.kind].model_validate(self.options)
        except ValidationError as error:
            raise ValueError(
                f"source {self.name!r} ({self.kind}): {_explain(error, OPTIONS[self.kind])}"
            ) from None
        object.__setattr__(self, "options", resolved.model_dump())
        return self

    @property
    def has_pictures(self) -> bool:
        """Whether the source counts as one of pictures when a stage has a vision_share."""
        return self.kind not in TEXT_KINDS if self.vision is None else self.vision

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
            lines.append(
                f"option {key}: {item['msg'].removeprefix('Value error, ')} (given {item.get('input')!r})"
            )
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
    """Unreadable picture, wrong encoding, image over the budget: stop, or leave it out, count it and log it.
    """
    overlong: Literal["split", "skip"] = "split"
    """Documents over a stage's length: split them at line ends, or treat them as bad samples (for
    conversations, whose second half means nothing without the first)."""
    max_bad_share: float = Field(0.1, ge=0, le=1)
    """on_bad_sample = "skip": largest share of bad samples before a process stops the run; looked at from 200
    samples on."""
    max_bad: int | None = Field(None, ge=0)
    """on_bad_sample = "skip": most bad samples of one process and stage; "null" means no limit."""
    prefetch: Literal["none", "thread", "process"] = "thread"
    """Who prepares the next steps: nobody, a thread, or processes."""
    prefetch_steps: PositiveInt = 2
    """Steps prepared in advance."""
    workers: PositiveInt = 1
    """Processes of prefetch = "process", for each rank; more than its lanes are of no use."""
    decode: DecodeConfig = DecodeConfig()
    """Limits of pictures and videos, the fast path, the video backend (data/decode_config.py)."""
    stall_s: float | None = Field(600.0, gt=0)
    """Seconds that a prefetch may spend on one sample before the run stops and names it; "null" waits for
    ever."""

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
