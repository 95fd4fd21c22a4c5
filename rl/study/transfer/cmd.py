"""`earlyfusion study transfer`: does reinforcement learning on pictures change the same skill in words?

    earlyfusion study transfer --out runs/transfer                       the shipped study
    earlyfusion study transfer --recipe mine.toml --seeds 2 --jobs 4     another one
    earlyfusion study transfer --out runs/transfer --resume              go on after a stop, or with more
    seeds or arms
    earlyfusion study transfer --out runs/transfer --report-only         tables and page from what is there

Stages run as subprocesses, --jobs at a time, each in its own folder; what has its result is not run again.
Ctrl-C or SIGTERM lets the running stages save and leaves with exit code 75: start the same command with
--resume. At the end lie OUT/report.html and OUT/study.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.rl.study.runner import Runner
from earlyfusion.rl.study.transfer.analysis import analyse
from earlyfusion.rl.study.transfer.plan import Stage, StudyConfig, read_study, stages, write_recipes
from earlyfusion.rl.study.transfer.probe import read_probes
from earlyfusion.rl.study.transfer.report import headline, percent, points, write_report

Prepare = Callable[[Sequence[Stage]], Sequence[Stage]]


def build_parser() -> argparse.ArgumentParser:
    """Options of the study."""
    parser = argparse.ArgumentParser(
        prog="earlyfusion study transfer",
        description="Vision RL and the same skill in words: arms, seeds, controls, statistics, one page.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--recipe", default="study-transfer", metavar="STUDY", help="shipped name or a TOML file"
    )
    parser.add_argument("--out", default="runs/transfer", metavar="DIR", help="output folder")
    parser.add_argument("--seeds", type=int, metavar="N", help="pretraining seeds, in place of the study's")
    parser.add_argument(
        "--rl-seeds", type=int, metavar="N", help="runs of an arm from each start, in place of the study's"
    )
    parser.add_argument("--arms", metavar="NAME[,NAME]", help="only these arms")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="stages at a time")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of a stage")
    parser.add_argument("--resume", action="store_true", help="go on in a folder that holds results")
    parser.add_argument(
        "--report-only", action="store_true", help="no runs: tables and page from what is there"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the stages and leave")
    return parser


def main(argv: Sequence[str] | None = None, prepare: Prepare | None = None) -> int:
    """Run the study; returns the exit code. prepare: lets a test replace the stages' commands."""
    options = build_parser().parse_args(argv)
    out = Path(options.out)
    config = _config(options)
    made: Sequence[Stage] = stages(config, out)
    if options.dry_run:
        for stage in made:
            print(("done  " if stage.done else "to do ") + " ".join(stage.command))
        print(f"{len(made)} stages, {sum(stage.done for stage in made)} done")
        return EXIT_OK
    console = Console(stderr=True)
    if not options.report_only:
        if options.jobs < 1 or options.threads < 1:
            raise UserError(f"--jobs {options.jobs}, --threads {options.threads}: give at least 1")
        if not options.resume and any((out / name).exists() for name in ("pretrain", "runs", "measured")):
            raise UserError(
                f"{out} already holds a study: add --resume to go on, or name another folder with --out"
            )
        write_recipes(config, out)
        made = prepare(made) if prepare is not None else made
        code = Runner(made, out / "study.jsonl", options.jobs, options.threads, console).run()
    elif not (out / "measured").is_dir():
        raise UserError(f"{out} holds no measurements; run the study first, without --report-only")
    else:
        code = EXIT_OK
    if (out / "measured").is_dir() and any((out / "measured").glob("*/none.jsonl")):
        results = analyse(config, out) | {"probe": read_probes(config, out)}
        write_json(out / "study.json", {"config": config.model_dump(mode="json"), **results})
        page = write_report(config, out, results)
        show(results, Console())
        print(f"written: {page}, {out / 'study.json'}")
    return code


def _config(options: argparse.Namespace) -> StudyConfig:
    changes: dict[str, Any] = {}
    if options.seeds is not None:
        changes["seeds"] = options.seeds
    if options.rl_seeds is not None:
        changes["rl_seeds"] = options.rl_seeds
    config = read_study(options.recipe, changes)
    if options.arms:
        wanted = [name.strip() for name in options.arms.split(",")]
        known = [arm.name for arm in config.arms]
        for name in wanted:
            if name not in known:
                raise UserError(f"--arms {name!r}; {did_you_mean(name, known)}")
        arms = [arm for arm in config.arms if arm.name in wanted]
        arms = [arm.model_copy(update={"against": [o for o in arm.against if o in wanted]}) for arm in arms]
        config = config.model_copy(update={"arms": arms})
    return config


def show(results: dict[str, Any], console: Console) -> None:
    """The primary table in the terminal."""
    table = Table(title=f"greedy accuracy in words, {results['primary']}, %", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("arm", "start", "after", "delta", "95 %", "p Holm", "verdict"):
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right")
    for row in results["rows"]:
        if row["registered"] and row["metric"] == "accuracy":
            span = f"[{points(row['low'])}, {points(row['high'])}]"
            cells = [
                percent(row["before"]),
                percent(row["after"]),
                points(row["value"]),
                span,
                f"{row['p_holm']:.3f}",
            ]
            table.add_row(row["arm"], *cells, results["verdicts"][row["arm"]])
    console.print(table)
    console.print(headline(results))
