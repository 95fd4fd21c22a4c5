"""Who reads and checks the items: this process, processes beside it, or the nodes of a Ray cluster. The
outcomes come in the order of the items all the same."""

import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

from earlyfusion.data.errors import DataError
from earlyfusion.data.prepare.write import Outcome, Worker, start_worker, work, work_on_node
from earlyfusion.kernels.errors import one_line

CHUNK = 32
"""Items of one task of a worker."""
Result = Callable[[], list[Outcome]]
"""Waits for the outcomes of a task."""


def outcomes(
    make: Callable[[], Worker], start: int, stop: int, workers: int, ray: str | None = None
) -> Iterator[Outcome]:
    """Outcomes of the items from `start` to before `stop` in order; a bounded number of tasks is under way,
    so that memory does not grow.

    workers: processes on this machine. ray: address of a cluster, all of whose CPUs work in their place.
    """
    # Few items are done before a process has started.
    tasks = deque(range(first, min(first + CHUNK, stop)) for first in range(start, stop, CHUNK))
    if not ray and (workers == 1 or len(tasks) < 2):
        worker = make()
        yield from map(worker.outcome, range(start, stop))
        return

    waiting: deque[tuple[range, Result]] = deque()
    with _cluster(make, ray) if ray else _pool(make, workers) as (submit, most):
        while tasks or waiting:
            # Results are taken in order, so a slow item holds up what comes after it.
            while tasks and len(waiting) <= most:
                numbers = tasks.popleft()
                waiting.append((numbers, submit(numbers)))
            numbers, result = waiting.popleft()
            try:
                found = result()
            except BrokenProcessPool:
                raise DataError(
                    "a worker died (out of memory, or a crash in a decoder) at or after items"
                    f" {numbers.start} to {numbers.stop - 1}; run the same command again to go on, with"
                    " --workers 1 to see it happen"
                ) from None
            yield from found


@contextmanager
def _pool(make: Callable[[], Worker], workers: int) -> Iterator[tuple[Callable[[range], Result], int]]:
    """Processes of this machine."""
    # A fork would copy the locks of torch's threads; spawn would import torch once a worker.
    context = get_context("forkserver")
    context.set_forkserver_preload(["earlyfusion.data.prepare.write"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(make,))
    try:
        yield lambda numbers: pool.submit(work, numbers).result, 3 * workers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _cluster(make: Callable[[], Worker], address: str) -> Iterator[tuple[Callable[[range], Result], int]]:
    """Ray's workers on all nodes. Every node needs the same environment and the source at the same place."""
    try:
        import ray
    except ImportError:
        raise DataError("--ray needs ray; pip install 'earlyfusion[ray]'") from None
    try:
        # Asked before Ray is, which takes minutes to find out that nobody is there.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdigit():
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise DataError(
            f"--ray {address}: no cluster there ({one_line(error)}); start one with ray start --head, or say"
            " --ray local"
        ) from None

    # A task whose node is lost runs again on another one.
    task = ray.remote(num_cpus=1, max_retries=3)(work_on_node)

    def wait(numbers: range, reference: Any) -> list[Outcome]:
        try:
            found: list[Outcome] = ray.get(reference)
        except ray.exceptions.RayError as error:
            why = one_line(getattr(error, "cause", None) or error)
            raise DataError(
                f"--ray {address}: a worker failed at items {numbers.start} to {numbers.stop - 1} ({why});"
                " run the same command again to go on"
            ) from None
        return found

    try:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        yield lambda numbers: partial(wait, numbers, task.remote(make, numbers)), 2 * cpus
    finally:
        ray.shutdown()
