"""Runs the stages of a study as subprocesses, some at a time; what has its result is not run again.

A stage may start when the stages it needs are done. A stage that fails does not stop the others, only those
that need it. SIGINT and SIGTERM are passed on: the stages save what they can and the runner leaves with the
exit code for "start me again". Every stage writes its own stage.log.

Log (JSON lines): {"time", "event": plan | skip | start | done | failed | stopped | end, "stage", "seconds",
"code"}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK, EXIT_REQUEUE
from earlyfusion.rl.study.transfer.plan import Stage

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
    console: Console = field(default_factory=lambda: Console(stderr=True))
    received: int | None = None
    failed: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Run what is not done. Returns 0, 1 when a stage failed, or the exit code of a stop."""
        self.finished = {stage.name for stage in self.stages if stage.done}
        self._note("plan", stages=len(self.stages), done=len(self.finished))
        running: list[Running] = []
        with self._signals(), self._progress() as advance:
            try:
                while True:
                    for one in [one for one in running if one.process.poll() is not None]:
                        running.remove(one)
                        self._ended(one)
                        advance(running)
                    if self.received is None:
                        self._start_more(running)
                        advance(running)
                    elif running:
                        self._stop(running)
                        running = []
                    if not running:
                        break
                    time.sleep(POLL_S)
            finally:
                for one in running:  # an error of our own must not leave children behind
                    one.process.kill()
        return self._end()

    def _start_more(self, running: list[Running]) -> None:
        names = {one.stage.name for one in running}
        for stage in self.stages:
            if len(running) >= self.jobs:
                return
            if stage.name in self.finished or stage.name in names or stage.name in self.failed:
                continue
            settled = {*self.finished, *self.failed} if stage.partial else self.finished
            if all(need in settled for need in stage.after):
                running.append(self._start(stage))

    def _start(self, stage: Stage) -> Running:
        command = list(stage.command)
        if stage.resumable:
            if any((stage.folder / "checkpoints").glob("*/COMPLETE")):
                command.append("--resume")
            elif stage.folder.is_dir():
                _clear(stage.folder)
        stage.folder.mkdir(parents=True, exist_ok=True)
        threads = str(self.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TERM": "dumb"}
        with open(stage.folder / LOG, "ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._note("start", stage=stage.name, pid=process.pid, command=command)
        return Running(stage, process, time.monotonic())

    def _ended(self, one: Running) -> None:
        code, seconds = one.process.returncode, round(time.monotonic() - one.begun, 2)
        if code == 0 and (one.stage.done or one.stage.partial):
            shutil.rmtree(one.stage.folder / "checkpoints", ignore_errors=True)  # the model is kept
            self.finished.add(one.stage.name)
            self._note("done", stage=one.stage.name, seconds=seconds)
        elif self.received is not None:
            self._note("stopped", stage=one.stage.name, seconds=seconds, code=code)
        else:
            self.failed[one.stage.name] = code
            last = _tail(one.stage.folder / LOG)
            self._note("failed", stage=one.stage.name, seconds=seconds, code=code, last=last)
            self.console.print(f"[red]{one.stage.name} failed (exit {code})[/]: {last}", highlight=False)

    def _stop(self, running: Sequence[Running]) -> None:
        """Ask all to save and leave; kill those that take too long."""
        for one in running:
            _signal(one.process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for one in running:
            try:
                one.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(one.process, signal.SIGKILL)
                one.process.wait()
            self._ended(one)

    def _end(self) -> int:
        left = [stage.name for stage in self.stages if stage.name not in self.finished]
        self._note("end", failed=sorted(self.failed), left=len(left))
        if self.received is not None:
            return EXIT_REQUEUE
        return EXIT_FAILURE if left else EXIT_OK

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def heard(number: int, frame: FrameType | None) -> None:
            self.received = number

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[Sequence[Running]], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with Progress(
            *columns, console=self.console, transient=False, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task("stages", total=len(self.stages), completed=len(self.finished), now="")

            def advance(running: Sequence[Running]) -> None:
                now = ", ".join(one.stage.name for one in running)
                progress.update(task, completed=len(self.finished), now=now)

            yield advance

    def _note(self, event: str, **fields: Any) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n")
        if not self.console.is_terminal and event in ("done", "stopped"):
            self.console.print(
                f"{len(self.finished)}/{len(self.stages)} {event} {fields['stage']} {fields['seconds']:.0f} s"
            )


def _clear(folder: Path) -> None:
    """Empty a run's folder of what a killed attempt left, but for the recipe and the log."""
    for path in folder.iterdir():
        if path.name in ("arm.toml", LOG):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the stage and its children (each stage leads a group of its own)."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _tail(path: Path) -> str:
    """The last line of a log that says something."""
    lines = [
        line.strip()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1][:300] if lines else ""
