"""How a study is conducted: its stages as processes, killed and resumed anywhere.

Stages run as subprocesses, each in its own folder; what has its result is not run again. Ctrl-C or SIGTERM
lets the running stages save and leaves with exit code 75: start the same command with --resume.

A stage may start when the stages it needs are done. One that fails does not stop the others, only those that
need it. Every stage writes its own stage.log; OUT/study.jsonl holds {"time", "event": start | done | failed |
stopped, "stage", "seconds", "code"}, one line an event.
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK, EXIT_REQUEUE

GRACE_S = 30.0
"""Time a stage has to save itself after a signal, before it is killed."""
LOG = "stage.log"


@dataclass(frozen=True)
class Stage:
    """One piece of work. command: asked for when it starts, as what ran before may decide it; result: what
    exists when it is done; after: names of the stages it needs; folder: its own. One whose folder holds a
    complete checkpoint goes on from there by --resume.
    """

    name: str
    command: Callable[[], tuple[str, ...]]
    result: Path
    folder: Path
    after: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        return self.result.is_file()


class Runner:
    """jobs: stages at a time; threads: torch threads of each."""

    def __init__(self, stages: Sequence[Stage], log: Path, jobs: int = 1, threads: int = 1) -> None:
        self.stages, self.log, self.jobs = stages, log, jobs
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.environment = os.environ | count | {"TERM": "dumb"}

    def run(self) -> int:
        """Run what is not done. Returns 0, 1 when a stage failed, or the exit code of a stop."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self.stop, self.slots = asyncio.Event(), asyncio.Semaphore(self.jobs)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        # The plan names what a stage needs before the stage, so its task is there to be waited for.
        self.tasks: dict[str, asyncio.Task[bool]] = {}
        for stage in self.stages:
            self.tasks[stage.name] = asyncio.create_task(self._stage(stage))
        good = await asyncio.gather(*self.tasks.values())
        if self.stop.is_set():
            return EXIT_REQUEUE
        return EXIT_OK if all(good) else EXIT_FAILURE

    async def _stage(self, stage: Stage) -> bool:
        """Whether the stage is done in the end."""
        if stage.done:
            return True
        needed = [await self.tasks[name] for name in stage.after]
        if not all(needed):
            return False
        async with self.slots:
            return not self.stop.is_set() and await self._process(stage)

    async def _process(self, stage: Stage) -> bool:
        """Run one stage to its end, or to the end of its grace after a signal."""
        command = list(stage.command())
        # A complete checkpoint is worth more than a fresh start.
        if any((stage.folder / "checkpoints").glob("*/COMPLETE")):
            command.append("--resume")
        elif stage.folder.is_dir():
            # What a killed attempt left is in the way, but for the recipe and the log.
            for path in stage.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in ("arm.toml", LOG):
                    path.unlink()
        stage.folder.mkdir(parents=True, exist_ok=True)

        begun = time.monotonic()
        with open(stage.folder / LOG, "ab") as log:
            # A group of its own: a signal reaches its children too, and ours only when we say.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self._note("start", stage, pid=process.pid, command=command)
        try:
            ended, stopped = (asyncio.ensure_future(one) for one in (process.wait(), self.stop.wait()))
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            # A signal: the stage saves what it can.
            if not ended.done():
                os.killpg(process.pid, signal.SIGTERM)
                await asyncio.wait([ended], timeout=GRACE_S)
        finally:
            # Also after an error of our own: no child is left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return self._ended(stage, await ended, time.monotonic() - begun)

    def _ended(self, stage: Stage, code: int, seconds: float) -> bool:
        about: Record = {"seconds": round(seconds, 2), "code": code}
        good = code == 0 and stage.done
        if good:
            shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)  # the model is kept
            self._note("done", stage, **about)
        elif self.stop.is_set():
            self._note("stopped", stage, **about)
        else:
            # The last line of a traceback says the most.
            said = (stage.folder / LOG).read_text(encoding="utf-8", errors="replace").strip()
            self._note("failed", stage, **about, last=said.rpartition("\n")[2][:300])
        return good

    def _note(self, event: str, stage: Stage, **fields: Any) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        told = {"time": round(time.time(), 3), "event": event, "stage": stage.name, **fields}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        if event != "start":
            done = sum(one.done for one in self.stages)
            shown = f"{fields['seconds']:.0f} s {fields.get('last', '')}"
            print(f"{done}/{len(self.stages)} {event} {stage.name} {shown}", flush=True)
