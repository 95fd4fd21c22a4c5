"""Who prepares the next steps: the caller itself, a thread, or processes. All give the same steps in the same
order.

A Step is what was prepared: the batches of lanes, the state of each lane after them, and the samples left out
on the way. The state travels with the batches, so what a checkpoint saves is what was consumed, however far
ahead the preparation has run. A worker that dies or stands still is told with the sample it held; nobody
waits for it.

    Line    one thread that keeps steps ready: it calls prepare(lanes), or receives what a process prepared
    Feed    the lines of this rank side by side; without any it calls prepare(lanes) when a step is asked for
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.lane import Lane, Spec, Watch, build_lanes
from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.data.sources.base import Source

STALL_S = 600.0
"""Seconds that a preparation may spend on one sample before the run stops and names it."""
_POLL_S = 0.2

States = Mapping[int, Mapping[str, Any]]


class Step(NamedTuple):
    """One optimizer step of some lanes."""

    batches: dict[int, PackedBatch]
    states: dict[int, dict[str, Any]]
    """Lane -> its state after the batch."""
    skipped: list[dict[str, Any]]
    """Samples left out while the step was prepared (stats.py)."""


def prepare(lanes: Sequence[Lane]) -> Step:
    """One step, prepared here and now."""
    # States are taken right after the batch: they say where its lane stands then.
    step = Step({}, {}, [])
    for lane in lanes:
        step.batches[lane.index], skipped = lane.next_batch()
        step.states[lane.index] = lane.state_dict()
        step.skipped.extend(skipped)
    return step


class Line:
    """A thread that keeps up to `depth` results of `make` ready. `process` makes them, if it is not the
    thread itself."""

    def __init__(
        self, name: str, make: Callable[[], Step], watch: Watch, depth: int, process: Any = None
    ) -> None:
        self.name, self.watch, self.process = name, watch, process
        self._make = make
        # Bounded: steps in advance hold their pictures in memory.
        self._ready: queue.Queue[Step | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        made: Step | BaseException
        while not self._stop.is_set():
            try:
                made = self._make()
            except BaseException as error:
                made = error
            self._put(made)
            if isinstance(made, BaseException):
                return

    def _put(self, made: Step | BaseException) -> None:
        # A full queue must not keep the thread from seeing that it is to stop.
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(made, timeout=_POLL_S)
                return

    def get(self) -> Step:
        """The next result; raises what was raised for it, now and ever after."""
        # An error is final: what comes after it would not be the next step.
        if self._error is None:
            made = self._wait()
            if not isinstance(made, BaseException):
                return made
            self._error = made
            # The pipe of a process ends with it, also in the middle of a step.
            if self.process is not None and isinstance(made, EOFError | OSError):
                self.process.join(timeout=5)
                self._error = DataError(
                    f"data process {self.name} ended with code {self.process.exitcode} (killed, or out of"
                    f" memory?) while {self.watch.text}; resume from the last checkpoint, or set"
                    " data.prefetch = 'thread'"
                )
        raise self._error

    def _wait(self) -> Step | BaseException:
        # Building the sources, before the first sample, may take any time.
        seen, since = self.watch.count, time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_POLL_S)
            if self.watch.count != seen:
                seen, since = self.watch.count, time.monotonic()
            elif seen and time.monotonic() - since > STALL_S:
                return DataError(
                    f"{self.name} has not moved for {STALL_S:g} s; it was {self.watch.text}. Take that sample"
                    " out"
                )

    def close(self) -> None:
        """Stop after the sample in hand; a thread stuck in one is left to die with the process."""
        self._stop.set()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self._error is None or self.process is not None:
            self._thread.join()


class Feed:
    """The steps of this rank's lanes, in order: prepared ahead by lines, without any by the caller."""

    def __init__(self, lines: Sequence[Line], lanes: Sequence[Lane] = ()) -> None:
        self.lines, self._lanes = lines, lanes

    def get(self) -> Step:
        """The next step; raises what its preparation raised."""
        if not self.lines:
            return prepare(self._lanes)
        step = Step({}, {}, [])
        # Every line has its part of each step, so all are asked in turn.
        for line in self.lines:
            made = line.get()
            step.batches.update(made.batches)
            step.states.update(made.states)
            step.skipped.extend(made.skipped)
        return step

    def close(self) -> None:
        """Stop preparing and free threads or processes; prepared steps are dropped."""
        for line in self.lines:
            line.close()


def open_feed(spec: Spec, sources: Mapping[str, Source], states: States) -> Feed:
    """What `data.prefetch` asks for, going on from the states of the lanes."""
    data = spec.data
    if data.prefetch == "none":
        return Feed([], build_lanes(spec, sources, states))
    if data.prefetch == "thread":
        # One thread, however many lanes: they share the interpreter's lock anyway.
        watch = Watch()
        make = partial(prepare, build_lanes(spec, sources, states, watch))
        return Feed([Line("earlyfusion-data", make, watch, data.prefetch_steps)])

    # Started afresh (spawn): a fork would carry the threads' locks of torch and of the decoders along.
    context = multiprocessing.get_context("spawn")
    count = min(data.workers, len(states))
    lines = []
    for number in range(count):
        # Each worker has whole lanes, so their number changes nothing that is delivered.
        own = {lane: states[lane] for lane in list(states)[number::count]}
        watch = context.RawValue(Watch)
        reader, writer = context.Pipe(duplex=False)
        widen(reader)
        name = f"earlyfusion-data-{number}"
        process = context.Process(target=_work, args=(spec, own, writer, watch), name=name, daemon=True)
        process.start()
        writer.close()  # else the pipe would outlive its worker, and a read would wait for ever
        lines.append(Line(name, partial(receive_item, reader), watch, data.prefetch_steps, process))
    return Feed(lines)


def _work(spec: Spec, states: States, writer: Connection, watch: Watch) -> None:
    """Body of a data process: prepare steps until nobody reads them any more."""
    # The parent decides when to stop; it may still need a batch.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Workers are parallel already; more threads would take the training's cores.
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        try:
            lanes = build_lanes(spec, spec.build_sources(), states, watch)
            while True:
                send_item(writer, prepare(lanes))
        except BrokenPipeError:
            return
        except DataError as error:
            send_item(writer, error)
        # Its text: other errors may not survive pickling, and an OSError would be taken for the pipe's.
        except BaseException as error:
            send_item(writer, DataError(f"{type(error).__name__}: {error}"))


# ---- objects with tensors through a pipe
#
# Plain pickling copies every tensor several times while it holds the interpreter lock; here the bytes go from
# the tensor into the pipe and from the pipe into the new tensor, so the training process can compute
# meanwhile. Nothing is left behind when either side is killed: a pipe goes with its ends.

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of Linux


class _Pickler(pickle.Pickler):
    """Tensors go as NumPy arrays, which can hand out their buffers."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return torch.from_numpy, (item.detach().contiguous().numpy(),)
        return NotImplemented


def widen(connection: Connection) -> None:
    """Ask for a pipe of 1 MiB in place of 64 KiB, where the system knows how."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(connection.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)


def send_item(connection: Connection, item: Any) -> None:
    """Write `item` (CPU tensors inside); raises BrokenPipeError when nobody reads any more."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=buffers.append).dump(item)
    # Sizes first, then the object, then the bytes of its tensors.
    views = [buffer.raw() for buffer in buffers]
    connection.send([view.nbytes for view in views])
    connection.send_bytes(head.getbuffer())
    for view in views:
        while view.nbytes:
            view = view[os.write(connection.fileno(), view) :]


def receive_item(connection: Connection) -> Any:
    """Read one item of `send_item`; raises the item where it is an error, and EOFError or OSError when the
    writer is gone, also in the middle of an item."""
    # Straight into memory that the tensors keep: no copy in between.
    sizes = connection.recv()
    head = connection.recv_bytes()
    buffers = []
    for size in sizes:
        buffer = np.empty(size, dtype=np.uint8)
        view = memoryview(buffer.data)
        while view.nbytes:
            read = os.readv(connection.fileno(), [view])
            if not read:
                raise EOFError("the writer went away in the middle of an item")
            view = view[read:]
        buffers.append(buffer)
    item = pickle.loads(head, buffers=buffers)
    if isinstance(item, BaseException):
        raise item
    return item
