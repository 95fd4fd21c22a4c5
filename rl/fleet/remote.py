"""An engine in a process of its own, and a fleet's end of it.

    processes = [Process(EngineOptions(folder)) for _ in range(2)]      they load side by side
    fleet = Fleet([Remote(process) for process in processes])
    fleet.close()                                                       ends them

The engine writes without being asked; what became known arrives as messages, each of JSON and bytes of
safetensors (PausedRequest.to_bytes), which a thread of the fleet's side takes in, whatever else is done
there: an engine never waits for a trainer that trains. Weights come over the rails of rl/weightsync into a
replica beside the engine, which takes them between two steps. Nothing is pickled, and whoever connects must
know the token.
"""

from __future__ import annotations

import hmac
import json
import multiprocessing
import select
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import (
    EngineFull,
    Event,
    PausedRequest,
    Request,
    RequestError,
    Token,
    TokenPrompt,
)
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline.parallel.shard import full
from earlyfusion.pipeline.runtime import keep_freed_memory
from earlyfusion.rl.fleet.fleet import Local, PartRefused
from earlyfusion.rl.fleet.schedule import Room
from earlyfusion.rl.weightsync.layout import SyncError, manifest_of, pack
from earlyfusion.rl.weightsync.publish import Link, publish
from earlyfusion.rl.weightsync.replica import Replica
from earlyfusion.rl.weightsync.wire import (
    LIMIT_S,
    MEMORY,
    Address,
    FileRail,
    Rail,
    Receiver,
    TcpRail,
    read_exactly,
)

HEAD = struct.Struct("!IQQ")
"""Bytes of a message's JSON, and of its two parts."""
MOST_HEAD, MOST_PART = 1 << 26, 1 << 36
START_S = 300.0
"""Seconds that an engine's process may take to load its model."""
ANSWER_S = 120.0
"""Seconds that an engine may take to answer a question."""


class Wire:
    """Messages over a connection: JSON and two strings of bytes each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Record, facts: bytes = b"", tensors: bytes = b"") -> None:
        """A message."""
        text = json.dumps(message).encode()
        self.connection.sendall(HEAD.pack(len(text), len(facts), len(tensors)) + text + facts)
        if tensors:
            self.connection.sendall(tensors)

    def waits(self, seconds: float = 0.0) -> bool:
        """Whether a message has come."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def read(self) -> tuple[Record, bytes, bytes]:
        """The next message. Raises OSError where the other side is gone or sends what is no message."""
        head, facts, tensors = HEAD.unpack(self._exactly(HEAD.size))
        if head > MOST_HEAD or max(facts, tensors) > MOST_PART:
            raise ConnectionError(f"a message of {head:,} + {facts:,} + {tensors:,} bytes")
        try:
            message = dict(json.loads(self._exactly(head)))
        except (ValueError, TypeError):
            raise ConnectionError("a message that is no JSON") from None
        return message, self._exactly(facts), self._exactly(tensors)

    def _exactly(self, size: int) -> bytes:
        room = bytearray(size)
        read_exactly(self.connection, memoryview(room))
        return bytes(room)

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


NOTHING = TokenPrompt(torch.zeros(1, dtype=torch.long))
"""In the place of a prompt that the other side has."""


def send_events(wire: Wire, events: Sequence[Event], version: int) -> None:
    """Tell what became known in a step: one message, whose completions and states lie together."""
    told = [
        (one.request_id, one.index, one.tokens, one.completion is not None, one.left is not None)
        for one in events
    ]
    done = [one.completion for one in events if one.completion is not None]
    left = [one.left for one in events if one.left is not None]
    parts = PausedRequest(Request("", NOTHING), left, done, version).to_bytes() if done else ()
    wire.send({"do": "events", "events": told}, *parts)


def events_from(message: Record, facts: bytes, tensors: bytes) -> list[Event]:
    """The reverse."""
    parts = PausedRequest.from_bytes(facts, tensors) if facts else None
    done, left = (iter(parts.finished), iter(parts.samples)) if parts else (iter(()), iter(()))
    events = []
    for request_id, index, tokens, ended, kept in message["events"]:
        known = [
            Token(id, logprob, logprob1, version, tuple((one, value) for one, value in top))
            for id, logprob, logprob1, version, top in tokens
        ]
        completion = next(done) if ended else None
        events.append(Event(request_id, index, tuple(known), "", completion, next(left) if kept else None))
    return events


# ---- the engine's process


@dataclass(frozen=True)
class EngineOptions:
    """What an engine's process needs. folder: model directory; dtype: "float32" or "bfloat16"; threads: None
    for torch's choice; engine: arguments of `Engine` beside model and tokenizer."""

    folder: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = 1
    engine: Record = field(default_factory=dict)


def serve(options: Record, told: Any) -> None:
    """The process: load the model, tell where to connect, and answer until the other side goes."""
    given = EngineOptions(**options)
    keep_freed_memory()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    model = load_model(Path(given.folder), torch.device(given.device), getattr(torch, given.dtype))
    engine = Engine(model, Tokenizer.load(Path(given.folder)), **given.engine)
    # Weights arrive beside the engine's work, in threads of their own.
    replica = Replica()
    weights = Receiver(replica)
    listening = socket.create_server(("127.0.0.1", 0))
    told.send((listening.getsockname()[1], tuple(weights.address)))
    wire = the_fleet(listening, weights.address.token)
    # What it holds in half precision need not travel in full.
    halves = [name for name, weight in model.state_dict().items() if weight.dtype == torch.bfloat16]
    room = Local(engine).room
    wire.send({"room": [room.slots, room.tokens, room.page], "halves": halves})
    with suppress(OSError):
        while True:
            # Messages first: a part that waits in the socket could join this step.
            while not engine.has_work or wire.waits():
                if engine.has_work or wire.waits(1.0):
                    answer(wire, engine, replica)
            events = engine.step()
            if events:
                send_events(wire, events, engine.scheduler.version)


def the_fleet(listening: socket.socket, token: str) -> Wire:
    """The one that knows the token; nobody comes after it."""
    with listening:
        while True:
            connection, _ = listening.accept()
            wire = Wire(connection)
            connection.settimeout(LIMIT_S)
            with suppress(OSError):
                hello, _, _ = wire.read()
                if hmac.compare_digest(str(hello.get("token")), token):
                    connection.settimeout(None)
                    return wire
            wire.close()


def answer(wire: Wire, engine: Engine, replica: Replica) -> None:
    """One message of the fleet."""
    message, facts, tensors = wire.read()
    do = message.get("do")
    # What is damaged raises and ends the process: its fleet sees an engine that is gone.
    if do == "start":
        try:
            engine.resume(PausedRequest.from_bytes(facts, tensors))
        except (RequestError, EngineFull) as error:
            # Whoever asked is told; another engine would refuse it as well.
            wire.send({"do": "refused", "id": message["id"], "error": str(error)})
    elif do == "end":
        engine.end_sample(message["id"], message["index"])
    elif do == "pause":
        try:
            paused = engine.pause(message["id"])
        except RequestError:
            # It has ended meanwhile; what that gave is on its way.
            wire.send({"do": "paused"})
            return
        # Without the prompt, whose pictures the fleet has.
        bare = PausedRequest(Request(message["id"], NOTHING), paused.samples, [], paused.version)
        wire.send({"do": "paused"}, *bare.to_bytes())
    elif do == "load":
        try:
            with replica.reading() as (version, weights):
                if version != message["version"]:
                    raise SyncError(f"version {version} is here, {message['version']} was to be read")
                engine.load_weights(weights, version)
            wire.send({"do": "loaded"})
        except (SyncError, ValueError) as error:
            wire.send({"do": "loaded", "error": str(error)})


class Process:
    """The process of an engine, which loads its model beside us until `ready` is asked."""

    def __init__(self, options: EngineOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self.options = options
        self.told, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(asdict(options), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> tuple[int, Address]:
        """Where a fleet connects, and where weights go. Raises OSError for one that does not come up."""
        try:
            if self.told.poll(START_S):
                port, address = self.told.recv()
                return port, Address(*address)
        except EOFError:
            pass
        self.close()
        raise ConnectionError(f"an engine did not load {self.options.folder} on {self.options.device}")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


class Remote:
    """A fleet's end of an engine in another process."""

    news = threading.Event()

    def __init__(self, process: Process) -> None:
        self.process = process
        self.next: Process | None = None
        port, address = process.ready()
        self.wire = Wire(socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S))
        self.wire.send({"token": address.token})
        told, _, _ = self.wire.read()
        self.room = Room(*told["room"])
        self.dtypes = dict.fromkeys(told["halves"], torch.bfloat16)
        # Shared memory where there is such a thing; the socket for what goes wrong there.
        rails: list[Rail] = [TcpRail(address)]
        if MEMORY.is_dir():
            rails.insert(0, FileRail(address, MEMORY))
        self.rails, self.link = rails, Link(address, rails)
        self.told: list[Event] = []
        # Read by a thread as it comes; OSError: nothing more will.
        self.arrived: SimpleQueue[tuple[Record, bytes, bytes] | OSError] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            self.wire.connection.settimeout(None)
            while True:
                self.arrived.put(self.wire.read())
                self.news.set()
        except OSError as error:
            self.arrived.put(error)
            self.news.set()

    def _next(self, seconds: float = 0.0) -> tuple[Record, bytes, bytes] | None:
        """The next message. Raises OSError where there will be none, PartRefused for a part that was
        refused."""
        try:
            found = self.arrived.get(timeout=seconds) if seconds else self.arrived.get_nowait()
        except Empty:
            return None
        if isinstance(found, OSError):
            self.arrived.put(found)  # for whoever asks again
            raise found
        if found[0]["do"] == "refused":
            raise PartRefused(found[0]["id"], str(found[0]["error"]))
        return found

    def start(self, part: PausedRequest) -> None:
        """See Instance."""
        self.wire.send({"do": "start", "id": part.request.id}, *part.to_bytes())

    def step(self) -> list[Event]:
        """What has arrived."""
        while (found := self._next()) is not None:
            self.told += events_from(*found)
        events, self.told = self.told, []
        return events

    def _ask(self, expected: str, message: Record) -> tuple[Record, bytes, bytes]:
        self.wire.send(message)
        while (found := self._next(ANSWER_S)) is not None:
            if found[0]["do"] == expected:
                return found
            self.told += events_from(*found)
        raise TimeoutError(f"an engine did not answer in {ANSWER_S:g} s")

    def pause(self, request_id: str) -> tuple[PausedRequest | None, list[Event]]:
        """See Instance."""
        _, facts, tensors = self._ask("paused", {"do": "pause", "id": request_id})
        return (PausedRequest.from_bytes(facts, tensors) if facts else None), self.step()

    def end_sample(self, request_id: str, index: int) -> None:
        """See Instance."""
        self.wire.send({"do": "end", "id": request_id, "index": index})

    @staticmethod
    def publish(remotes: Sequence[Remote], weights: Mapping[str, Tensor], version: int) -> dict[int, str]:
        """See Instance. Packed one tensor after the other (shards are put together here), sent to all at
        once, and read once all have everything."""
        manifest = manifest_of(weights, version, remotes[0].dtypes)
        # The whole version, once for all engines.
        buffer = bytearray(manifest.size)

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights.items():
                yield name, full(weight).detach()

        pack(gathered(), manifest, buffer)
        failed = {}
        links = [one.link for one in remotes]
        for place, sent in enumerate(publish(links, manifest, memoryview(buffer))):
            # Arrived everywhere is not read everywhere: the engine takes it between two of its steps.
            told: Record = {"error": sent} if isinstance(sent, str) else {}
            try:
                if not told:
                    told, _, _ = remotes[place]._ask("loaded", {"do": "load", "version": version})
            except OSError as error:
                told = {"error": one_line(error, 200) or type(error).__name__}
            if told.get("error"):
                failed[place] = str(told["error"])
        return failed

    def successor(self) -> Remote | None:
        """See Instance. Its process loads what this one's did. Raises OSError for one that cannot."""
        if self.next is None:
            self.next = Process(self.process.options)
        if not self.next.told.poll(0):
            return None
        process, self.next = self.next, None
        return Remote(process)

    def close(self) -> None:
        """End the process as well."""
        self.wire.close()
        self.link.close()
        for rail in self.rails:
            rail.close()
        self.process.close()
        if self.next is not None:
            self.next.close()
