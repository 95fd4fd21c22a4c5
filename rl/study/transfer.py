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

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import PositiveInt

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.rl.study.analysis import analyse, primary_of
from earlyfusion.rl.study.plan import StudyConfig, read_study, stages, write_recipes
from earlyfusion.rl.study.runner import Runner

Row = Mapping[str, Any]


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
    print(headline(results))
    print(f"written: {page}, {out / 'study.json'}")


# ---- The page.

# Both are warnings on the page, not exclusions: the claims stand as registered.
FULL = 0.95
"""Accuracy of the starts above which a gain cannot be told."""
SHORT = 0.9
"""Share of problems solved by a rule of place above which the skill is not needed."""


SENTENCES = {
    "gain, above": "A gain in words that its controls do not show",
    "gain": "A gain in words that its controls may explain",
    "loss": "A loss in words",
    "": "No difference in words could be shown",
}
"""Beginning of a verdict -> what it means; a verdict belongs to the first beginning that it has."""


def write_report(config: StudyConfig, out: Path, results: Row) -> Path:
    """Write the page; returns its path."""
    rows: dict[str, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in results["rows"]:
        rows[row["arm"]][row["label"]][row["metric"]] = row
    page = {
        **results,
        "title": "Vision RL and the same skill in words",
        "note": "Transfer study",
        "study": config,
        "headline": headline(results),
        "judged": {arm.name: primary_of(config, arm) for arm in config.arms},
        "rows": rows,
    }
    return write_page(out / "report.html", "study.html", page)


def headline(results: Row) -> str:
    """What came out, in plain sentences."""
    named: dict[str, list[str]] = {start: [] for start in SENTENCES}
    for name, about in results["arms"].items():
        if about["kind"] == "treated":
            verdict = results["verdicts"][name]
            named[next(start for start in SENTENCES if verdict.startswith(start))].append(name)
    told = [f"{SENTENCES[start]}: {', '.join(names)}." for start, names in named.items() if names]

    start, rule = results["start"].get(results["primary"]), results["shortcuts"].get(results["primary"])
    solved = fmean(row["accuracy"] for row in start) if start else 0.0
    if solved > FULL:
        told.append(
            f"The starts solve {solved:.1%} of the primary problems already: there is no room to see a"
            " gain, take a harder skill."
        )
    if rule and rule["solves"] >= SHORT:
        told.append(
            f"“{rule['rule'].capitalize()}” solves {rule['solves']:.1%} of the primary problems: a"
            " gain can be that rule and not the skill."
        )
    return " ".join(told) or "Nothing was measured yet."
