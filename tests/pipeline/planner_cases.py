"""A rank of test_planner.py: the step that `plan` rehearses, for real."""

import ctypes
import json
from pathlib import Path

import torch

from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline import build
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.optim.routing import local_part
from earlyfusion.pipeline.planner.rehearsal import Observed, Traffic, row
from earlyfusion.pipeline.runtime import M_MMAP_THRESHOLD, Runtime, spread
from earlyfusion.pipeline.step import LossMeter, PictureExchange, forward_backward
from earlyfusion.pipeline.update import Guard, update

STEPS = 3


def resident(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def step(recipe: str, out: str, patches: int, *overrides: tuple[str, object]) -> None:
    """Take STEPS steps of full rows; OUT/RANK.json: bytes that a step adds to what is resident, at least
    (what libraries add comes on top), with the tensors that stay, and bytes sent in the last one."""
    config = load_config([recipe], overrides)
    # Large buffers are mapped one by one from here on: what is freed is not resident.
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    stage, runtime = config.stages[0], Runtime("no", 1, config.parallel)
    fusion_config = meta_model(config).config
    model, fusion, _ = spread(lambda: NativeFusion(fusion_config), runtime)
    optimizer = build.optimizer(config.optim, fusion, runtime.layout)
    exchange = PictureExchange(config.parallel, fusion_config, runtime)
    meter, guard = LossMeter(["a"]), Guard("skip", runtime.agree)
    added, traffic = [], Traffic(runtime.layout)

    def one() -> None:
        batches = [row(config, stage, patches) for _ in range(stage.lanes // runtime.layout.data_world)]
        for batch in batches:
            batch.sources.append("a")
        model.train()
        batches, routes = exchange.spread(batches, stage.max_patches)
        loss = forward_backward(runtime, model, batches, meter, routes)
        update(fusion, optimizer, guard, runtime, loss=loss, lr=1e-3, clip_grad_norm=1.0)

    for _ in range(STEPS):
        libc.malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        one()
        added.append(resident("VmHWM") - before)
    with Observed(traffic):
        one()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    stays = [*fusion.parameters(), *fusion.buffers(), *(v for v in state if isinstance(v, torch.Tensor))]
    found = {
        "peak": min(added) + sum(local_part(tensor).nbytes for tensor in stays),
        "sent": {" ".join(key): size for key, size in traffic.bytes.items()},
    }
    Path(out, f"{runtime.rank}.json").write_text(json.dumps(found))
    runtime.close()
