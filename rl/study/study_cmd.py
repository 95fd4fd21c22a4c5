"""`earlyfusion study NAME ...`: whole experiments with their controls and statistics.

earlyfusion study transfer --help
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.pipeline.errors import EXIT_OK

STUDIES = {
    "transfer": (
        "earlyfusion.rl.study.transfer.cmd",
        "vision RL and the same skill in words, with its controls",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one study; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: earlyfusion study NAME [options]\n\nstudies:")
        print("\n".join(f"  {name:<10} {about}" for name, (_, about) in STUDIES.items()))
        return EXIT_OK
    if arguments[0] not in STUDIES:
        raise UserError(f"study {arguments[0]!r}; {did_you_mean(arguments[0], STUDIES)}")
    return int(importlib.import_module(STUDIES[arguments[0]][0]).main(arguments[1:]))


if __name__ == "__main__":
    from earlyfusion.pipeline.cli import guarded

    sys.exit(guarded(lambda: main(None)))
