"""A Python tool for models: programs nobody has read, run where they can do no harm.

    with Sandbox() as sandbox:
        result = sandbox.run("from PIL import Image\\nImage.open('image.png').size", {"image.png": picture})
        result.reason, result.text      # "ok", "(64, 48)"

Every program has a process, a temporary directory and a Python of its own: nothing is kept from one to the
next. What stands between it and the machine is described in eval/sandbox/walls.py; where one of those walls
cannot be had, programs are refused, unless `allow_weaker` is set, and then every result names what stood and
what did not. Whatever a program does, `run` returns a ProgramResult within the limits, of plain text that can
be encoded and shown on a terminal; only a sandbox that cannot be used raises. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast, get_args

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.programs import tool_text
from earlyfusion.eval.sandbox.child import FIRST_UID
from earlyfusion.kernels.files import Record

Reason = Literal["ok", "error", "timeout", "memory", "output_limit", "forbidden"]
REASONS: tuple[Reason, ...] = get_args(Reason)
_START_S, _GRACE_S = 60.0, 10.0
_BOOT = """import sys, types
for name, path in (("earlyfusion", ""), ("earlyfusion.eval", ""), ("earlyfusion.eval.sandbox", sys.argv[1])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from earlyfusion.eval.sandbox.child import main
main()
"""
"""The server's start: its two or three files, without the package around them, which would take longer to
load."""
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of terminals and of writing direction, breaks that only some count as lines, and half characters.
"""
_REMEDY = (
    "mount, net, ipc, pid: allow user namespaces (sysctl user.max_user_namespaces,"
    " kernel.apparmor_restrict_unprivileged_userns=0), or start the container with --cap-add SYS_ADMIN and a"
    " seccomp profile that lets unshare and mount through; landlock: a kernel from 5.13 with lsm=landlock;"
    " seccomp: x86_64 or aarch64; uid: an ordinary user, or root with CAP_SETUID and further users (uid_map)"
)


class SandboxError(DataError):
    """The sandbox itself cannot be used (not Linux, no fork, a wall is missing); never caused by a
    program."""


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
    disk_bytes: int = 64 << 20
    """Everything in the program's directory, beyond the files it was given."""
    disk_files: int = 1_000
    max_chars: int = 4_000
    """Characters of each stream, and of the value, that are kept."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. `refused` names what it was denied, also when it caught the refusal and went
    on."""

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
    """walls that stood: those of eval/sandbox/walls.py, audit, imports"""
    missing: tuple[str, ...] = ()
    """walls that should have stood; always () unless the sandbox has allow_weaker"""

    @property
    def ok(self) -> bool:
        """The program ended by itself, without an error and without asking for what is forbidden."""
        return self.reason == "ok"

    @property
    def weaker(self) -> str:
        """What a record of this program says of a sandbox with walls missing; "" where none is."""
        return f"without {', '.join(self.missing)}; with {', '.join(self.layers)}" if self.missing else ""

    @property
    def text(self) -> str:
        """What the model reads in its tool turn."""
        return tool_text(self.stdout, self.value, self.error)


class Sandbox:
    """A server process that starts programs; safe to use from several threads.

    allow_weaker: run programs although walls are missing here, and name these in every result.
    """

    def __init__(self, limits: Limits | None = None, *, allow_weaker: bool = False) -> None:
        self.limits, self.allow_weaker = limits or Limits(), allow_weaker
        self._lock = threading.Lock()
        # False leaves the kernel's walls alone, to prove that these hold by themselves.
        self._python_walls = True
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
        if self._channel is not None and self._server is not None:
            self._channel.close()
            self._server.kill()
            self._server.wait()
        self._channel = self._server = None

    def _start(self) -> socket.socket:
        if self._channel is not None and self._server is not None and self._server.poll() is None:
            return self._channel
        self._stop()
        if not sys.platform.startswith("linux"):
            raise SandboxError(
                f"the sandbox needs Linux, this is {sys.platform}; run tool programs on a Linux machine"
            )
        # Packets and not a stream: a message carries its descriptors, whole or not at all.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self._server = subprocess.Popen(
            # -s -P is -I but for the environment, which is given whole: equal programs print their sets
            # alike.
            [sys.executable, "-s", "-P", "-B", "-c", _BOOT, os.path.dirname(__file__), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **single},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        # The server has its own; when ours closes it sees the end.
        theirs.close()
        self._channel = ours
        ours.settimeout(_START_S)
        with contextlib.suppress(OSError):
            if ours.recv(16) == b"ready":
                return ours
        self._stop()
        raise SandboxError(f"the sandbox did not start within {_START_S:.0f} s; its message stands above")

    def check(self) -> ProgramResult:
        """The result of an empty program, which names the walls that stand. Where some are missing and may
        be, one line on stderr says so; otherwise, and where programs cannot be run at all, it raises
        SandboxError."""
        # A machine that is busy may take long over the first program; that is no missing wall.
        result = self.run("", limits=replace(self.limits, wall_s=60.0, cpu_s=60.0))
        if result.reason != "ok":
            raise SandboxError(f"the sandbox does not run programs here: {result.error or result.stderr}")
        if result.weaker:
            print(f"warning: programs run in a weaker sandbox: {result.weaker}", file=sys.stderr, flush=True)
        return result

    def run(
        self, code: str, files: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> ProgramResult:
        """Run `code` as a notebook cell in a directory that holds `files` (name -> bytes, text or PIL
        picture).

        Raises DataError for a file name that is not a plain relative one, SandboxError when no process can be
        started or a wall is missing; nothing for what a program does.
        """
        # Before anything is started: a wrong name is the caller's mistake, not the program's.
        for name in files or {}:
            plain = name not in ("", ".", "..") and "/" not in name and not _UNSAFE.search(name)
            if not plain or len(name.encode("utf-8", "replace")) > 255:
                raise DataError(f"sandbox file {name!r}: expected a plain file name such as 'image.png'")
        try:
            folder = os.path.realpath(tempfile.mkdtemp(prefix="program-"))
            try:
                uid = _job_uid(next(self._numbers))
                _mount(files or {}, Path(folder), uid)
                return self._run(limits or self.limits, code=code, folder=folder, uid=uid)
            finally:
                remove_folder(folder)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot start a program: {error}") from error

    def _run(self, limits: Limits, **program: Any) -> ProgramResult:
        job = {**asdict(limits), **program, "mark": secrets.token_hex(16)}
        job |= {"allow_weaker": self.allow_weaker, "python_walls": self._python_walls}
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
            file.write(json.dumps(job).encode())
            file.seek(0)
            source = os.open(job["folder"], os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, source)
            # The supervisor gets the ends to write; the caller keeps those to read, and the one to stop it.
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
                self._send([file.fileno(), *writes, stop[0], source])
            finally:
                for descriptor in (*writes, stop[0]):
                    os.close(descriptor)
            data, flooded = _collect(reads, limits, stopper.close)
        # The supervisor's JSON objects, one a line; a last one may be torn where it was killed.
        status: Record = {}
        for line in data["status"].splitlines():
            with contextlib.suppress(ValueError):
                status |= json.loads(line)
        missing = status.get("missing")
        if missing and not self.allow_weaker:
            reasons = "; ".join(dict.fromkeys(missing.values()))
            raise SandboxError(
                f"no program is run: the sandbox lacks {', '.join(missing)} here ({reasons}); {_REMEDY};"
                " or set sandbox.allow_weaker, which runs programs behind the other walls and names them in"
                " every record"
            )
        if status and "layers" not in status and not status.get("stopped"):
            raise SandboxError(f"the sandbox could not build its walls: {_plain(data['stderr'], 300)}")
        return _result(data, status, job["mark"], limits, flooded)

    def _send(self, descriptors: list[int]) -> None:
        with self._lock:
            for _ in range(2):  # a server that was killed is started again
                with contextlib.suppress(OSError):
                    socket.send_fds(self._start(), [b"run"], descriptors)
                    return
                self._stop()
        raise SandboxError("the sandbox cannot be reached: its server ends at once; its message stands above")


def _job_uid(number: int) -> int:
    """A user for one program: far above those of any system, or the last one that this container knows."""
    # A container may know few users; one beyond its map cannot be become.
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    uid = FIRST_UID + number % 100_000_000
    if any(first <= uid < first + length for first, _, length in ranges):
        return uid
    return max(first + length - 1 for first, _, length in ranges)


def _mount(files: Mapping[str, Any], folder: Path, uid: int) -> None:
    for name, content in files.items():
        if isinstance(content, PILImage.Image):
            content.save(folder / name, "PNG")
        elif isinstance(content, str):
            (folder / name).write_text(content, encoding="utf-8", errors="replace", newline="")
        else:
            (folder / name).write_bytes(content)
        # Given files are not to be changed: the next call of the conversation finds them again.
        os.chmod(folder / name, 0o444)
    if os.geteuid() == 0 and uid:
        with contextlib.suppress(OSError):  # the wall "uid" is missing then, and says so
            os.chown(folder, uid, uid)


def remove_folder(folder: str) -> None:
    """Delete a folder, however deep and whatever its modes; never raises."""
    # These walk without recursion and by descriptors: neither the length of a path nor a stack limits them.
    # Folders without rights are opened first, where plain removal has failed.
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if os.path.exists(folder):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL)


def _collect(
    reads: dict[int, str], limits: Limits, stop: Callable[[], None]
) -> tuple[dict[str, bytearray], bool]:
    """Drain the four pipes until the program and its supervisor are gone; `stop` it when it writes too much
    (True)."""
    data = {name: bytearray() for name in reads.values()}
    caps = {"status": 1 << 16, "result": 16 * limits.max_chars + (1 << 16)}
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
                    if name == "status":
                        # The program is gone as well; what could hold the others open is not waited for.
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    continue
                room = caps.get(name, limits.output_bytes) - len(data[name])
                data[name] += chunk[: max(0, room)]
                if len(chunk) > room:
                    flooded = True
                    stop()
    return data, flooded


def _told(text: bytearray, mark: str) -> tuple[dict[str, str], list[str]]:
    """What the program's process said of itself, and what it was refused. Writing to this channel is refused
    as well: the lines of the audit hook begin with the mark, and whatever stands between them came from
    somewhere else."""
    answer: dict[str, str] = {}
    before, *lines = bytes(text).split(mark.encode())
    refused, strange = [], bool(before)
    for line in lines:
        own, _, more = line.partition(b"\n")
        try:
            entry = {key: value for key, value in json.loads(own).items() if isinstance(value, str)}
        except (ValueError, AttributeError, RecursionError):
            entry, more = {}, own
        strange |= bool(more)
        if told := entry.pop("refused", None):
            refused.append(told)
        answer |= entry
    return answer, [*refused, "result channel"] if strange else refused


def _plain(text: str | bytearray, limit: int) -> str:
    """Text that can be encoded, and shown on a terminal without doing anything there, of at most `limit`
    characters."""
    if not isinstance(text, str):
        text = text.decode("utf-8", "replace")
    # Cut before anything is replaced: a program may write megabytes of controls.
    text = text[: limit + 1].replace("\r\n", "\n")
    text = _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
    return text if len(text) <= limit else text[:limit] + f"... [cut at {limit} characters]"


def _result(
    data: dict[str, bytearray], status: Record, mark: str, limits: Limits, flooded: bool
) -> ProgramResult:
    """What the supervisor saw comes before what the program said."""
    told, refusals = _told(data["result"], mark)
    refused = tuple(_plain(what, 80) for what in refusals[:64])
    cpu_s = status.get("cpu_s", 0.0)
    reason, error = told.get("reason", ""), told.get("error", "")
    if reason not in REASONS:
        reason, error = "error", "the program ended without a result"
    # The supervisor's word goes before the program's.
    reason, error = _stopped(status, cpu_s, limits, flooded) or (reason, error)
    if refused and reason in ("ok", "error"):
        reason = "forbidden"
    return ProgramResult(
        reason=cast(Reason, reason),
        stdout=_plain(data["stdout"], limits.max_chars),
        stderr=_plain(data["stderr"], limits.max_chars),
        value=_plain(told.get("value", ""), limits.max_chars),
        error=_plain(error, 1000),
        refused=refused,
        seconds=status.get("seconds", 0.0),
        cpu_s=cpu_s,
        layers=tuple(status.get("layers", ())),
        missing=tuple(status.get("missing", ())),
    )


def _stopped(status: Record, cpu_s: float, limits: Limits, flooded: bool) -> tuple[Reason, str] | None:
    """Why a program did not end by itself; None where it did."""
    killed, why = status.get("signal", 0), status.get("stopped")
    if flooded:
        return "output_limit", f"stopped: more than {limits.output_bytes} bytes of output"
    if why == "disk":
        return "output_limit", f"stopped: more than {limits.disk_bytes} bytes or {limits.disk_files} files"
    # The kernel's own limit of CPU time kills as well, when no supervisor was quicker.
    if why in ("late", "cpu") or (killed == signal.SIGKILL and cpu_s >= 0.9 * limits.cpu_s):
        return "timeout", f"stopped: more than {limits.wall_s:g} s, or {limits.cpu_s:g} s of CPU time"
    if killed == signal.SIGKILL:
        return "memory", "stopped: the system ran out of memory"
    if killed == signal.SIGSYS:
        return "forbidden", "stopped: a system call of another architecture"
    return ("error", f"stopped by signal {killed}") if killed else None
