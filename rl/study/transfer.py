"""Vision RL and the same skill in words: does reinforcement learning on pictures change the same skill in
words? Arms, seeds, controls, statistics, one page: OUT/report.html and OUT/study.json.

earlyfusion study transfer --out runs/transfer
earlyfusion study transfer --recipe mine.toml --seeds 2 --jobs 4
earlyfusion study transfer --out runs/transfer --resume
earlyfusion study transfer --out runs/transfer --report-only

How its stages run, stop and go on: pipeline/study/runner.py.
"""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

from pydantic import PositiveInt

from earlyfusion.data.options import verb
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.pipeline.study.runner import StudyOptions, conduct
from earlyfusion.rl.study.analysis import analyse, primary_of
from earlyfusion.rl.study.plan import StudyConfig, read_study, stages, write_recipes

Row = Record


class TransferOptions(StudyOptions):
    recipe: str = "study-transfer"
    """shipped name or a TOML file"""
    out: Path = Path("runs/transfer")
    """output folder"""
    rl_seeds: PositiveInt | None = None
    """runs of an arm from each start, in place of the study's"""


@verb
def transfer(options: TransferOptions) -> int:
    """Entry of `earlyfusion study transfer`."""
    out = options.out
    # What is left out on the line stays as the study says.
    changes = options.model_dump(include={"seeds", "rl_seeds"}, exclude_none=True)
    config = read_study(options.recipe, changes)
    return conduct(
        options,
        stages(config, out),
        ("pretrain", "runs", "measured"),
        lambda: write_recipes(config, out),
        lambda: report(config, out),
    )


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
