"""earlyfusion rollouts OUT: make the report of a reinforcement learning run again, from its folder alone.

    earlyfusion rollouts runs/rl --each 6

Works while the run goes on, after it, and on a copied folder; no model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from earlyfusion.kernels.errors import UserError
from earlyfusion.rl.report.measured import by_label, read_measured
from earlyfusion.rl.report.run import write_rl_report
from earlyfusion.rl.rollouts.log import FILE, read_rollouts


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    """The options of the verb."""
    made = argparse.ArgumentParser(
        prog="earlyfusion rollouts",
        description=(
            "Make report.html of a reinforcement learning run: curves, held-out gains, a gallery of rollouts."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("out", type=Path, metavar="OUT", help="the --out folder of the run")
    made.add_argument(
        "--each", type=_positive, default=3, help="pictures of one sort (best, worst, ...) and kind"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, say what it holds; returns the exit code. Raises UserError for a folder without a
    run."""
    arguments = parser().parse_args(argv)
    out: Path = arguments.out
    if not out.is_dir():
        raise UserError(f"{out}: no such folder; give the --out folder of a reinforcement learning run")
    rollouts, measured = read_rollouts(out), read_measured(out)
    if not rollouts and not measured and not (out / "metrics.jsonl").is_file():
        raise UserError(f"{out}: neither metrics.jsonl nor {FILE} is here; give the --out folder of a run")
    path = write_rl_report(out, each=arguments.each)
    kinds = len(by_label(rollouts))
    print(
        f"rollouts: {len(rollouts):,} groups of {kinds} kinds; measured after updates"
        f" {list(measured) or '(none)'}"
    )
    print(f"report:   {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    from earlyfusion.pipeline.cli import guarded

    raise SystemExit(guarded(main))
