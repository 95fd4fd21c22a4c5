"""A watchdog for runs of several processes: who keeps the others waiting, and where.

A rank that dies takes its connections with it, and the launcher ends the others. A rank that hangs does not:
the others wait in a collective for ever, and nothing says for whom. So a thread of every rank looks at its
main thread: one that computes is found at another place every time, one that waits at the same. Ranks leave
their places, and for how long they have not moved, in the store that they met in. When none has moved for
`parallel.timeout_s` seconds, rank 0 prints where each of them is, and all leave with exit code 1, which a
launcher restarts from. As long as one rank computes (an evaluation, a checkpoint), the others may wait.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from earlyfusion.pipeline.errors import EXIT_FAILURE

_HERE = Path(__file__).parents[1]


def place(frame: FrameType | None) -> str:
    """ "waits in all_reduce, called at pipeline/runtime.py:310 (sum)", or where else a thread is."""
    collective = ours = ""
    while frame is not None and not ours:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_HERE) and "site-packages" not in path.relative_to(_HERE).parts:
            ours = f"{path.relative_to(_HERE)}:{frame.f_lineno} ({frame.f_code.co_name})"
        elif "torch/distributed/" in path.as_posix() and not frame.f_code.co_name.startswith(
            ("_", "wrapper")
        ):
            # The outermost of torch's own is what was called.
            collective = frame.f_code.co_name
        frame = frame.f_back
    return f"waits in {collective}, called at {ours}" if collective else f"is at {ours or 'no line of ours'}"


def trace(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """What tells one place of a thread from another."""
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class Watchdog:
    """Watches the main thread of this rank, from `start` until `stop`."""

    def __init__(self, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.every_s = min(timeout_s / 4, 5.0)
        self._main, self._over = threading.main_thread().ident or 0, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Watchdog:
        if self.world > 1:
            # torch has no public name for the store that its default group was made with. (A client of its
            # own: the main thread may wait in the other.)
            store: Any = dist.distributed_c10d._get_default_store()
            self.watch(store.clone())
        return self

    def watch(self, store: Any) -> None:
        """Begin, with a store that all ranks share."""
        self._store = store
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: one that is still there when the interpreter ends may abort the process."""
        self._over.set()
        if self._thread is not None:
            # (Unless it waits for a store that is gone.)
            self._thread.join(2 * self.every_s)

    def _watch(self) -> None:
        seen, since = trace(None), time.monotonic()
        # The store may close before this thread does: then the run is over.
        with suppress(RuntimeError):
            while not self._over.wait(self.every_s):
                now, said = self._where()
                if now != seen:
                    seen, since = now, time.monotonic()
                still_s = time.monotonic() - since
                self._store.set(self._key(self.rank), json.dumps([still_s, said]))
                if still_s > self.timeout_s and (found := self._all_still()):
                    self._leave(still_s, found)

    def _where(self) -> tuple[tuple[tuple[int, int], ...], str]:
        """`trace` and `place` of the main thread now."""
        # Who holds a frame holds all its locals, tensors among them: nobody does behind this.
        frame = sys._current_frames().get(self._main)
        return trace(frame), place(frame)

    def _key(self, rank: int) -> str:
        return f"earlyfusion/watchdog/{rank}"

    def _all_still(self) -> list[str]:
        """Where every rank is, if none has moved for too long; else an empty list. A rank whose own thread
        stands still as well has left its last line long ago."""
        found = []
        for rank in range(self.world):
            said = "has said nothing"
            if self._store.check([self._key(rank)]):
                still_s, said = json.loads(self._store.get(self._key(rank)))
                if still_s < self.timeout_s - 2 * self.every_s:
                    return []
            found.append(f"rank {rank} {said}")
        return found

    def _leave(self, still_s: float, found: list[str]) -> None:
        if self.rank == 0:
            lines = "; ".join(found)
            print(f"error: nothing has moved for {still_s:.0f} s: {lines}", file=sys.stderr, flush=True)
        # The others come to the same end; whoever serves the store goes last.
        time.sleep(self.every_s * (4 if self.rank == 0 else 1))
        os._exit(EXIT_FAILURE)
