"""`earlyfusion measure`: what a model knows of held-out problems of the verifiable tasks.

    earlyfusion measure --model DIR --tasks counting/1/picture counting/1/twin --samples 8
    earlyfusion measure --model TREATED --recipe vision-rl --against runs/before/measured.jsonl --out
    runs/after earlyfusion measure --model UNTOUCHED --tasks counting/1/twin --match-entropy 0.21 earlyfusion
    measure --model SFT --tasks counting/0/picture/tools --pictures true,grey,swapped,none --samples 8

An answer that the limit cut off is no answer. "ended" is the share of greedy answers that ended by
themselves; "acc 4x" and "end 4x" are accuracy and that share with four times the limit, where a policy that
does not end is found out.

With --out the answers are kept (measured.jsonl) with the table (summary.json). --against pairs every problem
with an earlier measurement of other weights: difference, 95 % interval, exact or sampled sign-flip test, Holm
over the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import ask, match_entropy, parse_pictures
from earlyfusion.eval.measured import load_measured, paired, summary, write_measured
from earlyfusion.eval.results import write_json
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.generate_cmd import device_of
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.measure.tools import measure_tools
from earlyfusion.rl.recipe import RLConfig, RolloutSection, TaskEntry

SHOWN = ("n", "accuracy", "ended", "accuracy_4x", "ended_4x", "p_target", "ece", "entropy")
TOKENS, TOKENS_WITH_TOOLS = 8, 512  # longest answer of --tasks where nothing is said
HEADS = {
    "accuracy": "acc",
    "accuracy_4x": "acc 4x",
    "ended_4x": "end 4x",
    "p_target": "p",
    "temperature": "T",
    "entropy": "nats",
}


def build_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion measure",
        description=(
            "Greedy accuracy, p(correct), pass@k and calibration on held-out problems, the same for every"
            " model."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", metavar="DIR", required=True, help="model directory, or embedded:NAME")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tasks",
        metavar="TASK",
        nargs="+",
        help="such as counting/1/twin: task/difficulty/form[/thought or /tools]",
    )
    what.add_argument(
        "--recipe", metavar="RECIPE", help="measure what this reinforcement learning recipe measures"
    )
    parser.add_argument(
        "--problems", type=int, default=200, metavar="N", help="held-out problems of each task"
    )
    parser.add_argument("--seed", type=int, default=12345, help="which problems")
    parser.add_argument(
        "--samples", type=int, default=0, metavar="K", help="sampled answers to each problem (pass@k)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="of samples and probabilities"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=(
            f"longest answer, in tokens; if not given the recipe's, or {TOKENS}, with tools"
            f" {TOKENS_WITH_TOOLS}"
        ),
    )
    parser.add_argument(
        "--pictures",
        default="true",
        metavar="LIST",
        help=(
            "what is shown, one after the other: true, grey, swapped (another problem's), none; tools keep"
            " the true one"
        ),
    )
    parser.add_argument("--slots", type=int, default=128, metavar="N", help="answers written at a time")
    parser.add_argument(
        "--match-entropy", type=float, metavar="NATS", help="also at the temperature of this mean entropy"
    )
    parser.add_argument(
        "--against", metavar="FILE", help="measured.jsonl of other weights, paired by problem"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for measured.jsonl and summary.json")
    parser.add_argument(
        "--sandbox.allow_weaker",
        dest="allow_weaker",
        action="store_true",
        help="run programs although walls of the sandbox are missing here; the records name them",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; returns the exit code."""
    options = build_parser().parse_args(argv)
    entries, rollout, weaker = _asked_for(options)
    plain, tools = ([entry for entry in entries if entry.tools is wanted] for wanted in (False, True))
    if tools and options.match_entropy is not None:
        raise UserError(
            f"--match-entropy: {tools[0].label} answers with tools, whose entropy is not matched; leave it out"
        )
    against = load_measured(options.against) if options.against else None
    shared = {
        name: getattr(options, name) for name in ("problems", "seed", "samples", "temperature", "slots")
    }
    shared["pictures"] = parse_pictures(options.pictures)

    # The same problems without and with the tool.
    folder = model_folder(options.model)
    model, tokenizer = load_model(folder, device=device_of(options.device)), Tokenizer.load(folder)
    measured = []
    if plain:
        tokens = options.max_new_tokens or (rollout.max_new_tokens if options.recipe else TOKENS)
        asked = ask(model, tokenizer, plain, max_new_tokens=tokens, **shared)
        measured += asked.measured(options.temperature)
    if tools:
        weaker = weaker or options.allow_weaker
        measured += measure_tools(model, tokenizer, tools, rollout, allow_weaker=weaker, **shared)

    # What is shown and kept: the table, the control for sharpening, the differences.
    result: dict[str, Any] = {"model": str(options.model), "seed": options.seed, "tasks": summary(measured)}
    console = Console()
    print_table(console, _table(f"{options.model}", result["tasks"]))
    missing_walls = next((one.sandbox for one in measured if one.sandbox), "")
    if missing_walls:
        result["sandbox"] = missing_walls
    if options.match_entropy is not None:
        result["matched"] = {}
        for label in result["tasks"]:
            found = match_entropy(asked.only(label), options.match_entropy)
            about = {"temperature": found.temperature, "reached": found.reached}
            result["matched"][label] = {**summary(found.measured)[label], **about}
        title = f"at entropy {options.match_entropy:g}"
        print_table(console, _table(title, result["matched"], ("temperature",)))
    if against is not None:
        result["against"] = {"file": str(options.against), "rows": paired(against, measured)}
        print_table(console, _paired_table(result["against"]["rows"]))
    if options.out:
        write_measured(Path(options.out) / "measured.jsonl", measured)
        write_json(Path(options.out) / "summary.json", result)
        console.print(f"written: {options.out}/measured.jsonl, {options.out}/summary.json")
    return EXIT_OK


def _asked_for(options: argparse.Namespace) -> tuple[list[TaskEntry], RolloutSection, bool]:
    """What is measured, the limits of answers with tools, and whether the recipe allows a weaker sandbox."""
    weaker = False
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}: expected at least 1")
    if options.tasks:
        entries = [entry_of(label) for label in options.tasks]
        rollout = RolloutSection(max_new_tokens=TOKENS_WITH_TOOLS)
    else:
        config = validate(compose([options.recipe]), RLConfig)
        entries, rollout, weaker = config.measured, config.rollout, config.sandbox.allow_weaker
    if options.max_new_tokens:
        rollout = rollout.model_copy(update={"max_new_tokens": options.max_new_tokens})
    labels = [entry.label for entry in entries]
    if len(set(labels)) < len(labels):
        raise UserError(f"--tasks: {max(labels, key=labels.count)} is given twice; name every one once")
    return entries, rollout, weaker


def _table(title: str, rows: dict[str, dict[str, float]], extra: Sequence[str] = ()) -> Table:
    first = next(iter(rows.values()))
    passes = (
        [] if extra else [name for name in first if name.startswith("pass@")]
    )  # samples were drawn at --temperature
    columns = [*SHOWN, *passes, *extra]
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("task", overflow="fold")
    for name in columns:  # numbers are never cut, whatever the width
        table.add_column(
            HEADS.get(name, name), justify="right", no_wrap=True, min_width=6 if "@" in name else 5
        )
    for label, row in rows.items():
        table.add_row(label, *(f"{row[name]:.3f}" if name != "n" else str(row[name]) for name in columns))
    return table


def _paired_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="against the earlier weights; * interval excludes 0 after Holm",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("task", overflow="fold")
    for name, width in (
        ("metric", 8),
        ("before", 6),
        ("after", 6),
        ("delta", 6),
        ("95 %", 16),
        ("p Holm", 6),
    ):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True, min_width=width)
    for row in rows:
        span = f"[{row['low']:+.3f}, {row['high']:+.3f}]" if row["se"] == row["se"] else "-"
        cells = [
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['value']:+.3f}",
            span,
            f"{row['p_holm']:.3f}",
        ]
        table.add_row(row["label"], row["metric"], *cells[:-1], cells[-1] + ("*" if row["clear"] else ""))
    return table


if __name__ == "__main__":
    import sys

    from earlyfusion.pipeline.cli import guarded

    sys.exit(guarded(lambda: main(None)))
