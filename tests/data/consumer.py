"""A process that reads batches and may be killed at any instant: state and running hash go to one file,
atomically."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

TENSORS = ("ids", "labels", "loss_weights", "patches", "media_positions", "source_ids", "has_image")


def chained(before: str, batches) -> str:
    """SHA-256 over `before` and every bit of the batches."""
    digest = hashlib.sha256(before.encode())
    for batch in batches:
        digest.update(repr((batch.segments.lengths, batch.grids, batch.keys, batch.num_loss_weight)).encode())
        for name in TENSORS:
            digest.update(getattr(batch, name).numpy().tobytes())
    return digest.hexdigest()


class Reference:
    """The hash after every step of the run that nobody stops, made as far as it is asked for."""

    def __init__(self, loader) -> None:
        self.loader, self.hashes = loader, [""]

    def __getitem__(self, step: int) -> str:
        while len(self.hashes) <= step:
            self.hashes.append(chained(self.hashes[-1], self.loader.next_step()))
        return self.hashes[step]


def read(path: Path) -> dict:
    """The newest complete record."""
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "hash": "", "state": None}


def consume(build, path: Path) -> None:
    """Go on from the record for ever."""
    record, loader = read(path), build()
    if record["state"] is not None:
        loader.load_state_dict(record["state"])
    while True:
        digest = chained(record["hash"], loader.next_step())
        record = {"step": record["step"] + 1, "hash": digest, "state": loader.state_dict()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        os.replace(partial, path)


def killed_after(build, path: Path, delay_s: float, timeout_s: float = 60) -> dict:
    """Start a consumer, wait for its first new record and `delay_s` more, kill it with SIGKILL; the record it
    left."""
    before = read(path)["step"]
    child = os.fork()
    if child == 0:
        try:
            consume(build, path)
        finally:
            os._exit(1)
    deadline = time.monotonic() + timeout_s
    while read(path)["step"] == before:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the consumer ended by itself"
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return read(path)
