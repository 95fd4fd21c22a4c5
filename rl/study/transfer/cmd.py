"""`earlyfusion study transfer`: does reinforcement learning on pictures change the same skill in words?

At the end lie OUT/report.html and OUT/study.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
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


def transfer(
    recipe: Annotated[
        str, typer.Option(metavar="STUDY", help="shipped name or a TOML file")
    ] = "study-transfer",
    out: Annotated[Path, typer.Option(metavar="DIR", help="output folder")] = Path("runs/transfer"),
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="pretraining seeds, in place of the study's")
    ] = None,
    rl_seeds: Annotated[
        int | None, typer.Option(metavar="N", help="runs of an arm from each start, in place of the study's")
    ] = None,
    arms: Annotated[str | None, typer.Option(metavar="NAME[,NAME]", help="only these arms")] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="stages at a time")] = 2,
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="torch threads of a stage")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="go on in a folder that holds results")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="no runs: tables and page from what is there")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the stages and leave")] = False,
) -> int:
    """Vision RL and the same skill in words: arms, seeds, controls, statistics, one page.

    earlyfusion study transfer --out runs/transfer
    earlyfusion study transfer --recipe mine.toml --seeds 2 --jobs 4
    earlyfusion study transfer --out runs/transfer --resume
    earlyfusion study transfer --out runs/transfer --report-only

    Stages run as subprocesses, each in its own folder; what has its result is not run again. Ctrl-C or
    SIGTERM lets the running stages save and leaves with exit code 75: start the same command with --resume.
    """
    changes = {name: n for name, n in (("seeds", seeds), ("rl_seeds", rl_seeds)) if n is not None}
    config = only_arms(read_study(recipe, changes), arms)
    if dry_run:
        planned = stages(config, out)
        for stage in planned:
            print(("done  " if stage.done else "to do ") + " ".join(stage.command))
        print(f"{len(planned)} stages, {sum(stage.done for stage in planned)} done")
        return EXIT_OK
    if not report_only:
        return run_study(config, out, jobs, threads, resume)
    if not (out / "measured").is_dir():
        raise UserError(f"{out} holds no measurements; run the study first, without --report-only")
    report(config, out)
    return EXIT_OK


def run_study(
    config: StudyConfig,
    out: Path,
    jobs: int = 2,
    threads: int = 1,
    resume: bool = False,
    prepare: Callable[[Sequence[Stage]], Sequence[Stage]] = list,
) -> int:
    """Run what has no result yet, then report; returns the exit code.

    prepare: lets a test replace the stages' commands.
    """
    if not resume and any((out / name).exists() for name in ("pretrain", "runs", "measured")):
        raise UserError(
            f"{out} already holds a study: add --resume to go on, or name another folder with --out"
        )
    write_recipes(config, out)
    planned = prepare(stages(config, out))
    code = Runner(planned, out / "study.jsonl", jobs, threads, Console(stderr=True)).run()
    report(config, out)
    return code


def report(config: StudyConfig, out: Path) -> None:
    """study.json, the page and the table, of what is measured; nothing where no start is."""
    if not any((out / "measured").glob("*/none.jsonl")):
        return
    results = analyse(config, out) | {"probe": read_probes(config, out)}
    write_json(out / "study.json", {"config": config.model_dump(mode="json"), **results})
    page = write_report(config, out, results)
    show(results, Console())
    print(f"written: {page}, {out / 'study.json'}")


def only_arms(config: StudyConfig, names: str | None) -> StudyConfig:
    """The study with the arms named between commas alone; all without names."""
    if not names:
        return config
    kept = [name.strip() for name in names.split(",")]
    known = [arm.name for arm in config.arms]
    for name in kept:
        if name not in known:
            raise UserError(f"--arms {name!r}; {did_you_mean(name, known)}")

    arms = []
    for arm in config.arms:
        if arm.name in kept:
            arms.append(arm.model_copy(update={"against": [name for name in arm.against if name in kept]}))
    return config.model_copy(update={"arms": arms})


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
