"""Vision RL and the same skill in words: does reinforcement learning on pictures change the same skill in
words? Arms, seeds, controls, statistics, one page: OUT/report.html and OUT/study.json.

earlyfusion study transfer --out runs/transfer
earlyfusion study transfer --recipe mine.toml --seeds 2 --jobs 4
earlyfusion study transfer --out runs/transfer --resume
earlyfusion study transfer --out runs/transfer --report-only

Stages run as subprocesses, each in its own folder; what has its result is not run again. Ctrl-C or SIGTERM
lets the running stages save and leaves with exit code 75: start the same command with --resume.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.rl.study.analysis import Row, analyse
from earlyfusion.rl.study.plan import StudyConfig, read_study, stages, write_recipes
from earlyfusion.rl.study.report import headline, percent, points, write_report
from earlyfusion.rl.study.runner import Runner


class TransferOptions(Options):
    recipe: str = "study-transfer"
    """shipped name or a TOML file"""
    out: Path = Path("runs/transfer")
    """output folder"""
    seeds: PositiveInt | None = None
    """pretraining seeds, in place of the study's"""
    rl_seeds: PositiveInt | None = None
    """runs of an arm from each start, in place of the study's"""
    jobs: PositiveInt = 2
    """stages at a time"""
    threads: PositiveInt = 1
    """torch threads of a stage"""
    resume: bool = False
    """go on in a folder that holds results"""
    report_only: bool = False
    """no runs: tables and page from what is there"""
    dry_run: bool = False
    """print the stages and leave"""


@verb
def transfer(options: TransferOptions) -> int:
    """Entry of `earlyfusion study transfer`."""
    out = options.out
    # What is left out on the line stays as the study says.
    changes = options.model_dump(include={"seeds", "rl_seeds"}, exclude_none=True)
    config = read_study(options.recipe, changes)
    # The commands as they would run, so that one can be tried by hand.
    if options.dry_run:
        planned = stages(config, out)
        for stage in planned:
            print("done " if stage.done else "to do", *stage.command)
        print(f"{len(planned)} stages, {sum(stage.done for stage in planned)} done")
        return EXIT_OK
    if options.report_only:
        if not (out / "measured").is_dir():
            raise UserError(f"{out} holds no measurements; run the study first, without --report-only")
        report(config, out)
        return EXIT_OK

    # A second study in the same folder would be taken for the first one's results.
    if not options.resume and any((out / name).exists() for name in ("pretrain", "runs", "measured")):
        raise UserError(
            f"{out} already holds a study: add --resume to go on, or name another folder with --out"
        )
    write_recipes(config, out)
    # Also after a failure or a stop: the page shows what is there so far.
    code = Runner(stages(config, out), out / "study.jsonl", options.jobs, options.threads).run()
    report(config, out)
    return code


def report(config: StudyConfig, out: Path) -> None:
    """study.json, the page and the table, of what is measured; nothing where no start is."""
    # Every figure is a difference to a start.
    if not any((out / "measured").glob("*/none.jsonl")):
        return
    results = analyse(config, out)
    write_json(out / "study.json", {"config": config.model_dump(mode="json"), **results})
    page = write_report(config, out, results)
    show_primary(results)
    print(f"written: {page}, {out / 'study.json'}")


def show_primary(results: Row) -> None:
    """The primary table in the terminal."""
    columns = {}
    for row in results["rows"]:
        if row["registered"] and row["metric"] == "accuracy":
            columns[row["arm"]] = {
                "start": percent(row["before"]),
                "after": percent(row["after"]),
                "change": points(row["value"]),
                "95 %": f"[{points(row['low'])}, {points(row['high'])}]",
                "p Holm": row["p_holm"],
                "verdict": results["verdicts"][row["arm"]],
            }
    show(f"greedy accuracy in words, {results['primary']}, %", columns)
    print(headline(results))
