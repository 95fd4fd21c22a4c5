"""`earlyfusion bench speedrun`: how soon a recipe reaches the target of docs/speedrun.md.

The recipe is trained as a user trains it, once a seed, in processes of its own; every evaluation is a row of
its curve. A record needs the last row of every seed to reach all targets. core_seconds: processor time of all
processes, with set-up and evaluation.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

from pydantic import PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.bench.frame import numbers, save_record
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.track import read_metrics

TARGET = {"tokens": (None, 2_700_000), "easy_vqa": (0.97, None), "bits_per_byte": (None, 1.87)}
"""What is measured -> (least, most)."""
CONTROLS = ("easy_vqa_blind", "heldout/seen/scenes", "heldout/blind/scenes")
"""What stands beside it."""


class SpeedrunOptions(Options):
    recipe: str = "nano"
    """recipe, or a file of yours"""
    seeds: str = "1,2,3"
    """seeds of weights and of data, a run each"""
    processes: PositiveInt = 1
    """processes of a run"""
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
            found = {name: record[name] for name in (*TARGET, *CONTROLS) if name in record}
            rows.append({"step": record["step"], "tokens": tokens, **found})
    return rows


def missed(row: Record) -> list[str]:
    """What a row of a curve lacks, in words; empty where it reaches every target."""
    told = []
    for name, (least, most) in TARGET.items():
        value = row.get(name, float("nan"))
        # (Nothing measured is compared with nothing: a NaN reaches no target.)
        if least is not None and not value >= least:
            told.append(f"{name} {value:.4g}, at least {least}")
        if most is not None and not value <= most:
            told.append(f"{name} {value:.4g}, at most {most}")
    return told


def one_run(options: SpeedrunOptions, seed: int, out: Path) -> Record:
    """Train with one seed. Raises UserError if the run ends badly."""
    launch = ["-m", "earlyfusion.pipeline.pretrain"]
    if options.processes > 1:
        ranks = ["--standalone", "--nproc-per-node", str(options.processes)]
        launch = ["-m", "torch.distributed.run", *ranks, *launch]
    keys = {"run.seed": seed, "data.seed": seed, "run.out": out, "eval.tasks": '["easy_vqa","bpb"]'}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *launch, options.recipe, *words])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise UserError(f"bench speedrun: the run with seed {seed} ended with {done.returncode}; see above")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - start, "core_seconds": cpu, "curve": curve(out)}


@verb
def speedrun(options: SpeedrunOptions) -> None:
    """Entry of `earlyfusion bench speedrun`. Raises UserError where a folder of it is there already."""
    rows: dict[str, Record] = {}
    folders = {seed: options.folder / f"seed-{seed}" for seed in numbers(options.seeds)}
    for folder in folders.values():
        if folder.exists():
            raise UserError(f"bench speedrun: {folder} is there; move it away, or give another --folder")
    for seed, folder in folders.items():
        rows[f"seed {seed}"] = one_run(options, seed, folder)
        rows[f"seed {seed}"]["missed"] = missed(rows[f"seed {seed}"]["curve"][-1])
        # After every seed: what has been measured is not lost with what has not.
        save_record(options.out, options.model_dump(mode="json"), runs=rows)
    columns = {
        name: {seed: row["curve"][-1].get(name, float("nan")) for seed, row in rows.items()}
        for name in (*TARGET, *CONTROLS)
    }
    for name in ("seconds", "core_seconds"):
        columns[name] = {seed: row[name] for seed, row in rows.items()}
    show(f"{options.recipe}: the last evaluation", columns)
    for run, row in rows.items():
        print(f"{run}: {'; '.join(row['missed']) or 'every target reached'}")
