"""`earlyfusion prepare`: limits, duplicates, interruption, checksums."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig

from .prepare_cases import digest, killed, main, prepare, samples, skipped, words_of
from .shard_files import dump, picture

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def album(tmp_path):
    """40 captioned pictures in folders, one text, and seven things that are wrong."""
    root = tmp_path / "album"
    for i in range(40):
        folder = root / f"part {i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        form, end = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))[i % 3]
        (folder / f"pic.{i:02d}.{end}").write_bytes(picture(i, (30 + i, 40), form))
        (folder / f"pic.{i:02d}.txt").write_text(f"picture number {i}", encoding="utf-8")
    for path in root.rglob("pic.*"):  # a dot in the stem would split the key
        path.rename(path.with_name(path.name.replace("pic.", "pic-")))
    (root / "notes.md").write_text("# notes\n")
    (root / "twin.jpg").write_bytes((root / "part 0" / "pic-00.jpg").read_bytes())
    (root / "twin.txt").write_text("picture number 0")
    for name, data, words in (
        ("broken.jpg", picture(1)[:200], b"half"),
        ("empty.jpg", b"", b"nothing"),
        ("latin.jpg", picture(2), "café".encode("latin-1")),
        ("blank.jpg", picture(3), b"  "),
    ):
        (root / name).write_bytes(data)
        (root / name).with_suffix(".txt").write_bytes(words)
    (root / "alone.jpg").write_bytes(picture(4))
    (root / "box.jpg").write_bytes(picture(5))
    (root / "box.json").write_bytes(dump({"boxes": [[0, 0, 999, 9]], "labels": ["x"]}))
    return root


def test_a_folder_becomes_shards_and_everything_left_out_is_named(tmp_path, album):
    made = prepare(tmp_path, album)
    out = tmp_path / "out"
    texts = {sample.text for sample in samples(out)}
    assert texts == {f"\npicture number {i}" for i in range(40)} | {"# notes"}
    assert made["samples"] == 41 and made["items"] == 48 and made["formats"] == {"caption": 40, "text": 1}
    reasons = {entry["from"]: entry["reason"] for entry in skipped(out)}
    assert reasons == {
        "alone": "missing_member",
        "blank": "empty_text",
        "box": "box_outside",
        "broken": "corrupt_image",
        "empty": "empty_file",
        "latin": "encoding",
        "twin": "duplicate",
    }
    assert made["skipped"] == {reason: 1 for reason in reasons.values()}


def test_counts_are_those_of_encoding(tmp_path, album):
    made = prepare(tmp_path, album)
    words, vision = Tokenizer.load(tmp_path / "tokenizer"), VisionConfig.preset("tiny")
    documents = [encode(sample, words, vision) for sample in samples(tmp_path / "out")]
    assert made["tokens"] == sum(map(len, documents)) and made["patches"] == sum(
        d.num_patches for d in documents
    )


def test_limits_cut_shards_and_a_large_sample_has_its_own(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    for i in range(25):
        (root / f"{i:02d}.txt").write_text(f"{i} " + "x" * (20_000 if i == 7 else 300))
    made = prepare(tmp_path, root, "out", "--shard-mb", 0.01, "--shard-samples", 6)
    counts = [entry["samples"] for entry in made["shards"]]
    assert sum(counts) == 25 and max(counts) == 6 and counts.count(1) >= 1
    assert [entry["samples"] for entry in made["shards"] if entry["content_bytes"] > 20_000] == [1]
    assert [s.text.split()[0] for s in samples(tmp_path / "out")] == [str(i) for i in range(25)]


def test_the_result_does_not_depend_on_workers(tmp_path, album):
    for workers in (1, 2):
        prepare(tmp_path, album, f"w{workers}", "--shard-samples", 9, workers=workers)
    assert digest(tmp_path / "w1") == digest(tmp_path / "w2")


def test_shards_open_in_webdataset_itself(tmp_path, album):
    import webdataset

    made = prepare(tmp_path, album)
    urls = [str(tmp_path / "out" / entry["name"]) for entry in made["shards"]]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil"))
    assert len(theirs) == 41 and sum("jpg" in s or "png" in s or "webp" in s for s in theirs) == 40


# ---- interruption


@pytest.mark.parametrize(
    ("where", "count"),
    [("add", 1), ("add", 13), ("add", 30), ("add", 48), ("index", 1), ("index", 3)]
    + [("rename", n) for n in range(1, 11)],
)
def test_after_a_kill_the_same_command_ends_in_the_same_bytes(tmp_path, album, where, count):
    options = ["--shard-samples", "9"]
    prepare(tmp_path, album, "whole", *options)
    assert os.WTERMSIG(killed(words_of(tmp_path, album, "out", *options), where, count)) == signal.SIGKILL
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("shard-*.tar")}
    prepare(tmp_path, album, "out", *options)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    kept = [name for name, at in before.items() if (tmp_path / "out" / name).stat().st_mtime_ns == at]
    assert len(kept) >= len(before) - 1  # a tar whose index was not yet there is written again


def ended(group, seconds=15):
    """Whether every process of the group is gone within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_with_workers_at_any_moment(tmp_path, album, seed):
    options = ["--shard-samples", "3"]
    prepare(tmp_path, album, "whole", *options)
    command = [sys.executable, "-m", "earlyfusion.pipeline.cli", "prepare"]
    command += words_of(tmp_path, album, "out", *options, workers=2)
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    rng = np.random.default_rng(seed)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("shard-*.index.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(float(rng.uniform(0, 0.05)))
    os.kill(running.pid, signal.SIGKILL)  # only the parent: its workers must notice and end
    running.wait()
    assert ended(running.pid), "workers outlive a killed prepare"
    prepare(tmp_path, album, "out", *options, workers=2)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_a_finished_folder_is_left_alone_and_another_source_is_refused(tmp_path, album, capsys):
    prepare(tmp_path, album)
    before = digest(tmp_path / "out")
    prepare(tmp_path, album)
    assert digest(tmp_path / "out") == before and "already prepared" in capsys.readouterr().err
    (album / "more.txt").write_text("one more")
    with pytest.raises(
        DataError, match="another source or other options; take another folder or --overwrite"
    ):
        prepare(tmp_path, album)
    (tmp_path / "out" / "notes").mkdir()
    with pytest.raises(DataError, match=r"holds folders of its own \(notes\)"):
        prepare(tmp_path, album, "out", "--overwrite")
    (tmp_path / "out" / "notes").rmdir()
    assert prepare(tmp_path, album, "out", "--overwrite")["samples"] == 42


def test_files_of_the_user_are_never_deleted(tmp_path, album):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for options in ((), ("--overwrite",)):
        with pytest.raises(DataError, match="holds files of its own"):
            prepare(tmp_path, album, "out", *options)
    assert (tmp_path / "out" / "thesis.txt").is_file()


# ---- checksums


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "index"])
def test_verify_finds_every_kind_of_damage(tmp_path, album, harm):
    prepare(tmp_path, album, "out", "--shard-samples", 20)
    out = tmp_path / "out"
    main(["--verify", "--out", str(out)])
    shard = out / "shard-000001.tar"
    if harm == "flip":
        data = bytearray(shard.read_bytes())
        data[2000] ^= 1
        shard.write_bytes(data)
    elif harm == "cut":
        shard.write_bytes(shard.read_bytes()[:-10240])
    elif harm == "remove":
        shard.unlink()
    else:
        (out / "shard-000001.index.jsonl").write_bytes((out / "shard-000000.index.jsonl").read_bytes())
    words = {
        "flip": "checksum differs",
        "cut": "bytes, expected",
        "remove": "missing",
        "index": "of another shard",
    }
    with pytest.raises(DataError, match=rf"1 of 3 shards are damaged: shard-000001\.tar: .*{words[harm]}"):
        main(["--verify", "--out", str(out)])


# ---- errors of the user


def test_nothing_usable_says_why(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": " "}\n{"text": ""}\nno\n')
    with pytest.raises(
        DataError, match=r"none of 3 items can be used \(empty_text 2, bad_json 1\); see .*skipped\.jsonl"
    ):
        prepare(tmp_path, tmp_path / "d.jsonl")
    assert len(skipped(tmp_path / "out")) == 3


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_with_its_items(tmp_path, album, monkeypatch):
    script = tmp_path / "die.py"
    script.write_text(
        "import os, sys\n"
        "from earlyfusion.data.prepare import write as work\n"
        "real = work.Worker.outcome\n"
        "work.Worker.outcome = lambda self, number: os._exit(9) if number == 40 else real(self, number)\n"
        "from earlyfusion.pipeline.cli import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "prepare", *words_of(tmp_path, album, workers=2)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "a worker died" in done.stderr and "items 32 to 47" in done.stderr, (
        done.stderr
    )
    assert Path(tmp_path / "out").is_dir()
