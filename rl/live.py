"""What a reinforcement learning run looks like while it runs.

On a terminal: a small table that stays in place, one row with a sparkline for each kind of prompt, and three
lines of numbers below. Without one: a plain line for each update that is shown.

The keys of a record are those of metrics.jsonl: reward, reward/<entry>, score/<entry>, length (tokens),
entropy (nats), mismatch_kl (nats a token, engine against trainer), staleness (updates), clip_share,
time/<phase>_s, ... Whatever a record does not hold is not shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from earlyfusion.pipeline.track import duration, is_number

BARS = "▁▂▃▄▅▆▇█"
PHASES = ("rollout", "score", "train", "other")
REFRESH_S = 0.25  # redraws are this far apart: a fast run spends its time on training
REMEMBERED = 2048  # values of one curve; beyond, neighbours are averaged in pairs
SMOOTHING = 0.9  # of the seconds of an update, for the time left
PLAIN_ENTRIES = 6  # kinds of prompts told one by one in a plain line
_COLOURS = {"rollout": "cyan", "score": "magenta", "train": "green", "other": "bright_black"}


class Curve:
    """A curve of any length in bounded memory, as a line of block characters."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.first = self.last = float("nan")
        self._stride, self._pending = 1, []  # type: tuple[int, list[float]]

    def add(self, value: float) -> None:
        """One more value."""
        self.last = value
        if not self.values and not self._pending:
            self.first = value
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self.values.append(sum(self._pending) / self._stride)
            self._pending = []
        if len(self.values) >= REMEMBERED:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self._stride *= 2

    def text(self, width: int, low: float = 0.0, high: float = 1.0) -> str:
        """At most `width` blocks, each the mean of its share of the curve. The scale is low to high, wider
        when values lie outside, so that rows can be compared and noise is not blown up."""
        return sparkline(self.values or self._pending, width, low, high)


def sparkline(values: Sequence[float], width: int, low: float = 0.0, high: float = 1.0) -> str:
    """See Curve.text."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(low, *means), max(high, *means)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)


class LiveView:
    """Shows one run. `update` may be called for every update; it draws at most four times a second.

    console: of the first process; a quiet one shows nothing. total: updates of the run. title: what is run.
    """

    def __init__(self, console: Console, *, total: int, title: str) -> None:
        self.console, self.total, self.title = console, total, title
        self.number = 0
        self._record: dict[str, float] = {}
        self._rewards: dict[str, Curve] = {}
        self._all = Curve()
        self._live: Live | None = None
        self._drawn = float("-inf")
        self._began: tuple[float, int] | None = None
        self._each, self._weight = 0.0, 0.0

    def update(self, update: int, record: Mapping[str, Any]) -> None:
        """Show the numbers of finished update `update` (counted from 1)."""
        self.number = update
        if self._began is None:
            self._began = (time.monotonic(), update)
        self._record |= {key: value for key, value in record.items() if is_number(value) and value == value}
        for key, value in record.items():
            if is_number(value) and value == value:
                if key == "reward":
                    self._all.add(value)
                elif key.startswith("reward/"):
                    self._rewards.setdefault(key.removeprefix("reward/"), Curve()).add(value)
        rate = self._record.get("updates_per_min", 0.0)
        if rate > 0 and "updates_per_min" in record:
            self._each = SMOOTHING * self._each + (1 - SMOOTHING) * 60 / rate
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        if self.console.quiet:
            return
        if not self.console.is_terminal:
            self.say(self.line())
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        if time.monotonic() - self._drawn >= REFRESH_S or update >= self.total:
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        self._drawn = time.monotonic()
        self._live.update(self.table(), refresh=True)

    def say(self, text: str) -> None:
        """One line, above the table."""
        self.console.print(text, markup=False, soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen. May be called twice."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def seconds_left(self) -> float | None:
        """From the records' updates_per_min (a moving average), else from the clock; None while nothing is
        known."""
        if self._weight:
            each = self._each / self._weight
        elif self._began is not None and self.number > self._began[1]:
            each = (time.monotonic() - self._began[0]) / (self.number - self._began[1])
        else:
            return None
        return each * max(0, self.total - self.number)

    def shares(self) -> dict[str, float]:
        """Phase -> share of the time of the latest update; {} when it was not measured."""
        seconds = {phase: self._record.get(f"time/{phase}_s") for phase in PHASES}
        known = {phase: value for phase, value in seconds.items() if value is not None and value >= 0}
        whole = sum(known.values())
        return {phase: value / whole for phase, value in known.items()} if whole > 0 else {}

    def facts(self) -> list[list[str]]:
        """The numbers besides the rewards: the answers, the training, the machine; then what went wrong and
        was contained (rewards that failed, prompts left out), where anything did."""
        has = self._format
        length = has("length", "length {:.1f}")
        extra = [has("length_max", "max {:.0f}"), has("cut", "cut {:.1%}")]
        if length and any(extra):
            length += f" ({', '.join(text for text in extra if text)})"
        mismatch = has("mismatch_kl", "mismatch KL {:.1e}")
        if mismatch and "mismatch_max" in self._record:
            mismatch += has("mismatch_max", " (max {:.1e})")
        answers = [length, has("entropy", "entropy {:.3f}"), has("informative", "informative {:.0%}")]
        answers += [has("tools/valid", "valid calls {:.0%}"), has("temperature", "T {:.2f}")]
        answers += [has("staleness", "stale {:.2f}")]
        training = [
            mismatch,
            has("clip_share", "clipped {:.2%}"),
            has("k3", "k3 {:.1e}"),
            has("grad_norm", "|g| {:.3f}"),
        ]
        training += [has("lr", "lr {:.1e}"), has("ptx_loss", "ptx {:.3f}")]
        machine = [has("tokens_per_s", "{:,.0f} tok/s"), has("samples_per_s", "{:,.1f} answers/s")]
        machine += [has("updates_per_min", "{:.1f} updates/min"), has("memory_gib", "{:.2f} GiB")]
        machine += [has("engine_idle", "engine idle {:.0%}")]
        trouble = [
            has(key, f"{key} {{:,.0f}}")
            for key in sorted(self._record)
            if key.startswith(("rewards/", "prompts/"))
        ]
        return [[text for text in row if text] for row in (answers, training, machine, trouble)]

    def _format(self, key: str, form: str) -> str:
        value = self._record.get(key)
        return "" if value is None else form.format(value)

    def line(self) -> str:
        """Everything in one plain line."""
        parts = [f"update {self.number}/{self.total}"]
        if "reward" in self._record:
            parts.append(f"reward {self._record['reward']:.3f}")
        labels = sorted(self._rewards)
        parts += [f"{label} {self._rewards[label].last:.2f}" for label in labels[:PLAIN_ENTRIES]]
        if len(labels) > PLAIN_ENTRIES:
            parts.append(f"{len(labels) - PLAIN_ENTRIES} more")
        parts += [text for row in self.facts() for text in row]
        if shares := self.shares():
            parts.append(" ".join(f"{phase} {share:.0%}" for phase, share in shares.items()))
        left = self.seconds_left()
        if left is not None:
            parts.append(f"ETA {duration(left)}")
        return " | ".join(parts)

    def table(self) -> RenderableType:
        """What stands on a terminal."""
        rows: list[RenderableType] = [self._head()]
        if self._rewards or self._all.values:
            rows.append(self._rewards_table())
        joined: Callable[[Sequence[str]], str] = "  ·  ".join
        rows += [Text(joined(row), style="dim", overflow="fold") for row in self.facts() if row]
        if shares := self.shares():
            rows.append(self._split(shares))
        return Group(*rows)

    def _head(self) -> Text:
        left = self.seconds_left()
        done = min(1.0, self.number / self.total) if self.total else 1.0
        filled = round(20 * done)
        text = Text.assemble(
            (self.title, "bold"),
            f"  update {self.number:,}/{self.total:,}  ",
            ("━" * filled, "green"),
            ("━" * (20 - filled), "bright_black"),
            f"  {done:.0%}",
            no_wrap=True,
            overflow="ellipsis",
        )
        if left is not None:
            text.append(f"  ETA {duration(left)}")
        return text

    def _rewards_table(self) -> Table:
        """One row for each kind of prompt, as many as the screen holds."""
        table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
        table.add_column("reward", no_wrap=True, overflow="ellipsis", max_width=34)
        table.add_column("", no_wrap=True)
        for name in ("now", "first", "score"):
            table.add_column(name, justify="right", no_wrap=True)
        width = max(8, min(40, self.console.width - 62))
        labels = sorted(self._rewards)
        room = max(1, self.console.height - 11)
        for label in labels[:room]:
            self._row(table, Text(label), self._rewards[label], width, self._record.get(f"score/{label}"))
        if len(labels) > room:
            table.add_row(Text(f"{len(labels) - room} more", style="dim"))
        if len(labels) != 1 and self._all.values:
            self._row(table, Text("all", style="bold"), self._all, width, self._record.get("score"))
        return table

    def _row(self, table: Table, label: Text, curve: Curve, width: int, score: float | None) -> None:
        better = "green" if curve.last > curve.first else "red" if curve.last < curve.first else ""
        told = "" if score is None else f"{score:.2f}"
        now = Text(f"{curve.last:.2f}", style=better)
        table.add_row(label, Text(curve.text(width), style="cyan"), now, f"{curve.first:.2f}", told)

    def _split(self, shares: Mapping[str, float], width: int = 24) -> Text:
        """Where the time of an update goes, as a bar."""
        text, begun = Text("time  ", style="", no_wrap=True, overflow="ellipsis"), 0.0
        for phase, share in shares.items():
            cells = round(width * (begun + share)) - round(width * begun)
            text.append("█" * cells, style=_COLOURS[phase])
            begun += share
        for phase, share in shares.items():
            text.append(f"  {phase} ", style=_COLOURS[phase])
            text.append(f"{share:.0%}")
        return text
