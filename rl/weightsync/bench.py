"""`earlyfusion bench weightsync`: weights to an engine in another process, over several rails and over each
alone; readings meanwhile; how long a slice is without a rail when its own one hangs.

Bandwidth counts everything from the first question to the word upon which the version is read.
"""

import multiprocessing
import os
import statistics
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch
from pydantic import PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.bench.frame import alternate, compared, save_record
from earlyfusion.pipeline.figures import show
from earlyfusion.rl.weightsync.layout import Slice, manifest_of, pack
from earlyfusion.rl.weightsync.publish import Link, publish
from earlyfusion.rl.weightsync.replica import Replica
from earlyfusion.rl.weightsync.wire import MEMORY, Address, FileRail, GlooRail, Rail, Receiver, TcpRail

LOOKED_AT = 64
"""Places of the weights that a reading compares."""


class WeightsyncOptions(Options):
    mib: PositiveInt = 1024
    """MiB of weights"""
    slice_mib: PositiveInt = 2
    """MiB of a slice"""
    rounds: PositiveInt = 3
    """rounds, each side once a round"""
    readings: PositiveInt = 10_000
    """readings while versions arrive"""
    hangs: PositiveInt = 50
    """versions during which one of the rails hangs"""
    out: str = "runs/bench/weightsync.json"
    """where the numbers are saved"""


def engine(told: Connection) -> None:
    """The other process: it takes versions, and reads without a pause while it is asked to."""
    replica = Replica()
    receiver = Receiver(replica)
    told.send(tuple(receiver.address))
    reads = mixed = 0
    reading = threading.Event()

    def read() -> None:
        nonlocal reads, mixed
        rng = torch.Generator().manual_seed(0)
        while True:
            reading.wait()
            with replica.reading() as (version, weights):
                stamp = weights["stamp"]
                places = torch.randint(len(stamp), (LOOKED_AT,), generator=rng)
                mixed += bool((stamp[places] != version).any())
                reads += 1

    threading.Thread(target=read, daemon=True).start()
    while (asked := told.recv()) is not None:
        (reading.set if asked == "read" else reading.clear)()
        told.send((reads, mixed))
    # Threads of C++ may still be at work: they end with the process.
    os._exit(0)


class Hanging(TcpRail):
    """Hangs for `seconds` once, when it is told to."""

    seconds = 0.0

    def put(self, version: int, where: Slice, data: memoryview) -> None:
        """See Rail."""
        waited, self.seconds = self.seconds, 0.0
        if waited:
            threading.Event().wait(waited)
        super().put(version, where, data)


class Trainer:
    """This process: versions 0, 1, 2, ... of weights that say their version in every place."""

    def __init__(self, mib: int, slice_mib: int, folder: Path, address: Address) -> None:
        self.version, self.address, self.slice_bytes = -1, address, slice_mib << 20
        self.buffer = bytearray(mib << 20)
        self.weights = {"stamp": torch.zeros((mib << 20) // 8, dtype=torch.int64)}
        self.hanging = Hanging(address, "tcp 2")
        most = self.slice_bytes
        self.rails: dict[str, Rail] = {
            "memory": FileRail(address, MEMORY, "memory", most),
            "tcp": TcpRail(address),
            "tcp 2": self.hanging,
            "file": FileRail(address, folder, "file", most),
            "gloo": GlooRail(address),
        }
        self.links = {name: Link(address, [rail], slice_bytes=most) for name, rail in self.rails.items()}
        four = [rail for name, rail in self.rails.items() if name != "gloo"]
        self.links["four rails"] = Link(address, four, slice_bytes=most)

    def send(self, side: str) -> tuple[float, Any]:
        """The next version; seconds until it is read, and what sending took."""
        self.version += 1
        self.weights["stamp"].fill_(self.version)
        manifest = manifest_of(self.weights, self.version)
        pack(self.weights.items(), manifest, self.buffer)
        begun = monotonic()
        (sent,) = publish([self.links[side]], manifest, memoryview(self.buffer))
        if isinstance(sent, str):
            raise OSError(sent)
        return monotonic() - begun, sent


@verb
def weightsync(options: WeightsyncOptions) -> None:
    """Entry of `earlyfusion bench weightsync`."""
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    other = context.Process(target=engine, args=(theirs,), daemon=True)
    other.start()
    with tempfile.TemporaryDirectory(prefix="earlyfusion-weights-") as folder:
        trainer = Trainer(options.mib, options.slice_mib, Path(folder), Address(*told.recv()))
        gigabytes = (options.mib << 20) / 1e9

        def timed(side: str) -> dict[str, float]:
            seconds, _ = trainer.send(side)
            return {"GB/s": gigabytes / seconds, "seconds": seconds}

        # Once for what is only slow at first: memory that nobody has touched.
        for side in trainer.links:
            trainer.send(side)
        columns = compared(alternate(("four rails", *trainer.rails), options.rounds, timed))
        show(f"{options.mib:,} MiB of weights to another process", columns)

        told.send("read")
        reads, _ = told.recv()
        first, last, mixed = reads, reads, 0
        while last - first < options.readings:
            trainer.send("four rails")
            told.send("read")
            last, mixed = told.recv()
        told.send("rest")
        told.recv()

        rng, healing = Random(0), list[float]()
        for _ in range(options.hangs):
            trainer.hanging.seconds = rng.uniform(0.3, 0.6)
            healing += trainer.send("four rails")[1].healing
        told.send(None)
        for rail in trainer.rails.values():
            rail.close()
    healing.sort()
    faults: Record = {
        "readings": last - first,
        "mixed versions": mixed,
        "slices given to another rail": len(healing),
        "ms until then, median": 1e3 * statistics.median(healing) if healing else float("nan"),
        "p99": 1e3 * healing[int(0.99 * len(healing))] if healing else float("nan"),
    }
    show("readings, and a rail that hangs", {"": faults})
    save_record(options.out, options.model_dump(mode="json"), comparison=columns, faults=faults)
