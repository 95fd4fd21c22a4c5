"""How slices travel to a replica in another process: a receiver, and rails that lead to it.

    receiver = Receiver(replica)                    the engine's side
    rail = TcpRail(receiver.address)                the trainer's: put(version, Slice, bytes)
    rail = FileRail(receiver.address, folder)       one host: bytes through a file that both map; in
                                                    MEMORY through shared memory
    rail = GlooRail(receiver.address)               to any host: bytes through torch.distributed

Rails differ in how the bytes go; all of them tell the receiver over a connection of their own, which answers
once it has compared the checksum and put the slice in its place. A rail takes one slice at a time. Whoever
connects must know the receiver's token. Rails of one host share the bandwidth of its memory: several healthy
ones are no faster than the best, they are there for what is slow or broken.
"""

import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import zlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record
from earlyfusion.rl.weightsync.layout import Slice, SyncError, manifest_from
from earlyfusion.rl.weightsync.replica import Replica

HEADER = struct.Struct("!QQII")
"""Version, offset, size, CRC-32 of a slice."""
LENGTH = struct.Struct("!I")
DONE = b"\x01"
"""The answer to a slice that is in its place; a message of LENGTH bytes follows any other byte."""
MOST_MESSAGE = 1 << 28
"""Bytes of a message."""
MEMORY = Path("/dev/shm")
"""Where Linux keeps files that are memory."""
LIMIT_S = 10.0
"""Seconds after which a rail that does not move is broken."""


class Address(NamedTuple):
    """Of a receiver; token: what a sender must know."""

    host: str
    port: int
    token: str


class Rail(Protocol):
    """A way to a receiver. put returns once the slice is in its place, and raises SyncError or OSError where
    it is not; the next one connects again. close: nothing more is sent."""

    name: str

    def put(self, version: int, where: Slice, data: memoryview) -> None: ...

    def close(self) -> None: ...


def read_exactly(connection: socket.socket, room: memoryview) -> None:
    """Fill `room`. Raises ConnectionError where the other side has gone."""
    while room:
        count = connection.recv_into(room)
        if not count:
            raise ConnectionError("the other side has gone")
        room = room[count:]


def read_message(connection: socket.socket) -> Any:
    """JSON from the other side. Raises SyncError for what is too long or no JSON."""
    head = bytearray(LENGTH.size)
    read_exactly(connection, memoryview(head))
    (size,) = LENGTH.unpack(head)
    if size > MOST_MESSAGE:
        raise SyncError(f"a message of {size:,} bytes; at most {MOST_MESSAGE:,}")
    text = bytearray(size)
    read_exactly(connection, memoryview(text))
    try:
        return json.loads(text)
    except ValueError:
        raise SyncError("a message that is no JSON") from None


def write_message(connection: socket.socket, message: Any) -> None:
    """JSON to the other side."""
    text = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


def connect(address: Address, **about: Any) -> socket.socket:
    """A connection that the receiver has taken. Raises SyncError where it refuses, OSError where there is
    none."""
    connection = socket.create_connection((address.host, address.port), timeout=LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    write_message(connection, {"token": address.token, **about})
    told = read_message(connection)
    if told.get("error"):
        raise SyncError(f"refused: {told['error']}")
    return connection


# ---- the engine's side


class Receiver:
    """Takes versions into a replica, from any number of connections, until it is closed."""

    def __init__(self, replica: Replica, host: str = "127.0.0.1") -> None:
        self.replica = replica
        self._listening = socket.create_server((host, 0))
        self.address = Address(host, self._listening.getsockname()[1], secrets.token_hex(16))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for one in (self._listening, *list(self._open)):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        # What a sender does wrong ends its own connection, and nothing else.
        with (
            suppress(OSError, SyncError, RuntimeError, LookupError, ValueError, TypeError, AttributeError),
            connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(LIMIT_S)
            hello = read_message(connection)
            if not hmac.compare_digest(str(hello.get("token")), self.address.token):
                write_message(connection, {"error": "wrong token"})
                return
            connection.settimeout(None)
            source = self._source(hello)
            write_message(connection, {})
            if source is None:
                self._talk(connection)
            else:
                self._take(connection, source)
        self._open.discard(connection)

    def _source(self, hello: Record) -> "Inline | Mapped | Gloo | None":
        kind = hello.get("rail")
        if kind is None:
            return None
        if kind == "gloo":
            return Gloo(str(hello["host"]), int(hello["port"]), str(hello["group"]))
        return Inline() if kind == "tcp" else Mapped(Path(str(hello["place"])))

    def _talk(self, connection: socket.socket) -> None:
        """Questions of a sender, one after the other."""
        while True:
            asked = read_message(connection)
            told: Record = {}
            try:
                if asked["do"] == "begin":
                    self.replica.begin(manifest_from(asked["manifest"]), max(1, int(asked["slice_bytes"])))
                elif asked["do"] == "missing":
                    told = {"missing": self.replica.missing(asked["version"])}
                elif asked["do"] == "commit":
                    self.replica.commit(asked["version"])
                told["version"] = self.replica.version
            except SyncError as error:
                told = {"error": str(error)}
            write_message(connection, told)

    def _take(self, connection: socket.socket, source: "Inline | Mapped | Gloo") -> None:
        """Slices of a rail, one after the other."""
        head = bytearray(HEADER.size)
        try:
            while True:
                read_exactly(connection, memoryview(head))
                version, offset, size, checksum = HEADER.unpack(head)
                data = source.read(connection, size)
                try:
                    self.replica.place(version, offset, data, checksum)
                except SyncError as error:
                    connection.sendall(b"\x00")
                    write_message(connection, {"error": str(error)})
                else:
                    connection.sendall(DONE)
        finally:
            source.close()


class Inline:
    """Slices that come over the connection itself."""

    def __init__(self) -> None:
        self.room = bytearray()

    def read(self, connection: socket.socket, size: int) -> memoryview:
        """The bytes of a slice."""
        if size > MOST_MESSAGE:
            raise SyncError(f"a slice of {size:,} bytes; at most {MOST_MESSAGE:,}")
        if len(self.room) < size:
            self.room = bytearray(size)
        data = memoryview(self.room)[:size]
        read_exactly(connection, data)
        return data

    def close(self) -> None:
        """Nothing is held."""


class Mapped:
    """Slices in a file."""

    def __init__(self, place: Path) -> None:
        with place.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, connection: socket.socket, size: int) -> memoryview:
        """The bytes of a slice."""
        if size > len(self.map):
            raise SyncError(f"a slice of {size:,} bytes where there are {len(self.map):,}")
        # A copy: a sender that gave up may write the next slice there while this one is looked at.
        return memoryview(self.map[:size])

    def close(self) -> None:
        """Give the file back."""
        self.map.close()


class Gloo:
    """Slices through a process group of torch.distributed, of the two sides alone."""

    def __init__(self, host: str, port: int, group: str) -> None:
        self.host, self.port, self.name = host, port, group
        self.group: Any = None
        self.room = torch.empty(0, dtype=torch.uint8)

    def read(self, connection: socket.socket, size: int) -> memoryview:
        """The bytes of a slice."""
        if size > MOST_MESSAGE:
            raise SyncError(f"a slice of {size:,} bytes; at most {MOST_MESSAGE:,}")
        # Both sides come here for the first slice: a group is made by both at once.
        if self.group is None:
            store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=LIMIT_S))
            self.group = pair_of(store, self.name, 1)
        if len(self.room) < size:
            self.room = torch.empty(size, dtype=torch.uint8)
        part = self.room[:size]
        self.group.recv([part], 0, 0).wait()
        whole: Any = part.numpy()
        return memoryview(whole)

    def close(self) -> None:
        """The group ends with the object."""
        self.group = None


def pair_of(store: Any, name: str, rank: int) -> Any:
    """A group of two that nobody else is in, whatever groups the processes have for themselves."""
    made = dist.ProcessGroupGloo
    return made(dist.PrefixStore(name, store), rank, 2, timedelta(seconds=LIMIT_S))


# ---- the trainer's side


class TcpRail:
    """Bytes over a connection; to any host."""

    kind = "tcp"

    def __init__(self, address: Address, name: str = "tcp") -> None:
        self.address, self.name = address, name
        self._connection: socket.socket | None = None

    def about(self) -> Record:
        """What the receiver must know."""
        return {"rail": self.kind}

    def bring(self, connection: socket.socket, head: bytes, data: memoryview) -> None:
        """Header and bytes."""
        connection.sendall(head)
        connection.sendall(data)

    def put(self, version: int, where: Slice, data: memoryview) -> None:
        """See Rail."""
        try:
            if self._connection is None:
                self._connection = connect(self.address, **self.about())
            head = HEADER.pack(version, where.offset, where.size, zlib.crc32(data))
            self.bring(self._connection, head, data)
            answer = bytearray(1)
            read_exactly(self._connection, memoryview(answer))
            if answer != DONE:
                raise SyncError(read_message(self._connection)["error"])
        except BaseException:
            # Whatever is still under way there belongs to nobody.
            self.disconnect()
            raise

    def close(self) -> None:
        """See Rail."""
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection; the next slice makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class FileRail(TcpRail):
    """Bytes through a file that both sides map. most: bytes of the largest slice."""

    kind = "file"

    def __init__(self, address: Address, folder: Path, name: str = "file", most: int = 1 << 23) -> None:
        super().__init__(address, name)
        self.path = folder / f"earlyfusion-weights-{secrets.token_hex(8)}"
        # For its owner's eyes alone: weights are nobody else's.
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "rb+") as file:
            file.truncate(most)
            self.map = mmap.mmap(number, most)

    def about(self) -> Record:
        """See TcpRail."""
        return {"rail": self.kind, "place": str(self.path)}

    def bring(self, connection: socket.socket, head: bytes, data: memoryview) -> None:
        """See TcpRail."""
        self.map[: len(data)] = data
        connection.sendall(head)

    def close(self) -> None:
        """Remove the file, too."""
        self.disconnect()
        self.map.close()
        self.path.unlink(missing_ok=True)


class GlooRail(TcpRail):
    """Bytes through torch.distributed's gloo. host: of this side, as the receiver reaches it."""

    kind = "gloo"

    def __init__(self, address: Address, name: str = "gloo", host: str = "127.0.0.1") -> None:
        super().__init__(address, name)
        self.host = host
        self.store = dist.TCPStore(host, 0, None, True, timedelta(seconds=LIMIT_S), wait_for_workers=False)
        self.group: Any = None
        self.label = ""

    def about(self) -> Record:
        """See TcpRail."""
        # A new connection is a new group: what was under way in the old one belongs to nobody.
        self.label, self.group = secrets.token_hex(8), None
        return {"rail": self.kind, "host": self.host, "port": self.store.port, "group": self.label}

    def bring(self, connection: socket.socket, head: bytes, data: memoryview) -> None:
        """See TcpRail."""
        connection.sendall(head)
        try:
            if self.group is None:
                self.group = pair_of(self.store, self.label, 0)
            self.group.send([torch.frombuffer(data, dtype=torch.uint8)], 1, 0).wait()
        except RuntimeError as error:  # what torch raises for whatever goes wrong there
            raise SyncError(one_line(error, 120)) from None

    def disconnect(self) -> None:
        """See TcpRail."""
        super().disconnect()
        self.group = None
