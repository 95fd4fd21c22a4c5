"""Who prepares the next steps: the caller itself, a thread, or processes. All give the same steps in the same
order.

A feed yields a Step: the batches of this rank's lanes, the state of each lane after them, and the samples
left out on the way. The state travels with the batches, so what a checkpoint saves is what was consumed,
however far ahead a feed has run. A worker that dies or stands still is told with the sample it held; nobody
waits for it.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.lane import Lane, build_lanes
from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.data.loading.stream import Spec, Watch

_POLL_S = 0.2


class Step(NamedTuple):
    """One optimizer step of this rank."""

    batches: list[PackedBatch]
    states: dict[int, dict[str, Any]]
    """Lane -> its state after the batch."""
    skipped: list[dict[str, Any]]
    """Samples left out while the step was prepared (`Lane.take_skipped`)."""


class Feed(Protocol):
    """A source of steps."""

    def get(self) -> Step:
        """The next step; raises what its preparation raised."""
        ...

    def close(self) -> None:
        """Stop preparing and free threads or processes; prepared steps are dropped."""
        ...


def produce(lanes: Sequence[Lane]) -> Step:
    """One step, prepared here and now."""
    batches = [lane.next_batch() for lane in lanes]
    skipped = [entry for lane in lanes for entry in lane.take_skipped()]
    return Step(batches, {lane.index: lane.state_dict() for lane in lanes}, skipped)


class DirectFeed:
    """Prepares a step when it is asked for."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes

    def get(self) -> Step:
        return produce(self._lanes)

    def close(self) -> None:
        pass


def _wait(ready: queue.Queue[Any], watch: Watch, stall_s: float | None, who: str) -> Any:
    """The next item; DataError when the worker has been at one sample for `stall_s` seconds (building its
    sources, before the first sample, may take any time)."""
    seen, since = watch.count, time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            return ready.get(timeout=_POLL_S)
        if watch.count != seen:
            seen, since = watch.count, time.monotonic()
        elif stall_s is not None and seen and time.monotonic() - since > stall_s:
            raise DataError(
                f"{who} has not moved for {stall_s:g} s; it was {watch.text or 'starting'}. Take that sample"
                " out, or raise data.stall_s"
            )


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(queue.Full):
            ready.put(item, timeout=_POLL_S)
            return


class ThreadFeed:
    """One background thread, at most `depth` steps ahead."""

    def __init__(self, lanes: Sequence[Lane], depth: int, stall_s: float | None = None) -> None:
        self._ready: queue.Queue[Step | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._stall_s, self._watch, self._stuck = stall_s, Watch(), False
        for lane in lanes:
            lane.watch_with(self._watch)
        self._thread = threading.Thread(target=self._run, args=(lanes,), name="earlyfusion-data", daemon=True)
        self._thread.start()

    def _run(self, lanes: Sequence[Lane]) -> None:
        made: Step | BaseException
        while not self._stop.is_set():
            try:
                made = produce(lanes)
            except BaseException as error:
                made = error
            _put(self._ready, made, self._stop)
            if isinstance(made, BaseException):
                return

    def get(self) -> Step:
        if self._error is None:
            try:
                made = _wait(self._ready, self._watch, self._stall_s, "the data thread")
            except DataError as error:
                self._stuck, made = True, error
            if not isinstance(made, BaseException):
                return made
            self._error = made
        raise self._error

    def close(self) -> None:
        """Stops after the sample in hand; a thread stuck in one is left to die with the process."""
        self._stop.set()
        if not self._stuck:
            self._thread.join(timeout=self._stall_s)


class ProcessFeed:
    """`workers` processes that share this rank's lanes, each at most `depth` steps ahead.

    They are started afresh (spawn) and build the sources themselves. Each has a pipe to a thread here that
    keeps up to `depth` steps ready; the end of a pipe tells of its worker's death at once, also in the middle
    of a step.
    """

    def __init__(
        self,
        spec: Spec,
        states: dict[int, dict[str, Any] | None],
        depth: int,
        workers: int,
        stall_s: float | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._order, self._stall_s = list(states), stall_s
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._workers: list[Any] = []
        self._watches: list[Watch] = []
        self._ready: list[queue.Queue[Any]] = []
        self._threads: list[threading.Thread] = []
        count = min(workers, len(self._order))
        for number in range(count):
            memory = context.RawArray("B", Watch.SIZE)
            reader, writer = context.Pipe(duplex=False)
            widen(reader)
            part = {lane: states[lane] for lane in self._order[number::count]}
            name = f"earlyfusion-data-{number}"
            worker = context.Process(target=_work, args=(spec, part, writer, memory), name=name, daemon=True)
            worker.start()
            writer.close()  # else the pipe would outlive its worker, and a read would wait for ever
            ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
            thread = threading.Thread(
                target=self._receive, args=(reader, ready), name=f"{name}-pipe", daemon=True
            )
            thread.start()
            self._workers.append(worker)
            self._watches.append(Watch(memory))
            self._ready.append(ready)
            self._threads.append(thread)

    def _receive(self, reader: Any, ready: queue.Queue[Any]) -> None:
        made: Any = None
        while not self._stop.is_set() and not isinstance(made, BaseException):
            try:
                made = receive_item(reader)
            except (EOFError, OSError):
                made = EOFError()
            except Exception as error:
                made = DataError(f"a data process sent something that cannot be read: {error}")
            _put(ready, made, self._stop)
        reader.close()

    def get(self) -> Step:
        if self._error is not None:
            raise self._error
        batches: dict[int, PackedBatch] = {}
        states: dict[int, dict[str, Any]] = {}
        skipped: list[dict[str, Any]] = []
        for worker, watch, ready in zip(self._workers, self._watches, self._ready):
            try:
                made = _wait(ready, watch, self._stall_s, f"data process {worker.name}")
            except DataError as error:
                made = error
            if isinstance(made, BaseException):
                self._error = self._death(worker, watch) if isinstance(made, EOFError) else made
                self.close()
                raise self._error
            batches |= zip(made.states, made.batches)
            states |= made.states
            skipped += made.skipped
        order = self._order
        return Step([batches[lane] for lane in order], {lane: states[lane] for lane in order}, skipped)

    @staticmethod
    def _death(worker: Any, watch: Watch) -> DataError:
        worker.join(timeout=5)
        return DataError(
            f"data process {worker.name} ended with code {worker.exitcode} (killed, or out of memory?) while "
            f"{watch.text or 'starting'}; resume from the last checkpoint, or set data.prefetch = 'thread'"
        )

    def close(self) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for thread in self._threads:
            thread.join()


def _work(spec: Spec, states: dict[int, dict[str, Any] | None], writer: Any, memory: Any) -> None:
    """Body of a data process: prepare steps until nobody reads them any more."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the parent decides when to stop; it may still need a batch
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    watch = Watch(memory)
    try:
        lanes = build_lanes(spec, spec.build_sources(), states)
        for lane in lanes:
            lane.watch_with(watch)
    except BaseException as error:
        _send(writer, _sendable(error))
        return
    made: Step | BaseException | None = None
    while not isinstance(made, BaseException):
        try:
            made = produce(lanes)
        except BaseException as error:
            made = _sendable(error)
        if not _send(writer, made):
            return


def _send(writer: Any, made: Any) -> bool:
    """Whether somebody took it."""
    try:
        send_item(writer, made)
    except (BrokenPipeError, OSError):
        return False
    return True


def _sendable(error: BaseException) -> BaseException:
    """The error itself where it survives pickling, else its text."""
    loads: Callable[[bytes], Any] = pickle.loads
    try:
        return loads(pickle.dumps(error))
    except Exception:
        return DataError(f"{type(error).__name__}: {error}")


# ---- objects with tensors through a pipe
#
# Plain pickling copies every tensor several times while it holds the interpreter lock; here the bytes go from
# the tensor into the pipe and from the pipe into the new tensor, so the training process can compute
# meanwhile.
# Nothing is left behind when either side is killed: a pipe goes with its ends.

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of Linux


class _Pickler(pickle.Pickler):
    """Tensors go as NumPy arrays, which can hand out their buffers."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _tensor, (item.detach().contiguous().numpy(),)
        return NotImplemented


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def widen(connection: Connection) -> None:
    """Ask for a pipe of 1 MiB in place of 64 KiB, where the system knows how."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(connection.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)


def send_item(connection: Connection, item: Any) -> None:
    """Write `item` (CPU tensors inside); raises BrokenPipeError when nobody reads any more."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=buffers.append).dump(item)
    views = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps([view.nbytes for view in views]))
    connection.send_bytes(head.getbuffer())
    for view in views:
        while view.nbytes:
            view = view[os.write(connection.fileno(), view) :]


def receive_item(connection: Connection) -> Any:
    """Read one item of `send`; raises EOFError or OSError when the writer is gone, also in the middle of an
    item."""
    sizes = pickle.loads(connection.recv_bytes())
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
    return pickle.loads(head, buffers=buffers)
