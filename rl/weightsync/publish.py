"""A version of the weights, from a trainer to its engines: everywhere whole first, then everywhere read.

    link = Link(receiver.address, [FileRail(receiver.address, MEMORY), TcpRail(receiver.address)])
    publish([link, ...], manifest, buffer)

Two phases: all slices to all engines, compared with their checksums; then one word to each, upon which it
reads the new version. An engine that fails is named and keeps its old version; the others go on.
"""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record
from earlyfusion.rl.weightsync.layout import Manifest, SyncError
from earlyfusion.rl.weightsync.spray import Sent, Sprayer
from earlyfusion.rl.weightsync.wire import Address, Rail, connect, read_message, write_message

SLICE_BYTES = 2 << 20
ROUNDS = 3
"""Times that slices which did not come are sent again."""


class Link:
    """A trainer's end of one engine: rails for the bytes, a connection for what is agreed."""

    def __init__(
        self,
        address: Address,
        rails: Sequence[Rail],
        *,
        slice_bytes: int = SLICE_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        self.address, self.slice_bytes = address, slice_bytes
        self.sprayer = Sprayer(rails, timeout_s)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def ask(self, do: str, **about: Any) -> Record:
        """An answer of the receiver. Raises SyncError for a refusal, OSError where it is gone."""
        with self._lock:
            try:
                self._connection = self._connection or connect(self.address)
                write_message(self._connection, {"do": do, **about})
                told: Record = read_message(self._connection)
            except BaseException:
                self.close()
                raise
        if told.get("error"):
            raise SyncError(str(told["error"]))
        return told

    def prepare(self, manifest: Manifest, buffer: memoryview) -> Sent:
        """Bring a version there, whole. Raises SyncError, OSError."""
        self.ask("begin", manifest=manifest.record(), slice_bytes=self.slice_bytes)
        slices = manifest.slices(self.slice_bytes)
        sent = self.sprayer.send(manifest.version, slices, buffer)
        for _ in range(ROUNDS):
            missing = set(self.ask("missing", version=manifest.version)["missing"])
            if not missing:
                return sent
            self.sprayer.send(manifest.version, [one for one in slices if one.offset in missing], buffer)
        raise SyncError(f"{len(missing):,} slices of version {manifest.version} do not arrive")

    def close(self) -> None:
        """End the connection; the next question makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def publish(links: Sequence[Link], manifest: Manifest, buffer: memoryview) -> list[Sent | str]:
    """Send a version to all engines; for each what it took, or why it keeps the version that it has."""

    def guarded(work: Any, *given: Any) -> Any:
        try:
            return work(*given)
        except (OSError, SyncError) as error:
            return one_line(error, 200) or type(error).__name__

    with ThreadPoolExecutor(max(1, len(links))) as pool:
        found = list(pool.map(lambda link: guarded(link.prepare, manifest, buffer), links))
        ready = [i for i, one in enumerate(found) if not isinstance(one, str)]
        told = pool.map(lambda i: guarded(lambda: links[i].ask("commit", version=manifest.version)), ready)
        for i, one in zip(ready, told):
            if isinstance(one, str):
                found[i] = one
    return found
