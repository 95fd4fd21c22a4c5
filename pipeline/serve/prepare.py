"""From messages and texts to prompts: tokenising and decoding of what strangers send, where it can be
stopped.

Short texts are tokenised in a thread. Whatever holds pictures or videos, or is long, goes to one of a few
processes with a bound of memory and time: a decoder or tokenizer that hangs, crashes or eats memory costs its
own request, is killed, and a new process stands in its place within milliseconds (they are forked from one
that has imported everything). Tensors come back as safetensors, never pickles: a process that read a hostile
file is not trusted.
"""

import asyncio
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from earlyfusion.data.chat.template import Message, Template
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Sample, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video import give_back
from earlyfusion.model.engine.requests import TokenPrompt
from earlyfusion.pipeline.serve.protocol import Refused
from earlyfusion.vision.config import VisionConfig

SHORT = 16_000
"""Characters that are tokenised in a thread: the tokenizer holds the interpreter's lock, here for some 10 ms.
"""
START_S = 120.0
"""Time that a process may take to be ready (the first imports torch)."""
GROWTH = 128 * 2**20
"""A process that has kept this much after a request makes room for a new one."""
LINE = 64
"""Requests that wait for a process; more are told to come back."""
PR_SET_PDEATHSIG = 1
OK, NO = b"+", b"-"
"""First byte of an answer: tensors follow, or the reason why there are none."""

DECODE = DecodeConfig(
    max_pixels=25_000_000,
    video_max_seconds=300,
    video_max_pixels=4096 * 2304,
    video_max_frames=20_000,
    animation_max_pixels=200_000_000,
    video_max_patches=1 << 16,
)
"""Limits of one picture or video in a request."""
MAX_PATCHES = 1 << 17
"""Most patches of one request."""

Job = str | list[Message]


@dataclass(frozen=True)
class Setup:
    """What a process needs to know."""

    tokenizer: Tokenizer
    vision: VisionConfig
    template: Template
    memory_mb: int = 640

    def encoded(self, job: Job) -> Encoded:
        """The open document of a text or a conversation; raises DataError."""
        if isinstance(job, str):
            return encode(Sample([Text(job)], "prompt", "0"), self.tokenizer, self.vision, eos=False)
        return encode_chat(job, self.tokenizer, self.vision, template=self.template, decode=DECODE)


def for_client(error: Exception) -> str:
    """What a client is told of an error whose text speaks to somebody who prepares data: no options, no
    sample's name."""
    if isinstance(error, RecursionError | OverflowError):
        return "the request is nested too deep or holds numbers that are too large"
    # The names that our own requests give to their one document.
    text = re.sub(r"^(chat chat|prompt 0): ", "", " ".join(str(error).split()))
    text = re.sub(r"; (mend it|raise data\.|set max_frames|check the path|decode its bytes).*", "", text)
    return re.sub(r"(data\.decode\.)\w+( = )?", "", text)


# ---- In the process.


def serve_jobs(pipe: Connection, setup: Setup) -> None:
    """Answers jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(5)

    # What decoders print of strangers' files would fill the server's log.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    # What is there already (torch) does not count against the job.
    start = data_bytes()
    if start:
        most = start + setup.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with suppress(EOFError, OSError):
        pipe.send_bytes(OK)
        while data_bytes() <= start + GROWTH:
            pipe.send_bytes(answer(pipe.recv(), setup))
            give_back()


def answer(job: Job, setup: Setup) -> bytes:
    """The prompt's tensors, or why there are none."""
    try:
        found = setup.encoded(job)
        if found.num_patches > MAX_PATCHES:
            raise BadSample(f"the pictures give {found.num_patches} patches, more than {MAX_PATCHES}")
        # Everything as tensors: nothing else can be read back without trust.
        grids = torch.tensor(found.grids, dtype=torch.int64)
        tensors = {"ids": found.ids, "grids": grids, "media_positions": found.media_positions}
        if found.patches is not None:
            tensors["patches"] = found.patches
        return OK + save({name: tensor.contiguous() for name, tensor in tensors.items()})
    except Exception as error:  # MemoryError, torch's own, and what else a hostile file brings about
        reason = "the request cannot be read"
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            reason = f"the request takes more than {setup.memory_mb} MiB to read; send less or smaller media"
        elif isinstance(error, DataError | RecursionError | OverflowError):
            reason = for_client(error)
        return NO + reason.encode(errors="replace")


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it; 0 where /proc does not say."""
    with suppress(OSError):
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found.group(1)) * 1024 if found else 0
    return 0


# ---- In the server.


class Reader:
    """One process, the server's end of its pipe, and the one thread that talks to it; any may kill it."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        self.setup, self.seconds, self.closed = setup, seconds, False
        self.process: Any = None
        self.pipe: Connection | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self.thread.submit(self.start)

    def start(self) -> Connection:
        """The pipe of a living process."""
        if self.pipe is not None and self.process.is_alive():
            return self.pipe
        self.kill()

        # The fork server has imported everything: a new process is there in milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        here, there = context.Pipe()
        process = context.Process(target=serve_jobs, args=(there, self.setup), daemon=True)
        process.start()
        self.process = process  # from here on it can be killed
        there.close()
        if self.closed:
            self.kill()
        if not here.poll(START_S) or here.recv_bytes(1) != OK:
            raise OSError("the process that reads media did not start")
        self.pipe = here
        return here

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self.pipe = None
        if self.process is not None:
            self.process.kill()

    def call(self, job: Job) -> TokenPrompt:
        """The prompt of a job; raises Refused."""
        # Twice: it may have been killed, or have grown and ended, while nothing was asked of it.
        for _ in range(2):
            if self.closed:
                break
            try:
                pipe = self.start()
                pipe.send(job)
            except (OSError, EOFError):
                self.pipe = None
                continue
            return self._received(pipe)
        raise Refused("the server is stopping or cannot read requests now", status=503, code="stopping")

    def _received(self, pipe: Connection) -> TokenPrompt:
        limit = f"{self.seconds:g} s"
        try:
            if pipe.poll(self.seconds):
                limit = f"{self.setup.memory_mb} MiB"
                found = pipe.recv_bytes(1 << 30)
                if found.startswith(NO):
                    raise Refused(found[1:].decode(), param="messages")
                tensors = load(found[1:])
                grids = tuple((t, h, w) for t, h, w in tensors["grids"].tolist())
                positions = tuple(tensors["media_positions"].tolist())
                return TokenPrompt(tensors["ids"], tensors.get("patches"), grids, positions)
        except (EOFError, OSError):
            pass  # it has crashed, or was killed

        # What hangs, has crashed or is full of a stranger's file is not used again.
        self.kill()
        raise Refused(
            f"the request cannot be read, or takes more than {limit} to read; send less or smaller media",
            param="messages",
        )


class Preparer:
    """Makes prompts, at most `processes` at a time outside. seconds: time of one request in a process."""

    def __init__(self, setup: Setup, *, processes: int = 2, seconds: float = 20.0) -> None:
        self.setup, self.waiting = setup, 0
        self.readers = [Reader(setup, seconds) for _ in range(processes)]
        self._free, self._room = list(self.readers), asyncio.Semaphore(processes)

    async def prompt(self, job: Job, characters: int) -> TokenPrompt:
        """The prompt of a text or a conversation of so many characters; raises Refused and DataError.
        Cancelling it frees its process."""
        # Short words alone are harmless, and a thread is quicker.
        segments = [] if isinstance(job, str) else [s for message in job for s in message.content]
        if characters <= SHORT and all(isinstance(segment, Text) for segment in segments):
            return TokenPrompt((await asyncio.to_thread(self.setup.encoded, job)).ids)

        # Who waits holds a body in memory.
        if self.waiting >= LINE:
            raise Refused(f"{LINE} requests wait to be read; try later", status=429, code="queue_full")
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1

        # The process is given back when its thread is done with it, not when the caller leaves.
        reader = self._free.pop()
        call = asyncio.get_running_loop().run_in_executor(reader.thread, reader.call, job)
        call.add_done_callback(lambda done: self._give(reader, done))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            reader.kill()
            raise

    def _give(self, reader: Reader, done: asyncio.Future[Any]) -> None:
        done.exception()  # looked at, in case nobody waits any more
        self._free.append(reader)
        self._room.release()

    def close(self) -> None:
        """Kill all processes; whoever waits is refused."""
        for reader in self.readers:
            reader.closed = True
            reader.kill()
            reader.thread.shutdown(wait=False)
