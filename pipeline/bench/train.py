"""`earlyfusion bench train`: speed, memory and where the time goes, beside a peer measured in the same run.

Part 1 trains the recipe's decoder shape without vision and Attention Residuals against transformers'
KimiLinearForCausalLM (its pure-torch path on a CPU), each side in its own process, in turn (A B A B ...), on
equal token ids; it prints both medians and the ratio of pairs. Part 2 trains the whole recipe on its own data
and reports tokens/s, patches/s, MFU, memory and the share of time by room. Everything is saved as JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.bench.record import SideFailed, new_record, run_side, save_record
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.errors import EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Options of `earlyfusion bench train`."""
    train = argparse.ArgumentParser(
        prog="earlyfusion bench train", description=__doc__, formatter_class=BenchFormatter
    )
    train.add_argument("--recipe", default="nano", help="recipe whose shape and data are used")
    train.add_argument("--documents", type=int, default=8, help="documents in a step of the comparison")
    train.add_argument("--length", type=int, default=512, help="tokens of a document in the comparison")
    train.add_argument("--steps", type=int, default=4, help="timed steps of one round")
    train.add_argument("--warmup", type=int, default=1, help="untimed steps at the start of a round")
    train.add_argument("--rounds", type=int, default=2, help="rounds, each side once a round")
    train.add_argument(
        "--recipe-steps", type=int, default=12, help="timed steps of the whole recipe; 0 leaves it out"
    )
    train.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch CPU threads")
    train.add_argument("--seed", type=int, default=0, help="seed of weights and token ids")
    train.add_argument(
        "--mixed-precision",
        default="bf16" if torch.cuda.is_available() else "no",
        choices=["no", "bf16"],
        help="autocast of both sides in the comparison",
    )
    train.add_argument("--out", default="runs/bench/train.json", help="where the numbers are saved")
    return train


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Alternate the two sides; raises UserError when a side cannot run."""
    config = load_config([options.recipe])
    shape = config.model.model_dump(mode="json")
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "transformers": []}
    for number in range(options.rounds):
        for side, results in sides.items():
            with console.status(f"round {number + 1}/{options.rounds}: {side}"):
                results.append(_one_side(side, shape, options))
    tokens = options.documents * options.length
    speed = {
        side: [tokens / statistics.median(result["seconds"]) for result in results]
        for side, results in sides.items()
    }
    memory = {side: max(result["peak_mib"] for result in results) for side, results in sides.items()}
    loaded = {side: max(result["loaded_mib"] for result in results) for side, results in sides.items()}
    pairs = [a / b for a, b in zip(speed["ours"], speed["transformers"], strict=True)]
    return {
        "tokens_per_step": tokens,
        "parameters": {side: results[0]["parameters"] for side, results in sides.items()},
        "first_loss": {side: results[0]["losses"][0] for side, results in sides.items()},
        "tokens_per_s": {side: statistics.median(values) for side, values in speed.items()},
        "tokens_per_s_ratio": statistics.median(pairs),
        "peak_mib": memory,
        "peak_ratio": memory["ours"] / memory["transformers"],
        "step_mib": {side: memory[side] - loaded[side] for side in sides},
        "rounds": sides,
    }


def _one_side(side: str, shape: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    request = {
        "side": side,
        "shape": shape,
        "documents": options.documents,
        "length": options.length,
        "threads": options.threads,
        "seed": options.seed,
        "warmup": options.warmup,
        "steps": options.steps,
        "bf16": options.mixed_precision == "bf16",
    }
    try:
        return run_side("earlyfusion.pipeline.bench.peer", request)
    except SideFailed as error:
        raise UserError(f"bench train: the side {side!r} failed: {error}") from None


def comparison_table(result: dict[str, Any]) -> Table:
    """The comparison as a table."""
    table = Table(title=f"decoder training step, {result['tokens_per_step']} tokens", title_justify="left")
    for heading in ("", "ours", "transformers", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (
        ("tokens/s", result["tokens_per_s"], result["tokens_per_s_ratio"], ",.0f"),
        ("peak memory of the process, MiB", result["peak_mib"], result["peak_ratio"], ",.0f"),
        ("of which the training steps, MiB", result["step_mib"], None, ",.0f"),
        ("parameters", result["parameters"], None, ",d"),
        ("loss of the first step, nats", result["first_loss"], None, ".3f"),
    )
    for label, values, ratio, form in rows:
        shown = "" if ratio is None else f"{ratio:.2f}"
        table.add_row(label, format(values["ours"], form), format(values["transformers"], form), shown)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench train`."""
    options = parser().parse_args(argv)
    console = Console(highlight=False)
    record = {**new_record(options), "comparison": compare(options, console)}
    print_table(console, comparison_table(record["comparison"]))
    if options.recipe_steps:
        from earlyfusion.pipeline.bench.recipe import measure_recipe, recipe_table

        record["recipe"] = measure_recipe(options.recipe, options.recipe_steps, options.threads)
        print_table(console, recipe_table(record["recipe"]))
    save_record(record, options.out, console)
    return EXIT_OK
