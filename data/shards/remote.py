"""Object stores (s3://, gs://, memory://, ...): reading by fsspec, with patience where a server fails for the
moment.

Address and credentials are those of the store's own tools: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, ~/.aws, or fsspec's configuration.
"""

import errno
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import fsspec

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import one_line

LOG = logging.getLogger("earlyfusion.data")
PAUSES_S = (1.0, 2.0, 4.0)
"""Seconds between tries; s3fs tries five times of its own in each."""
TOGETHER = 4 << 20
"""Most bytes that are asked for beyond what is read, or to have a sample in one request."""
_NEAR = 1 << 12
"""Bytes between two reads that are taken for one after the other: headers and padding."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
T = TypeVar("T")


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it); raises DataError when the protocol's package is missing."""
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: {error}; pip install 'earlyfusion[shards]' brings s3fs") from None
    except ValueError as error:
        raise DataError(f"{url}: {error}; write it as protocol://path, of a protocol fsspec knows") from None


def patiently(url: str, call: Callable[[], T]) -> T:
    """`call()`, tried again after pauses while a server is busy, slow, or breaks off.

    Raises FileNotFoundError, and DataError for denied access and when no try went well. What is missing or
    denied, and a disk that is full here, is not tried again.
    """
    for pause in (*PAUSES_S, None):
        try:
            return call()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, DataError):
            raise
        except Exception as error:  # each store has errors of its own, most of them no OSError
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            why = f"{type(error).__name__}: {one_line(error, 160)}"
            if isinstance(error, PermissionError) or "Credentials" in why:
                raise DataError(
                    f"{url}: access denied ({why}); check the credentials (for s3: AWS_ACCESS_KEY_ID,"
                    " AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) and what they may read"
                ) from None
            if pause is None:
                raise DataError(
                    f"{url}: cannot be read, {len(PAUSES_S) + 1} tries ({why}); run the same command again"
                    " when the server answers"
                ) from None
            LOG.warning("%s: %s; trying again", url, why)
        # Not all at the same moment, and not from the seeded generator.
        time.sleep(pause * random.SystemRandom().uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _range(url: str, offset: int, size: int) -> bytes:
    fs, inside = file_system(url)
    data: bytes = fs.cat_file(inside, start=offset, end=offset + size)
    if len(data) != size:
        raise OSError(f"{len(data)} of {size} bytes came")
    return data


class RemoteFile:
    """Positioned reads of an object of `size` bytes by byte ranges; safe to share among threads.

    The last range is kept. One who reads on from where it ends is given twice as much each time, at most
    TOGETHER, so that reading in order takes few requests and reading anywhere no byte too many.
    """

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        # Replaced whole: a thread sees an old range or a new one.
        self._kept = (0, b"")

    def __call__(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        start, kept = self._kept
        end = start + len(kept)
        if size and not (start <= offset and offset + size <= end):
            ahead = min(2 * len(kept), TOGETHER) if start < offset <= end + _NEAR else 0
            count = min(max(size, ahead), self.size - offset)
            try:
                start, kept = offset, patiently(self.url, partial(_range, self.url, offset, count))
            except FileNotFoundError:
                raise DataError(f"{self.url}: no such file any more") from None
            self._kept = start, kept
        return kept[offset - start : offset - start + size] if size else b""
