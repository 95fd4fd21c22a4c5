"""A Python tool for models: programs nobody has read, run where they can do no harm.

    with Sandbox() as sandbox:
        result = sandbox.run("from PIL import Image\\nImage.open('image.png').size", {"image.png": picture})
        result.reason, result.text      # "ok", "(64, 48)"

Every program has a process, a temporary directory and a Python of its own: nothing is kept from one to the next. What
stands between it and the machine is described in eval/sandbox_child.py. Whatever a program does, `run` returns a
ProgramResult within the limits; only a sandbox that cannot be started raises. Linux only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.programs import tool_text
from earlyfusion.eval.sandbox_child import FIRST_UID, IMPORTS

Reason = Literal["ok", "error", "timeout", "memory", "output_limit", "forbidden"]
REASONS: tuple[Reason, ...] = ("ok", "error", "timeout", "memory", "output_limit", "forbidden")
_START_S, _GRACE_S = 60.0, 10.0


class SandboxError(DataError):
    """The sandbox itself cannot be used (not Linux, no fork); never caused by a program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Memory is counted beyond that of an idle interpreter."""

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mb: float = 512.0
    file_bytes: int = 4 << 20
    """Largest file."""
    output_bytes: int = 1 << 18
    """A program that writes more to stdout or stderr is stopped."""
    max_chars: int = 4_000
    """Characters of each stream, and of the value, that are kept."""
    imports: tuple[str, ...] = IMPORTS

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "file_bytes", "output_bytes", "max_chars"):
            if not getattr(self, name) > 0:
                raise DataError(f"sandbox limit {name} = {getattr(self, name)}: expected a positive number")


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. `refused` names what it was denied, also when it caught the refusal and went on."""

    reason: Reason
    stdout: str = ""
    stderr: str = ""
    value: str = ""
    """repr of the last expression"""
    error: str = ""
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_s: float = 0.0
    layers: tuple[str, ...] = ()
    """walls that stood: net, ipc, pid, uid, landlock, rlimits, audit, imports"""

    @property
    def ok(self) -> bool:
        """The program ended by itself, without an error and without asking for what is forbidden."""
        return self.reason == "ok"

    @property
    def text(self) -> str:
        """What the model reads in its tool turn."""
        return tool_text(self.stdout, self.value, self.error)


class Sandbox:
    """A server process that starts programs; safe to use from several threads. `counts` counts reasons and refusals."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._python_walls = True  # False leaves the kernel's walls alone, to prove that these hold by themselves
        self._numbers = count(os.getpid() % 1000 * 100_000)
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server; a later `run` starts another."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._channel = self._server = None

    def _start(self) -> socket.socket:
        if self._channel is not None and self._server is not None and self._server.poll() is None:
            return self._channel
        self._stop()
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"the sandbox needs Linux, this is {sys.platform}; run tool programs on a Linux machine")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("sandbox_child.py")
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self._server = subprocess.Popen(
            # -s -P is -I but for the environment, which is given whole: equal programs print their sets alike.
            [sys.executable, "-s", "-P", "-B", str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **single},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        ours.settimeout(_START_S)
        try:
            ready = ours.recv(16)
        except OSError:
            ready = b""
        self._channel = ours
        if ready != b"ready":
            self._stop()
            raise SandboxError(f"the sandbox did not start within {_START_S:.0f} s; its message stands above")
        return ours

    def run(self, code: str, files: Mapping[str, Any] | None = None, limits: Limits | None = None) -> ProgramResult:
        """Run `code` as a notebook cell in a directory that holds `files` (name -> bytes, text, path or PIL picture).

        Raises DataError for a file name that is not a plain relative one, SandboxError when no process can be started.
        """
        chosen = limits or self.limits
        folder = os.path.realpath(tempfile.mkdtemp(prefix="program-"))
        try:
            uid = FIRST_UID + next(self._numbers) % 100_000_000
            _mount(files or {}, Path(folder), uid)
            result = self._run(code, folder, uid, chosen)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self.counts[result.reason] += 1
            self.counts.update(f"refused {what}" for what in result.refused)
        return result

    def map(self, programs: Sequence[tuple[str, Mapping[str, Any]]], workers: int = 2) -> list[ProgramResult]:
        """Results of (code, files) pairs in order, `workers` at a time."""
        with ThreadPoolExecutor(max(1, workers)) as pool:
            return list(pool.map(lambda item: self.run(*item), programs))

    def _run(self, code: str, folder: str, uid: int, limits: Limits) -> ProgramResult:
        keys = ("wall_s", "cpu_s", "memory_mb", "file_bytes", "max_chars", "imports")
        job = {"code": code, "folder": folder, "uid": uid, "python_walls": self._python_walls}
        job |= {key: getattr(limits, key) for key in keys}
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
            file.write(json.dumps(job).encode())
            file.seek(0)
            reads, writes = {}, []
            for name in ("stdout", "stderr", "result", "status"):
                read, write = os.pipe()
                stack.callback(os.close, read)
                reads[read] = name
                writes.append(write)
            stop = os.pipe()
            stopper = os.fdopen(stop[1], "wb")
            stack.callback(stopper.close)
            try:
                self._send([file.fileno(), *writes, stop[0]])
            finally:
                for descriptor in (*writes, stop[0]):
                    os.close(descriptor)
            return _collect(reads, limits, stopper.close)

    def _send(self, descriptors: list[int]) -> None:
        with self._lock:
            for attempt in (0, 1):
                channel = self._start()
                try:
                    socket.send_fds(channel, [b"run"], descriptors)
                    return
                except OSError as error:
                    self._stop()
                    if attempt:
                        raise SandboxError(f"the sandbox cannot be reached: {error}") from None


def _mount(files: Mapping[str, Any], folder: Path, uid: int) -> None:
    for name, content in files.items():
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or len(path.parts) != 1:
            raise DataError(f"sandbox file {name!r}: expected a plain file name such as 'image.png'")
        if isinstance(content, PILImage.Image):
            buffer = io.BytesIO()
            content.save(buffer, "PNG")
            content = buffer.getvalue()
        elif isinstance(content, Path):
            content = content.read_bytes()
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else bytes(content))
        os.chmod(folder / name, 0o444)
    if os.geteuid() == 0:
        os.chown(folder, uid, uid)


def _collect(reads: dict[int, str], limits: Limits, stop: Callable[[], None]) -> ProgramResult:
    """Drain the four pipes until the program and its supervisor are gone; `stop` it when it writes too much."""
    data = {name: bytearray() for name in reads.values()}
    caps = {"stdout": limits.output_bytes, "stderr": limits.output_bytes, "result": 16 * limits.max_chars + (1 << 16)}
    flooded, deadline = False, time.monotonic() + limits.wall_s + _GRACE_S + _START_S
    with selectors.DefaultSelector() as selector:
        for read in reads:
            selector.register(read, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            events = selector.select(max(0.0, left))
            if not events and left <= 0:
                break
            for key, _ in events:
                name, chunk = reads[key.fd], os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                    continue
                room = caps.get(name, 1 << 16) - len(data[name])
                data[name] += chunk[: max(0, room)]
                if len(chunk) > room:
                    flooded = True
                    stop()
    return _result(data, limits, flooded)


def _lines(text: bytearray) -> dict[str, Any]:
    """JSON objects, one a line, in one dict. A program could have written here: whatever is no object is left out."""
    found: dict[str, Any] = {}
    for line in bytes(text).split(b"\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.update(entry)
    return found


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + f"... [cut at {limit} characters]"


def _result(data: dict[str, bytearray], limits: Limits, flooded: bool) -> ProgramResult:
    told, status = _lines(data["result"]), _lines(data["status"])
    refused = (
        tuple(str(item)[:80] for item in told.get("refused", []) or []) if isinstance(told.get("refused"), list) else ()
    )
    reason, error = told.get("reason"), str(told.get("error", ""))
    killed, cpu_s = status.get("signal", 0), float(status.get("cpu_s", 0.0))
    if flooded:
        reason, error = "output_limit", f"stopped: more than {limits.output_bytes} bytes of output"
    elif status.get("late") or (killed and cpu_s >= limits.cpu_s - 0.1):
        reason, error = "timeout", f"stopped: more than {limits.wall_s:g} s, or {limits.cpu_s:g} s of CPU time"
    elif killed == signal.SIGKILL:
        reason, error = "memory", "stopped: the system ran out of memory"
    elif killed:
        reason, error = "error", f"stopped by signal {killed}"
    elif reason not in REASONS:
        reason, error = "error", "the program ended without a result"
    elif refused and reason in ("ok", "error"):
        reason = "forbidden"
    texts = {name: bytes(data[name]).decode("utf-8", "replace") for name in ("stdout", "stderr")}
    layers = told.get("layers")
    return ProgramResult(
        reason=cast(Reason, reason),
        stdout=_clip(texts["stdout"], limits.max_chars),
        stderr=_clip(texts["stderr"], limits.max_chars),
        value=_clip(str(told.get("value", "")), limits.max_chars),
        error=error[:1000],
        refused=refused,
        seconds=float(status.get("seconds", 0.0)),
        cpu_s=cpu_s,
        layers=tuple(str(layer) for layer in layers) if isinstance(layers, list) else (),
    )
