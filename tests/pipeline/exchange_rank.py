"""One of W gloo processes for test_picture_exchange.py; writes FOLDER/rank{RANK}.pt."""

import exchange_cases as cases
import torch
import torch.distributed as dist

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.parallel.encoder import DecoupledEncoder
from earlyfusion.pipeline.runtime import Runtime, replicate
from earlyfusion.pipeline.step import PictureExchange
from earlyfusion.vision import balance
from earlyfusion.vision.balance import Route, gather_grids
from earlyfusion.vision.patches import Share, VisionCost


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
    out["decoupled"], out["shares"] = decoupled(runtime, exchange, fusion, prepared, parts)
    return out


def decoupled(runtime: Runtime, exchange: PictureExchange, fusion, prepared, parts) -> tuple:
    """The step with its pictures encoded first, a few at a time, large ones by all ranks; and how many of
    these there are."""
    cost = VisionCost.from_config(fusion.config.vision)
    encoder = DecoupledEncoder(fusion, runtime, exchange.group, cost, 40)
    encoder.begin(parts, gather_grids([part.grids for part in parts], exchange.group))
    found = cases.gradients(runtime, prepared, fusion, parts, encoder=encoder)
    return found, sum(isinstance(grid, Share) for grid in encoder.held)


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
    # So that the small pictures of the cases are large.
    balance.LEAST_SHARE = 4
    out: dict = {}
    for name in cases.names(runtime.world):
        out[name] = take(runtime, exchange, cases.step_of(runtime.world, name), len(name))
    if runtime.world == 2:
        out["refusals"] = refusals(runtime, dist.new_group())
    torch.save(out, f"{folder}/rank{runtime.rank}.pt")
    runtime.close()
