"""What a recipe says about data: the sources, their shares, and how they are read.

[data]
seed = 0
[[data.sources]]
name = "vqa"
kind = "easy_vqa"
weight = 0.5
options = { questions_per_image = 6 }
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.sources.base import SourceConfig


class DataConfig(BaseModel):
    """The `data` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    # What a name means is fixed by the sources; what follows holds for all of them.
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
    # None of these three changes a batch, only who waits for whom.
    prefetch: Literal["none", "thread", "process"] = "thread"
    """Who prepares the next steps: nobody, a thread, or processes."""
    prefetch_steps: PositiveInt = 2
    """Steps prepared in advance."""
    workers: PositiveInt = 1
    """Processes of prefetch = "process", for each rank; more than its lanes are of no use."""
    decode: DecodeConfig = DecodeConfig()
    """Limits of pictures and videos, the fast path, the video backend (data/decode_config.py)."""

    @field_validator("sources")
    @classmethod
    def _distinct(cls, sources: list[SourceConfig]) -> list[SourceConfig]:
        # Weights, reports and checkpoints know a source by its name.
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {twice[0]!r}; give each its own name")
        if not any(source.weight > 0 for source in sources):
            raise ValueError("every source has weight 0; give at least one a positive weight")
        return sources
