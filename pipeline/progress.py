"""How far a loop is: one view for pretraining, fine-tuning, reinforcement learning and DPO.

On a terminal a small block stays in place: how far, the time left, a sparkline for each kind of prompt, the
numbers folded at the screen's width. Without one, `line()` is everything in one plain line, for a log file.
The keys are those of metrics.jsonl; whatever a record does not hold is not shown.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.25  # redraws are this far apart: a fast run spends its time on training
REMEMBERED = 2048  # values of one sparkline
SMOOTHING = 0.9  # of the seconds of a step: one that evaluated as well does not throw the time left off
LISTED = 6  # kinds of prompts in a plain line

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
        self.step = 0
        self.numbers: dict[str, Any] = {}
        self.rewards: dict[str, deque[float]] = {}
        self._first: dict[str, float] = {}
        self._seconds = self._weight = 0.0
        self._live: Live | None = None
        self._drawn = -math.inf
        self._doing = ""

    def update(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of a finished step. Numbers that are not finite are left out."""
        # A finished step ends whatever went on before it.
        self.step, self._doing = step, ""
        found = {key: value for key, value in numbers.items() if key == "stage" or is_finite(value)}
        self.numbers |= found

        # Kinds of prompts come and go: each has its own curve and its first value.
        for key, value in found.items():
            if key.startswith("reward/"):
                label = key.removeprefix("reward/")
                self.rewards.setdefault(label, deque(maxlen=REMEMBERED)).append(value)
                self._first.setdefault(label, value)

        # A moving average without the bias of its first values.
        if found.get("step_s"):
            self._seconds = SMOOTHING * self._seconds + (1 - SMOOTHING) * found["step_s"]
            self._weight = SMOOTHING * self._weight + 1 - SMOOTHING
        self._draw(step >= self.total)

    def busy(self, text: str, done: int = 0, total: int = 0) -> None:
        """What goes on between two steps, until the next `update`; `done` of `total` of it."""
        if self.console.is_terminal:
            self._doing = f"{text} " + (f"{done:,}/{total:,}" if total else "...")
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
        """Every number that is known, in words."""
        numbers = self.numbers
        parts = [str(numbers["stage"])] if "stage" in numbers else []
        parts += [form.format(numbers[key]) for key, form in FIELDS.items() if key in numbers]
        return parts + [f"{key} {numbers[key]:,.0f}" for key in sorted(numbers) if key.startswith(COUNTED)]

    def line(self) -> str:
        """Everything in one plain line."""
        # The rewards by kind stand last: there may be many.
        labels = sorted(self.rewards)
        parts = [f"{self.unit} {self.step}/{self.total}", *self.facts()]
        parts += [f"{label} {self.rewards[label][-1]:.2f}" for label in labels[:LISTED]]
        if len(labels) > LISTED:
            parts.append(f"{len(labels) - LISTED} more")
        if (left := self.seconds_left()) is not None:
            parts.append(f"ETA {duration(left)}")
        return " | ".join(parts)

    def view(self) -> RenderableType:
        """What stands on a terminal: it folds where the screen ends, and nothing is cut."""
        done = min(1.0, self.step / self.total) if self.total else 1.0
        left = self.seconds_left()
        head = [self.title, f"{self.unit} {self.step}/{self.total}", "━" * round(20 * done), f"{done:.0%}"]
        head += [] if left is None else [f"ETA {duration(left)}"]
        # Everything folds; a table's first column does, and its numbers are short.
        rows: list[RenderableType] = [Text(" ".join(filter(None, head)), style="bold", overflow="fold")]

        if self.rewards:
            rows.append(self._table())
        if self._doing:
            rows.append(Text(self._doing, overflow="fold"))
        rows.append(Text(" | ".join(self.facts()), style="dim", overflow="fold"))
        return Group(*rows)

    def _table(self) -> Table:
        """The rewards of each kind of prompt, as many as the screen holds."""
        table = Table("reward", "", "now", "first", box=None, header_style="dim")
        labels = sorted(self.rewards)
        # The head and the facts below need their lines too.
        room = max(1, self.console.height - 11)
        for label in labels[:room]:
            values, first = self.rewards[label], self._first[label]
            line = sparkline(list(values), max(8, min(40, self.console.width - 56)))
            table.add_row(Text(label), Text(line, style="cyan"), f"{values[-1]:.2f}", f"{first:.2f}")
        if len(labels) > room:
            table.add_row(f"{len(labels) - room} more")
        return table


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks, each the mean of its share of the values.

    The scale is 0 to 1, wider when values lie outside: rows can be compared, and noise is not blown up.
    """
    # Shares of equal size, one block each.
    count = min(width, len(values))
    edges = [len(values) * index // max(1, count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min([0.0, *means]), max([1.0, *means])
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, int((mean - low) / (high - low) * len(BLOCKS)))] for mean in means)


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
