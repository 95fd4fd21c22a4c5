"""Shards in an object store: a real S3 server (moto's) on this machine that fails on purpose."""

import shutil
import sys
import threading
import time
import urllib.request

import fsspec
import pytest

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.shards import remote
from earlyfusion.data.shards.read import Shards
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.pipeline.report import sheet

from .prepare_cases import digest, main, prepare, words_of
from .shard_files import captions, write_tar

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")

SAMPLES = 60


class Store:
    """The server, what it was asked for as (method, path, bytes of a range or None), and how it fails
    next."""

    def __init__(self):
        self.asked, self.faults = [], []
        self._app = moto.DomainDispatcherApplication(moto.create_backend_app)

    def __call__(self, environ, start):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        first, _, last = environ.get("HTTP_RANGE", "").removeprefix("bytes=").partition("-")
        self.asked.append((method, path, int(last) - int(first) + 1 if last else None))
        fault = (
            self.faults.pop(0)
            if self.faults and method == "GET" and path.endswith((".tar", ".bin"))
            else None
        )
        if fault == "slow":
            time.sleep(1.5)
        elif isinstance(fault, tuple):
            start(f"{fault[0]} no", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{fault[1]}</Code><Message>on purpose</Message></Error>".encode()]
        told = []
        body = b"".join(self._app(environ, lambda status, headers, _=None: told.append((status, headers))))
        start(*told[0])
        return [body[: len(body) // 2] if fault == "short" else body]

    def gets(self):
        """What was read of shards since the last call: the bytes of each range, None for a whole one."""
        found = [size for method, path, size in self.asked if method == "GET" and path.endswith(".tar")]
        self.asked.clear()
        return found


BUSY = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "short": "short",
    "slow": "slow",
}


@pytest.fixture
def store(tmp_path, own_cache, monkeypatch):
    """s3://bucket/set with what `prepare` makes of SAMPLES pictures, and the same in tmp_path/set."""
    made = Store()
    server = serving.make_server("127.0.0.1", 0, made, threaded=True)
    server.RequestHandlerClass.log_request = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.address = f"http://127.0.0.1:{server.server_port}"
    for name, value in (
        ("AWS_ENDPOINT_URL", made.address),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    # The tries of s3fs and botocore are off, so that it is ours that are seen; a second is too slow.
    settings = {"config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 1}}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(remote, "PAUSES_S", (0.01, 0.02, 0.04))
    s3fs.S3FileSystem.clear_instance_cache()
    write_tar(tmp_path / "in.tar", [*captions(SAMPLES), ("zz.txt", b" ")])
    prepare(tmp_path, tmp_path / "in.tar", "set", "--shard-samples", 25)
    s3 = fsspec.filesystem("s3")
    s3.mkdir("bucket")
    s3.put(str(tmp_path / "set"), "bucket/", recursive=True)
    made.gets()
    yield made
    # The server's buckets belong to the process.
    urllib.request.urlopen(f"{made.address}/moto-api/reset", data=b"")
    server.shutdown()
    s3fs.S3FileSystem.clear_instance_cache()


def source(path, **options):
    return build_source(
        SourceConfig(name="mine", kind="webdataset", path=str(path), options=options), val_fraction=0.0
    )


def read_all(shards):
    groups = [shards.group(s, i) for s in range(len(shards.urls)) for i in range(shards.counts[s])]
    return {group.key: {name: group.read(name) for name in group.sizes} for group in groups}


@pytest.mark.parametrize("byte_ranges", [False, True])
def test_training_draws_the_same_batches_from_the_store(tmp_path, store, loader, byte_ranges):
    batches = []
    for path, options in ((tmp_path / "set", {}), ("s3://bucket/set", {"byte_ranges": byte_ranges})):
        mine = SourceConfig(name="mine", kind="webdataset", path=str(path), options=options)
        one = loader(DataConfig(sources=[mine], val_fraction=0.1, prefetch="none"))
        batches.append([batch for _ in range(6) for batch in one.next_step()])
    for here, there in zip(*batches, strict=True):
        assert here.ids.equal(there.ids) and here.patches.equal(there.patches)
    assert len(list((tmp_path / "cache" / "shards").glob("*.tar"))) == (0 if byte_ranges else 3)


def test_a_sample_is_one_request_of_its_own_bytes_and_a_walk_takes_few(tmp_path, store):
    local, far = Shards(str(tmp_path / "set")), Shards("s3://bucket/set", ranges=True)
    assert store.gets() == [], "opening reads no shard"
    for position in (17, 3, 11):
        group, members = far.group(0, position), local.index(0).sample(position)[1]
        assert {name: group.read(name) for name in group.sizes} == {
            name: local.group(0, position).read(name) for name in members
        }
        ends = [at for offset, size in members.values() for at in (offset, offset + size)]
        assert store.gets() == [max(ends) - min(ends)]
    assert read_all(far) == read_all(local)
    assert len(store.gets()) <= 30 < SAMPLES  # 3 shards: ranges double from one sample of 25 to the whole
    # Without its index, or beside one of another size, a shard is copied as before.
    s3 = fsspec.filesystem("s3")
    s3.rm("bucket/set/shard-000000.index.jsonl")
    s3.copy("bucket/set/shard-000002.index.jsonl", "bucket/set/shard-000001.index.jsonl")
    shutil.rmtree(tmp_path / "cache")
    assert read_all(Shards("s3://bucket/set", ranges=True)) == read_all(local)
    assert len(list((tmp_path / "cache" / "shards").glob("*.tar"))) == 2


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("fault", BUSY)
def test_a_server_that_fails_for_the_moment_costs_no_sample(tmp_path, store, fault, ranges):
    expected = read_all(Shards(str(tmp_path / "set")))
    far = Shards("s3://bucket/set", ranges=ranges)
    store.faults[:] = [BUSY[fault]] * 3
    assert read_all(far) == expected and not store.faults
    store.faults[:] = [BUSY[fault]] * 4
    with pytest.raises(
        DataError, match=r"s3://bucket/set/shard-000000\.tar: cannot be read, 4 tries \("
    ) as told:
        shutil.rmtree(tmp_path / "cache")
        read_all(Shards("s3://bucket/set", ranges=ranges))
    assert "\n" not in str(told.value) and not store.faults
    assert read_all(Shards("s3://bucket/set", ranges=ranges)) == expected, "nothing torn was kept"


@pytest.mark.parametrize("fault", ["503", "short"])
def test_a_web_server_that_breaks_off_is_asked_again(tmp_path, store, fault):
    fsspec.filesystem("s3").chmod("bucket/set/shard-000001.tar", "public-read")
    store.faults[:] = [BUSY[fault]] * 3
    far = Shards(f"{store.address}/bucket/set/shard-000001.tar")
    assert read_all(far) == read_all(Shards(str(tmp_path / "set" / "shard-000001.tar"))) and not store.faults


@pytest.mark.parametrize("pieces", [1, 3])
def test_prepare_reads_the_store_and_ends_in_the_bytes_of_the_folder(tmp_path, store, pieces):
    prepare(tmp_path, tmp_path / "set", "local", "--shard-samples", 7)
    store.faults[:] = [BUSY["500"], BUSY["short"]]
    for piece in range(1, pieces + 1):
        extra = ["--part", f"{piece}/{pieces}"] if pieces > 1 else []
        main(words_of(tmp_path, "s3://bucket/set", "far", "--shard-samples", 7, *extra))
    if pieces > 1:
        main(["--merge", "--out", str(tmp_path / "far")])
    assert digest(tmp_path / "far") == digest(tmp_path / "local") and not store.faults
    assert not list((tmp_path / "cache" / "shards").glob("*.tar")), "no shard is copied"


def test_an_outage_stops_prepare_and_loses_no_item(tmp_path, store):
    prepare(tmp_path, tmp_path / "set", "local")
    store.faults[:] = [BUSY["503"]] * 4
    with pytest.raises(DataError, match="cannot be read, 4 tries"):
        prepare(tmp_path, "s3://bucket/set", "far")
    prepare(tmp_path, "s3://bucket/set", "far")
    assert digest(tmp_path / "far") == digest(tmp_path / "local")


def test_inspect_copies_nothing(tmp_path, store, capsys):
    sheet.inspect("s3://bucket/set", samples=2)
    shown = capsys.readouterr().out
    assert (
        f"{SAMPLES} samples" in shown and f"{SAMPLES} caption" in shown and "left out: 1 empty_text" in shown
    )
    assert len(store.gets()) == 2 and not list((tmp_path / "cache").rglob("*.tar"))


def test_what_is_missing_or_denied_is_one_line_at_once(tmp_path, store, monkeypatch):
    for path, told in (
        ("s3://bucket/none.tar", r"s3://bucket/none\.tar: no such file"),
        ("s3://bucket/none", "no shard at s3://bucket/none: expected"),
        ("s3://other/set", "no shard at s3://other/set: expected"),
    ):
        with pytest.raises(DataError, match=told):
            source(path)
    store.faults[:] = [(403, "AccessDenied")] * 2
    for ranges in (False, True):
        with pytest.raises(
            DataError, match=r"shard-000000\.tar: access denied \(PermissionError: on purpose\); check"
        ):
            Shards("s3://bucket/set", ranges=ranges).group(0, 0).read("txt")
    assert not store.faults, "asked once each"

    # Deleted after it was opened: about the source, and so no sample that may be left out.
    far = Shards("s3://bucket/set", ranges=True)
    group = far.group(0, 0)
    far.group(0, 1).read("txt")
    fsspec.filesystem("s3").rm("bucket/set/shard-000000.tar")
    with pytest.raises(DataError, match=r"shard-000000\.tar: no such file any more"):
        group.read("txt")

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"access denied \(NoCredentialsError: .*AWS_ACCESS_KEY_ID"):
        source("s3://bucket/set")


def test_a_store_without_its_package_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        DataError, match=r"s3://bucket/set/index\.json: .*s3fs.*; pip install 'earlyfusion\[shards\]'"
    ):
        source("s3://bucket/set")
