"""`earlyfusion bench WHAT`: speed and memory beside a peer measured in the same run; figures are printed and
saved as JSON."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Sequence

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.pipeline.errors import EXIT_OK

# what -> (module with main(argv) -> int, one line); offered where the module exists
BENCHES: dict[str, tuple[str, str]] = {
    "train": ("earlyfusion.pipeline.bench.train", "a training step, beside transformers"),
    "kernels": ("earlyfusion.pipeline.bench.kernels.run", "every kernel, beside fla and torch"),
    "data": ("earlyfusion.pipeline.bench.data.run", "reading, decoding and packing, beside webdataset"),
    "engine": ("earlyfusion.pipeline.bench.engine.run", "generation, beside transformers"),
    "balance": ("earlyfusion.pipeline.bench.balance", "vision work of the ranks, at home and exchanged"),
}


class BenchFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows types and defaults, and keeps the lines of the description, as far as they fit the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(indent + line, width) for line in text.splitlines())

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return f"({action.type.__name__}) {text}" if isinstance(action.type, type) else text


def available() -> dict[str, tuple[str, str]]:
    """The benchmarks whose modules exist here."""
    return {what: entry for what, entry in BENCHES.items() if importlib.util.find_spec(entry[0]) is not None}


def usage() -> str:
    lines = ["usage: earlyfusion bench WHAT [options]", "", "what:"]
    lines += [f"  {what:<10} {text}" for what, (_, text) in available().items()]
    lines += ["", "earlyfusion bench WHAT --help shows its options."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench`; raises UserError for an unknown benchmark."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return EXIT_OK if arguments else 2
    benches = available()
    if arguments[0] not in benches:
        raise UserError(f"unknown benchmark {arguments[0]!r}; {did_you_mean(arguments[0], benches)}")
    return int(importlib.import_module(benches[arguments[0]][0]).main(arguments[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
