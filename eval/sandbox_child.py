"""The other side of eval/sandbox.py: a server that forks one confined process for every program.

Run as a script (`python -s -P -B sandbox_child.py FD`), never imported; it needs only the standard library, NumPy and Pillow,
which are loaded once, so that a program starts in milliseconds. For every job the server forks a supervisor; that enters
new namespaces, forks the program's process, waits with a deadline, kills, and reports.

Walls, outermost first; each is used where the kernel permits it, and the report names those that stand:
    net, ipc, pid   namespaces: no interface but a dead loopback, no other process in sight
    uid             an unprivileged user of the job's own (when the caller is root); else a user namespace without capabilities
    rlimits         CPU time, address space, file size, open files, no new process or thread, no core
    landlock        the kernel refuses every file but the job's directory and, for reading, Python's own
    audit, imports  Python's audit events and a list of modules: the wall that explains itself to the program's author
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import importlib
import json
import math
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import time

NEWIPC, NEWUSER, NEWPID, NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
FIRST_UID = 1_500_000_000
"""Users of jobs, far above those of any system."""
FDS = ("job", "stdout", "stderr", "result", "status", "stop")
MAX_WRITES, MAX_REFUSED = 64, 32

REFUSED_EVENTS = tuple(
    "socket. subprocess. pty. ctypes. shutil. mmap. urllib. http. ftplib. smtplib. poplib. imaplib. telnetlib. nntplib. webbrowser. "
    "os.system os.exec os.fork os.posix_spawn os.spawn os.kill os.chmod os.chown os.lchown os.link os.symlink os.mkfifo "
    "os.setxattr os.removexattr os.putenv os.unsetenv os.startfile os.add_dll_directory os.lockf os.chflags os.fwalk "
    "signal. resource. fcntl. syslog. sqlite3. winreg. msvcrt. gc. code.__new__ pickle.find_class "
    "sys.addaudithook sys.settrace sys.setprofile sys._current_frames cpython. tempfile. glob.".split()
)
"""Audit events by their beginning."""
PATH_EVENTS = frozenset(
    "os.listdir os.scandir os.remove os.rename os.mkdir os.rmdir os.chdir os.truncate os.utime".split()
)
REFUSED_MODULES = frozenset(
    "_ctypes ctypes cffi socket _socket ssl _ssl subprocess _posixsubprocess multiprocessing _multiprocessing pty mmap fcntl "
    "resource signal asyncio threading _thread concurrent importlib ensurepip pip site torch shutil tempfile".split()
)
IMPORTS = tuple(
    "numpy PIL math cmath json statistics itertools functools collections random re string fractions decimal datetime heapq "
    "bisect operator dataclasses typing textwrap copy io time colorsys enum array numbers __future__".split()
)
"""Modules a program may import, unless its limits say otherwise."""
libc = ctypes.CDLL(None, use_errno=True)


class Forbidden(PermissionError):
    """What a program asked for is not given to it."""


def syscall(name: str, value: int) -> int:
    """`value` of a libc call; raises OSError when it is negative."""
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return value


def preload() -> None:
    """Load what programs use, before any wall stands: Python itself may lie where an unprivileged user cannot read."""
    for name in IMPORTS:
        importlib.import_module(name)
    readable_folders()
    import numpy
    import numpy.fft
    import numpy.linalg
    import numpy.random
    from PIL import Image, ImageChops, ImageColor, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps, ImageStat

    modules = (ImageChops, ImageColor, ImageDraw, ImageEnhance, ImageFilter, ImageOps, ImageStat)
    assert modules and numpy.random.default_rng(0).random() < 1
    numpy.random.seed(0)  # the same for every program, see `program`
    Image.preinit()
    ImageFont.load_default(12)


# ---- walls of the kernel


def enter_namespaces() -> list[str]:
    """New namespaces for this process (pid: for its children); returns the names of those that were permitted."""
    user = NEWUSER if os.geteuid() else 0
    uid, gid = os.geteuid(), os.getegid()
    for flags, names in (
        (user | NEWNET | NEWIPC | NEWPID, ["net", "ipc", "pid"]),
        (user | NEWNET | NEWIPC, ["net", "ipc"]),
        (user | NEWNET, ["net"]),
    ):
        if libc.unshare(flags) == 0:
            if user:
                write_maps(uid, gid)
            return names
    return []


def write_maps(uid: int, gid: int) -> None:
    """The same user inside a user namespace as outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def drop_privileges(uid: int) -> list[str]:
    """Become `uid` when root, and lose every capability; ["uid"] when that is done."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    syscall("capset", libc.capset(header, nothing))
    syscall("not dumpable", libc.prctl(4, 0, 0, 0, 0))
    syscall("parent death signal", libc.prctl(1, int(signal.SIGKILL), 0, 0, 0))
    return ["uid"] if os.geteuid() else []


def set_limits(job: dict) -> list[str]:
    """Resource limits, soft and hard alike, so that the process cannot raise them again."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_CPU: math.ceil(job["cpu_s"]),
        resource.RLIMIT_AS: used + int(job["memory_mb"] * 2**20),
        resource.RLIMIT_FSIZE: int(job["file_bytes"]),
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    return ["rlimits"]


@functools.cache
def readable_folders() -> tuple[str, ...]:
    """Where Python's own files lie."""
    names = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(sorted({os.path.realpath(name) for name in names if name and os.path.isdir(name)}))


def landlock(folder: str) -> list[str]:
    """Let the kernel refuse files outside `folder` (reading Python's own is allowed), TCP, and signals to others."""
    syscall("no_new_privs", libc.prctl(38, 1, 0, 0, 0))
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return []
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", everything, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = syscall("landlock", libc.syscall(444, ctypes.create_string_buffer(attributes), len(attributes), 0))
    read_only, files = 0b1100, everything & 0b110
    allowed = [(folder, everything & ~1 & ~0b1_1110_0100_0000 | 0b1_0000_0000)]
    allowed += [(path, read_only) for path in (*readable_folders(), "/lib", "/lib64", "/usr/lib")]
    allowed += [("/dev/null", files), ("/dev/urandom", 0b100)]
    for path, access in allowed:
        if os.path.exists(path):
            where = os.open(path, os.O_PATH | os.O_CLOEXEC)
            syscall(
                path, libc.syscall(445, rules, 1, ctypes.create_string_buffer(struct.pack("=Qi", access, where)), 0)
            )
            os.close(where)
    syscall("landlock", libc.syscall(446, rules, 0))
    os.close(rules)
    return ["landlock"]


# ---- walls inside Python


def make_hook(folder: str, refused: list[str]):  # type: ignore[no-untyped-def]
    """An audit hook that refuses REFUSED_EVENTS and paths outside `folder`, and writes down what it refused.

    Everything it uses is bound here, so that a program that reaches the builtins does not reach the hook.
    """
    inside, library = folder + os.sep, tuple(path + os.sep for path in readable_folders())
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fsdecode, error = os.path.realpath, os.fsdecode, Forbidden
    as_int, as_text, is_a, length, any_of = int, str, isinstance, len, any
    events, path_events, modules = REFUSED_EVENTS, PATH_EVENTS, REFUSED_MODULES
    writes: list[int] = []

    def refuse(what: str, told: str):  # type: ignore[no-untyped-def]
        if length(refused) < MAX_REFUSED:
            refused.append(what)
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
                    path.startswith(inside) or (path == folder and event in ("os.listdir", "os.scandir", "os.chdir"))
                ):
                    refuse(event, f"{event}: no path outside the program's directory")
        elif event.startswith(events):
            refuse(event, f"{event} is not available here")

    return hook


def guarded_builtins(allowed: frozenset[str], refused: list[str]) -> dict:
    """The builtins a program sees: imports by the list, and nothing that waits for a person."""
    real = builtins.__import__

    def guarded(name: str, globals=None, locals=None, fromlist=(), level: int = 0):  # type: ignore[no-untyped-def]
        if level or name.partition(".")[0] not in allowed:
            if len(refused) < MAX_REFUSED:
                refused.append(f"import {name[:40]}")
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


def explain(error: BaseException) -> str:
    """ "line 3: ValueError: why", of the program's own last line."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    said = str(error.msg if isinstance(error, SyntaxError) else error)[:500]
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}{': ' if said else ''}{said}"


def reason_of(error: BaseException) -> str:
    """One of the reasons of ProgramResult."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno == 27:
        return "output_limit"
    return "forbidden" if isinstance(error, Forbidden) else "error"


def program(job: dict, layers: list[str], fds: dict[str, int]) -> None:
    """The program's process: build the walls, run, write the result, end. Never returns."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(fds[name], number)
    os.dup2(fds["result"], 3)
    os.closerange(4, 256)
    os.chdir(job["folder"])
    # Root opens what the job's user may not, so the kernel's rules come before the change of user.
    layers += set_limits(job)
    layers += landlock(job["folder"])
    layers += drop_privileges(job["uid"])
    random.seed(0)  # equal programs draw equal numbers; a fork would have drawn a new seed
    allowed = frozenset(job["imports"])
    refused: list[str] = []
    namespace: dict = {"__name__": "__main__"}
    if job["python_walls"]:
        namespace["__builtins__"] = guarded_builtins(allowed, refused)
    if job["python_walls"]:
        layers += ["audit", "imports"]
    os.write(3, json.dumps({"layers": layers}).encode() + b"\n")
    sys.stdout, sys.stderr = (open(n, "w", 1, "utf-8", errors="replace", closefd=False) for n in (1, 2))
    answer = {"reason": "ok", "value": "", "error": ""}
    dump, write, leave = json.dumps, os.write, os._exit
    if job["python_walls"]:
        for name in [name for name in sys.modules if name.partition(".")[0] in REFUSED_MODULES]:
            del sys.modules[name]
        sys.addaudithook(make_hook(job["folder"], refused))
    try:
        answer["value"] = execute(job["code"], namespace)[: job["max_chars"] + 1]
    except SystemExit as stop:
        if stop.code not in (None, 0):
            answer.update(reason="error", error=f"SystemExit: {stop.code!r:.80}")
    except BaseException as error:
        answer.update(reason=reason_of(error), error=explain(error))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue
    write(3, dump({**answer, "refused": refused}).encode())
    leave(0)


# ---- the server


def supervise(job: dict, fds: dict[str, int]) -> None:
    """Fork the program's process, wait until the deadline, report how it ended."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    layers = enter_namespaces()
    child = os.fork()
    if child == 0:
        try:
            program(job, layers, fds)
        except BaseException as error:
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(70)
    for name in ("stdout", "stderr", "result"):
        os.close(fds[name])
    started = time.monotonic()
    watch = os.pidfd_open(child)
    # The caller closes its end of `stop` to end the program, and the kernel closes it when the caller dies.
    ready = select.select([watch, fds["stop"]], [], [], job["wall_s"])[0]
    if watch not in ready:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    report = {
        "late": not ready,
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
                    supervise(json.load(file), fds)
            finally:
                os._exit(0)
        for descriptor in received:
            os.close(descriptor)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
