"""`earlyfusion bench engine`: generation beside transformers on equal weights, and decoding at long contexts.

Part 1: tokens/s of the engine and of transformers' generate (dynamic and static cache) and continuous
batching, for the recipe's decoder shape without what transformers' model lacks (Attention Residuals, gated
MLA), over batch sizes and prompt lengths, each side in its own process, in turn. With one CPU thread the
clock is the process's busy time, else wall time. Answers are greedy and compared. On a CPU our side keeps
freed buffers, as our verbs do (`pipeline.runtime.keep_freed_memory`), and multiplies as kernels/products.py
says; transformers runs as it comes, and as `generate-kept` with freed buffers kept, which its users would
have to know. What transformers refuses for this model is printed with its reason. Part 2: see
bench_engine_context.py. Everything is saved as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.bench.cmd import BenchFormatter
from earlyfusion.pipeline.bench.engine.context import context_table, measure_contexts
from earlyfusion.pipeline.bench.engine.peer import DTYPES, GROUP, KEPT, SIDES, TUNED
from earlyfusion.pipeline.bench.record import SideFailed, new_record, run_side, save_record
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.errors import EXIT_OK


def numbers(text: str) -> list[int]:
    """A list such as 1,8,64; argparse shows the error."""
    values = [int(part) for part in text.split(",") if part]
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values


def parser() -> argparse.ArgumentParser:
    """Options of `earlyfusion bench engine`."""
    engine = argparse.ArgumentParser(
        prog="earlyfusion bench engine", description=__doc__, formatter_class=BenchFormatter
    )
    engine.add_argument(
        "--recipe",
        default="nano",
        help="recipe whose decoder shape is used; --model.KEY VALUE changes a key of it",
    )
    engine.add_argument(
        "--dtype",
        default="bfloat16" if torch.cuda.is_available() else "float32",
        choices=list(DTYPES),
        help="dtype of the weights, of all sides",
    )
    engine.add_argument("--batches", type=numbers, default=[1, 8, 64], help="numbers of prompts, as 1,8,64")
    engine.add_argument("--prompts", type=numbers, default=[32, 128], help="prompt lengths in tokens")
    engine.add_argument("--new", type=int, default=64, help="tokens to generate")
    engine.add_argument("--rounds", type=int, default=1, help="rounds, each side once a round")
    engine.add_argument(
        "--sides",
        default="generate,static,continuous,generate-kept,generate-tuned",
        help="of transformers; empty leaves part 1 out",
    )
    engine.add_argument(
        "--contexts",
        type=numbers,
        default=[4096, 32768, 131072, 524288, 1048576],
        help="part 2: context lengths",
    )
    engine.add_argument("--steps", type=int, default=3, help="part 2: timed steps; 0 leaves part 2 out")
    engine.add_argument(
        "--most-batch", type=int, default=16, help="part 2: largest batch for the memory saved"
    )
    engine.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch CPU threads")
    engine.add_argument("--seed", type=int, default=0, help="seed of weights and prompts")
    engine.add_argument("--out", default="runs/bench/engine.json", help="where the numbers are saved")
    return engine


def one_side(side: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a side in its own process; raises UserError when it breaks down."""
    try:
        return run_side("earlyfusion.pipeline.bench.engine.peer", {**request, "side": side})
    except SideFailed as error:
        if side == "engine":
            raise UserError(f"bench engine: our side failed: {error}") from None
        return {"refused": str(error)}


def decoder_shape(recipe: str, changes: Sequence[str]) -> dict[str, Any]:
    """The decoder of a recipe, with changes such as ["--model.num_experts", "16"].

    Raises:
        UserError: the recipe or a key is unknown, a value is missing, or the shape is impossible.
    """
    if any(not word.startswith("--model.") for word in changes[::2]) or len(changes) % 2:
        raise UserError(
            f"bench engine: {' '.join(changes)!r} is not understood; expected --model.KEY VALUE pairs"
        )
    pairs = [(key.removeprefix("--"), value) for key, value in zip(changes[::2], changes[1::2])]
    return load_config([recipe], pairs).model.model_dump(mode="json")


def compare(options: argparse.Namespace, shape: dict[str, Any], console: Console) -> list[dict[str, Any]]:
    """One record per (batch, prompt length, kind of lengths)."""
    theirs = [side for side in options.sides.split(",") if side]
    unknown = [side for side in theirs if side not in SIDES]
    if unknown:
        raise UserError(f"--sides {unknown[0]!r}: known are {', '.join(SIDES)}")
    cases = [(batch, prompt, "equal") for batch in options.batches for prompt in options.prompts]
    cases += [(batch, max(options.prompts), "ragged") for batch in options.batches if batch > 1]
    cases += [(batch, max(options.prompts), "groups") for batch in options.batches if batch % GROUP == 0]
    records = []
    refused: dict[str, str] = {}
    for batch, prompt, lengths in cases:
        request = {
            "shape": shape,
            "batch": batch,
            "prompt": prompt,
            "new": options.new,
            "lengths": lengths,
            "threads": options.threads,
            "seed": options.seed,
            "dtype": options.dtype,
        }
        results: dict[str, list[dict[str, Any]]] = {
            side: [] for side in ("engine", *theirs) if side not in refused
        }
        for number in range(options.rounds):
            for side in results:
                with console.status(
                    f"batch {batch}, prompt {prompt}, round {number + 1}/{options.rounds}: {side}"
                ):
                    result = one_side(side, request)
                if "refused" in result:
                    refused[side] = result["refused"]
                else:
                    results[side].append(result)
        records.append(_record(batch, prompt, lengths, results, refused))
    return records


def _record(
    batch: int, prompt: int, lengths: str, results: dict[str, list[dict[str, Any]]], refused: dict[str, str]
) -> dict[str, Any]:
    """Medians of one case. equal_tokens: share of answers that equal the engine's token for token."""
    sides: dict[str, Any] = {}
    ours = results["engine"][0]["answers"]
    for side, found in results.items():
        if not found:
            continue
        total, first = (statistics.median(r[key] for r in found) for key in ("total_s", "first_s"))
        same = [a == b for a, b in zip(ours, found[0]["answers"])]
        sides[side] = {
            "tokens_per_s": found[0]["tokens"] / total,
            "first_token_s": first,
            "total_s": total,
            "decode_tokens_per_s": (found[0]["tokens"] - batch) / max(total - first, 1e-9),
            "peak_mib": max(r["peak_mib"] for r in found),
            "clock": found[0]["clock"],
            "equal_tokens": sum(same) / len(same),
        }
    ratio = _ratio(sides, [name for name in sides if name not in ("engine", KEPT, TUNED)])
    return {
        "batch": batch,
        "prompt": prompt,
        "lengths": lengths,
        "sides": sides,
        "ratio_to_best": ratio,
        "ratio_to_kept": _ratio(sides, [name for name in sides if name == KEPT]),
        "ratio_to_tuned": _ratio(sides, [name for name in sides if name == TUNED]),
        "refused": dict(refused),
    }


def _ratio(sides: dict[str, Any], theirs: list[str]) -> float | None:
    """Speed of the engine over that of the quickest of these."""
    best = max((sides[name]["tokens_per_s"] for name in theirs), default=None)
    return None if best is None else sides["engine"]["tokens_per_s"] / best


def comparison_table(records: list[dict[str, Any]], new: int) -> Table:
    """Part 1 as a table."""
    table = Table(
        title=f"greedy generation, {new} new tokens, tokens/s (prompts read included)", title_justify="left"
    )
    names = list(dict.fromkeys(name for record in records for name in record["sides"]))
    headings = (
        "batch",
        "prompt",
        "lengths",
        *names,
        "engine / best",
        "engine / kept",
        "engine / tuned",
        "engine, decode only",
    )
    for heading in (*headings, "equal answers"):
        table.add_column(heading, justify="right")
    for record in records:
        shown = [
            f"{record['sides'][n]['tokens_per_s']:,.0f}" if n in record["sides"] else "refused" for n in names
        ]
        equal = min((s["equal_tokens"] for n, s in record["sides"].items() if n != "engine"), default=1.0)
        ratios = [record[f"ratio_to_{name}"] for name in ("best", "kept", "tuned")]
        shown += ["" if ratio is None else f"{ratio:.1f}" for ratio in ratios]
        shown += [f"{record['sides']['engine']['decode_tokens_per_s']:,.0f}", f"{100 * equal:.0f} %"]
        table.add_row(str(record["batch"]), str(record["prompt"]), record["lengths"], *shown)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `earlyfusion bench engine`."""
    options, changes = parser().parse_known_args(argv)
    shape = decoder_shape(options.recipe, changes)
    console = Console(highlight=False)
    record = new_record(options)
    if options.sides:
        record["comparison"] = compare(options, shape, console)
        print_table(console, comparison_table(record["comparison"], options.new))
        for side, reason in record["comparison"][-1]["refused"].items():
            console.print(f"transformers refuses {side}: {reason}")
    if options.steps:
        with console.status("decoding at long contexts"):
            record["contexts"] = measure_contexts(
                shape,
                options.contexts,
                options.steps,
                options.seed,
                options.most_batch,
                DTYPES[options.dtype],
            )
        print_table(console, context_table(record["contexts"]))
    save_record(record, options.out, console)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
