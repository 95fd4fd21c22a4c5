"""Sources: map-style collections of samples, one class for each kind, in one registry.

A source knows its length, gives the sample of (index, epoch) without any hidden state, and holds some samples
out. Order, sharing among ranks, packing and resuming are the business of mixture.py and loader.py.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from earlyfusion.data.config import SourceConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import Sample, Text
from earlyfusion.kernels.errors import did_you_mean, one_line

KINDS = {
    "easy_vqa": "earlyfusion.data.sources.easy_vqa:EasyVqa",
    "pydoc": "earlyfusion.data.sources.text:Pydoc",
    "stdlib_code": "earlyfusion.data.sources.text:StdlibCode",
    "synth_scenes": "earlyfusion.data.sources.synth:SynthScenes",
    "synth_charts": "earlyfusion.data.sources.synth:SynthCharts",
    "synth_words": "earlyfusion.data.sources.synth:SynthWords",
    "synth_grid": "earlyfusion.data.sources.synth:SynthGrid",
    "synth_clips": "earlyfusion.data.sources.synth:SynthClips",
    "zero_vision": "earlyfusion.data.sources.zero_vision:ZeroVision",
    "chat_scenes": "earlyfusion.data.sources.zero_vision:ChatScenes",
    "problems": "earlyfusion.data.sources.problems:Problems",
    "folder": "earlyfusion.data.sources.folder:Folder",
    "webdataset": "earlyfusion.data.sources.shards:WebDataset",
    "text_files": "earlyfusion.data.sources.text_files:TextFiles",
    "chat_files": "earlyfusion.data.sources.chat_files:ChatFiles",
}
"""Kind of source -> module:class, imported when first used."""


class Source(ABC):
    """One source. The same (config, seed) gives the same samples in every process."""

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        self.config, self.name = config, config.name
        self.seed, self.val_fraction = seed, val_fraction

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
        options = sorted(self.config.options.items())
        return f"{digest64(self.config.kind, options, self.seed, self.val_fraction, *self.contents()):016x}"


def build_source(config: SourceConfig, *, seed: int = 0, val_fraction: float = 0.1) -> Source:
    """The source that `config` describes; raises DataError when its data is missing or holds no training
    sample."""
    module, _, name = KINDS[config.kind].partition(":")
    made: type[Source] = getattr(importlib.import_module(module), name)
    try:
        source = made(config, seed=seed, val_fraction=val_fraction)
    except DataError:
        raise
    except Exception as error:  # files of others: whatever nobody thought of is one line, too
        raise DataError(
            f"source {config.name!r} ({config.kind}{' ' + config.path if config.path else ''}) cannot be"
            f" opened ({type(error).__name__}: {one_line(error)})"
        ) from error
    if len(source) == 0:
        raise DataError(
            f"source {config.name!r} ({config.kind}{' ' + config.path if config.path else ''}) has no"
            " training sample; add data or lower data.val_fraction"
        )
    return source


def find_source(sources: dict[str, Source], name: str) -> Source:
    """`sources[name]`, or a DataError with the nearest name."""
    if name not in sources:
        raise DataError(f"no data source {name!r}; {did_you_mean(name, sources)}")
    return sources[name]
