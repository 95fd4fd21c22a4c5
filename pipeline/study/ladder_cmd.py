"""Studies of pretraining: one thing changed, at several sizes and seeds, beside what it is compared with.

earlyfusion study optimizer --out runs/optimizer
earlyfusion study residuals --recipe mine.toml --seeds 5 --jobs 4
earlyfusion study optimizer --out runs/optimizer --resume

An arm changes keys of a recipe. The first arm is the base; every other one is compared with it, seed by seed.
An arm may tune one key of its own on a seed that no comparison uses. The base is also run for more and for
fewer tokens, which tells how many it needs for the loss of another arm. Two arms test the study itself: one
that must not differ from the base, and one that must be worse. The page, report.html, holds all of it;
study.json the figures. How the runs are stopped and go on: pipeline/study/runner.py.
"""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from earlyfusion.data.options import verb
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.pipeline.config.compose import to_toml
from earlyfusion.pipeline.study.findings import power, write_findings
from earlyfusion.pipeline.study.ladder import LadderConfig, read_ladder, stages
from earlyfusion.pipeline.study.runner import StudyOptions, conduct


def write_plan(config: LadderConfig, out: Path) -> None:
    """Write study.toml and say what can be seen. Raises UserError when OUT holds another study."""
    text, path = to_toml(config.model_dump(mode="json")), out / "study.toml"
    if path.is_file():
        old, new = (tomllib.loads(one) for one in (path.read_text(encoding="utf-8"), text))
        if changed := sorted(key for key in {*old, *new} - {"seeds"} if old.get(key) != new.get(key)):
            raise UserError(
                f"{out} holds a study with other {', '.join(changed)}: name another folder with --out; only"
                " seeds may change"
            )
    write_atomic(path, text)
    print(power(config))


class LadderOptions(StudyOptions):
    recipe: str = ""
    """a TOML file in place of the shipped study"""
    out: Path = Path()
    """output folder; runs/NAME if not given"""


def named(name: str) -> Callable[..., int | None]:
    """The verb of a shipped study."""

    @verb
    def run(options: LadderOptions) -> int:
        out = options.out if options.out != Path() else Path("runs") / name
        changes = options.model_dump(include={"seeds"}, exclude_none=True)
        config = read_ladder(options.recipe or name, changes)
        own = options.model_copy(update={"out": out})
        write = partial(write_plan, config, out)
        return conduct(
            own, stages(config, out), ("tuning", "runs"), write, partial(write_findings, config, out)
        )

    return run


optimizer, residuals = named("optimizer"), named("residuals")
fusion, qkclip = named("fusion"), named("qkclip")
