"""What agents did, and when: spans, critical steps, a page with the timeline.

A span is a line of JSON with the names of OpenTelemetry's conventions for generative AI
(gen_ai.operation.name, gen_ai.agent.name, gen_ai.usage.output_tokens, ...), so that other tools can read the
file.

Critical steps (Kimi K2.5, section 3): each message of the orchestrator is one step, and a group of
assignments that runs side by side costs as many as its longest one; with fewer places than assignments, as
many as the places need when each takes the next assignment as it becomes free.

    sum over turns of (1 + the longest way through the group)
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import Record, write_atomic
from earlyfusion.pipeline.report.page import write_page


@dataclass
class Span:
    """One piece of work. start, end: seconds of the clock, None while it runs; about: its attributes."""

    number: int
    parent: int | None
    operation: str
    agent: str
    start: float
    end: float | None = None
    about: Record = field(default_factory=dict)

    def record(self, begun: float) -> Record:
        """As a line of the trace. begun: Unix time of the clock's zero, seconds."""
        nano = lambda seconds: None if seconds is None else int((begun + seconds) * 1e9)
        return {
            "name": f"{self.operation} {self.agent}",
            "span_id": f"{self.number:016x}",
            "parent_span_id": None if self.parent is None else f"{self.parent:016x}",
            "start_time_unix_nano": nano(self.start),
            "end_time_unix_nano": nano(self.end),
            "attributes": {
                "gen_ai.operation.name": self.operation,
                "gen_ai.agent.name": self.agent,
                **self.about,
            },
        }


class Trace:
    """All spans of one question. watch: told of every change, for a live view."""

    def __init__(self, watch: Callable[["Trace"], None] = lambda trace: None) -> None:
        self.spans: list[Span] = []
        self.watch, self.begun = watch, time.time()
        self._zero, self._numbers = time.monotonic(), itertools.count(1)

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._zero

    @contextmanager
    def span(self, operation: str, agent: str, parent: int | None = None, **about: Any) -> Iterator[Span]:
        """A span around a piece of work; an exception is noted and goes on."""
        made = Span(next(self._numbers), parent, operation, agent, self.now(), about=about)
        self.spans.append(made)
        self.watch(self)
        try:
            yield made
        except BaseException as error:
            made.about["error.type"] = type(error).__name__
            raise
        finally:
            made.end = self.now()
            self.watch(self)

    def critical(self) -> set[int]:
        """Numbers of the spans on the critical path: of every group the agent that ended last."""
        groups: dict[Any, list[Span]] = {}
        for span in self.spans:
            if span.operation == "invoke_agent":
                groups.setdefault((span.parent, span.about.get("swarm.turn")), []).append(span)
        return {max(group, key=lambda span: span.end or 0.0).number for group in groups.values()}

    def write(self, folder: Path, question: str, answer: str, counts: Record) -> Path:
        """trace.jsonl and timeline.html of a folder; returns the page."""
        lines = [json.dumps(span.record(self.begun), ensure_ascii=False) for span in self.spans]
        write_atomic(folder / "trace.jsonl", "".join(f"{line}\n" for line in lines))
        whole = max([span.end or 0.0 for span in self.spans], default=0.0) or 1.0
        critical = self.critical()
        rows = [
            {
                "agent": span.agent,
                "operation": span.operation,
                "left": 100 * span.start / whole,
                "width": max(0.3, 100 * ((span.end or whole) - span.start) / whole),
                "seconds": (span.end or whole) - span.start,
                "critical": span.number in critical,
                "about": {key: value for key, value in span.about.items() if value not in (None, "")},
            }
            for span in self.spans
        ]
        data = {"title": question, "note": "Agent swarm", "answer": answer, "counts": counts, "rows": rows}
        return write_page(folder / "timeline.html", "swarm.html", data | {"seconds": whole})
