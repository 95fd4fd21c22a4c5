"""Where the numbers of a run go: metrics.jsonl always, TensorBoard and accelerate trackers when asked, the
terminal.

`metrics.jsonl` holds one strict JSON object a line: {"step", "event", "time", ...}; step counts finished
updates. Event "train" carries the numbers; other events (guard, eval, checkpoint, stage, ...) carry what they
are about. A resume from step s keeps the records up to s and drops later ones, so no step is told twice.
Non-finite numbers are written as null (JSON has no NaN). All ranks may call; only rank 0 writes.
"""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import TensorBoardTracker, filter_trackers
from rich.console import Console

from earlyfusion.kernels.errors import UserError, did_you_mean, one_line
from earlyfusion.kernels.files import Record, plain, read_jsonl, write_atomic
from earlyfusion.pipeline.config.compose import dump, flatten
from earlyfusion.pipeline.progress import Progress
from earlyfusion.pipeline.runtime import Runtime

FILE = "metrics.jsonl"


TRACKERS = (
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "comet_ml",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
)
"""accelerate's trackers; each needs the module of its name."""
PROJECT = "earlyfusion"
"""What trackers with projects file every run under."""
RUN_NAMES = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
"""Tracker -> the argument of its start that names the run."""


def check_trackers(trackers: Sequence[str]) -> None:
    """UserError for a tracker that is unknown or not installed: accelerate would only warn and go on
    untracked."""
    for name in trackers:
        if name not in TRACKERS:
            raise UserError(f"track.trackers: unknown tracker {name!r}; {did_you_mean(name, TRACKERS)}")
        # Looked for and not imported: some trackers log in when they are.
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"track.trackers: {name} is not installed; pip install {name}, or take it off the list"
                " (metrics.jsonl is always written)"
            )


def read_metrics(path: str | Path, event: str | None = None) -> list[Record]:
    """The records of a metrics file, of one event when named; a torn last line (a kill mid-write) is left
    out."""
    return [record for record in read_jsonl(path) if event is None or record.get("event") == event]


class Tracker:
    """Records and shows one run.

    out: output folder. total_steps: for the ETA. start_step: finished updates (0: a fresh run, the file is
    begun anew; s > 0: records up to s are kept). config: the resolved recipe; its `track.trackers` get the
    numbers too (tensorboard writes below <out>/tensorboard; others file the run `run.name` under PROJECT).
    unit: what a step is called on the terminal.
    """

    def __init__(
        self,
        out: str | Path,
        runtime: Runtime,
        *,
        total_steps: int,
        start_step: int = 0,
        config: Any = None,
        console: Console | None = None,
        unit: str = "step",
    ) -> None:
        self.main = runtime.is_main
        self.path = Path(out) / FILE
        console = console or Console(file=sys.stderr, highlight=False, quiet=not self.main)
        title = "" if config is None else config.run.name
        self.progress = Progress(console, total_steps, unit=unit, title=title)
        self._file: Any = None
        # accelerate sends to all its trackers, and to none where there are none.
        self._trackers = runtime.accelerator
        if config is not None and config.track.trackers:
            self._start_trackers(config, start_step)
        if self.main and start_step == 0:
            self.path.unlink(missing_ok=True)
        self.rewind(start_step)

    def _start_trackers(self, config: Any, start_step: int) -> None:
        """Let accelerate begin its trackers; TensorBoard forgets events after `start_step`."""
        out, names = self.path.parent, config.track.trackers
        self._trackers.project_configuration.set_directories(str(out))
        loggers: list[Any] = [name for name in names if name != "tensorboard"]
        if "tensorboard" in names:
            # accelerate's own would write elsewhere, and keep what a resume repeats.
            loggers.append(TensorBoardTracker("tensorboard", out, purge_step=start_step + 1))
        self._trackers.log_with = filter_trackers(loggers, out)
        # Trackers take flat tables of plain values.
        shown = {}
        for key, value in flatten(dump(config)):
            shown[key] = value if isinstance(value, int | float | str) else str(value)
        name = config.run.name
        given = {tracker: {argument: name} for tracker, argument in RUN_NAMES.items()}
        given["wandb"]["dir"] = str(out)
        try:
            if self.main:
                out.mkdir(parents=True, exist_ok=True)  # wandb writes elsewhere where there is no folder yet
            self._trackers.init_trackers(PROJECT, config=shown, init_kwargs=given)
        # Whatever it raises (no key, no network): a run that was to be tracked must not go on untracked.
        except Exception as error:
            raise UserError(
                f"track.trackers {names}: cannot start ({one_line(error)}); log in or mend its settings, or"
                " take it off the list (metrics.jsonl is always written)"
            ) from error

    def _unwritable(self, error: OSError) -> UserError:
        """The end of a run that can tell no more. What the file still holds in memory is dropped with it."""
        with contextlib.suppress(OSError):
            self.close()
        return UserError(
            f"{self.path}: cannot be written ({error.strerror or error}); free disk space, then go on with"
            " --resume"
        )

    def log(self, step: int, numbers: Record) -> None:
        """An event "train" of the numbers at `step`, on every channel, and one plain line when there is no
        terminal."""
        # The file first: whatever a tracker or a terminal does, the record is there.
        self._write(step, "train", numbers)
        self._send(step, numbers)
        self.tick(step, numbers)
        if not self.progress.console.is_terminal:
            self.say(self.progress.line())

    def _send(self, step: int, numbers: Record) -> None:
        """The plain numbers to the trackers."""
        scalars = {key: value for key, value in numbers.items() if type(value) in (int, float)}
        if scalars:
            self._trackers.log(scalars, step=step)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """Any other record; a `message` is also shown, and the numbers of an evaluation reach the trackers as
        well."""
        self._write(step, kind, fields)
        # Curves of evaluations belong beside those of the losses.
        if kind == "eval":
            self._send(step, dict(flatten(fields)))
        if fields.get("message"):
            self.say(f"[{kind}] {self.progress.unit} {step}: {fields['message']}")

    def _write(self, step: int, event: str, fields: Record) -> None:
        if self._file is not None:
            # Flushed line by line: a killed run has told everything up to its last step.
            record = {"step": step, "event": event, "time": round(time.time(), 3)} | plain(dict(fields))
            try:
                self._file.write(json.dumps(record, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise self._unwritable(error) from None

    def tick(self, step: int, numbers: Record) -> None:
        """Show the numbers of a step and write nothing; cheap enough for every step."""
        if self.main:
            self.progress.update(step, numbers)

    def busy(self, text: str, done: int = 0, total: int = 0) -> None:
        """What goes on between two steps, until the next `tick`; `done` of `total` of it."""
        if self.main:
            self.progress.busy(text, done, total)

    def say(self, text: str) -> None:
        """One line on the terminal (rank 0), above the progress."""
        self.progress.say(text)

    def rewind(self, step: int) -> None:
        """Forget records after `step`: the run went back to a checkpoint."""
        self.progress.step = step
        if not self.main:
            return
        if self._file is not None:
            self._file.close()
        # A resume and a rollback both tell steps again, which must stand there once.
        kept = []
        for record in read_jsonl(self.path):
            if type(at := record.get("step", 0)) in (int, float) and at <= step:
                kept.append(json.dumps(record, allow_nan=False) + "\n")
        try:
            write_atomic(self.path, "".join(kept))
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        self.progress.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()
