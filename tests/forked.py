"""Calls in processes of their own that begin with everything imported: forks of a server that did so once.

What a user's command does but for the seconds of its imports. The launchers are tested where they are the
matter (tests/pipeline/test_launchers.py).
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from random import SystemRandom
from typing import Any

SERVER = get_context("forkserver")
# Threads of a library would not survive a fork: nothing but imports happens there.
SERVER.set_forkserver_preload(["earlyfusion.rl.train", "earlyfusion.pipeline.sft"])


def _run(call: Callable[..., Any], given: tuple, environment: dict[str, str], errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.dup2(os.open(errors, os.O_WRONLY), sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # An exit code, of what gives one.
    code = call(*given)
    sys.exit(code if isinstance(code, int) else 0)


class Forked:
    """`call(*given)` under an environment; what a test uses of subprocess.Popen."""

    def __init__(self, call: Callable[..., Any], given: tuple, environment: dict[str, str]) -> None:
        self.errors = tempfile.NamedTemporaryFile()
        self.process = SERVER.Process(target=_run, args=(call, given, environment, self.errors.name))
        self.process.start()
        # A test that failed waits for nobody.
        atexit.register(self.process.kill)
        self.pid, self.kill, self.poll = self.process.pid, self.process.kill, lambda: self.returncode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("earlyfusion", timeout)
        return "", Path(self.errors.name).read_text()


def free_port() -> str:
    """A port for the ranks to meet at."""
    while True:
        # Below the range from which the kernel serves outgoing connections: between this look and the bind of
        # rank 0 nobody else is given it, and no rank meets the store of another run.
        port = SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return str(port)


def ranks(
    call: Callable[..., Any], given: tuple, environment: dict[str, str], world: int = 2
) -> list[Forked]:
    """The processes that torchrun would start for a command."""
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    shared |= environment | {"MASTER_PORT": free_port()}
    own = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [Forked(call, given, each) for each in own]


def finish(process: Forked | subprocess.Popen, timeout: float = 240) -> tuple[int, str]:
    """Exit code and stderr of a started run."""
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"the run hangs; its last words: {errors[-3000:]}") from None
    return process.returncode, errors


def _tell(call: Callable[..., Any], given: dict, path: str) -> None:
    Path(path).write_text(json.dumps(call(**given)))


def result_of(call: Callable[..., Any], given: dict) -> Any:
    """What `call(**given)` returns in a process of its own, as JSON holds it."""
    with tempfile.NamedTemporaryFile() as file:
        code, errors = finish(Forked(_tell, (call, given, file.name), {**os.environ}))
        assert code == 0, errors[-3000:]
        return json.loads(file.read())
