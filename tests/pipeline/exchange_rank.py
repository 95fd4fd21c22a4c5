"""One of W gloo processes for test_picture_exchange.py; writes FOLDER/rank{RANK}.pt."""

import exchange_cases as cases
import torch
import torch.distributed as dist

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.runtime import Runtime, replicate
from earlyfusion.pipeline.step import PictureExchange
from earlyfusion.vision.balance import Route, gather_grids


def take(runtime: Runtime, exchange: PictureExchange, step: cases.Step, seed: int) -> dict:
    """One step plain, planned, and with every picture sent anywhere."""
    fusion = cases.model(seed, torch.float64)
    prepared = replicate(fusion, runtime)
    parts = cases.batches(step, runtime.rank, seed)
    routes = exchange.routes(parts, 4096)
    out: dict = {"routes": [route is not None for route in routes]}
    ways = {"plain": (), "planned": routes}
    ways["scattered"] = [Route(plan, runtime.rank, exchange.group) for plan in cases.scattered(step, seed)]
    for name, way in ways.items():
        result, gradients = cases.gradients(runtime, prepared, fusion, parts, way)
        out[name] = (result, gradients)
    return out


def refusals(runtime: Runtime, group) -> dict[str, str]:
    """What every rank is told when one of them brings something else."""
    rank, said = runtime.rank, {}

    def note(name: str, call) -> None:
        try:
            call()
            said[name] = ""
        except UserError as error:
            said[name] = str(error)

    note("micro-batches", lambda: gather_grids([[(1, 2, 2)]] * (1 + rank), group))
    note("digest", lambda: gather_grids([[]], group, str(rank)))
    fusion = cases.config()
    note(
        "setting",
        lambda: PictureExchange(ParallelSection(exchange_pictures=("on", "off")[rank]), fusion, runtime),
    )
    uneven = PictureExchange(ParallelSection(), fusion, runtime)
    uneven.above += rank
    note("threshold", lambda: uneven.routes([cases.batch([[]], 0)], 4096))
    part = cases.batch([[(1, 4, 4)], [(1, 2, 2)]], 0)
    if rank == 1:
        part.patches = part.patches[:-1]
    exchange = PictureExchange(ParallelSection(), fusion, runtime)
    note("patches", lambda: exchange.routes([part], 4096))
    return said


def main(folder: str) -> None:
    runtime = Runtime(threads=1)
    exchange = PictureExchange(ParallelSection(exchange_pictures="on"), cases.config(), runtime)
    out: dict = {}
    for name in cases.names(runtime.world):
        out[name] = take(runtime, exchange, cases.step_of(runtime.world, name), len(name))
    if runtime.world == 2:
        out["refusals"] = refusals(runtime, dist.new_group())
    torch.save(out, f"{folder}/rank{runtime.rank}.pt")
    runtime.close()
