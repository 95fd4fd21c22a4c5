"""Runs the stages of a study as subprocesses, some at a time; what has its result is not run again.

A stage may start when the stages it needs are done. A stage that fails does not stop the others, only those
that need it. SIGINT and SIGTERM are passed on: the stages save what they can and the runner leaves with the
exit code for "start me again". Every stage writes its own stage.log.

Log (JSON lines): {"time", "event": start | done | failed | stopped, "stage", "seconds", "code"}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK, EXIT_REQUEUE
from earlyfusion.rl.study.plan import Stage

# Stages take minutes: nobody waits for a tenth of a second.
POLL_S = 0.1
GRACE_S = 30.0
"""Time a stage has to save itself after a signal, before it is killed."""
LOG = "stage.log"


@dataclass
class Running:
    stage: Stage
    process: subprocess.Popen[bytes]
    begun: float


@dataclass
class Runner:
    """jobs: stages at a time; threads: torch threads of each."""

    stages: Sequence[Stage]
    log: Path
    jobs: int = 1
    threads: int = 1
    received: bool = False
    failed: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Run what is not done. Returns 0, 1 when a stage failed, or the exit code of a stop."""
        self.finished = {stage.name for stage in self.stages if stage.done}
        running: list[Running] = []
        with self._signals():
            try:
                while True:
                    for one in [one for one in running if one.process.poll() is not None]:
                        running.remove(one)
                        self._ended(one)
                    if self.received:
                        self._stop(running)
                        return EXIT_REQUEUE
                    self._start_more(running)
                    if not running:
                        break
                    time.sleep(POLL_S)
            finally:
                for one in running:  # an error of our own must not leave children behind
                    one.process.kill()
        return EXIT_OK if len(self.finished) == len(self.stages) else EXIT_FAILURE

    def _start_more(self, running: list[Running]) -> None:
        known = {*self.finished, *self.failed, *(one.stage.name for one in running)}
        for stage in self.stages:
            # A stage that makes do with what there is waits for the end of all, good or bad.
            settled = {*self.finished, *self.failed} if stage.partial else self.finished
            if len(running) < self.jobs and stage.name not in known and settled.issuperset(stage.after):
                running.append(self._start(stage))

    def _start(self, stage: Stage) -> Running:
        command = list(stage.command)
        # A complete checkpoint is worth more than a fresh start.
        if any((stage.folder / "checkpoints").glob("*/COMPLETE")):
            command.append("--resume")
        elif stage.folder.is_dir() and not stage.partial:
            # What a killed attempt left is in the way, but for the recipe and the log.
            for path in stage.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in ("arm.toml", LOG):
                    path.unlink()
        stage.folder.mkdir(parents=True, exist_ok=True)
        threads = str(self.threads)
        with open(stage.folder / LOG, "ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TERM": "dumb"},
                # A group of its own: a signal reaches its children too, and ours only when we say.
                start_new_session=True,
            )
        self._note("start", stage, pid=process.pid, command=command)
        return Running(stage, process, time.monotonic())

    def _ended(self, one: Running) -> None:
        stage, code = one.stage, one.process.returncode
        about: dict[str, Any] = {"seconds": round(time.monotonic() - one.begun, 2), "code": code}
        if code == 0 and (stage.done or stage.partial):
            shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)  # the model is kept
            self.finished.add(stage.name)
            self._note("done", stage, **about)
        elif self.received:
            self._note("stopped", stage, **about)
        else:
            self.failed.add(stage.name)
            # The last line of a traceback says the most.
            said = (stage.folder / LOG).read_text(encoding="utf-8", errors="replace").strip()
            self._note("failed", stage, **about, last=said.rpartition("\n")[2][:300])

    def _stop(self, running: list[Running]) -> None:
        """Ask all to save and leave; kill those that take too long."""
        for one in running:
            _signal(one, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while running:
            one = running.pop()
            # All share one grace: the second waits while the first saves.
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.1, until - time.monotonic()))
            _signal(one, signal.SIGKILL)
            one.process.wait()
            self._ended(one)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def heard(*_: object) -> None:
            self.received = True

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, event: str, stage: Stage, **fields: Any) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        told = {"time": round(time.time(), 3), "event": event, "stage": stage.name, **fields}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        if event != "start":
            shown = f"{fields['seconds']:.0f} s {fields.get('last', '')}"
            print(f"{len(self.finished)}/{len(self.stages)} {event} {stage.name} {shown}", flush=True)


def _signal(one: Running, number: int) -> None:
    """To a stage and its children (each stage leads a group of its own)."""
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid, number)
