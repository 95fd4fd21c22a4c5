"""Objects with tensors through a pipe between processes, tensor bytes written and read in place.

Plain pickling copies every tensor several times while it holds the interpreter lock; here the bytes go from
the tensor into the pipe and from the pipe into the new tensor, so the training process can compute meanwhile.
Nothing is left behind when either side is killed: a pipe goes with its ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of Linux


class _Pickler(pickle.Pickler):
    """Tensors go as NumPy arrays, which can hand out their buffers."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _tensor, (item.detach().contiguous().numpy(),)
        return NotImplemented


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def widen(connection: Connection) -> None:
    """Ask for a pipe of 1 MiB in place of 64 KiB, where the system knows how."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(connection.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)


def send(connection: Connection, item: Any) -> None:
    """Write `item` (CPU tensors inside); raises BrokenPipeError when nobody reads any more."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=buffers.append).dump(item)
    views = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps([view.nbytes for view in views]))
    connection.send_bytes(head.getbuffer())
    for view in views:
        while view.nbytes:
            view = view[os.write(connection.fileno(), view) :]


def receive(connection: Connection) -> Any:
    """Read one item of `send`; raises EOFError or OSError when the writer is gone, also in the middle of an
    item."""
    sizes = pickle.loads(connection.recv_bytes())
    head = connection.recv_bytes()
    buffers = []
    for size in sizes:
        buffer = np.empty(size, dtype=np.uint8)
        view = memoryview(buffer.data)
        while view.nbytes:
            read = os.readv(connection.fileno(), [view])
            if not read:
                raise EOFError("the writer went away in the middle of an item")
            view = view[read:]
        buffers.append(buffer)
    return pickle.loads(head, buffers=buffers)
