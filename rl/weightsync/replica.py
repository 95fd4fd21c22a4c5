"""The weights that an engine reads: two copies, one that is read, one that is written.

    replica = Replica()
    with replica.reading() as (version, weights):      # of one version, whatever arrives meanwhile
        engine.load_weights(weights, version)

    replica.begin(manifest, slice_bytes)
    replica.place(version, offset, data, checksum)     # ... until missing(version) == []
    replica.commit(version)

A version is whole or not there: commit exchanges the two copies, and only once every slice has come with its
checksum. A slice may come twice, late, in any order and from several threads; it is written once. A reader
that holds the old copy keeps it, and the version after next waits for it.
"""

import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from earlyfusion.rl.weightsync.layout import Manifest, SyncError, views

READERS_S = 60.0
"""Seconds that a new version waits for readers of the copy that it will overwrite."""


class Copy:
    """One copy. manifest: the version in it; left: slices that have not come, by their offset; writing:
    threads that are at it."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.manifest: Manifest | None = None
        self.weights: dict[str, Tensor] = {}
        self.left: dict[int, int] = {}
        self.readers = self.writing = 0


class Replica:
    """See the module. Methods may be called by any thread of its process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._live: Copy | None = None
        self._spare: Copy | None = None

    @property
    def version(self) -> int:
        """Of what is read; -1 before the first."""
        live = self._live
        return -1 if live is None or live.manifest is None else live.manifest.version

    @contextmanager
    def reading(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The version and its weights, which stay as they are inside. Raises SyncError before the first."""
        with self._changed:
            copy = self._live
            if copy is None or copy.manifest is None:
                raise SyncError("no weights have arrived yet")
            copy.readers += 1
        try:
            yield copy.manifest.version, copy.weights
        finally:
            with self._changed:
                copy.readers -= 1
                self._changed.notify_all()

    def begin(self, manifest: Manifest, slice_bytes: int) -> None:
        """Make room for a version; what came of an unfinished one is dropped. A version that is begun again
        must have the bytes that it had.

        Raises SyncError for a version that is not newer, and where readers keep the other copy too long.
        """
        with self._changed:
            if manifest.version <= self.version:
                raise SyncError(f"version {manifest.version} after version {self.version}: it must be newer")
            spare = self._spare
            if spare is None or len(spare.bytes) != manifest.size:
                spare = Copy(manifest.size)
            elif not self._changed.wait_for(lambda: not spare.readers + spare.writing, READERS_S):
                raise SyncError(f"a reader has kept the weights of an old version for {READERS_S:g} s")
            spare.manifest = manifest
            spare.left = {one.offset: one.size for one in manifest.slices(slice_bytes)}
            spare.weights = views(manifest, spare.bytes)
            self._spare = spare

    def place(self, version: int, offset: int, data: memoryview, checksum: int) -> None:
        """Write a slice to where it belongs. Raises SyncError for one that is damaged, that nobody waits for
        or whose version is not being written; one that is there already is left as it is."""
        if zlib.crc32(data) != checksum:
            raise SyncError(f"the slice at byte {offset:,} is damaged")
        with self._changed:
            spare = self._writing(version)
            size = spare.left.get(offset)
            if size is None and 0 <= offset < len(spare.bytes):
                return
            if size != len(data):
                raise SyncError(f"a slice of {len(data):,} bytes at byte {offset:,}: nobody waits for it")
            # Claimed: whoever brings it again finds nothing to do.
            del spare.left[offset]
            spare.writing += 1
        # By numpy, which lets other threads run meanwhile.
        np.frombuffer(spare.bytes, np.uint8)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        with self._changed:
            spare.writing -= 1
            self._changed.notify_all()

    def missing(self, version: int) -> list[int]:
        """Offsets of the slices that have not come."""
        with self._changed:
            spare = self._writing(version)
            self._changed.wait_for(lambda: not spare.writing)
            return sorted(spare.left)

    def commit(self, version: int) -> None:
        """From here on the new version is read. Raises SyncError for one that is not whole."""
        with self._changed:
            spare = self._writing(version)
            if spare.left or spare.writing:
                raise SyncError(f"version {version} lacks {len(spare.left) + spare.writing:,} slices")
            self._live, self._spare = spare, self._live
            self._changed.notify_all()

    def _writing(self, version: int) -> Copy:
        spare = self._spare
        if spare is None or spare.manifest is None or spare.manifest.version != version:
            raise SyncError(f"version {version} is not being written")
        return spare
