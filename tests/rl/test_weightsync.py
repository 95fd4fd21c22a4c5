"""Weights on their way to engines: bit for bit whatever rails do, never two versions in one reading."""

import threading
import time
import zlib
from random import Random

import numpy as np
import pytest
import torch

from earlyfusion.rl.weightsync import spray
from earlyfusion.rl.weightsync.layout import (
    Manifest,
    Slice,
    SyncError,
    manifest_from,
    manifest_of,
    pack,
    views,
)
from earlyfusion.rl.weightsync.publish import Link, publish
from earlyfusion.rl.weightsync.replica import Replica
from earlyfusion.rl.weightsync.spray import Sprayer
from earlyfusion.rl.weightsync.wire import MEMORY, Address, FileRail, GlooRail, Receiver, TcpRail, connect

SLICE = 4096


def weights_of(version, seed=0):
    torch.manual_seed(seed)
    made = {
        "a": torch.randn(300, 40),
        "b": torch.randint(0, 9, (7,)),
        "empty": torch.empty(0, 3),
        "c": torch.randn(()),
    }
    return {**made, "stamp": torch.full((9001,), version, dtype=torch.int64)}


def packed(weights, version, dtype=None):
    manifest = manifest_of(weights, version, dtype)
    buffer = bytearray(manifest.size)
    pack(weights.items(), manifest, buffer)
    return manifest, memoryview(buffer)


@pytest.fixture
def engine():
    replica = Replica()
    receiver = Receiver(replica)
    yield replica, receiver
    receiver.close()


def rails_of(receiver, tmp_path):
    return [
        TcpRail(receiver.address),
        FileRail(receiver.address, MEMORY, "memory", SLICE),
        FileRail(receiver.address, tmp_path, "file", SLICE),
        GlooRail(receiver.address),
    ]


def test_bytes_hold_what_was_packed_and_casts_are_torchs():
    weights = weights_of(3)
    manifest, buffer = packed(weights, 3, torch.bfloat16)
    again = manifest_from(manifest.record())
    assert again == manifest
    for name, weight in views(again, buffer).items():
        want = weights[name].to(torch.bfloat16) if weights[name].is_floating_point() else weights[name]
        assert weight.dtype == want.dtype and torch.equal(weight, want)
    with pytest.raises(SyncError, match="did not come: stamp"):
        pack([(n, w) for n, w in weights.items() if n != "stamp"], manifest, bytearray(manifest.size))
    with pytest.raises(SyncError, match="is not what the manifest says"):
        pack([("a", torch.zeros(3))], manifest, bytearray(manifest.size))


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"size": 10},
        {"size": 1 << 50},
        {"entries": "x"},
        {"entries": [["a", "float32", [4], 0, 15]]},
        {"entries": [["a", "nonsense", [4], 0, 16]]},
        {"entries": [["a", "float32", [-4], 0, 16]]},
        {"entries": [["a", "float32", [4], 0, 16], ["b", "float32", [4], 0, 16]]},
        {"entries": [["a", "float32", [4], 8, 16]]},
        {"entries": [["a", "load", [4], 0, 16]]},
    ],
)
def test_a_manifest_from_outside_is_not_believed(change):
    record = manifest_of(weights_of(0), 0).record()
    with pytest.raises(SyncError):
        manifest_from({**record, **change})


@pytest.mark.parametrize("kind", ["tcp", "memory", "file", "gloo", "all"])
def test_every_rail_brings_every_bit(engine, tmp_path, kind):
    replica, receiver = engine
    every = rails_of(receiver, tmp_path)
    rails = [one for one in every if kind in ("all", one.name)]
    link = Link(receiver.address, rails, slice_bytes=SLICE)
    for version in (1, 2, 5):
        weights = weights_of(version, version)
        (sent,) = publish([link], *packed(weights, version))
        assert sum(lane.sent for lane in sent.lanes.values()) >= sent.size > 0
        with replica.reading() as (told, read):
            assert told == version and all(torch.equal(read[name], weights[name]) for name in weights)
    (refused,) = publish([link], *packed(weights_of(5), 5))
    assert "must be newer" in refused and replica.version == 5
    for rail in every:
        rail.close()
    assert not [*tmp_path.iterdir()], "nothing is left behind"


class Faulty(TcpRail):
    """Now and then it does what rails do."""

    def __init__(self, address, name, rng, faults, share=0.25):
        super().__init__(address, name)
        self.rng, self.faults, self.share, self.late = rng, faults, share, None

    def put(self, version, where, data):
        what = self.rng.choice(self.faults) if self.rng.random() < self.share else ""
        if what == "stall":
            time.sleep(0.08)
        if what == "drop":
            self.disconnect()
            raise TimeoutError("nothing came back")
        if what == "kill" and self._connection is not None:
            self._connection.close()
        if what == "twice":
            super().put(version, where, data)
        if what == "reorder":
            # What it was given before comes once more, later.
            self.late, now = (version, where, data), self.late
            if now is not None and now[0] == version:
                super().put(*now)
        super().put(version, where, data)

    def bring(self, connection, head, data):
        if self.rng.random() < self.share and "cut" in self.faults:
            connection.sendall(head)
            connection.sendall(data[: len(data) // 2])
            raise ConnectionError("cut off")
        if self.rng.random() < self.share and "flip" in self.faults:
            wrong = np.frombuffer(data, np.uint8).copy()
            wrong[self.rng.randrange(len(wrong))] ^= 1
            data = memoryview(wrong.tobytes())
        super().bring(connection, head, data)


FAULTS = ("stall", "drop", "kill", "twice", "reorder", "cut", "flip")


@pytest.mark.parametrize("faults", [*((one,) for one in FAULTS), FAULTS])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_bit_is_right_whatever_rails_do(engine, faults, seed):
    replica, receiver = engine
    rails = [Faulty(receiver.address, f"{i}", Random(f"{faults}{seed}{i}"), faults) for i in range(3)]
    link = Link(receiver.address, [*rails, TcpRail(receiver.address, "well")], slice_bytes=SLICE)
    for version in range(4):
        weights = weights_of(version, seed)
        (sent,) = publish([link], *packed(weights, version))
        assert not isinstance(sent, str), sent
        with replica.reading() as (told, read):
            assert told == version and all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_rail_that_hangs_loses_its_slice_to_another_and_is_not_waited_for(engine):
    replica, receiver = engine
    hang = threading.Event()

    class Hangs(TcpRail):
        def put(self, version, where, data):
            hang.wait(20)

    well = TcpRail(receiver.address, "well")
    link = Link(receiver.address, [Hangs(receiver.address, "hangs"), well], slice_bytes=SLICE)
    for version in range(3):
        begun = time.monotonic()
        (sent,) = publish([link], *packed(weights_of(version), version))
        assert time.monotonic() - begun < 10 and replica.version == version
        # It hangs in the first version, and is asked for nothing more.
        assert (sent.healing or version) and sent.lanes["hangs"].slices == 0
    hang.set()


def test_without_any_way_it_says_so_and_the_old_version_stays(engine):
    replica, receiver = engine
    publish(
        [Link(receiver.address, [TcpRail(receiver.address)], slice_bytes=SLICE)], *packed(weights_of(1), 1)
    )

    class Broken(TcpRail):
        def put(self, version, where, data):
            raise ConnectionError("no route")

    gone = Link(Address("127.0.0.1", 9, "x"), [TcpRail(Address("127.0.0.1", 9, "x"))])
    broken = Link(receiver.address, [Broken(receiver.address)], slice_bytes=SLICE, timeout_s=0.5)
    found = publish([broken, gone], *packed(weights_of(2), 2))
    assert "slices in 0.5 s; tcp: no route" in found[0] and "refused" in found[1]
    assert replica.version == 1
    with pytest.raises(SyncError, match="lacks"):
        broken.ask("commit", version=2)
    # And afterwards it goes on.
    good = Link(receiver.address, [TcpRail(receiver.address)], slice_bytes=SLICE)
    assert not isinstance(publish([good], *packed(weights_of(2), 2))[0], str) and replica.version == 2


def test_a_stranger_gets_nowhere(engine):
    replica, receiver = engine
    with pytest.raises(SyncError, match="wrong token"):
        connect(receiver.address._replace(token="guess"))
    link = Link(receiver.address, [TcpRail(receiver.address)])
    for message in ({"do": "begin"}, {"do": "commit", "version": 3}, {"do": "missing", "version": 0}):
        with pytest.raises((SyncError, OSError)):
            link.ask(**message)
    assert replica.version == -1
    with pytest.raises(SyncError, match="no weights have arrived"), replica.reading():
        pass


def test_no_reading_holds_two_versions():
    """Readers without a pause while versions come one after the other; one keeps an old one open."""
    replica = Replica()
    readings, wrong, over = 0, [], threading.Event()
    manifest = manifest_of(weights_of(0), 0)

    def read():
        nonlocal readings
        while not over.is_set():
            with replica.reading() as (version, weights):
                stamp = weights["stamp"]
                if not (stamp == version).all():
                    wrong.append(version)
                readings += 1

    def write(version):
        made = Manifest(version, manifest.entries, manifest.size)
        replica.begin(made, SLICE)
        _, buffer = packed(weights_of(version), version)
        for offset, size in Random(version).sample(made.slices(SLICE), len(made.slices(SLICE))):
            data = buffer[offset : offset + size]
            replica.place(version, offset, data, zlib.crc32(data))
        replica.commit(version)

    write(0)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for one in readers:
        one.start()
    version = 0
    while readings < 10_000:
        version += 1
        write(version)
    over.set()
    for one in readers:
        one.join()
    assert version > 20 and not wrong
    with replica.reading() as (held, weights):
        write(version + 1)
        assert (weights["stamp"] == held).all() and replica.version == version + 1


def test_slow_rails_take_less_and_a_recovered_one_is_found(engine, monkeypatch):
    """By a clock of their own: what a rail takes is what it is given to take."""
    _, receiver = engine
    # A machine that is busy elsewhere makes none of them late.
    monkeypatch.setattr(spray, "PATIENCE_S", 5.0)

    class Slow(TcpRail):
        wait_s = 0.002

        def put(self, version, where, data):
            time.sleep(self.wait_s)

    fast, slow = Slow(receiver.address, "fast"), Slow(receiver.address, "slow")
    slow.wait_s = 0.012
    sprayer = Sprayer([fast, slow])
    slices = [Slice(SLICE * i, SLICE) for i in range(200)]
    buffer = memoryview(bytearray(SLICE * 200))
    sent = sprayer.send(1, slices, buffer)
    assert 2 * sent.lanes["slow"].slices < sent.lanes["fast"].slices
    before = {name: lane.slices for name, lane in sent.lanes.items()}
    slow.wait_s, fast.wait_s = 0.001, 0.006
    again = sprayer.send(2, slices, buffer)
    assert again.lanes["slow"].slices - before["slow"] > again.lanes["fast"].slices - before["fast"]
