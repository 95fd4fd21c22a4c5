"""`earlyfusion compare`: did the treatment change anything, and could this test have seen it?

    earlyfusion compare runs/start runs/vision-rl --control runs/text-rl
    earlyfusion compare runs/start 'runs/vision-rl-seed*' --out runs/delta

Paired deltas between evaluated models. A table on the terminal, compare.json, and compare.html, a page that
loads nothing and shows what the table has no room for. The computation is eval/compare.py.
"""

from collections import defaultdict
from pathlib import Path
from typing import ClassVar

from earlyfusion.data.options import Options, verb
from earlyfusion.eval.compare import compare_arms, load_arm
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.report.page import number, p_value, write_page


class CompareOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("base", "treated")

    base: str
    """evaluation folder of the starting model; seeds: DIR,DIR or a pattern"""
    treated: str
    """evaluation folder of the treated model; several seeds likewise"""
    control: str = ""
    """arm that got everything but the treatment (same compute)"""
    metric: str = "score"
    """number of the records: score, mae, cer, iou, ..."""
    out: Path = Path("compare")
    """folder for compare.json and compare.html"""


@verb
def compare(options: CompareOptions) -> None:
    """Print the table, write numbers and page."""
    given = {"base": options.base, "treated": options.treated, "control": options.control}
    arms = {name: load_arm(name, place, options.metric) for name, place in given.items() if place}
    base, treated = arms["base"], arms["treated"]

    # One dict for the terminal, the JSON file and the page.
    result = {"metric": options.metric, **compare_arms(base, treated, arms.get("control"))}
    unit = Unit(result)
    show(f"treated - base, {unit.name}", table(result, unit))
    # Several seeds: whether the gain holds for others is said apart.
    for entry in result["tasks"]:
        if seeds := entry["seeds"]:
            told = f"{len(base.runs)} base and {len(treated.runs)} treated seeds; over seeds"
            told += f" {unit.range(seeds['seeds'])}, over new questions and seeds {unit.range(seeds['both'])}"
            print(f"{one_line(entry['task'])}: {told}")
    if result["left_out"]:
        print(f"not in every run, left out: {one_line(', '.join(result['left_out']))}")
    print(f"numbers: {write_json(options.out / 'compare.json', result)}")

    # The template reads the result itself.
    names = {arm: ", ".join(Path(folder).name or folder for folder in result["arms"][arm]) for arm in arms}
    page = {
        **result,
        "title": f"{names['treated']} against {names['base']}",
        "note": f"{len(result['tasks'])} lines of results; {result['metric']}",
        "unit": unit,
    }
    print(f"report:  {write_page(options.out / 'compare.html', 'compare.html', page)}")


class Unit:
    """How the numbers of a result are written: scores from 0 to 1 in points (hundredths), all else as it
    is."""

    def __init__(self, result: Record) -> None:
        scores = [entry[arm]["score"] for entry in result["tasks"] for arm in ("base", "treated")]
        self.name, self.scale, self.digits = result["metric"], 1, 4
        if self.name == "score" and all(-1 <= score <= 1 for score in scores):
            self.name, self.scale, self.digits = "points", 100, 2

    def __call__(self, value: float | None, sign: str = "") -> str:
        return number(value, f"{sign}.{self.digits}f", self.scale)

    def range(self, interval: Record) -> str:
        """ "[-0.31, +1.20]"; words where nothing changed: an interval of no width would claim too much."""
        # Equal answers do not show that no other question would be answered differently.
        if interval.get("se") == 0:
            return "[none changed]"
        return f"[{self(interval['low'], '+')}, {self(interval['high'], '+')}]"

    def delta(self, interval: Record) -> str:
        """ "+0.45 ± 0.38"."""
        return f"{self(interval['value'], '+')} ± {self(interval['se'])}"


def table(result: Record, unit: Unit) -> dict[str, dict[str, str]]:
    """Column -> task -> what the terminal shows; the page has the rest."""
    columns: dict[str, dict[str, str]] = defaultdict(dict)
    # What decides stands on the terminal: everything else would not fit its width.
    for entry in result["tasks"]:
        delta, against = entry["delta"], entry.get("difference_in_differences")
        cells = {
            "n": f"{entry['n']:,}",
            "base": unit(entry["base"]["score"]),
            "treated": unit(entry["treated"]["score"]),
            "delta ± SE": unit.delta(delta),
            "95 %": unit.range(delta),
            "p Holm": p_value(delta["p_holm"]),
            "visible from": unit(delta["smallest_delta"]),
        }
        if against:
            cells["less control's"] = f"{unit.delta(against)} {unit.range(against)}"
        cells["verdict"] = entry["verdict"]
        for name, text in cells.items():
            columns[name][entry["task"]] = text
    return columns
