"""A run that is killed anywhere goes on bit for bit, at once, and reads nothing again."""

import json
import random
import sys
import time
from pathlib import Path

import pytest
from PIL import Image as PILImage

sys.path.insert(0, str(Path(__file__).parent))
from consumer import Reference, chained, killed_after

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.loader import Loader, merge_states
from earlyfusion.data.loading.mixture import Point, Schedule
from earlyfusion.data.sources.base import SourceConfig

SHAPE = {"length": 128, "tokens": 512, "max_patches": 2048, "lanes": 2}
MIX = {"easy_vqa": 0.5, "pydoc": 0.3, "synth_scenes": 0.2}
RESUME_S = 2.0
SAMPLES = 10_000


@pytest.fixture
def build(tokenizer, vision, mix):
    """build(**settings of the loader) -> Loader; data settings by data_<name>. A ramp and long documents are
    inside."""

    def make(**settings):
        data = {key[5:]: settings.pop(key) for key in list(settings) if key.startswith("data_")}
        schedule = Schedule([Point(0, None, 0.3), Point(200, None, 0.8, linear=True)])
        return Loader(mix(MIX, **data), tokenizer, vision, schedule=schedule, **{**SHAPE, **settings})

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "kills"), [("none", 48), ("thread", 48), ("process", 4)])
def test_a_hundred_kills_at_random_points_are_a_hundred_exact_continuations(build, tmp_path, prefetch, kills):
    """SIGKILL between two instructions, with a prefetch that has run ahead; the next process goes on from the
    last record. Every chain of hashes over every bit of every batch is that of the run nobody stopped."""
    reference, rng, steps = Reference(build(data_prefetch="none")), random.Random(prefetch), 0
    for _ in range(kills):
        record = killed_after(
            lambda: build(data_prefetch=prefetch, data_workers=2),
            tmp_path / "record.json",
            0.03 * rng.random(),
        )
        assert record["step"] > steps
        steps = record["step"]
        assert record["hash"] == reference[steps]
    assert steps >= kills


def count_reads(loader, reads):
    """Write (source, epoch, index) of everything the loader's sources read into `reads`."""
    for name, source in loader.sources.items():

        def get(index, epoch, name=name, real=source.get):
            reads.append((name, epoch, index))
            return real(index, epoch)

        source.get = get


def test_a_resume_from_ten_thousand_samples_takes_a_moment_and_reads_nothing_before_the_cursor(build, capsys):
    shape = {"tokens": 4096, "length": 512, "max_patches": 8192, "lanes": 1}
    first, reads = build(**shape), []
    count_reads(first, reads)
    samples = 0
    while samples < SAMPLES:
        samples += sum(len(batch.keys) for batch in first.next_step())
    state = json.loads(json.dumps(first.state_dict()))
    pool = {tuple(row[:3]) for row in state["lanes"]["0"]["pool"]}
    finished = set(reads[:-1]) - pool - {reads[-1]}
    split = {
        (name, *first_where(first, name)) for name, s in state["lanes"]["0"]["streams"].items() if s["start"]
    }
    finished -= split
    assert len(reads) == len(set(reads)) and len(finished) > 0.9 * SAMPLES

    second, again = build(**shape), []
    count_reads(second, again)
    start = time.perf_counter()
    second.load_state_dict(state)
    assert not again, "loading a state reads nothing"
    batches = second.next_step()
    took = time.perf_counter() - start
    with capsys.disabled():
        print(
            f"\nresume at {samples} samples: first batch after {1000 * took:.0f} ms, {len(again)} samples"
            " read"
        )
    assert took < RESUME_S
    assert not finished & set(again), "nothing before the cursor"
    assert len(again) <= 2 * len(batches[0].keys) < len(pool), (
        "the packed documents and what refills the pool"
    )
    assert chained("", batches) == chained("", first.next_step())


def first_where(loader, name):
    """(epoch, index) of the document in which a source of lane 0 stands."""
    lane = loader._feed._lanes[0]
    return lane.streams[name].where()


def test_large_pictures_wait_in_the_pool_undecoded(tokenizer, vision, tmp_path, monkeypatch):
    """After a resume a picture of the pool is decoded when it is packed, and once."""
    for i in range(40):
        PILImage.new("RGB", (96 + 8 * (i % 5), 96), (i, 2 * i, 3 * i)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"picture {i}")
    config = DataConfig(
        sources=[SourceConfig(name="p", kind="folder", path=str(tmp_path))],
        val_fraction=0,
        prefetch="none",
        lookahead=6,
    )
    shape = {"length": 256, "tokens": 256, "max_patches": 4096}
    one = Loader(config, tokenizer, vision, **shape)
    for _ in range(3):
        one.next_step()
    two, reads = Loader(config, tokenizer, vision, **shape), []
    two.load_state_dict(one.state_dict())
    count_reads(two, reads)
    for step in range(4):
        assert chained("", two.next_step()) == chained("", one.next_step())
        if step == 0:
            held = len(two.state_dict()["lanes"]["0"]["pool"])
            assert len(reads) < held, "most of the pool is still only known by name"
    assert len(reads) == len(set(reads))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_ranks_goes_on_without_repeating_or_dropping(build, world):
    alone = build(lanes=4)
    steps = [alone.next_step() for _ in range(7)]
    pair = [build(lanes=4, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(4):
        for one in pair:
            one.next_step()
    state = json.loads(json.dumps(merge_states([one.state_dict() for one in pair])))
    ranks = [build(lanes=4, rank=rank, world_size=world) for rank in range(world)]
    for one in ranks:
        one.load_state_dict(state)
    for step in steps[4:]:
        for rank, one in enumerate(ranks):
            assert chained("", one.next_step()) == chained("", step[rank::world])


def test_counts_that_do_not_divide_are_refused_with_the_choices(build):
    with pytest.raises(
        DataError, match=r"start 1, 2, 3 or 6 processes, or give a multiple of 4 \(nearest: 8\)"
    ):
        build(lanes=6, world_size=4)
    state = build(lanes=4).state_dict()
    with pytest.raises(
        DataError, match=r"lanes was 4 and is 6.*its 4 lanes can be shared by 1, 2 or 4 processes"
    ):
        build(lanes=6).load_state_dict(state)


# ---- leaving out a bad stretch


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skip_leaves_out_the_documents_of_its_steps_and_reads_none(build, seed):
    plain = build(data_seed=seed)
    keys = [[key for batch in plain.next_step() for key in batch.keys] for _ in range(40)]
    one, reads = build(data_seed=seed), []
    one.skip(range(10, 20))
    before = [[key for batch in one.next_step() for key in batch.keys] for _ in range(10)]
    assert before == keys[:10] and one.step == 10
    count_reads(one, reads)
    after = [key for _ in range(10) for batch in one.next_step() for key in batch.keys]
    assert one.step == 30, "the next batch has the number after the last one left out"
    bad = {name(key) for step in keys[10:20] for key in step} - {
        name(key) for step in keys[:10] for key in step
    }
    missed = {name(key) for key in after} & bad
    assert len(missed) <= max(1, 0.02 * len(bad)), "estimated by the mean length of documents, with a margin"
    assert len(reads) < 0.9 * len({name(k) for step in keys[10:30] for k in step}), (
        "they were not read either"
    )
    assert not {name(key) for key in after} & {name(key) for step in keys[:10] for key in step}, (
        "nothing comes twice"
    )


def name(key):
    """A document without the range of its piece."""
    return key.split("[")[0]


def test_a_skip_is_the_same_for_every_prefetch_and_number_of_ranks_and_survives_saving(build):
    def rest(one, steps):
        return [chained("", one.next_step()) for _ in range(steps)]

    one = build()
    one.skip(range(6, 9))
    whole = rest(one, 8)
    for prefetch in ("none", "thread"):
        two = build(data_prefetch=prefetch)
        rest(two, 3)  # the prefetch has run ahead
        two.skip(range(6, 8))
        two.skip(range(7, 9))
        saved = json.loads(json.dumps(two.state_dict()))
        two.close()
        three = build(data_prefetch=prefetch)
        three.load_state_dict(saved)
        assert rest(three, 5) == whole[3:]
        three.skip(range(2, 7))
        assert rest(three, 1) == rest(one, 1), "steps already behind stay as they were"
        three.close()
        one = build()
        one.skip(range(6, 9))
        rest(one, 8)
    ranks = [build(rank=rank, world_size=2) for rank in range(2)]
    alone = build()
    for loader in (*ranks, alone):
        loader.skip(range(2, 30))
    for _ in range(4):
        step = alone.next_step()
        assert [chained("", r.next_step()) for r in ranks] == [chained("", step[i : i + 1]) for i in range(2)]


@pytest.mark.parametrize("steps", [range(5, 5), range(7, 3), range(0, 10, 2)])
def test_a_skip_without_sense_is_refused(build, steps):
    with pytest.raises(DataError, match=r"expected range\(first, end\)"):
        build().skip(steps)
