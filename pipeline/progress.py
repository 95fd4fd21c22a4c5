"""How far a loop is: one view for pretraining, fine-tuning, reinforcement learning and DPO.

On a terminal a small block stays in place: how far, the time left, and the numbers, folded at the screen's
width. Without one, `line()` is everything in one plain line, for a log file. The keys are those of
metrics.jsonl; whatever a record does not hold is not shown.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, TypeGuard

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

REFRESH_S = 0.25  # redraws are this far apart: a fast run spends its time on training
SMOOTHING = 0.9  # of the seconds of a step: one that evaluated as well does not throw the time left off
LISTED = 6  # kinds of prompts that are listed

FIELDS = {
    "loss": "loss {:.3f}",
    "loss/image": "img {:.3f}",
    "loss/text": "txt {:.3f}",
    "reward": "reward {:.3f}",
    "length": "length {:.1f}",
    "length_max": "longest {:.0f}",
    "cut": "cut {:.1%}",
    "entropy": "entropy {:.3f}",
    "informative": "informative {:.0%}",
    "tools/valid": "valid calls {:.0%}",
    "temperature": "T {:.2f}",
    "staleness": "stale {:.2f}",
    "mismatch_kl": "mismatch KL {:.1e}",
    "mismatch_max": "largest {:.1e}",
    "clip_share": "clipped {:.2%}",
    "k3": "k3 {:.1e}",
    "grad_norm": "|g| {:.3f}",
    "lr": "lr {:.2e}",
    "ptx_loss": "ptx {:.3f}",
    "tokens_per_s": "{:,.0f} tok/s",
    "patches_per_s": "{:,.0f} patch/s",
    "samples_per_s": "{:,.1f} answers/s",
    "mfu": "MFU {:.1%}",
    "memory_gib": "{:.2f} GiB",
    "engine_idle": "engine idle {:.0%}",
    "time/rollout_s": "rollout {:.2f}s",
    "time/score_s": "score {:.2f}s",
    "time/train_s": "train {:.2f}s",
}
"""Key of a record -> how it is shown, in the order of the line."""
COUNTED = ("rewards/", "prompts/")
"""What went wrong and was contained: counts, shown where there are any."""


class Progress:
    """Shows one run; a quiet console shows nothing.

    total: steps of the run. unit: what a step is called. title: what is run.
    """

    def __init__(self, console: Console, total: int, *, unit: str = "step", title: str = "") -> None:
        self.console, self.total, self.unit, self.title = console, total, unit, title
        self.step, self.doing = 0, ""
        self.numbers: dict[str, Any] = {}
        self._seconds = self._weight = 0.0
        self._live: Live | None = None
        self._drawn = -math.inf

    def update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of a finished step. Numbers that are not finite are left out."""
        # A finished step ends whatever went on before it.
        self.step, self.doing = step, ""
        for key, value in numbers.items():
            if key == "stage" or is_finite(value):
                self.numbers[key] = value

        # A moving average without the bias of its first values.
        if is_finite(seconds := numbers.get("step_s")):
            self._seconds = SMOOTHING * self._seconds + (1 - SMOOTHING) * seconds
            self._weight = SMOOTHING * self._weight + 1 - SMOOTHING
        self._draw(step >= self.total)

    def busy(self, text: str, done: int = 0, total: int = 0) -> None:
        """What goes on between two steps, until the next `update`; `done` of `total` of it."""
        if self.console.is_terminal:
            self.doing = f"{text} " + (f"{done:,}/{total:,}" if total else "...")
            self._draw(not total)
        elif not total:
            self.say(f"{text} ...")

    def _draw(self, now: bool) -> None:
        if self.console.quiet or not self.console.is_terminal:
            return
        # Redrawn by hand: a thread of its own would read records that are being changed.
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        # A step of a tiny model takes a millisecond; drawing it takes more.
        if now or time.monotonic() - self._drawn >= REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self.view(), refresh=True)

    def say(self, text: str) -> None:
        """One line of its own, above the block."""
        self.console.print(text, markup=False, soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen. May be called twice."""
        if self._live is not None:
            self._draw(now=True)
            self._live.stop()
            self._live = None

    def seconds_left(self) -> float | None:
        """From the moving average of the records' step_s; None while nothing is known."""
        return self._seconds / self._weight * max(0, self.total - self.step) if self._weight else None

    def facts(self) -> list[str]:
        """Every number that is known, in words; of the kinds of prompts, which may be many, a few."""
        numbers = self.numbers
        parts = [str(numbers["stage"])] if "stage" in numbers else []
        parts += [form.format(numbers[key]) for key, form in FIELDS.items() if key in numbers]
        parts += [f"{key} {numbers[key]:,.0f}" for key in sorted(numbers) if key.startswith(COUNTED)]

        # A study has thirty kinds of prompts; a line has room for some.
        kinds = sorted(key for key in numbers if key.startswith("reward/"))
        parts += [f"{key.removeprefix('reward/')} {numbers[key]:.2f}" for key in kinds[:LISTED]]
        if len(kinds) > LISTED:
            parts.append(f"{len(kinds) - LISTED} more")
        left = self.seconds_left()
        return parts if left is None else [*parts, f"ETA {duration(left)}"]

    def line(self) -> str:
        """Everything in one plain line."""
        return " | ".join([f"{self.unit} {self.step}/{self.total}", *self.facts()])

    def view(self) -> Group:
        """What stands on a terminal: it folds where the screen ends, and nothing is cut."""
        # A resume for fewer steps may stand beyond its end.
        done = min(1.0, self.step / self.total) if self.total else 1.0
        head = (
            f"{self.title} {self.unit} {self.step}/{self.total} {'━' * round(20 * done)} {done:.0%}".strip()
        )
        rows = [(head, "bold"), (self.doing, ""), (" | ".join(self.facts()), "dim")]
        return Group(*(Text(text, style=style, overflow="fold") for text, style in rows if text))


def is_finite(value: Any) -> TypeGuard[float]:
    """True for a number; what is beyond 1e100 is no measurement, and neither is a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
