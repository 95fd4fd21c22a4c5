"""A run that is killed anywhere goes on bit for bit, at once, and reads nothing again."""

import json
import random
import time
from itertools import chain

import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.loader import merge_states
from earlyfusion.data.loading.order import Point, Schedule

from .consumer import Reference, chained, killed_after

SHAPE = {"length": 128, "tokens": 512, "max_patches": 2048, "lanes": 2}
MIX = {"easy_vqa": 0.5, "pydoc": 0.3, "synth_scenes": 0.2}
RESUME_S = 2.0
SAMPLES = 10_000


@pytest.fixture
def build(loader, mix):
    """build(**settings of the loader) -> Loader; data settings by data_<name>. A ramp and long documents are
    inside."""

    def make(**settings):
        data = {key[5:]: settings.pop(key) for key in list(settings) if key.startswith("data_")}
        schedule = Schedule([Point(0, None, 0.3), Point(200, None, 0.8, linear=True)])
        return loader(mix(MIX, **data), schedule=schedule, **{**SHAPE, **settings})

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
    # The last document of each source may still be in the middle of its pieces.
    finished = set(reads) - pool - set({read[0]: read for read in reads}.values())
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


@pytest.mark.parametrize("cut", [1, 5, 17, 33])
def test_a_resume_inside_a_split_document_continues_with_its_next_piece(loader, mix, cut):
    config = mix({"pydoc": 1.0}, lookahead=1)
    whole, first, resumed = (loader(config, length=64, tokens=64) for _ in range(3))
    for _ in range(cut):
        chained("", whole.next_step())
        first.next_step()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(6):
        assert chained("", resumed.next_step()) == chained("", whole.next_step())
    assert resumed.state_dict() == whole.state_dict()


def test_the_states_of_one_rank_are_not_enough_for_another_number(build):
    with pytest.raises(DataError, match=r"also owns \[1, 3\]; merge the states"):
        build(lanes=4).load_state_dict(build(lanes=4, rank=0, world_size=2).state_dict())


# ---- leaving out a bad stretch


def names(batches):
    """Documents without the ranges of their pieces."""
    return {key.split("[")[0] for batch in batches for key in batch.keys}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skip_leaves_out_the_documents_of_its_steps_and_reads_none(build, seed):
    plain, one, reads = build(data_seed=seed), build(data_seed=seed), []
    steps = [plain.next_step() for _ in range(30)]
    one.skip(range(10, 20))
    for step in steps[:10]:
        assert chained("", one.next_step()) == chained("", step)
    count_reads(one, reads)
    after = names(batch for _ in range(10) for batch in one.next_step())
    assert one.step == 30, "the next batch has the number after the last one left out"
    before, bad, usual = (names(chain(*part)) for part in (steps[:10], steps[10:20], steps[10:]))
    assert len(after & (bad - before)) <= max(1, 0.02 * len(bad)), "estimated by mean lengths, with a margin"
    assert len(reads) < 0.9 * len(usual), "they were not read either"
    assert not after & before, "nothing comes twice"


@pytest.mark.parametrize("prefetch", ["none", "thread"])
def test_a_skip_is_the_same_for_every_prefetch_and_number_of_ranks_and_survives_saving(build, prefetch):
    whole = build()
    whole.skip(range(6, 9))
    steps = [whole.next_step() for _ in range(9)]
    one = build(data_prefetch=prefetch)
    for _ in range(3):  # the prefetch has run ahead
        one.next_step()
    one.skip(range(6, 8))
    one.skip(range(7, 9))
    saved = json.loads(json.dumps(one.state_dict()))
    ranks = [build(data_prefetch=prefetch, rank=rank, world_size=2) for rank in range(2)]
    two = build(data_prefetch=prefetch)
    for loader in (two, *ranks):
        loader.load_state_dict(saved)
    for step in steps[3:8]:
        assert chained("", two.next_step()) == chained("", step)
        for rank, loader in enumerate(ranks):
            assert chained("", loader.next_step()) == chained("", step[rank : rank + 1])
    two.skip(range(2, 7))
    assert chained("", two.next_step()) == chained("", steps[8]), "steps already behind stay as they were"
