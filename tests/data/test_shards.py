"""Tar walk, index, fetching: against the standard library's tarfile and webdataset's own iteration."""

import gzip
import http.server
import json
import tarfile
import threading
from functools import partial

import fsspec
import numpy as np
import pytest
import webdataset

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.shards.fetch import expand
from earlyfusion.data.shards.read import ShardIndex, Shards, index_lines, index_name, scan_tar, write_index
from earlyfusion.data.sources.base import Split

from .shard_files import captions, write_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


pytestmark = pytest.mark.usefixtures("own_cache")


def scan(path):
    data = path.read_bytes()
    return data, scan_tar(lambda offset, size: data[offset : offset + size], len(data))


def indexed(folder, members, samples=None):
    """a.tar with its index, and an index.json that lists it with so many samples."""
    path = write_tar(folder / "a.tar", members, tarfile.USTAR_FORMAT)
    size, found = path.stat().st_size, scan(path)[1]
    write_index(folder / index_name("a.tar"), index_lines(found, "a.tar", size))
    listed = {"name": "a.tar", "samples": samples or len(found.samples), "bytes": size}
    (folder / "index.json").write_text(json.dumps({"earlyfusion_shards": 1, "shards": [listed]}))
    return path


def everything(shards):
    """Key -> extension -> bytes, in order, of all shards."""
    groups = [shards.group(s, i) for s in range(len(shards.urls)) for i in range(shards.usable[s])]
    return {group.key: {name: group.fetch(name) for name in group.sizes} for group in groups}


@pytest.mark.parametrize("form", FORMATS)
def test_the_walk_finds_what_tarfile_finds(tmp_path, form):
    rng = np.random.default_rng(3)
    names = [f"a/{'d' * 60}/{'n' * 90}-{i}.jpg" if i % 3 == 0 else f"b/ü{i}.tar.bin" for i in range(20)]
    members = [(name, rng.bytes(int(rng.integers(0, 3000)))) for name in names]
    path = write_tar(tmp_path / "x.tar", members, FORMATS[form])
    data, found = scan(path)
    with tarfile.open(path) as tar:
        expected = {info.name: (info.offset_data, info.size) for info in tar}
    mine = {f"{key}.{end}": where for key, ends in found.samples.items() for end, where in ends.items()}
    assert mine == expected and not found.cut and not found.refused
    assert all(data[o : o + s] == dict(members)[name] for name, (o, s) in mine.items())


def test_samples_are_those_of_webdataset_in_its_order(tmp_path):
    members = [
        *captions(7),
        ("deep/a.b/c.left.png", b"1"),
        ("deep/a.b/c.right.png", b"2"),
        ("__meta__", b"no"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False))
    mine = everything(Shards(str(path)))
    assert list(mine) == [sample["__key__"] for sample in theirs]
    assert [dict(m) for m in mine.values()] == [
        {k: v for k, v in sample.items() if not k.startswith("__")} for sample in theirs
    ]


def test_an_index_is_opened_when_a_sample_of_its_shard_is_asked_for_and_not_before(tmp_path, monkeypatch):
    indexed(tmp_path, [(f"{i:06d}.txt", b"x" * 700) for i in range(2_000)])
    write_tar(tmp_path / "b.tar", captions(3))
    (tmp_path / "index.json").unlink()
    opened, real = [], ShardIndex.__init__
    monkeypatch.setattr(ShardIndex, "__init__", lambda self, path: opened.append(path) or real(self, path))
    shards = Shards(str(tmp_path))
    assert shards.counts == [2_000, 3] and not opened
    group = shards.group(0, 1_999)
    assert group.key == "001999" and group.fetch("txt") == b"x" * 700
    assert opened == [tmp_path / "a.index.jsonl"]


@pytest.mark.parametrize("name", ["../a.tar", "/etc/a.tar", "x/a.tar", ".a.tar", None])
def test_a_hostile_index_json_is_refused(tmp_path, name):
    path = indexed(tmp_path, captions(3)).with_name("index.json")
    path.write_text(path.read_text().replace('"a.tar"', json.dumps(name)))
    with pytest.raises(DataError, match="plain file names" if name else "damaged"):
        Shards(str(tmp_path))


@pytest.mark.parametrize("samples", [2, 4, 10**12])
def test_an_index_json_that_counts_otherwise_than_the_index_is_not_believed(tmp_path, samples):
    indexed(tmp_path, captions(3), samples)
    assert Shards(str(tmp_path)).usable == [3]


def test_a_listed_shard_that_is_torn_replaced_or_gone(tmp_path):
    path = indexed(tmp_path, captions(9))
    path.write_bytes(path.read_bytes()[:5000])
    torn = Shards(str(tmp_path))
    assert 0 < torn.usable[0] < 9 and torn.cut == [True]
    write_tar(path, captions(40))
    assert Shards(str(path)).usable == [40], "an index of another size is not used"
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        Shards(str(tmp_path))


@pytest.mark.parametrize("row", ["5", '["k", [["txt", -1, 4]]]', "[" * 9999])
def test_a_damaged_row_of_an_index_is_one_bad_sample(tmp_path, row):
    index = indexed(tmp_path, captions(3)).with_suffix(".index.jsonl")
    lines = index.read_text().splitlines()
    index.write_text("\n".join([*lines[:2], row, *lines[3:], ""]))
    shards = Shards(str(tmp_path))
    assert shards.usable == [3] and shards.key(0, 0) == "000000" and shards.key(0, 2) == "000002"
    with pytest.raises(BadSample, match=r"a\.index\.jsonl, line 3") as caught:
        shards.group(0, 1)
    assert caught.value.reason == "bad_index"


# ---- where shards come from


@pytest.fixture
def place(tmp_path):
    """A shard of five samples, and the same in every other form: place("http") -> what a recipe names."""
    plain = write_tar(tmp_path / "a.tar", captions(5))
    data = plain.read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data))
    fsspec.filesystem("memory").pipe("/set/a.tar", data)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "glob": f"{tmp_path}/?.tar",
            "braces": f"{tmp_path}/{{a..a}}.tar",
            "file": f"file://{tmp_path}/a.tar",
            "gz": f"{tmp_path}/a.tar.gz",
            "zst": f"{tmp_path}/a.tar.zst",
            "pipe": f"pipe:echo run >> {tmp_path}/runs; gzip -c {plain}",
            "memory": "memory://set/a.tar",
            "memory glob": "memory://set/*.tar",
            "memory folder": "memory://set",
            "http": f"http://127.0.0.1:{server.server_port}/a.tar",
        }.__getitem__
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    "glob braces file gz zst pipe memory".split() + ["memory glob", "memory folder", "http"],
)
def test_a_shard_is_the_same_wherever_it_lies_and_is_fetched_once(tmp_path, place, name, monkeypatch):
    expected = everything(Shards(str(tmp_path / "a.tar")))
    if name == "zst":
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress((tmp_path / "a.tar").read_bytes())
        (tmp_path / "a.tar.zst").write_bytes(packed)
    assert everything(Shards(place(name))) == expected
    monkeypatch.setattr("earlyfusion.data.shards.read.scan_tar", None)
    assert everything(Shards(place(name))) == expected, "index and copy are kept"
    assert name != "pipe" or (tmp_path / "runs").read_text() == "run\n"
    if name == "http":
        with pytest.raises(DataError, match="no such file"):
            Shards(place(name).replace("a.tar", "b.tar"))


def test_lists_keep_their_order(tmp_path):
    urls = [str(write_tar(tmp_path / f"s-{i:03d}.tar", captions(2, 10 * i))) for i in range(3)]
    assert expand(str(tmp_path)) == urls == expand(f"{tmp_path}/s-{{000..002}}.tar")
    listed = Shards(None, listed=[urls[2], f"{tmp_path}/s-{{000..001}}.tar"])
    assert list(everything(listed))[:2] == ["000020", "000021"] and sum(listed.usable) == 6


def test_a_failing_pipe_is_an_error_and_leaves_nothing(tmp_path):
    path = write_tar(tmp_path / "a.tar", captions(50))
    with pytest.raises(DataError, match="the command failed"):
        Shards(f"pipe:head -c 20000 {path}; exit 3")
    assert not [p for p in (tmp_path / "cache" / "shards").iterdir() if not p.name.startswith(".")]


# ---- damage


@pytest.mark.parametrize("seed", range(4))
def test_samples_before_a_cut_are_usable_and_the_cut_is_one_bad_sample(tmp_path, seed):
    whole = write_tar(tmp_path / "w.tar", captions(12), tarfile.USTAR_FORMAT)
    expected = everything(Shards(str(whole)))
    data = whole.read_bytes()
    with tarfile.open(whole) as tar:
        ends = [info.offset_data + -(-info.size // 512) * 512 for info in tar]
    cut = int(np.random.default_rng(seed).integers(600, ends[-1]))
    (tmp_path / "c.tar").write_bytes(data[:cut])
    shards = Shards(str(tmp_path / "c.tar"))
    got = everything(shards)
    whole_samples = {key for i, key in enumerate(expected) if ends[2 * i + 1] <= cut}
    assert whole_samples <= set(got) and all(got[key] == expected[key] for key in whole_samples)
    assert len(got) <= len(whole_samples) + 1 and shards.cut == [True]
    with pytest.raises(BadSample, match=r"c\.tar: the archive ends early") as caught:
        shards.group(0, shards.usable[0])
    assert caught.value.reason == "truncated_tar" and shards.counts == [len(got) + 1]


def test_a_torn_gzip_gives_what_came_before(tmp_path):
    data = gzip.compress(write_tar(tmp_path / "w.tar", captions(30), tarfile.USTAR_FORMAT).read_bytes())
    (tmp_path / "c.tar.gz").write_bytes(data[: len(data) // 2])
    shards = Shards(str(tmp_path / "c.tar.gz"))
    assert 5 < shards.usable[0] < 30 and shards.cut == [True]


def test_a_shard_that_shrank_after_it_was_opened_is_a_bad_sample(tmp_path):
    path = write_tar(tmp_path / "a.tar", captions(5))
    shards = Shards(str(path))
    with path.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(BadSample, match="only") as caught:
        shards.group(0, 4).fetch("txt")
    assert caught.value.reason == "truncated_tar"


# ---- held-out samples


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_every_sample_is_on_exactly_one_side(fraction):
    counts = [1, 0, 7, 100, 1, 33, 999]
    split = Split([f"s{i}" for i in range(7)], counts, fraction)
    train = [split.train(i) for i in range(split.train_len)]
    held = [split.heldout(i) for i in range(split.heldout_len)]
    everyone = [(s, i) for s, count in enumerate(counts) for i in range(count)]
    assert sorted(train + held) == everyone and train == sorted(train)
    assert abs(len(held) - fraction * sum(counts)) <= len(counts)
    with pytest.raises(IndexError):
        split.train(split.train_len)


def test_more_shards_do_not_move_samples_of_the_old_ones():
    few, more = Split(["a", "b"], [50, 70], 0.2), Split(["a", "b", "c"], [50, 70, 10], 0.2)
    held = [{s.heldout(i) for i in range(s.heldout_len)} for s in (few, more)]
    assert held[0] == {item for item in held[1] if item[0] < 2}


def test_many_small_files_hold_out_the_fraction_on_average():
    split = Split([f"file-{i}" for i in range(3000)], [1] * 3000, 0.1)
    assert abs(split.heldout_len - 300) < 4 * (3000 * 0.09) ** 0.5  # four standard deviations


def test_braces_that_stand_for_a_billion_files_are_refused_at_once():
    for path in (
        "a-{0..999999999}.tar",
        "{0..9999}{0..9999}.tar",
        "{a,b}" * 40 + ".tar",
        "{a..z}" * 9 + ".tar",
    ):
        with pytest.raises(DataError, match="more than 1,000,000 files"):
            Shards(path)
