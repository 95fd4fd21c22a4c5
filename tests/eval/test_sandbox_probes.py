"""Every way out that is known is tried: none is open, whoever calls, and where a wall is missing nothing runs
unasked."""

import contextlib
import errno
import json
import os
import platform
import shutil
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_probes import AREAS, KERNEL_WHOLE, PROBES, WHOLE, program

from earlyfusion.eval.sandbox import child as sandbox_child
from earlyfusion.eval.sandbox import host as module
from earlyfusion.eval.sandbox import walls as sandbox_walls
from earlyfusion.eval.sandbox.host import REASONS, Limits, Sandbox, SandboxError

LINUX = sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(not LINUX, reason="the sandbox needs Linux")
SHORT = Limits(wall_s=8.0, cpu_s=1.0, memory_mb=128, file_bytes=1 << 17, disk_bytes=1 << 22, disk_files=200)
LONG = Limits(wall_s=60.0, cpu_s=20.0, memory_mb=512, output_bytes=1 << 20, max_chars=200_000)
ORDINARY = 54_321
ROOT = LINUX and os.geteuid() == 0
CALLERS = ["root", "ordinary"] if ROOT else ["ordinary"]
LATER = platform.machine() == "aarch64"
libc = sandbox_walls.libc


# ---- a caller of either kind, on a kernel that refuses some calls


def refusing(calls):
    """A filter that answers some system calls with an error: (numbers, errno, argument, its value or
    bits)."""
    op, code = sandbox_walls._op, b""
    for numbers, error, *test in calls:
        body = op(0x06, 0x00050000 | error)
        if test:
            index, compare, value = test
            body = op(0x20, 16 + 8 * index) + op(compare, value, 0, 1) + body + op(0x20, 0)
        code += op(0x15, numbers[LATER], 0, len(body) // 8) + body
    return op(0x20, 0) + code + op(0x06, 0x7FFF0000)


EQUAL, BITS = 0x15, 0x45
UNSHARE, PRCTL, PRLIMIT = (272, 97), (157, 167), (302, 261)
SPACES = ("mount", "net", "ipc", "pid")
TAKEN = {
    # what the kernel refuses -> the walls that are missing then, the
    # refused calls, areas whose probes then get through
    "namespaces": (SPACES, [(UNSHARE, errno.EPERM)], ("metadata",)),
    "mounts": (("mount",), [((165, 40), errno.EPERM)], ("metadata",)),
    "pivot_root": (("mount",), [((155, 41), errno.EINVAL)], ("metadata",)),
    "network namespaces": (("net",), [(UNSHARE, errno.EPERM, 0, BITS, 0x40000000)], ()),
    "ipc namespaces": (("ipc",), [(UNSHARE, errno.EPERM, 0, BITS, 0x08000000)], ()),
    "process namespaces": (("pid",), [(UNSHARE, errno.EPERM, 0, BITS, 0x20000000)], ()),
    "keyrings": (("keyring",), [((250, 219), errno.EDQUOT)], ()),
    "landlock": (("landlock",), [((444, 444), errno.ENOSYS)], ("files", "metadata")),
    "filters": (("seccomp",), [(PRCTL, errno.EINVAL, 0, EQUAL, 22)], tuple(AREAS)),
    "limits": (("rlimits",), [(PRLIMIT, errno.EPERM, 2, BITS, 0xFFFFFFFF)], ("privileges",)),
    "users": (("uid",), [((117, 147), errno.EPERM)], ()),
    "user namespaces": (SPACES, [(UNSHARE, errno.EPERM, 0, BITS, 0x10000000)], ("metadata",)),
    "namespaces and landlock": (
        (*SPACES, "landlock"),
        [(UNSHARE, errno.EPERM), ((444, 444), errno.ENOSYS)],
        ("files", "metadata", "processes"),
    ),
    "everything": (
        (*SPACES, "landlock", "seccomp"),
        [(UNSHARE, errno.EPERM), ((444, 444), errno.ENOSYS), (PRCTL, errno.EINVAL, 0, EQUAL, 22)],
        tuple(AREAS),
    ),
}


@contextlib.contextmanager
def served(caller, monkeypatch, calls=(), **options):
    """A sandbox without the walls inside Python, whose server is this process's child: it needs not be found
    by a user who may not look into the folder of this Python."""
    sandbox_child.preload()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        try:
            ours.close()
            if caller == "ordinary" and ROOT:
                drop(ORDINARY)
                libc.prctl(4, 1, 0, 0, 0)  # a changed user hides /proc/self from itself; a login does not
            if calls:
                sandbox_walls.attach(refusing(calls))
            sandbox_child.serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    box = Sandbox(LONG, **options)
    box._python_walls = False
    with monkeypatch.context() as patch, contextlib.closing(ours):
        assert ours.recv(16) == b"ready"
        patch.setattr(Sandbox, "_start", lambda self: ours)
        if caller == "ordinary" and ROOT:
            patch.setattr(module, "_job_uid", lambda number: ORDINARY)
        yield box
    os.waitpid(server, 0)


def drop(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# ---- the world outside


def listening(family, kind, address):
    listener = socket.socket(family, kind)
    listener.bind(address)
    listener.setblocking(False)
    if kind == socket.SOCK_STREAM:
        listener.listen()
    return listener


class World:
    """What a program should not reach, in a folder that everybody may write, and what arrived there."""

    def __init__(self, owner):
        self.folder = Path(tempfile.mkdtemp(prefix="world-"))
        self.folder.chmod(0o777)
        path = self.folder / "secret"
        path.write_text("PRIVATE KEY")
        os.utime(path, (10**9, 10**9))
        os.symlink(path, self.folder / "link")
        os.mkfifo(self.folder / "fifo")
        with contextlib.suppress(OSError):
            os.setxattr(path, "user.a", b"1")
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        names = {"unix": f"{self.folder}/unix", "unix_datagram": f"{self.folder}/datagram"}
        names["abstract"] = f"\0world-{os.getpid()}"
        kinds = zip(names.values(), (stream, datagram, stream))
        self.listeners = [listening(socket.AF_UNIX, kind, name) for name, kind in kinds]
        ports = [listening(socket.AF_INET, kind, ("127.0.0.1", 0)) for kind in (stream, datagram)]
        self.listeners += ports
        for name in ("secret", "fifo", "unix", "datagram"):
            (self.folder / name).chmod(0o666)
            os.chown(self.folder / name, owner, owner)
        self.victim = os.fork()
        if self.victim == 0:
            if owner != os.geteuid():
                drop(owner)
            while True:
                signal.pause()
        keyctl, add_key = (219, 217) if LATER else (250, 248)
        self.key = libc.syscall(add_key, b"user", b"sandbox-probe", b"SECRET", 6, -3)
        libc.syscall(keyctl, 5, self.key, 0x3F3F3F3F)
        self.shm_key = 0x5EC0000 + os.getpid() % 60_000
        self.shm = libc.shmget(self.shm_key, 4096, 0o1666)
        self.told = {
            "secret": str(path),
            "open": str(self.folder),
            "fifo": str(self.folder / "fifo"),
            **names,
            "link": str(self.folder / "link"),
            "size": 11,
            "name": self.folder.name,
            "pid": os.getpid(),
            "victim": self.victim,
            "tcp": ports[0].getsockname()[1],
            "udp": ports[1].getsockname()[1],
            "key": self.key,
            "shm_key": self.shm_key,
        }

    def untouched(self):
        """Whether nothing arrived and nothing changed."""
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                return not (listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(9))
        names = {"secret", "link", "fifo", "unix", "datagram"}
        secret = (self.folder / "secret").stat()
        assert set(os.listdir(self.folder)) == names
        assert os.waitpid(self.victim, os.WNOHANG) == (0, 0)
        assert not [name for name in os.listdir("/") if name.startswith("new-")]
        return (secret.st_mode & 0o777, secret.st_mtime) == (0o666, 10**9) and (
            (self.folder / "secret").read_text() == "PRIVATE KEY"
        )

    def close(self):
        os.kill(self.victim, signal.SIGKILL)
        os.waitpid(self.victim, 0)
        libc.shmctl(self.shm, 0, None)
        for listener in self.listeners:
            listener.close()
        shutil.rmtree(self.folder)


@pytest.fixture(params=CALLERS)
def caller(request):
    return request.param


@pytest.fixture
def world(caller):
    one = World(ORDINARY if caller == "ordinary" and ROOT else os.geteuid())
    yield one
    one.close()


@pytest.fixture
def folder():
    """An empty folder that everybody may enter and write, unlike `tmp_path`, whose parents are shut to other
    users."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def unconfined(world, caller, folder):
    """Names of the probes that get through without a sandbox."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.alarm(60)
            sys.stdout = os.fdopen(write, "w")
            os.chdir(folder)
            if ROOT:
                drop(ORDINARY if caller == "ordinary" else 1_500_000_000)
            exec(program(world.told, ("channel",)), {"__name__": "probes"})
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        said = lines.read()
    os.waitpid(child, 0)
    return json.loads(said.splitlines()[-1])[0]


def through(box, world, leave_out=()):
    """Names of the probes that get through in a sandbox, with the result."""
    result = box.run(program(world.told, leave_out))
    assert result.reason == "ok", (result.reason, result.error, result.stderr[-500:])
    found, held = json.loads(result.stdout.splitlines()[-1])
    assert len(found) + len(held) == len(PROBES) - sum(len(AREAS[area]) for area in leave_out)
    return found, result


def needs(walls):
    """Skip where the kernel, or the container, has no such wall to take away."""
    with Sandbox(allow_weaker=True) as box:
        lacking = set(walls) & set(box.check().missing)
    if lacking:
        pytest.skip(f"this kernel or container does not permit {', '.join(sorted(lacking))}")


def test_no_probe_gets_through(caller, world, monkeypatch):
    needs(sandbox_walls.REQUIRED)
    assert len(PROBES) + len(WHOLE) + len(KERNEL_WHOLE) >= 255
    with served(caller, monkeypatch) as box:
        found, result = through(box, world)
    assert found == [], found
    assert world.untouched()
    assert result.missing == () and set(sandbox_walls.REQUIRED) <= set(result.layers)
    assert ("uid" in result.layers) == (caller == "root" and ROOT), "an unchanged user is no wall"


def test_the_probes_work_without_a_sandbox(caller, world, folder):
    """What holds in the sandbox is not held by a mistake in the probe: unprivileged users do most of it."""
    found = unconfined(world, caller, folder)
    share = {
        area: sum(name.startswith(f"{area}: ") for name in found) / len(AREAS[area])
        for area in AREAS
        if area != "channel"
    }
    assert all(part > 0.3 for part in share.values()) and len(found) > 150, (len(found), share)
    assert not world.untouched()


@pytest.mark.parametrize("name", TAKEN)
def test_a_missing_wall_is_refused_or_named(caller, world, monkeypatch, name):
    missing, calls, areas = TAKEN[name]
    if (caller == "root") != (name != "user namespaces") and name in ("users", "user namespaces"):
        pytest.skip("this caller does not need it")
    needs(missing)
    with served(caller, monkeypatch, calls) as box, pytest.raises(SandboxError) as refused:
        box.run("open('ran', 'w')")
    told = str(refused.value)
    assert (
        told.startswith(f"no program is run: the sandbox lacks {', '.join(missing)} here (")
        and "\n" not in told
    )
    assert "allow_weaker" in told
    with served(caller, monkeypatch, calls, allow_weaker=True) as box:
        # Without a filter a program may close its own channel, which ends it without a result.
        found, result = through(box, world, ("channel",) if "seccomp" in missing else ())
    assert result.missing == missing and not set(missing) & set(result.layers)
    assert set(sandbox_walls.REQUIRED) <= {*result.layers, *result.missing}
    assert {one.partition(": ")[0] for one in found} <= set(areas), found
    if not {"landlock", "mount"} <= set(missing):
        assert world.untouched(), "one wall is missing, another holds"


# ---- whole programs


@pytest.fixture(scope="module")
def box():
    with Sandbox(SHORT, allow_weaker=True) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def bare():
    with Sandbox(SHORT, allow_weaker=True) as sandbox:
        sandbox._python_walls = False
        yield sandbox


def check(box, name, code, reasons, claim):
    r = box.run(code, {"image.png": b"x"})
    assert r.reason in REASONS and r.reason in reasons.split(), (name, r)
    assert eval(claim, {"r": r}), (name, r)
    for text in (r.stdout, r.stderr, r.value, r.error, *r.refused, *r.layers):
        assert text.encode() and "FORGED" not in text if text else True, (name, r)
        assert not any(
            (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202e\u2028" for c in text
        ), r


@pytest.mark.parametrize("name", WHOLE)
def test_whole_programs_harm_nobody(box, name):
    check(box, name, *WHOLE[name])


@pytest.mark.parametrize("name", KERNEL_WHOLE)
def test_whole_programs_harm_nobody_by_the_kernel_alone(bare, name):
    check(bare, name, *KERNEL_WHOLE[name])


@pytest.mark.parametrize("taken", ["namespaces", "namespaces and landlock"])
def test_quotas_hold_and_folders_go_without_a_file_system_of_their_own(caller, monkeypatch, folder, taken):
    """The supervisor counts where no tmpfs does, and what is left is removed, however deep and whatever its
    modes."""
    monkeypatch.setattr(module.tempfile, "tempdir", str(folder))
    names = (
        "much in many files",
        "many files",
        "many folders",
        "folders and files without rights",
        "deep folders",
    )
    with served(caller, monkeypatch, TAKEN[taken][1], allow_weaker=True) as box:
        box.limits = SHORT
        for name in names:
            check(box, name, *KERNEL_WHOLE[name])
            assert list(folder.iterdir()) == [], name


def test_a_folder_of_any_depth_is_removed(tmp_path):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # quicker
    top = Path(tempfile.mkdtemp(dir=memory))
    here = os.open(top, os.O_RDONLY)
    for number in range(1_200):  # more than a stack of Python has, and longer than a path may be
        os.mkdir("d" * 200, dir_fd=here)
        os.close(os.open(f"f{number}", os.O_CREAT, 0, dir_fd=here))
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    os.symlink(tmp_path, top / "link")
    (top / "shut").mkdir(mode=0)
    (tmp_path / "kept").write_text("x")
    module.remove_folder(str(top))
    module.remove_folder(str(tmp_path / "none"))
    assert not top.exists() and [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_filter_knows_both_architectures():
    """Run by a small machine of the filter's language: what is listed passes, the rest does not, elsewhere it
    dies."""

    def run(code, number, arch, *arguments):
        data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
        at, held = 0, 0
        while True:
            kind, then, other, value = struct.unpack_from("=HBBI", code, 8 * at)
            at += 1
            if kind == 0x20:
                held = struct.unpack_from("=I", data, value)[0]
            elif kind == 0x06:
                return value
            else:
                at += then if (held == value if kind == 0x15 else held >= value) else other

    allow, die, low = 0x7FFF0000, 0x80000000, 0x00050000
    calls = """read 0 63, socket 41 198, ptrace 101 117, kill 62 129, clone 56 220, clone3 435 435,
        ioctl 16 29, limit 302 261"""
    numbers = {row.split()[0]: row.split()[1:] for row in calls.split(",")}
    expected = {
        ("read",): allow,
        ("socket",): low | errno.EPERM,
        ("ptrace",): low | errno.EPERM,
        ("clone",): low | errno.EAGAIN,
        ("clone3",): low | errno.ENOSYS,
        ("kill", 7): allow,
        ("kill", 8): low | errno.EPERM,
        ("ioctl", 1, 0x5401): allow,
        ("ioctl", 1, 0x5412): low | errno.EPERM,
        ("limit", 0, 1, 0, 9): allow,
        ("limit", 0, 1, 1 << 40): low | errno.EPERM,
    }
    for column, (machine, arch) in enumerate(sandbox_walls.ARCHITECTURES.items()):
        code = sandbox_walls.build(machine, 7)
        for (name, *arguments), answer in expected.items():
            assert run(code, int(numbers[name][column]), arch, *arguments) == answer, (machine, name)
        assert run(code, int(numbers["read"][column]), 0x40000003) == die
    x86 = sandbox_walls.ARCHITECTURES["x86_64"]
    assert run(sandbox_walls.build("x86_64", 7), 0x40000000 | 1, x86) == die
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        sandbox_walls.build("riscv64", 1)
