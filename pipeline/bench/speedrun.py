"""`earlyfusion bench speedrun`: how soon a recipe reaches the target of docs/speedrun.md.

The recipe is trained as a user trains it, once a seed, in a process of its own; every evaluation is a row of
its curve. A record needs the last row of every seed to reach all targets. core_seconds: processor time of the
whole process, with set-up and evaluation. What was measured is not trained again.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from earlyfusion.data.options import Options, verb
from earlyfusion.eval.samples import STEP_DIGITS
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.bench.frame import numbers, save_record, saved_record
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.track import read_metrics

TARGET = {
    "tokens": (0, 2_700_000),
    "easy_vqa": (0.97, 1),
    "questions": (9_673, 9_673),  # the whole test split: a recipe may ask fewer
    "bits_per_byte": (0, 1.87),
}
"""What is measured -> from, to."""
CONTROLS = ("easy_vqa_blind", "heldout/seen/scenes", "heldout/blind/scenes")
"""What stands beside it."""


class SpeedrunOptions(Options):
    recipe: str = "nano"
    """recipe, or a file of yours"""
    seeds: str = "1,2,3"
    """seeds of weights and of data, a run each"""
    folder: Path = Path("runs/speedrun")
    """where the runs are written, a folder a seed"""
    out: str = "runs/bench/speedrun.json"
    """where the numbers are saved"""


def curve(run: Path) -> list[Record]:
    """The evaluations of a run: step, tokens until then (of text and of pictures), and what was measured."""
    rows, tokens = [], 0
    for record in read_metrics(run / "metrics.jsonl"):
        if record["event"] == "train":
            tokens = int(record["tokens"])
        elif record["event"] == "eval":
            step = record["step"]
            found = {name: record[name] for name in (*TARGET, *CONTROLS) if name in record}
            name = f"easy_vqa_{step:0{STEP_DIGITS}d}.json"
            asked = json.loads((run / "eval" / name).read_bytes())["questions"]
            rows.append({"step": step, "tokens": tokens, "questions": asked, **found})
    return rows


def missed(row: Record) -> list[str]:
    """What a row of a curve lacks, in words; empty where it reaches every target."""
    told = []
    for name, (least, most) in TARGET.items():
        value = row.get(name, float("nan"))
        # A NaN (not measured) lies in no range.
        if not least <= value <= most:
            told.append(f"{name} {value:.4g}, expected {least} to {most}")
    return told


def one_run(recipe: str, seed: int, out: Path) -> Record:
    """Train with one seed. Raises UserError if the run ends badly."""
    keys = {"run.seed": seed, "data.seed": seed, "run.out": out, "eval.tasks": '["easy_vqa","bpb"]'}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "earlyfusion.pipeline.pretrain", recipe, *words])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise UserError(f"bench speedrun: the run with seed {seed} ended with {done.returncode}; see above")
    # The first two: seconds of the process and of the kernel for it.
    cpu = sum(after[:2]) - sum(before[:2])
    told: Record = {"seconds": time.perf_counter() - start, "core_seconds": cpu, "curve": curve(out)}
    return {**told, "missed": missed(told["curve"][-1])}


@verb
def speedrun(options: SpeedrunOptions) -> None:
    """Entry of `earlyfusion bench speedrun`. Raises UserError for the folder of a run that was cut off."""
    # With every key: a recipe that was edited is another one.
    config = load_config([options.recipe]).model_dump(mode="json")
    given, found = {**options.model_dump(mode="json"), "config": config}, {}
    if Path(options.out).exists():
        record = saved_record(options.out)
        if record["options"] | {"seeds": options.seeds} == given:
            found = record["runs"]
    rows: dict[str, Record] = {}
    for seed in numbers(options.seeds):
        name, folder = f"seed {seed}", options.folder / f"seed-{seed}"
        if name in found:
            print(f"{name}: measured before, {folder}")
        elif folder.exists():
            raise UserError(
                f"bench speedrun: {folder} is no run of {options.out} that came to its end; move it away"
            )
        rows[name] = found.get(name) or one_run(options.recipe, seed, folder)
        # After every seed: nothing measured is lost.
        save_record(options.out, given, runs=found | rows)
    shown = {}
    for run, row in rows.items():
        print(f"{run}: {'; '.join(row['missed']) or 'every target reached'}")
        shown[run] = row["curve"][-1] | {name: row[name] for name in ("seconds", "core_seconds")}
    show(f"{options.recipe}: the last evaluation", shown)
