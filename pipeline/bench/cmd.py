"""`earlyfusion bench WHAT`: speed and memory beside a peer measured in the same run; figures are printed and
saved as JSON."""

from __future__ import annotations

from earlyfusion.pipeline.cli import group_of
from earlyfusion.pipeline.verbs import Verb

# A benchmark's peers are imported when it runs, and only then.
BENCHES = {
    "train": Verb("earlyfusion.pipeline.bench.train:train", "a training step, beside transformers"),
    "kernels": Verb("earlyfusion.pipeline.bench.kernels:kernels", "every kernel, beside fla and torch"),
    "data": Verb("earlyfusion.pipeline.bench.data:data", "reading, decoding and packing, beside webdataset"),
    "engine": Verb("earlyfusion.pipeline.bench.engine:engine", "generation, beside transformers"),
    "lm-eval": Verb("earlyfusion.pipeline.bench.lm_eval:lm_eval", "letters of MMLU-Pro, beside lm-eval"),
}


def bench() -> None:
    """Measure speed and memory beside a peer in the same run; figures are printed and saved as JSON."""


app = group_of(BENCHES, bench)
