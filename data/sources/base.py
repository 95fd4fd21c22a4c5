"""A source: a map-style collection of samples, and the one registry of the kinds of sources.

A source knows its length, gives the sample of (index, epoch) without any hidden state, and holds some samples
out. Order, sharing among ranks, packing and resuming are the business of data/loading.

A kind is one file that holds the options, the class and the line that registers both:

    class FolderOptions(Options):
        text_loss: float = Field(1.0, ge=0)

    @source("folder", FolderOptions, pictures=True, path="directory")
    class Folder(Source):
        ...

A recipe names it by `kind = "folder"`; a class of yours that is not part of the project by its place,
`kind = "my_package.my_module:MySource"`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import Numbered, digest64
from earlyfusion.data.sample import Sample, Text
from earlyfusion.kernels.errors import did_you_mean, one_line


class Options(BaseModel):
    """Base of the options of one kind of source."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of source without opening one."""

    name: str
    source: type[Source]
    options: type[Options]
    pictures: bool
    """Its documents hold pictures, unless a recipe says otherwise."""
    path: str = ""
    """What the recipe's `path` names ("directory"); "" for kinds that take none."""
    chat: bool = False
    """Its documents are conversations in the chat form."""
    licence: str = ""
    note: str = ""
    """Where the data comes from, for the model card."""


KINDS: dict[str, Kind] = {}
"""Every registered kind by its name; `data/sources/__init__.py` imports those of the project."""


# One decorator is all that a kind needs: no list elsewhere names it.
def source(
    name: str, options: type[Options] = Options, **facts: Any
) -> Callable[[type[Source]], type[Source]]:
    """Register the decorated class as the kind `name`; see Kind for the facts (pictures=True, ...)."""

    def register(cls: type[Source]) -> type[Source]:
        cls.kind = KINDS[name] = Kind(name, cls, options, **facts)
        return cls

    return register


def kind_of(name: str) -> Kind:
    """The kind of a recipe's `kind`: a registered name, or "package.module:Class" of a class with @source.

    Raises DataError with the nearest name, or with what is wrong at that place.
    """
    module, colon, cls = name.partition(":")
    if not colon and name not in KINDS:
        raise DataError(f"unknown kind of source {name!r}; {did_you_mean(name, KINDS)}")
    try:
        # A place imports on demand: a class of one's own need not be registered anywhere.
        found: Kind = getattr(importlib.import_module(module), cls).kind if colon else KINDS[name]
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"kind of source {name!r}: no class with @source there ({error})") from None
    return found


class SourceConfig(BaseModel):
    """One source of documents."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """Name in reports, mixture weights and checkpoints."""
    kind: str
    """A kind of data/sources: easy_vqa, pydoc, stdlib_code, synth_scenes, synth_charts, synth_words,
    synth_grid, synth_clips, zero_vision, chat_scenes, problems, tool_problems, folder, webdataset,
    text_files, chat_files; or "package.module:Class" of your own."""
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

    @model_validator(mode="after")
    def _check(self) -> SourceConfig:
        kind = kind_of(self.kind)
        # Said before anything is opened, with the recipe's own words.
        if kind.path and self.path is None and not self.options.get("shards"):
            raise ValueError(f"source {self.name!r}: kind = {self.kind!r} needs path = '<{kind.path}>'")
        if self.path is not None and not kind.path:
            others = ", ".join(repr(other.name) for other in KINDS.values() if other.path)
            raise ValueError(f"source {self.name!r}: path is for kind = {others}; {self.kind} takes none")

        # All options, with their defaults, so that a recipe prints whole and a fingerprint sees them.
        try:
            resolved = self.typed
        except ValidationError as error:
            wrong = explain_options(error, kind.options)
            raise ValueError(f"source {self.name!r} ({self.kind}): {wrong}") from None
        # The model is frozen for everybody else.
        object.__setattr__(self, "options", resolved.model_dump())
        return self

    @property
    def has_pictures(self) -> bool:
        """Whether the source counts as one of pictures when a stage has a vision_share."""
        return kind_of(self.kind).pictures if self.vision is None else self.vision

    @property
    def typed(self) -> Any:
        """The options as the model of this kind."""
        return kind_of(self.kind).options.model_validate(self.options)


def explain_options(error: ValidationError, model: type[Options]) -> str:
    """What is wrong with options, in one line."""
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "options"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown option {key!r}; {did_you_mean(key, model.model_fields)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"option {key}: {message} (given {item.get('input')!r})")
    return "; ".join(parts)


class Source(ABC):
    """One source. The same (config, seed) gives the same samples in every process."""

    kind: ClassVar[Kind]

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        self.config, self.name = config, config.name
        self.options: Any = config.typed
        self.seed, self.val_fraction = seed, val_fraction
        self.open()

    def open(self) -> None:  # noqa: B027 (most generated sources have nothing to find)
        """Find the data; raises DataError when it is missing."""

    @abstractmethod
    def __len__(self) -> int:
        """Training samples of one epoch."""

    @abstractmethod
    def get(self, index: int, epoch: int) -> Sample:
        """Training sample `index` of `epoch`; raises BadSample when this one cannot be read."""

    def locate(self, index: int) -> tuple[str, str]:
        """(shard or file, key) of training sample `index` without reading it, for the log of samples left
        out."""
        return "", str(index)

    @abstractmethod
    def heldout_len(self) -> int:
        """Held-out samples."""

    @abstractmethod
    def heldout(self, index: int) -> Sample:
        """Held-out sample `index`; never seen by `get`."""

    def contents(self) -> Iterator[object]:
        """What makes two sources different besides their config: names and sizes of files, lengths."""
        yield len(self)

    def texts(self, index: int) -> list[str]:
        """The texts of training sample `index`, for training a tokenizer; draws no pictures."""
        return [segment.text for segment in self.get(index, 0).segments if isinstance(segment, Text)]

    def heldout_samples(self, limit: int | None = None) -> Iterator[Sample]:
        """Held-out samples in their own order, all or the first `limit`."""
        count = self.heldout_len()
        for index in range(count if limit is None else min(limit, count)):
            yield self.heldout(index)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when samples or their order would; weight and max_epochs do not
        count."""
        # Weight and epochs choose among the samples, they do not change them.
        options = sorted(self.config.options.items())
        return f"{digest64(self.config.kind, options, self.seed, self.val_fraction, *self.contents()):016x}"


class Listed(Source):
    """A source that lists its samples when it is opened, in `train` and `held`; `read` gives that of an
    item."""

    train: Sequence[Any]
    held: Sequence[Any]

    def __len__(self) -> int:
        return len(self.train)

    def get(self, index: int, epoch: int) -> Sample:
        # The same in every epoch: the order changes, not the sample.
        return self.read(self.train[index])

    def heldout_len(self) -> int:
        return len(self.held)

    def heldout(self, index: int) -> Sample:
        return self.read(self.held[index])

    @abstractmethod
    def read(self, item: Any) -> Sample:
        """The sample of one item of a list."""


class Split:
    """Training and held-out numbers -> (file, position) for files of the given `counts` of samples.

    Of a file with m samples, floor(m * fraction + u) are held out, u in [0, 1) from the hash of its name:
    right on average also for many small files. A file's choice depends on its own name and length only.
    """

    def __init__(self, names: Sequence[str], counts: Sequence[int], fraction: float) -> None:
        # By its name: files added later move no sample of this one.
        self._counts, self._shift = counts, [digest64("held-out", name) / 2.0**64 for name in names]
        held = [min(m, int(m * fraction + u)) if fraction > 0 else 0 for m, u in zip(counts, self._shift)]
        self._held = held
        self._heldout, self._train = Numbered(held), Numbered(m - h for m, h in zip(counts, held))

    @property
    def train_len(self) -> int:
        """Training samples of all files."""
        return len(self._train)

    @property
    def heldout_len(self) -> int:
        """Held-out samples of all files."""
        return len(self._heldout)

    def _positions(self, file: int) -> np.ndarray:
        """Held-out positions of one file, ascending and evenly spread."""
        count, held = self._counts[file], self._held[file]
        steps = np.arange(held, dtype=np.float64) + self._shift[file]
        return np.minimum((steps * (count / max(1, held))).astype(np.int64), count - 1)

    def train(self, index: int) -> tuple[int, int]:
        """(file, position) of training sample `index`."""
        file, rank = self._train.locate(index)
        held = self._positions(file)
        # The k-th sample that stays has as many held-out ones before it as have position - own rank <= k.
        return file, rank + int(np.searchsorted(held - np.arange(len(held)), rank, side="right"))

    def heldout(self, index: int) -> tuple[int, int]:
        """(file, position) of held-out sample `index`."""
        file, rank = self._heldout.locate(index)
        return file, int(self._positions(file)[rank])


class InFiles(Source):
    """A source of files that hold many samples each; the kind sets `names` of the files and `split`."""

    names: list[str]
    split: Split

    def __len__(self) -> int:
        return self.split.train_len

    def get(self, index: int, epoch: int) -> Sample:
        return self.read(*self.split.train(index), epoch)

    def locate(self, index: int) -> tuple[str, str]:
        file, position = self.split.train(index)
        return self.names[file], f"{self.names[file]}:{position + 1}"

    def heldout_len(self) -> int:
        return self.split.heldout_len

    def heldout(self, index: int) -> Sample:
        return self.read(*self.split.heldout(index), 0)

    @abstractmethod
    def read(self, file: int, position: int, epoch: int) -> Sample:
        """The sample at a position of a file."""


class GeneratedOptions(Options):
    count: PositiveInt = 100_000
    """Samples of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Samples held out."""


class Generated(Source):
    """A source without end: a sample is made from (seed, kind, number), of training number = epoch * count +
    index."""

    def __len__(self) -> int:
        return self.options.count

    def heldout_len(self) -> int:
        return self.options.heldout_count

    def contents(self) -> Iterator[object]:
        # The first is raised when other samples are made than before.
        yield 1
        yield len(self)

    def get(self, index: int, epoch: int) -> Sample:
        # No epoch repeats another: there is always a next number.
        number = epoch * len(self) + index
        return self.made(number, str(number), heldout=False)

    def heldout(self, index: int) -> Sample:
        # Held-out numbers have names of their own, so no training number can meet one.
        return self.made(index, f"heldout/{index}", heldout=True)

    @abstractmethod
    def made(self, number: int, key: str, heldout: bool) -> Sample:
        """The sample of a number, of one side."""


def build_source(config: SourceConfig, *, seed: int = 0, val_fraction: float = 0.1) -> Source:
    """The source that `config` describes; raises DataError when its data is missing or holds no training
    sample."""
    described = f"source {config.name!r} ({config.kind}{' ' + config.path if config.path else ''})"
    try:
        built = kind_of(config.kind).source(config, seed=seed, val_fraction=val_fraction)
    except DataError as error:
        raise DataError(f"source {config.name!r}: {error}") from None
    except Exception as error:  # files of others: whatever nobody thought of is one line, too
        raise DataError(
            f"{described} cannot be opened ({type(error).__name__}: {one_line(error)})"
        ) from error
    # Better told here than by a loader that waits for a first document.
    if len(built) == 0:
        raise DataError(f"{described} has no training sample; add data or lower data.val_fraction")
    return built
