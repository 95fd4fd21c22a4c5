"""`earlyfusion measure`: what a model knows of held-out problems of the verifiable tasks
(eval/measure.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import ask, match_entropy, parse_pictures
from earlyfusion.eval.measured import load_measured, paired, summary, write_measured
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.config.compose import compose, validate
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


def measure(
    model: Annotated[str, typer.Option(metavar="DIR", help="model directory, or embedded:NAME")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK", help="such as counting/1/twin: task/difficulty/form[/thought or /tools]"
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="measure what this reinforcement learning recipe measures"),
    ] = None,
    problems: Annotated[int, typer.Option(metavar="N", help="held-out problems of each task")] = 200,
    seed: Annotated[int, typer.Option(help="which problems")] = 12345,
    samples: Annotated[int, typer.Option(metavar="K", help="sampled answers to each problem (pass@k)")] = 0,
    temperature: Annotated[float, typer.Option(metavar="X", help="of samples and probabilities")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"longest answer, in tokens; if not given the recipe's, or {TOKENS}, with tools"
            f" {TOKENS_WITH_TOOLS}",
        ),
    ] = None,
    pictures: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="what is shown, one after the other: true, grey, swapped (another problem's), none; tools"
            " keep the true one",
        ),
    ] = "true",
    slots: Annotated[int, typer.Option(metavar="N", help="answers written at a time")] = 128,
    match: Annotated[
        float | None,
        typer.Option("--match-entropy", metavar="NATS", help="also at the temperature of this mean entropy"),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="measured.jsonl of other weights, paired by problem")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="folder for measured.jsonl and summary.json")
    ] = None,
    allow_weaker: Annotated[
        bool,
        typer.Option(
            "--sandbox.allow_weaker",
            help="run programs although walls of the sandbox are missing here; the records name them",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    """Greedy accuracy, p(correct), pass@k and calibration on held-out problems, the same for every model.

    earlyfusion measure --model DIR --tasks counting/1/picture counting/1/twin --samples 8
    earlyfusion measure --model TREATED --recipe vision-rl --against BEFORE/measured.jsonl --out AFTER
    earlyfusion measure --model UNTOUCHED --tasks counting/1/twin --match-entropy 0.21
    earlyfusion measure --model SFT --tasks counting/0/picture/tools --pictures true,grey,swapped,none

    An answer that the limit cut off is no answer. "ended" is the share of greedy answers that ended by
    themselves; "acc 4x" and "end 4x" are accuracy and that share with four times the limit, where a policy
    that does not end is found out. With --out the answers are kept with the table. --against pairs every
    problem with an earlier measurement of other weights: difference, 95 % interval, exact or sampled
    sign-flip test, Holm over the rows.
    """
    entries, rollout, weaker = _asked_for(tasks or [], recipe, max_new_tokens)
    plain = [entry for entry in entries if not entry.tools]
    tools = [entry for entry in entries if entry.tools]
    if tools and match is not None:
        raise UserError(
            f"--match-entropy: {tools[0].label} answers with tools, whose entropy is not matched; leave"
            " it out"
        )
    # A file that cannot be read is named before the model is loaded.
    earlier = load_measured(against) if against else None
    shared: dict[str, Any] = {"problems": problems, "seed": seed, "samples": samples, "slots": slots}
    shared |= {"temperature": temperature, "pictures": parse_pictures(pictures)}

    # The same problems without and with the tool.
    folder = model_folder(model)
    trained, tokenizer = load_model(folder, device=device_of(device)), Tokenizer.load(folder)
    measured = []
    if plain:
        tokens = max_new_tokens or (rollout.max_new_tokens if recipe else TOKENS)
        asked = ask(trained, tokenizer, plain, max_new_tokens=tokens, **shared)
        measured += asked.measured(temperature)
    if tools:
        weaker = weaker or allow_weaker
        measured += measure_tools(trained, tokenizer, tools, rollout, allow_weaker=weaker, **shared)

    # What is shown and kept: the table, the control for sharpening, the differences.
    result: dict[str, Any] = {"model": model, "seed": seed, "tasks": summary(measured)}
    console = Console()
    print_table(console, _table(model, result["tasks"]))
    missing_walls = next((one.sandbox for one in measured if one.sandbox), "")
    if missing_walls:
        result["sandbox"] = missing_walls
    if match is not None:
        result["matched"] = {}
        for label in result["tasks"]:
            found = match_entropy(asked.only(label), match)
            about = {"temperature": found.temperature, "reached": found.reached}
            result["matched"][label] = {**summary(found.measured)[label], **about}
        print_table(console, _table(f"at entropy {match:g}", result["matched"], ("temperature",)))
    if earlier is not None:
        result["against"] = {"file": str(against), "rows": paired(earlier, measured)}
        print_table(console, _paired_table(result["against"]["rows"]))
    if out:
        write_measured(out / "measured.jsonl", measured)
        write_json(out / "summary.json", result)
        console.print(f"written: {out}/measured.jsonl, {out}/summary.json")


def _asked_for(
    labels: list[str], recipe: str | None, max_new_tokens: int | None
) -> tuple[list[TaskEntry], RolloutSection, bool]:
    """What is measured, the limits of answers with tools, and whether the recipe allows a weaker sandbox."""
    if bool(labels) == bool(recipe):
        raise UserError("what is to be measured? Give --tasks TASK ... or --recipe RECIPE, one of them")
    if recipe:
        config = validate(compose([recipe]), RLConfig)
        entries, rollout, weaker = config.measured, config.rollout, config.sandbox.allow_weaker
    else:
        entries = [entry_of(label) for label in labels]
        rollout, weaker = RolloutSection(max_new_tokens=TOKENS_WITH_TOOLS), False

    if max_new_tokens:
        rollout = rollout.model_copy(update={"max_new_tokens": max_new_tokens})
    names = [entry.label for entry in entries]
    if len(set(names)) < len(names):
        raise UserError(f"--tasks: {max(names, key=names.count)} is given twice; name every one once")
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
