"""`prepare --part i/n`, `--merge` and `--ray`: however the work is cut, the bytes are those of one run."""

import fcntl
import os
import shutil
import signal
import sys

import numpy as np
import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.prepare import workers
from earlyfusion.data.prepare.parts import PARTS
from earlyfusion.data.prepare.write import ShardSet

from .prepare_cases import digest, killed, main, prepare, words_of
from .shard_files import dump, picture

pytestmark = pytest.mark.usefixtures("own_cache")

ITEMS = 47
LIMITS = [("--shard-samples", 5), ("--shard-mb", 0.02), ("--shard-samples", 6, "--dedup", "none")]


@pytest.fixture
def source(tmp_path):
    """Nine pictures, then 38 texts of 5 to 9,000 letters: duplicates far apart and side by side, and bad rows
    at both ends."""
    root, rng = tmp_path / "source", np.random.default_rng(7)
    root.mkdir()
    for i in range(9):
        (root / f"{i}.png").write_bytes(picture(i % 7, (20 + i % 7, 30), "PNG"))
        (root / f"{i}.txt").write_text(f"picture {i % 7}")
    (root / "0.png").write_bytes(b"no picture")
    rows = [dump({"text": f"{i} " + "x " * int(rng.integers(1, 4500)), "prompt": "?"}) for i in range(38)]
    rows[12] = rows[13] = rows[37] = rows[3]
    rows[20] = b"{"
    rows[36] = dump({"text": " "})
    (root / "rows.jsonl").write_bytes(b"\n".join(rows))
    return root


def part(tmp_path, source, piece, *options, **settings):
    main(words_of(tmp_path, source, "out", "--part", piece, *options, **settings))


def merge(tmp_path):
    main(["--merge", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize("parts", [1, 2, 7, ITEMS + 3])
def test_parts_in_any_order_end_in_the_bytes_of_one_run(tmp_path, source, parts, options, capsys):
    made = prepare(tmp_path, source, "whole", *options)
    told = [line for line in capsys.readouterr().err.splitlines() if "without the field" in line]
    assert made["items"] == ITEMS and len(made["shards"]) >= 7 and len(told) == 1
    duplicates = made["skipped"].pop("duplicate", 0)
    assert made["skipped"] == {"corrupt_image": 1, "bad_json": 1, "empty_text": 1}
    assert duplicates == (0 if "none" in options else 4)  # three rows and a picture; the other is broken
    for number in np.random.default_rng(parts).permutation(parts):
        part(tmp_path, source, f"{number + 1}/{parts}", *options)
    merge(tmp_path)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole"), "and the parts are gone"
    assert told[0] in capsys.readouterr().err
    # What is done is not done again.
    merge(tmp_path)
    part(tmp_path, source, "1/2", *options)
    assert "already prepared" in capsys.readouterr().err
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "where", "count"),
    [("part", "part", n) for n in (1, 9, 23)]
    + [("part", "rename", n) for n in (1, 2, 5)]
    + [("merge", "add", n) for n in (1, 19, ITEMS)]
    + [("merge", "index", 2), ("merge", "delete", 1)]
    + [("merge", "rename", n) for n in (1, 6, 26)],
)
def test_a_killed_part_or_merge_goes_on(tmp_path, source, words, where, count):
    options = LIMITS[0]
    prepare(tmp_path, source, "whole", *options)
    part(tmp_path, source, "1/2", *options)
    second = words_of(tmp_path, source, "out", "--part", "2/2", *options)
    if words == "part":
        assert os.WTERMSIG(killed(second, where, count)) == signal.SIGKILL
    main(second)
    if words == "merge":
        assert (
            os.WTERMSIG(killed(["--merge", "--out", str(tmp_path / "out")], where, count)) == signal.SIGKILL
        )
    merge(tmp_path)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_what_a_part_has_stored_is_not_read_again(tmp_path, source, capsys):
    killed(words_of(tmp_path, source, "out", "--part", "2/2", *LIMITS[0]), "part", 13)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.items")}
    part(tmp_path, source, "2/2", *LIMITS[0])
    assert len(kept) == 2 and all(path.stat().st_mtime_ns == at for path, at in kept.items())
    assert "going on at item 33: 2 files kept" in capsys.readouterr().err


def test_a_merge_names_every_part_that_is_not_there(tmp_path, source):
    with pytest.raises(DataError, match=r"holds no parts; run prepare SRC --out .* --part i/n for every i"):
        merge(tmp_path)
    for piece in ("2/5", "3/5"):
        part(tmp_path, source, piece)
    for file in (tmp_path / "out" / PARTS / "3-of-5").glob("*.items"):
        file.unlink()
    with pytest.raises(
        DataError, match=r"out: 4 of 5 parts missing or unfinished: 1,3,4,5; run --part i/5 for"
    ):
        merge(tmp_path)


def test_parts_that_do_not_belong_together_are_refused(tmp_path, source):
    part(tmp_path, source, "1/2")
    with pytest.raises(
        DataError, match=r"holds part 1 of a cut into 2, not 3; give every part the same, delete"
    ):
        part(tmp_path, source, "2/3")
    with pytest.raises(DataError, match="holds part 1 of another source or other options; give every part"):
        part(tmp_path, source, "2/2", "--shard-samples", 9)
    # Two that began at the same moment in an empty folder meet at the merge.
    shutil.copytree(tmp_path / "out" / PARTS / "1-of-2", tmp_path / "kept")
    shutil.rmtree(tmp_path / "out")
    part(tmp_path, source, "2/2", "--shard-samples", 9)
    shutil.copytree(tmp_path / "kept", tmp_path / "out" / PARTS / "1-of-2")
    with pytest.raises(DataError, match="holds part 2 of another source or other options"):
        merge(tmp_path)
    with pytest.raises(DataError, match="holds parts of a preparation: join them with --merge, or delete"):
        prepare(tmp_path, source)
    prepare(tmp_path, source, "whole")
    with pytest.raises(DataError, match="holds shards of another source or other options"):
        main(words_of(tmp_path, source, "whole", "--part", "1/2", "--shard-samples", 9))


@pytest.mark.parametrize("piece", ["3", "0/2", "3/2", "-1/2", "1/2/3", "a/b"])
def test_a_part_that_is_none(tmp_path, source, piece):
    with pytest.raises(DataError, match=f"--part {piece}: expected i/n with i from 1 to n"):
        main([str(source), "--out", str(tmp_path / "out"), f"--part={piece}"])
    with pytest.raises(DataError, match="--overwrite goes with no --part"):
        part(tmp_path, source, "1/2", "--overwrite")


def test_one_worker_a_part_and_no_merge_beside_it(tmp_path, source):
    folder = tmp_path / "out" / PARTS / "1-of-2"
    part(tmp_path, source, "1/2")
    with (folder / ".lock").open() as own, (tmp_path / "out" / ".lock").open() as shared:
        fcntl.flock(own, fcntl.LOCK_EX)
        fcntl.flock(shared, fcntl.LOCK_SH)
        with pytest.raises(DataError, match="1-of-2: another prepare is at work there"):
            part(tmp_path, source, "1/2")
        part(tmp_path, source, "2/2")
        with pytest.raises(DataError, match="out: another prepare is at work there"):
            merge(tmp_path)
    merge(tmp_path)


@pytest.mark.parametrize("harm", ["flip", "cut", "line"])
def test_a_damaged_file_of_a_part_is_named(tmp_path, source, harm):
    for piece in ("1/2", "2/2"):
        part(tmp_path, source, piece)
    (file,) = (tmp_path / "out" / PARTS / "2-of-2").glob("*.items")
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[data.index(b"x x x")] ^= 1  # in a text
    file.write_bytes({"flip": data, "cut": data[:-9000], "line": data[5:]}[harm])
    with pytest.raises(
        DataError, match=r"000000023-000000047\.items: damaged \(.*; delete it, run --part 2/2"
    ):
        merge(tmp_path)
    file.unlink()
    part(tmp_path, source, "2/2")
    merge(tmp_path)
    prepare(tmp_path, source, "whole")
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


# ---- Ray


@pytest.fixture
def nodes(monkeypatch):
    """A cluster of two nodes of one CPU: (cluster, its second node)."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sizes = {"num_cpus": 1, "object_store_memory": 80 << 20}  # bytes; the least Ray takes is 75 MiB
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    yield cluster, cluster.add_node(**sizes)
    cluster.shutdown()


def on_every_node(monkeypatch, folder):
    """Each task leaves a file with the name of its node in `folder`."""
    folder.mkdir()
    real = workers.work_on_node

    def spied(make, numbers):
        import ray

        (folder / ray.get_runtime_context().get_node_id()).touch()
        return real(make, numbers)

    monkeypatch.setattr(workers, "work_on_node", spied)
    monkeypatch.setattr(workers, "CHUNK", 2)


@pytest.mark.slow
def test_the_nodes_of_a_cluster_give_the_bytes_of_one_process(tmp_path, source, nodes, monkeypatch):
    options = LIMITS[0]
    prepare(tmp_path, source, "whole", *options)
    on_every_node(monkeypatch, tmp_path / "nodes")
    # From another folder, with names relative to it: the workers stand elsewhere.
    monkeypatch.chdir(tmp_path)
    address = ["--ray", nodes[0].address]
    main(
        [
            "source",
            "--out",
            "ray",
            "--tokenizer",
            "tokenizer",
            "--vision",
            "tiny",
            *address,
            *map(str, options),
        ]
    )
    assert digest(tmp_path / "ray") == digest(tmp_path / "whole")
    assert len(list((tmp_path / "nodes").iterdir())) == 2
    for piece in ("2/2", "1/2"):
        part(tmp_path, source, piece, *address, *options)
    merge(tmp_path)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")

    # A node that is lost on the way: what it had is done again by the other.
    real = ShardSet.add

    def losing(self, outcome):
        if outcome.number == 5:
            nodes[0].remove_node(nodes[1])
        return real(self, outcome)

    monkeypatch.setattr(ShardSet, "add", losing)
    prepare(tmp_path, source, "lost", *address, *options)
    assert digest(tmp_path / "lost") == digest(tmp_path / "whole")

    # A worker's own mistake is one line: such as a source that is not there.
    def failing(make, numbers):
        raise DataError("source: does not exist")

    monkeypatch.setattr(workers, "work_on_node", failing)
    with pytest.raises(DataError, match=r"a worker failed at items 0 to 1 \(source: does not exist\); run"):
        prepare(tmp_path, source, "failing", *address)


def test_no_cluster_and_no_ray_are_one_line_each(tmp_path, source, monkeypatch):
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        with pytest.raises(DataError, match=f"--ray {address}: no cluster there .* start one with ray start"):
            prepare(tmp_path, source, "out", "--ray", address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"--ray needs ray; pip install 'earlyfusion\[ray\]'"):
        prepare(tmp_path, source, "out", "--ray", "auto")
