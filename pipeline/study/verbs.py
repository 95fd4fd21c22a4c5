"""Studies: one thing changed, at several seeds, beside what it is compared with.

earlyfusion study optimizer --out runs/optimizer
earlyfusion study residuals --recipe mine.toml --seeds 5 --jobs 4
earlyfusion study optimizer --out runs/optimizer --resume

An arm changes keys of a recipe, of pretraining or of a later stage that begins with the model of another run.
The first arm is the base; every other one is compared with it, or with those that it names, seed by seed. An
arm may tune one key of its own on a seed that no comparison uses. The base may also be run for more and for
fewer tokens, which tells how many it needs for the loss of another arm. Some arms test the study itself: what
must not differ, and what must be worse. The page, report.html, holds all of it; study.json the figures. How
the runs are stopped and go on: pipeline/study/runner.py.
"""

from collections.abc import Callable
from pathlib import Path

from pydantic import PositiveInt
from rich.table import Table

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.config.compose import recipe_names
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.study.findings import power, write_findings
from earlyfusion.pipeline.study.plan import FOLDER, StudyConfig, read_study, stages, write_plan
from earlyfusion.pipeline.study.runner import Runner


class StudyOptions(Options):
    recipe: str = ""
    """a TOML file in place of the shipped study"""
    out: Path = Path()
    """output folder; runs/NAME if not given"""
    seeds: PositiveInt | None = None
    """seeds, in place of the study's"""
    jobs: PositiveInt = 2
    """runs at a time"""
    threads: PositiveInt = 1
    """torch threads of a run"""
    resume: bool = False
    """go on in a folder that holds results"""
    report_only: bool = False
    """no runs: tables and page from what is there"""
    dry_run: bool = False
    """print the runs and leave"""


def named(name: str) -> Callable[..., int | None]:
    """The verb of a shipped study."""

    @verb
    def run(options: StudyOptions) -> int:
        out = options.out if options.out != Path() else Path("runs") / name
        changes = options.model_dump(include={"seeds"}, exclude_none=True)
        config = read_study(options.recipe or name, changes)
        return conduct(options, config, out)

    return run


def conduct(options: StudyOptions, config: StudyConfig, out: Path) -> int:
    """Run what is not done, then write tables and page. Returns the exit code."""
    made = stages(config, out)
    # The commands as they would run, so that one can be tried by hand.
    if options.dry_run:
        for stage in made:
            try:
                words = stage.command()
            except UserError as error:  # what decides it has not run yet
                words = (stage.name, f"({error})")
            print("done " if stage.done else "to do", *words)
        print(f"{len(made)} stages, {sum(stage.done for stage in made)} done")
        return EXIT_OK
    if options.report_only:
        if not (out / "runs").is_dir():
            raise UserError(f"{out} holds no runs; run the study first, without --report-only")
        write_findings(config, out)
        return EXIT_OK

    # A second study in the same folder would be taken for the first one's results.
    if not options.resume and any((out / name).exists() for name in ("tuning", "runs")):
        raise UserError(
            f"{out} already holds a study: add --resume to go on, or name another folder with --out"
        )
    write_plan(config, out)
    print(power(config))
    # Also after a failure or a stop: the page shows what is there so far.
    code = Runner(made, out / "study.jsonl", options.jobs, options.threads).run()
    write_findings(config, out)
    return code


optimizer, residuals, hybrid = map(named, ("optimizer", "residuals", "hybrid"))
fusion, qkclip = named("fusion"), named("qkclip")
transfer, transfer_steps = named("transfer"), named("transfer_steps")
objectives, toggle, asynchronous = named("objectives"), named("toggle"), named("asynchronous")
joint, tools, swarm = named("joint"), named("tools"), named("swarm")


class ListOptions(Options):
    pass


@verb
def listing(options: ListOptions) -> None:
    """Entry of `earlyfusion study list`."""
    table = Table(title="earlyfusion study NAME", title_justify="left")
    for head in ("study", "what is asked", "what was published"):
        table.add_column(head)
    for name in recipe_names(FOLDER):
        config = read_study(name, {})
        table.add_row(name, config.title, config.claim)
    print_table(table)
