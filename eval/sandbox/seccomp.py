"""The system calls a program may make: a seccomp filter in classic BPF, which needs no privilege and no
library.

    install(os.getpid())        # this process, for good

What computing on numbers and pictures asks of the kernel is listed; everything else is refused: sockets of
every family, new processes and programs, keyrings, System V and POSIX message queues and shared memory,
memfd, namespaces, mounts, ptrace and the memory of others, userfaultfd, io_uring, bpf, perf, inotify, chmod,
chown, utime, xattr, links, limits. Landlock governs none of these. A call of another architecture's numbers
(i386, x32) ends the process.

Format: include/uapi/linux/seccomp.h and filter.h; numbers: the tables of x86_64 and of the generic 64-bit
interface.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

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
    libc = ctypes.CDLL(None, use_errno=True)
    # Kept until the call returns: the kernel copies it from this address.
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(held)), 16
    )
    for call in ((38, 1, 0), (22, 2, ctypes.addressof(program))):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(call[0], ctypes.c_ulong(call[1]), ctypes.c_ulong(call[2]), 0, 0) < 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def install(pid: int) -> None:
    """The filter of programs, on this process. Raises OSError where there is none."""
    attach(build(platform.machine(), pid))
