"""`earlyfusion study NAME ...`: whole experiments with their controls and statistics."""

from __future__ import annotations

from earlyfusion.pipeline.cli import group_of
from earlyfusion.pipeline.verbs import Verb

# One row a study; its module is imported when it is called.
STUDIES = {
    "transfer": Verb(
        "earlyfusion.rl.study.transfer:transfer",
        "vision RL and the same skill in words, with its controls",
    ),
}


def study() -> None:
    """Whole experiments with their controls and statistics."""


app = group_of(STUDIES, study)
