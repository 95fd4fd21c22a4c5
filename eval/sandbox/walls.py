"""What the kernel puts between a program and the machine, for eval/sandbox/child.py; the wall that Python is
stands there.

    mount     a file system of its own: an empty root, Python's folders read-only, one folder limited in bytes
              and files
    net       no interface but a dead loopback
    ipc       no System V objects or message queues of others
    pid       no other process in sight
    keyring   a session keyring of its own
    rlimits   CPU time, address space, file size, open files, no new process or thread, no core
    landlock  every file but the program's folder and, for reading, Python's own is refused; TCP; signals to
              others
    uid       a user of the program's own (where the caller is root: another user's program keeps that user's
              id, which is no wall and not named); every capability is dropped either way
    seccomp   a list of system calls

Each is tried, and those that stand are named. All in REQUIRED (and uid, for root) must stand unless the
caller allows less. Namespaces of an ordinary user are made inside a user namespace.

System calls: a seccomp filter in classic BPF, which needs no privilege and no library. What computing on
numbers and pictures asks of the kernel is listed; everything else is refused: sockets of every family, new
processes and programs, keyrings, System V and POSIX message queues and shared memory, memfd, namespaces,
mounts, ptrace and the memory of others, userfaultfd, io_uring, bpf, perf, inotify, chmod, chown, utime,
xattr, links, limits. Landlock governs none of these. A call of another architecture's numbers (i386, x32)
ends the process. Format: include/uapi/linux/seccomp.h and filter.h; numbers: the tables of x86_64 and of the
generic 64-bit interface.
"""

import ctypes
import errno
import functools
import math
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable

REQUIRED = ("mount", "net", "ipc", "pid", "keyring", "rlimits", "landlock", "seccomp")
FOLDER = "/tmp/program-00000000"
"""The program's folder inside its own file system; named like those that have a name of their own
(rl/rollouts/tools.py)."""
NEWNS, NEWUSER = 0x00020000, 0x10000000
SPACES = {"net": 0x40000000, "ipc": 0x08000000, "pid": 0x20000000}
DEVICES = ("/dev/null", "/dev/urandom")
ROOT = "/proc"
"""Where the new root is put together: a folder that every system has, and below which nothing is taken into
it."""
MAX_DEPTH = 64
libc = ctypes.CDLL(None, use_errno=True)
_LATER = platform.machine() == "aarch64"  # numbers of the generic interface
_KEYCTL, _PIVOT_ROOT = (219, 41) if _LATER else (250, 155)


class Walls:
    """Those that stand, in order, and why others do not."""

    def __init__(self) -> None:
        self.standing: list[str] = []
        self.missing: dict[str, str] = {}

    def raise_(self, name: str, build: Callable[[], object]) -> bool:
        """Build one; whether it stands."""
        try:
            build()
        except OSError as error:
            self.missing[name] = str(error)
            return False
        self.standing.append(name)
        return True

    def lacking(self) -> dict[str, str]:
        """What must stand and does not, with reasons."""
        wanted = (*REQUIRED, "uid") if "uid" in self.missing else REQUIRED
        return {name: self.missing.get(name, "not tried") for name in wanted if name not in self.standing}


def call(name: str, value: int) -> int:
    """`value` of a libc call; raises OSError when it is negative."""
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return value


@functools.cache
def readable_folders() -> tuple[str, ...]:
    """Where Python's own files lie, and those of the packages that programs use."""
    names = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    for module in (sys.modules.get("numpy"), sys.modules.get("PIL")):
        if module is not None and module.__file__:
            package = os.path.dirname(module.__file__)
            names += [package] + [
                f"{os.path.dirname(package)}/{lib}.libs" for lib in ("numpy", "pillow", "Pillow")
            ]
    return tuple(sorted({os.path.realpath(name) for name in names if name and os.path.isdir(name)}))


# ---- namespaces


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    words = [text.encode() if text is not None else None for text in (source, target, kind)]
    call(f"mount {target}", libc.mount(*words, ctypes.c_ulong(flags), options.encode()))


def read_only(target: str, whole: bool = True) -> None:
    """mount_setattr(2): nothing is written below a mount point, and no setuid bit counts."""
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", 1 | 2, 0, 0, 0), 32)
    call(
        f"read-only {target}",
        libc.syscall(442, -100, target.encode(), 0x8000 if whole else 0, attributes, 32),
    )


def new_user() -> None:
    """A user namespace with the same user inside as outside, and every capability over what is made in it."""
    # Read before the new namespace, in which this process is nobody until it is mapped.
    uid, gid = os.geteuid(), os.getegid()
    call("user namespace", libc.unshare(NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def new_root() -> None:
    """A file system of nothing but what Python needs, read-only, with a place for the program's folder."""
    call("mount namespace", libc.unshare(NEWNS))
    old = os.umask(0o022)
    # Private first: nothing mounted here is seen outside.
    mount("none", "/", None, 0x44000)  # MS_REC | MS_PRIVATE
    mount("tmpfs", ROOT, "tmpfs", 0b110, "size=1m,nr_inodes=4k,mode=755")
    placed = "\0"
    paths = (*readable_folders(), "/lib", "/lib64", "/usr/lib")
    for real in sorted({os.path.realpath(path) for path in (*paths, *DEVICES) if os.path.exists(path)}):
        if real.startswith(placed + "/"):
            continue
        target, placed = ROOT + real, real
        if os.path.isdir(real):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(real, target, None, 0x5000)  # MS_BIND | MS_REC
        read_only(target)
    # The names under which these are known as well, such as /lib for /usr/lib.
    for path in (*paths, *(name for name in sys.path if os.path.isdir(name))):
        if os.path.realpath(path) != path and not os.path.lexists(ROOT + path):
            os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)
            os.symlink(os.path.realpath(path), ROOT + path)
    os.makedirs(ROOT + FOLDER)
    # pivot_root takes the working directory; the old root is left below it and then taken away.
    os.chdir(ROOT)
    call("pivot_root", libc.syscall(_PIVOT_ROOT, b".", b"."))
    call("leave the old root", libc.umount2(b".", 2))
    os.chdir("/")
    read_only("/", whole=False)
    os.umask(old)


def own_folder(job: dict, source: int) -> None:
    """The program's folder: a tmpfs of limited bytes and files with copies of what lies in `source`, a
    descriptor."""
    call("mount namespace", libc.unshare(NEWNS))
    # Rounded up to pages, as tmpfs counts them.
    names, page = os.listdir(source), resource.getpagesize()
    size = sum(-(-os.stat(name, dir_fd=source).st_size // page) * page for name in names)
    owner = (
        f"uid={job['uid']},gid={job['uid']}"
        if os.geteuid() == 0
        else f"uid={os.geteuid()},gid={os.getegid()}"
    )
    limits = f"size={job['disk_bytes'] + size},nr_inodes={job['disk_files'] + len(names) + 1}"
    mount("tmpfs", FOLDER, "tmpfs", 0b1110, f"{limits},mode=700,{owner}")  # no suid, no devices, no execution
    for name in names:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=source)) as file:
            target = os.open(f"{FOLDER}/{name}", os.O_CREAT | os.O_WRONLY, 0o444)
            while chunk := file.read(1 << 20):
                os.write(target, chunk)
            os.close(target)


def own_keyring() -> None:
    """Join a new session keyring. A container that refuses the call refuses it to programs, too, which is as
    good."""
    if libc.syscall(_KEYCTL, 1, None) < 0 and ctypes.get_errno() not in (1, 38):  # EPERM, ENOSYS
        call("session keyring", -1)


# ---- the process itself


def set_limits(job: dict, used: int) -> None:
    """Resource limits, soft and hard alike, so that the process cannot raise them again; `used`: bytes
    already mapped."""
    limits = {
        # The supervisor's clock is exact and comes first; this one counts ticks, on a busy machine also those
        # of others, and holds without a supervisor.
        resource.RLIMIT_CPU: 2 * math.ceil(job["cpu_s"]) + 1,
        resource.RLIMIT_AS: used + int(job["memory_mb"] * 2**20),
        resource.RLIMIT_FSIZE: int(job["file_bytes"]),
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(name, (value, value))
        except ValueError as error:
            raise PermissionError(str(error)) from None


def drop_privileges(uid: int) -> None:
    """Become `uid`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """None is left, nobody may look into the process, and it ends with its supervisor."""
    # Version 3 of the call, this process; all three sets empty.
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    call("capset", libc.capset(header, ctypes.create_string_buffer(24)))
    call("not dumpable", libc.prctl(4, 0, 0, 0, 0))
    call("parent death signal", libc.prctl(1, int(signal.SIGKILL), 0, 0, 0))


def landlock(folder: str) -> None:
    """Let the kernel refuse files outside `folder` (reading Python's own is allowed), TCP, and signals to
    others."""
    call("no_new_privs", libc.prctl(38, 1, 0, 0, 0))
    # Newer kernels know more rights; those that this one does not know must not be asked for.
    abi = call("landlock", libc.syscall(444, None, 0, 1))
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", everything, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = call("landlock", libc.syscall(444, ctypes.create_string_buffer(attributes), len(attributes), 0))
    reading, files = 0b1100, everything & 0b110
    allowed = [(folder, everything & ~1 & ~0b1_1110_0100_0000 | 0b1_0000_0000)]
    allowed += [(path, reading) for path in (*readable_folders(), "/lib", "/lib64", "/usr/lib")]
    allowed += [("/dev/null", files), ("/dev/urandom", 0b100)]
    for path, access in allowed:
        if os.path.exists(path):
            where = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, where))
            call(path, libc.syscall(445, rules, 1, rule, 0))
            os.close(where)
    call("landlock", libc.syscall(446, rules, 0))
    os.close(rules)


# ---- system calls

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH numbers."""
ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
    pwritev 296 70, lseek 8 62, fstat 5 80, newfstatat 262 79, statx 332 291, stat 4 -, lstat 6 -,
    access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, open 2 -,
    creat 85 -, openat 257 56, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
    mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38,
    renameat2 316 276, truncate 76 45, ftruncate 77 46, fsync 74 82, fdatasync 75 83, fadvise64 221 223,
    sendfile 40 71, copy_file_range 326 285, umask 95 166, dup 32 23, pipe 22 -, pipe2 293 59, poll 7 -,
    ppoll 271 73, select 23 -, pselect6 270 72, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226,
    madvise 28 233, msync 26 227, brk 12 214, futex 202 98, set_robust_list 273 99,
    get_robust_list 274 100, rseq 334 293, restart_syscall 219 128, sched_yield 24 124, getcpu 309 168,
    clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -,
    times 100 153, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
    getpgrp 111 -, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, uname 63 160, getrandom 318 278,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
    rt_sigsuspend 130 133, sigaltstack 131 132, exit 60 93, exit_group 231 94
"""
"""name, number on x86_64, number on aarch64 (-: it has none)."""
ONE_OF = """
    ioctl 16 29 1 0x5401 0x5413 0x541B 0x5450 0x5451, fcntl 72 25 1 0 1 2 3 4 5 6 7 1030, getpgid 121 155 0 0,
    getsid 124 156 0 0, sched_getaffinity 204 123 0 0, clock_gettime 228 113 0 0 1 2 3 4 5 6 7 8 9 11
"""
"""name, numbers, argument, its permitted values. ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIOCLEX, FIONCLEX.
fcntl: descriptors, flags and locks, but no owner of signals, leases, notices or sizes of pipes. The others:
questions about the process itself, and clocks of the machine or its own."""
NOT = "close 3 57 0 3, dup2 33 - 1 3, dup3 292 24 1 3"
"""name, numbers, argument, its one forbidden value: the channel of results stays what it is."""
FORK = "clone 56 220, fork 57 -, vfork 58 -"
KILL, PRLIMIT, NEW_CALLS = "kill 62 129, tgkill 234 131", "prlimit64 302 261", 424
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_DIE, _REFUSE, _ALLOW, X32 = 0x80000000, 0x00050000, 0x7FFF0000, 0x40000000


def _numbers(table: str, column: int) -> list[tuple[int, list[int]]]:
    """(number, further values) of the entries of a table that exist on an architecture."""
    rows = [entry.split() for entry in table.split(",")]
    return [
        (int(row[1 + column]), [int(value, 0) for value in row[3:]]) for row in rows if row[1 + column] != "-"
    ]


def _op(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, other, value)


def _answer(code: int) -> bytes:
    return _op(_RETURN, _REFUSE | code)


def _argument(index: int, half: int = 0) -> bytes:
    """Load the low (0) or high (1) 32 bits of an argument."""
    return _op(_LOAD, 16 + 8 * index + 4 * half)


def _case(number: int, body: bytes) -> bytes:
    """`body`, which returns, for one system call."""
    return _op(_EQUAL, number, 0, len(body) // 8) + body


def build(machine: str, pid: int) -> bytes:
    """The filter's instructions for a process that sees itself as `pid`; raises OSError for other
    architectures."""
    if machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, f"no table of system calls for {machine}, only for {', '.join(ARCHITECTURES)}"
        )
    column = list(ARCHITECTURES).index(machine)
    allow, refuse, number = _op(_RETURN, _ALLOW), _answer(errno.EPERM), _op(_LOAD, 0)
    own = _argument(0) + _op(_EQUAL, pid, 0, 1) + allow + refuse
    # Its own limits may be read: the pointer to new ones is null.
    zero = [_argument(0), _argument(2), _argument(2, 1)]
    reading = b"".join(part + _op(_EQUAL, 0, 1, 0) + refuse for part in zero) + allow

    # The architecture first: the same number is another call elsewhere.
    code = [_op(_LOAD, 4), _op(_EQUAL, ARCHITECTURES[machine], 1, 0), _op(_RETURN, _DIE), number]
    code += [_op(_AT_LEAST, X32, 0, 1), _op(_RETURN, _DIE)] if machine == "x86_64" else []
    # One comparison a call, the common ones first; every other number falls through to the refusal.
    code += [_case(call, allow) for call, _ in _numbers(ALLOWED, column)]
    for call, (index, *values) in _numbers(ONE_OF, column):
        code.append(
            _case(call, _argument(index) + b"".join(_op(_EQUAL, v, 0, 1) + allow for v in values) + refuse)
        )
    for call, (index, value) in _numbers(NOT, column):
        code.append(_case(call, _argument(index) + _op(_EQUAL, value, 0, 1) + refuse + allow))
    code += [_case(call, own) for call, _ in _numbers(KILL, column)]
    code += [_case(call, reading) for call, _ in _numbers(PRLIMIT, column)]
    code += [
        _case(call, _answer(errno.EAGAIN)) for call, _ in _numbers(FORK, column)
    ]  # as at the limit of processes
    # A C library takes an older call where a newer one does not
    # exist, and gives up where it is not permitted.
    return b"".join(code) + _op(_AT_LEAST, NEW_CALLS, 0, 1) + _answer(errno.ENOSYS) + refuse


def attach(code: bytes) -> None:
    """Put a filter on the calling process, its children and what they execute. Raises OSError where there is
    no seccomp.

    Needs no_new_privs, which it sets: programs with the setuid bit gain nothing any more."""
    # Kept until the call returns: the kernel copies it from this address.
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(held)), 16
    )
    for call in ((38, 1, 0), (22, 2, ctypes.addressof(program))):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(call[0], ctypes.c_ulong(call[1]), ctypes.c_ulong(call[2]), 0, 0) < 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


# ---- the order of it all


def build_house(walls: Walls) -> None:
    """Once, by the server: what all programs share."""
    walls.raise_("keyring", own_keyring)
    if os.geteuid() != 0:
        try:
            new_user()
        except OSError as error:
            walls.missing["mount"] = str(error)
            return
    walls.raise_("mount", new_root)


def enter(space: str) -> None:
    """A namespace of its own."""
    call(f"{space} namespace", libc.unshare(SPACES[space]))


def build_rooms(walls: Walls, job: dict, source: int) -> None:
    """By every supervisor: namespaces of one program (pid: of its children)."""
    # Programs do not share keys with each other either.
    libc.syscall(_KEYCTL, 1, None)
    for name in SPACES:
        walls.raise_(name, functools.partial(enter, name))
    if "mount" in walls.standing:
        walls.standing.remove("mount")
        if walls.raise_("mount", lambda: own_folder(job, source)):
            job["folder"] = FOLDER


def close_doors(walls: Walls, job: dict, used: int) -> None:
    """By the program's process, before it runs anything: the rest. The order matters: root opens what the
    program's user may not, so Landlock's rules come before the change of user; after the filter nothing can
    be built."""
    # While the path can still be opened.
    os.chdir(job["folder"])
    walls.raise_("rlimits", lambda: set_limits(job, used))
    walls.raise_("landlock", lambda: landlock(job["folder"]))
    if os.geteuid() == 0:
        walls.raise_("uid", lambda: drop_privileges(job["uid"]))
    drop_capabilities()
    walls.raise_("seccomp", lambda: attach(build(platform.machine(), os.getpid())))


def too_much(folder: str, most_bytes: float, most_files: int) -> bool:
    """Whether a folder outside a file system of its own holds more; one nested deep, or unreadable, counts as
    more."""

    def unreadable(error: OSError) -> None:
        raise error

    try:
        # By descriptors: a name that is swapped for a link while it is looked at leads nowhere.
        for path, folders, files, where in os.fwalk(folder, onerror=unreadable):
            for name in (*folders, *files):
                most_bytes -= os.stat(name, dir_fd=where, follow_symlinks=False).st_blocks * 512
            most_files -= len(folders) + len(files)
            if most_bytes < 0 or most_files < 0 or path.count("/") > MAX_DEPTH:
                return True
    except FileNotFoundError:  # it changes while it is looked at; the next look is soon
        return False
    except OSError:
        return True
    return False
