"""The other side of eval/sandbox/host.py: a server that forks one confined process for every program.

It runs in a Python of its own (`main`), which needs only the standard library, NumPy and Pillow; these are
loaded once, so that a program starts in milliseconds. For every job the server forks a supervisor; that
enters new namespaces, forks the program's process, waits with a deadline, kills, and reports.

What confines a program are the kernel's walls (eval/sandbox/walls.py), which the report names as far as they
stand, and
    audit, imports  Python's audit events and a list of modules: the wall that explains itself to the
                    program's author.
A program that means to gets past the latter, so nothing but manners rests on it.

Two channels: `status` belongs to the supervisor alone, which says there which walls stand and how the process
ended. `result` is the program's process's own: refusals, written down at the moment they happen, and at the
end what the program gave. It is what a program says about itself, and can be no more; but its lines carry a
mark that only the audit hook holds, so that whatever else is written there is known as such and cannot tear
or replace them.
"""

import ast
import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from earlyfusion.eval.sandbox import walls as sandbox_walls
from earlyfusion.eval.sandbox.walls import (
    Walls,
    build_house,
    build_rooms,
    close_doors,
    readable_folders,
    too_much,
)

FIRST_UID = 1_500_000_000
"""Users of jobs, far above those of any system."""
FDS = ("job", "stdout", "stderr", "result", "status", "stop", "source")
RESULT = 3
"""Descriptor of the channel of results in a program's process; the system call filter keeps it open."""
END, REFUSED = "earlyfusion.end", "earlyfusion.refused"
"""Audit events of our own: the last line of the result, and a refused import."""
MAX_WRITES, MAX_REFUSED = 64, 32
TICK_S = 0.05

REFUSED_EVENTS = tuple(
    "socket. subprocess. pty. ctypes. shutil. mmap. urllib. http. ftplib. smtplib. poplib. imaplib."
    " telnetlib. nntplib. webbrowser. os.system os.exec os.fork os.posix_spawn os.spawn os.kill os.chmod"
    " os.chown os.lchown os.link os.symlink os.mkfifo os.setxattr os.removexattr os.putenv os.unsetenv"
    " os.startfile os.add_dll_directory os.lockf os.chflags os.fwalk signal. resource. fcntl. syslog."
    " sqlite3. winreg. msvcrt. gc. code.__new__ pickle.find_class sys.addaudithook sys.settrace"
    " sys.setprofile sys._current_frames cpython. tempfile. glob.".split()
)
"""Audit events by their beginning."""
PATH_EVENTS = frozenset(
    "os.listdir os.scandir os.remove os.rename os.mkdir os.rmdir os.chdir os.truncate os.utime".split()
)
REFUSED_MODULES = frozenset(
    "_ctypes ctypes cffi socket _socket ssl _ssl subprocess _posixsubprocess multiprocessing _multiprocessing"
    " pty mmap fcntl resource signal asyncio threading _thread concurrent importlib ensurepip pip site torch"
    " shutil tempfile".split()
)
IMPORTS = tuple(
    "numpy PIL math cmath json statistics itertools functools collections random re string fractions decimal"
    " datetime heapq bisect operator dataclasses typing textwrap copy io time colorsys enum array numbers"
    " __future__".split()
)
"""Modules a program may import."""
PRELOADED = tuple(
    "numpy.fft numpy.linalg numpy.random PIL.Image PIL.ImageChops PIL.ImageColor PIL.ImageDraw"
    " PIL.ImageEnhance PIL.ImageFilter PIL.ImageFont PIL.ImageOps PIL.ImageStat".split()
)


class Forbidden(PermissionError):
    """What a program asked for is not given to it."""


def preload() -> None:
    """Load what programs use, before any wall stands: Python itself may lie where an unprivileged user cannot
    read."""
    for name in (*IMPORTS, *PRELOADED):
        importlib.import_module(name)
    readable_folders()
    from numpy import random as numbers
    from PIL import Image, ImageFont

    # What these load when they are first used, and the same seed for every program, see `program`.
    numbers.default_rng(0).random()
    numbers.seed(0)
    Image.preinit()
    ImageFont.load_default(12)


# ---- walls inside Python


def make_recorder(mark: bytes):  # type: ignore[no-untyped-def]
    """An audit hook that writes what is refused (REFUSED), at once, and the end (END) to the channel of
    results.

    It never raises and calls nothing that a program could have replaced: no frame of it is ever in a
    program's hands, so neither is `mark`, which stands before every line. Its arguments are plain strings or
    are not looked at.
    """
    quote, write, leave, kind, text = json.encoder.encode_basestring_ascii, os.write, os._exit, type, str
    names = {END: ("reason", "value", "error"), REFUSED: ("refused",)}
    count, most, channel = [0], MAX_REFUSED, RESULT

    def recorder(event: str, args: tuple) -> None:
        if event not in names:
            return
        parts = ""
        for name, value in zip(names[event], args):
            if kind(value) is not text:
                return
            parts += f'{"," if parts else ""}"{name}":{quote(value)}'
        count[0] += 1
        try:
            if count[0] <= most or "value" in names[event]:
                line = mark + ("{" + parts + "}\n").encode()
                while line:  # a pipe takes a long line in pieces
                    line = line[write(channel, line) :]
        except OSError:
            leave(70)
        if "value" in names[event]:
            leave(0)

    return recorder


def make_hook(folder: str):  # type: ignore[no-untyped-def]
    """An audit hook that refuses REFUSED_EVENTS and paths outside `folder`, and has what it refused written
    down.

    Everything it uses is bound here, so that a program that reaches the builtins does not reach the hook.
    """
    inside, library = folder + os.sep, tuple(path + os.sep for path in readable_folders())
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fsdecode, error, tell, told_as = os.path.realpath, os.fsdecode, Forbidden, sys.audit, REFUSED
    as_int, as_text, is_a, length, any_of = int, str, isinstance, len, any
    events, path_events, modules = REFUSED_EVENTS, PATH_EVENTS, REFUSED_MODULES
    writes: list[int] = []

    def refuse(what: str, told: str):  # type: ignore[no-untyped-def]
        tell(told_as, as_text(what))
        raise error(told)

    def path_of(value: object) -> str:
        return realpath(fsdecode(value))  # type: ignore[arg-type]

    def check_open(args: tuple) -> None:
        if is_a(args[0], as_int):
            return
        path = path_of(args[0])
        mode, flags = (*args, None, None)[1:3]
        writes_it = (is_a(mode, as_text) and any_of(letter in mode for letter in "wax+")) or (
            is_a(flags, as_int) and flags & writing
        )
        if path.startswith(inside):
            if writes_it:
                writes.append(1)
                if length(writes) > MAX_WRITES:
                    refuse("open", f"a program may open at most {MAX_WRITES} files for writing")
        elif writes_it or not (path.startswith(library) or path in ("/dev/null", "/dev/urandom")):
            refuse("open", f"no file outside the program's directory: {path}")

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            check_open(args)
        elif event == "import":
            if args[0].partition(".")[0] in modules:
                refuse(f"import {args[0][:40]}", f"module {args[0]!r} is not available here")
        elif event in path_events:
            paths = args[:2] if event == "os.rename" else args[:1]
            for value in paths:
                path = path_of("." if value is None else value) if not is_a(value, as_int) else "/"
                if not (
                    path.startswith(inside)
                    or (path == folder and event in ("os.listdir", "os.scandir", "os.chdir"))
                ):
                    refuse(event, f"{event}: no path outside the program's directory")
        elif event.startswith(events):
            refuse(event, f"{event} is not available here")

    return hook


def guarded_builtins(allowed: frozenset[str]) -> dict:
    """The builtins a program sees: imports by the list, and nothing that waits for a person."""
    real, tell, told_as = builtins.__import__, sys.audit, REFUSED

    def guarded(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level or name.partition(".")[0] not in allowed:
            tell(told_as, f"import {name[:40]}")
            raise Forbidden(f"module {name!r} is not available here; allowed: {', '.join(sorted(allowed))}")
        return real(name, globals, locals, fromlist, level)

    hidden = ("input", "breakpoint", "help", "exit", "quit", "copyright", "credits", "license")
    names = {name: value for name, value in vars(builtins).items() if name not in hidden}
    return {**names, "__import__": guarded}


def execute(code: str, namespace: dict) -> str:
    """Run a program as a notebook cell; the repr of its last expression, "" without one."""
    tree = ast.parse(code, "<program>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), "<program>", "eval"), namespace)
    return "" if value is None else repr(value)


def told(error: BaseException) -> tuple[str, str]:
    """(one of the reasons of ProgramResult, "line 3: ValueError: why", of the program's own last line)."""
    reason = "forbidden" if isinstance(error, Forbidden) else "error"
    if isinstance(error, MemoryError):
        reason = "memory"
    elif isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC):
        reason = "output_limit"
    try:
        line, trace = getattr(error, "lineno", None), error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<program>":
                line = trace.tb_lineno
            trace = trace.tb_next
        said = str(error.msg if isinstance(error, SyntaxError) else error)[:500]
        place = f"line {line}: " if line else ""
        return reason, str.__str__(f"{place}{type(error).__name__}{': ' if said else ''}{said}")
    except BaseException:
        return reason, "an error that cannot be told"


def outcome(code: str, namespace: dict, max_chars: int) -> tuple[str, str, str]:
    """(reason, value, error) of a program: plain strings, whatever it made of its own classes."""
    try:
        value = str.__str__(execute(code, namespace))
        return "ok", value[: max_chars + 1], ""
    except SystemExit as stop:
        given = stop.code
        # A class of the program's own may do anything where it is asked whether it is 0.
        if given is None or (type(given) is int and given == 0):
            return "ok", "", ""
        return "error", "", f"SystemExit: {given if type(given) is str else repr(given):.80}"
    except BaseException as error:
        reason, text = told(error)
        return reason, "", text


def hide_tools() -> None:
    """Take from a program's reach, as far as Python can, what this process needed to build its walls."""
    for module in (sandbox_walls, ctypes):
        vars(module).clear()
    for name in "ctypes importlib resource select signal socket sandbox_walls".split():
        globals().pop(name, None)
    for name in [name for name in sys.modules if name.partition(".")[0] in (*REFUSED_MODULES, "earlyfusion")]:
        del sys.modules[name]


def program(job: dict, walls: Walls, fds: dict[str, int], used: int) -> None:
    """The program's process: build the walls, run, write the result, end. Never returns."""
    status = 4
    # Numbers first, then everything above them is closed: no descriptor of the server is left.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for number, name in ((1, "stdout"), (2, "stderr"), (RESULT, "result"), (status, "status")):
        os.dup2(fds[name], number)
    os.closerange(5, 4096)
    close_doors(walls, job, used)
    # Told before the program runs: it cannot change what was said of its walls.
    lacking = walls.lacking()
    if job["python_walls"]:
        walls.standing += ["audit", "imports"]
    os.write(status, json.dumps({"layers": walls.standing, "missing": lacking}).encode() + b"\n")
    os.close(status)
    if lacking and not job["allow_weaker"]:
        os._exit(0)
    random.seed(0)  # equal programs draw equal numbers; a fork would have drawn a new seed
    namespace: dict = {"__name__": "__main__"}
    sys.stdout, sys.stderr = (open(n, "w", 1, "utf-8", errors="replace", closefd=False) for n in (1, 2))
    sys.addaudithook(make_recorder(job.pop("mark").encode()))
    tell, end, plain, leave = sys.audit, END, str.__str__, os._exit
    if job["python_walls"]:
        namespace["__builtins__"] = guarded_builtins(frozenset(IMPORTS))
        hook = make_hook(job["folder"])
        hide_tools()
        sys.addaudithook(hook)
        del hook
    # From here on everything may have been replaced by the program but what is bound above.
    answer = outcome(job["code"], namespace, job["max_chars"])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue
    tell(end, *(plain(part) for part in answer))
    leave(70)


# ---- the server


def watch(child: int, job: dict, stop: int, room: tuple[int, int] | None) -> str:
    """Wait for the end of a process: "" where it came by itself, else why it has to be ended: late, cpu,
    disk, or stopped, when the caller closes its end of `stop` (the kernel does when the caller dies). room:
    bytes and files of a folder that is not a file system of its own and has to be looked at."""
    ended, deadline, clock = os.pidfd_open(child), time.monotonic() + job["wall_s"], ~child << 3 | 2
    while True:
        left = {"late": deadline - time.monotonic(), "cpu": job["cpu_s"]}
        # The process's own clock: exact, where the kernel's limit counts ticks, whoever's they were.
        with contextlib.suppress(OSError):
            left["cpu"] -= time.clock_gettime(clock)
        why = min(left, key=left.__getitem__)
        ready = select.select([ended, stop], [], [], max(0.0, min(left[why], TICK_S if room else left[why])))[
            0
        ]
        if ended in ready:
            return ""
        if stop in ready:
            return "stopped"
        if left[why] <= 0:
            return why
        if room and too_much(job["folder"], *room):
            return "disk"


def supervise(job: dict, walls: Walls, fds: dict[str, int], used: int) -> None:
    """Fork the program's process, wait until the deadline, report how it ended."""
    # A session of its own: signals to the caller's group do not reach it, nor its own the caller.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sizes = [os.stat(name, dir_fd=fds["source"]).st_blocks * 512 for name in os.listdir(fds["source"])]
    room = (job["disk_bytes"] + sum(sizes), job["disk_files"] + len(sizes))
    build_rooms(walls, job, fds["source"])
    child = os.fork()
    if child == 0:
        try:
            program(job, walls, fds, used)
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(70)
    for name in ("stdout", "stderr", "result"):
        os.close(fds[name])
    started = time.monotonic()
    why = watch(child, job, fds["stop"], None if "mount" in walls.standing else room)
    if why:
        os.kill(child, signal.SIGKILL)
    # Reaped here, so the times are the program's own.
    _, status, usage = os.wait4(child, 0)
    report = {
        "stopped": why,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "seconds": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    os.write(fds["status"], json.dumps(report).encode() + b"\n")


def serve(channel: socket.socket) -> None:
    """Take jobs until the other side closes. A message carries the descriptors of FDS."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    preload()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    walls = Walls()
    build_house(walls)
    channel.send(b"ready")
    while True:
        message, received, _, _ = socket.recv_fds(channel, 16, len(FDS))
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            try:
                fds = dict(zip(FDS, received))
                with os.fdopen(fds.pop("job"), "rb") as file:
                    supervise(json.load(file), walls, fds, used)
            finally:
                os._exit(0)
        for descriptor in received:
            os.close(descriptor)


def main() -> None:
    """Serve on the descriptor of the last argument."""
    serve(socket.socket(fileno=int(sys.argv[-1])))
