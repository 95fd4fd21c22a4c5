"""What is left out is counted by reason, logged with its place, and stops the run when it is too much."""

import json
from collections import Counter

import pytest
from PIL import Image as PILImage

from earlyfusion.data.errors import REASONS, DataError
from earlyfusion.data.loading.lane import Stream, Watch
from earlyfusion.data.loading.loader import append_skipped, read_skipped, skip_file
from earlyfusion.data.sources.folder import Folder

from .conftest import folder_config

BAD = {
    "broken.png": "corrupt_image",
    "empty.png": "empty_file",
    "latin.md": "encoding",
    "huge.png": "over_budget",
}
GOOD = 20
ENTRY = {"stage": 0, "step": 1, "lane": 0, "source": "a", "epoch": 0, "index": 5, "reason": "encoding"}


@pytest.fixture
def folder(tmp_path):
    """Twenty good pictures and one sample of each fault."""
    path = tmp_path / "pictures"
    path.mkdir()
    for i in range(GOOD):
        PILImage.new("RGB", (24, 24), (10 * i, 0, 0)).save(path / f"good{i}.png")
        (path / f"good{i}.txt").write_text(f"shade {i}")
    (path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (path / "empty.png").write_bytes(b"")
    (path / "latin.md").write_bytes(b"caf\xe9")
    PILImage.new("RGB", (200, 200)).save(path / "huge.png")
    for name in ("broken", "empty", "huge"):
        (path / f"{name}.txt").write_text(name)
    return path


@pytest.fixture
def build(loader, folder, tmp_path):
    def made(rank=0, world_size=1, **settings):
        config = folder_config(folder, **{"on_bad_sample": "skip", "max_bad_share": 1.0, **settings})
        sizes = {"length": 64, "tokens": 128, "max_patches": 64, "lanes": 2}
        return loader(config, rank=rank, world_size=world_size, log=skip_file(tmp_path, rank), **sizes)

    return made


def expected(one):
    """Every bad sample that the lanes have come to, from the order of the epochs: (lane, epoch, index) ->
    reason."""
    found = {}
    items = [item.key for item in one.sources["mine"].train]
    for lane, state in one.state_dict()["lanes"].items():
        stream = Stream(one.sources["mine"], one.spec, int(lane), Watch())
        for stream.cursor in range(state["streams"]["mine"]["cursor"]):
            epoch, index = stream.where()
            if items[index] in BAD:
                found[int(lane), epoch, index] = items[index]
    return found


@pytest.mark.parametrize("prefetch", ["none", "thread"])
def test_every_sample_left_out_is_counted_and_logged_with_its_reason(build, tmp_path, prefetch):
    one = build(prefetch=prefetch)
    for _ in range(8):
        one.next_step()
    one.close()
    entries = read_skipped(tmp_path)
    wanted = expected(one)
    assert {(e["lane"], e["epoch"], e["index"]) for e in entries} == set(wanted) and len(wanted) >= 8
    items = [item.key for item in one.sources["mine"].train]
    for entry in entries:
        name = items[entry["index"]]
        assert (
            entry["reason"] in REASONS
            and entry["source"] == "mine"
            and name.split(".")[0] in entry["message"]
        )
        assert entry["reason"] == BAD[name] and entry["key"] == name and entry["shard"].endswith(name)
        assert entry["stage"] == 0 and 1 <= entry["step"] <= 8
    assert one.stats()["skipped"] == Counter(entry["reason"] for entry in entries)


def test_a_resume_tells_nothing_twice_and_ranks_write_files_of_their_own(build, tmp_path):
    alone = build()
    for _ in range(8):
        alone.next_step()
    whole = read_skipped(tmp_path)
    skip_file(tmp_path).unlink()
    first = build()
    for _ in range(5):
        first.next_step()
        if first.step == 3:
            state = first.state_dict()
    second = build()  # the process died after step 5; its last checkpoint is of step 3
    second.load_state_dict(state)
    for _ in range(5):
        second.next_step()
    lines = skip_file(tmp_path).read_text().splitlines()
    assert len(lines) > len(whole), "steps 4 and 5 were told twice"
    assert read_skipped(tmp_path) == whole
    skip_file(tmp_path).unlink()
    for rank in range(2):
        one = build(rank=rank, world_size=2)
        for _ in range(8):
            one.next_step()
    assert sorted(path.name for path in tmp_path.glob("skipped*")) == ["skipped-rank1.jsonl", "skipped.jsonl"]
    assert read_skipped(tmp_path) == whole


def test_a_torn_last_line_is_left_alone(tmp_path):
    append_skipped(tmp_path / "new" / "skipped.jsonl", [ENTRY])
    with open(tmp_path / "new" / "skipped.jsonl", "a") as file:
        file.write(json.dumps(ENTRY)[:20])
    assert read_skipped(tmp_path / "new") == [ENTRY] and read_skipped(tmp_path) == []


def test_the_share_goes_by_what_was_read_since_the_stage_began_also_after_a_resume(build):
    one = build(max_bad_share=0.1)
    for _ in range(8):
        one.next_step()
    two = build(max_bad_share=0.1)
    two.load_state_dict(one.state_dict())
    steps = []
    for each in (one, two):
        with pytest.raises(DataError, match="max_bad_share"):
            while True:
                each.next_step()
        steps.append(each.step)
    assert steps[0] == steps[1]


def test_any_exception_in_one_sample_costs_that_sample_alone(build, monkeypatch):
    one, real = build(), Folder.get

    def get(self, index, epoch):
        if index % 5 == 0:
            raise ZeroDivisionError("nobody\nthought of it")
        return real(self, index, epoch)

    monkeypatch.setattr(Folder, "get", get)
    for _ in range(20):
        one.next_step()
    assert one.stats()["skipped"]["unexpected"] >= 5
    monkeypatch.setattr(Folder, "get", lambda self, index, epoch: 1 // 0)
    with pytest.raises(DataError, match=r"source 'mine'.*ZeroDivisionError"):
        build(on_bad_sample="raise").next_step()


def test_a_source_that_cannot_be_opened_is_named(build, monkeypatch):
    monkeypatch.setattr(Folder, "_scan", lambda self: 1 // 0)
    with pytest.raises(DataError, match=r"^source 'mine' \(folder .*\) cannot be opened \(ZeroDivisionError"):
        build()
