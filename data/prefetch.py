"""Who prepares the next steps: the caller itself, a thread, or processes. All give the same batches in the same order.

A feed yields (batches of this rank's lanes, state of each lane after them). The state travels with the batches, so what
a checkpoint saves is what was consumed, however far ahead a feed has run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.lane import Lane, Spec, build_lanes
from earlyfusion.data.pack import PackedBatch

Step: TypeAlias = tuple[list[PackedBatch], dict[int, dict[str, Any]]]
_POLL_S = 0.5


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
    return batches, {lane.index: lane.state_dict() for lane in lanes}


class DirectFeed:
    """Prepares a step when it is asked for."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes

    def get(self) -> Step:
        return produce(self._lanes)

    def close(self) -> None:
        pass


class ThreadFeed:
    """One background thread, at most `depth` steps ahead."""

    def __init__(self, lanes: Sequence[Lane], depth: int) -> None:
        self._ready: queue.Queue[Step | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(lanes,), name="earlyfusion-data", daemon=True)
        self._thread.start()

    def _run(self, lanes: Sequence[Lane]) -> None:
        while not self._stop.is_set():
            made: Step | BaseException
            try:
                made = produce(lanes)
            except BaseException as error:
                made = error
            while not self._stop.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(made, timeout=_POLL_S)
                    break
            if isinstance(made, BaseException):
                return

    def get(self) -> Step:
        if self._error is None:
            made = self._ready.get()
            if not isinstance(made, BaseException):
                return made
            self._error = made
        raise self._error

    def close(self) -> None:
        self._stop.set()
        while not self._ready.empty():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
        self._thread.join()


class ProcessFeed:
    """`workers` processes that share this rank's lanes, each at most `depth` steps ahead.

    They are started afresh (spawn), build the sources themselves and send plain bytes, so that no shared memory is
    left behind when either side is killed.
    """

    def __init__(self, spec: Spec, states: dict[int, dict[str, Any] | None], depth: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        owned = list(states)
        workers = min(workers, len(owned))
        self._order = owned
        self._ready = [context.Queue(maxsize=depth) for _ in range(workers)]
        self._workers = []
        for number, ready in enumerate(self._ready):
            part = {lane: states[lane] for lane in owned[number::workers]}
            worker = context.Process(
                target=_work, args=(spec, part, ready), name=f"earlyfusion-data-{number}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def get(self) -> Step:
        batches: dict[int, PackedBatch] = {}
        states: dict[int, dict[str, Any]] = {}
        for worker, ready in zip(self._workers, self._ready):
            made = pickle.loads(self._wait(worker, ready))
            if isinstance(made, BaseException):
                self.close()
                raise made
            for batch, (lane, state) in zip(made[0], made[1].items()):
                batches[lane], states[lane] = batch, state
        return [batches[lane] for lane in self._order], states

    @staticmethod
    def _wait(worker: Any, ready: Any) -> bytes:
        while True:
            try:
                return bytes(ready.get(timeout=_POLL_S))
            except queue.Empty:
                if not worker.is_alive() and ready.empty():
                    raise DataError(
                        f"data process {worker.name} ended with code {worker.exitcode} (killed, or out of memory?); "
                        "resume from the last checkpoint, or set data.prefetch = 'thread'"
                    ) from None

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for ready in self._ready:
            ready.close()
            ready.cancel_join_thread()


def _work(spec: Spec, states: dict[int, dict[str, Any] | None], ready: Any) -> None:
    """Body of a data process: prepare steps until the parent goes away."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to stop; it may still need a batch
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    made: Step | BaseException
    lanes: list[Lane] | None = None
    while True:
        try:
            if lanes is None:
                lanes = build_lanes(spec, spec.build_sources(), states)
            made = produce(lanes)
        except BaseException as error:
            made = error
        packed = pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL)
        while parent is None or parent.is_alive():
            with contextlib.suppress(queue.Full):
                ready.put(packed, timeout=_POLL_S)
                break
        else:
            return
        if isinstance(made, BaseException):
            return
