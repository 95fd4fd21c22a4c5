"""What a data worker is reading right now, legible to another process, also after the worker has died."""

from __future__ import annotations

from typing import Any

_BYTES = 512
_COUNT = 8


class Watch:
    """A line of text in fixed memory: ordinary, or shared (`multiprocessing.RawArray("B", Watch.SIZE)`)."""

    SIZE = _BYTES + _COUNT

    def __init__(self, memory: Any = None) -> None:
        self._view = memoryview(bytearray(self.SIZE) if memory is None else memory).cast("B")

    def note(self, text: str) -> None:
        """Replace the line (cut at 511 bytes) and count the change."""
        raw = text.encode("utf-8", "replace")[: _BYTES - 1]
        self._view[_COUNT : _COUNT + len(raw) + 1] = raw + b"\0"
        self._view[:_COUNT] = ((self.count + 1) % 2**63).to_bytes(_COUNT, "little")

    @property
    def count(self) -> int:
        """Changes so far: a worker whose count stands still is stuck, or has nothing to do."""
        return int.from_bytes(self._view[:_COUNT], "little")

    @property
    def text(self) -> str:
        """The line; empty before the first note."""
        return bytes(self._view[_COUNT:]).split(b"\0", 1)[0].decode("utf-8", "replace")
