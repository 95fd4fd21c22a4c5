import json
import random

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, DataExhausted
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.loader import Loader, merge_states
from earlyfusion.data.sources.base import SourceConfig
from earlyfusion.vision.patches import num_patches, num_tokens

SHAPE = {"length": 192, "tokens": 512, "max_patches": 2048}
TENSORS = ("ids", "labels", "loss_weights", "patches", "media_positions", "source_ids", "has_image")


@pytest.fixture
def loader(tokenizer, vision, mix):
    """loader(config or None, **settings) -> Loader of small batches; closed at the end."""
    made = []

    def build(config=None, **settings):
        made.append(Loader(config or mix(), tokenizer, vision, **{**SHAPE, **settings}))
        return made[-1]

    yield build
    for one in made:
        one.close()


def same(a, b):
    """Whether two micro-batches are equal bit for bit."""
    fields = (a.segments == b.segments, a.grids == b.grids, a.keys == b.keys, a.sources == b.sources)
    return all(fields) and all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)


def same_steps(one, two):
    return len(one) == len(two) and all(
        same(a, b) for x, y in zip(one, two) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("prefetch", ["none", "thread"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_resume_mid_stream_equals_the_uninterrupted_run(loader, mix, seed, prefetch):
    config = mix(seed=seed, prefetch=prefetch)
    whole = loader(config, lanes=2)
    steps = [whole.next_step() for _ in range(14)]
    cut = random.Random(seed).randint(3, 9)
    first = loader(config, lanes=2)
    for _ in range(cut):
        first.next_step()
    saved = json.dumps(first.state_dict(), sort_keys=True)
    resumed = loader(config, lanes=2)
    resumed.load_state_dict(json.loads(saved))
    assert same_steps([resumed.next_step() for _ in range(14 - cut)], steps[cut:])
    assert json.dumps(resumed.state_dict(), sort_keys=True) == json.dumps(whole.state_dict(), sort_keys=True)
    assert not same_steps(steps[:1], [loader(mix(seed=seed + 7), lanes=2).next_step()])


def test_a_resume_inside_a_split_document_continues_with_its_next_piece(loader, mix):
    config = mix({"pydoc": 1.0}, lookahead=1)
    whole = loader(config, length=64, tokens=64)
    steps = [whole.next_step() for _ in range(40)]
    for cut in (1, 5, 17, 33):
        first = loader(config, length=64, tokens=64)
        for _ in range(cut):
            first.next_step()
        resumed = loader(config, length=64, tokens=64)
        resumed.load_state_dict(first.state_dict())
        assert same_steps([resumed.next_step() for _ in range(40 - cut)], steps[cut:])


@pytest.mark.parametrize("world", [2, 4])
def test_the_data_of_a_step_does_not_depend_on_the_number_of_ranks(loader, world):
    alone = loader(lanes=4)
    ranks = [loader(lanes=4, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(4):
        expected = alone.next_step()
        for rank, one in enumerate(ranks):
            assert same_steps([one.next_step()], [expected[rank::world]])


def test_a_checkpoint_of_two_ranks_continues_on_one(loader):
    alone = loader(lanes=4)
    steps = [alone.next_step() for _ in range(8)]
    pair = [loader(lanes=4, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(5):
        for one in pair:
            one.next_step()
    states = [one.state_dict() for one in pair]
    merged = loader(lanes=4)
    merged.load_state_dict(json.loads(json.dumps(merge_states(states))))
    assert same_steps([merged.next_step() for _ in range(3)], steps[5:])
    with pytest.raises(DataError, match=r"also owns \[1, 3\]; merge the states"):
        loader(lanes=4).load_state_dict(states[0])


@pytest.mark.slow
def test_processes_give_the_same_batches_as_the_caller(loader, mix):
    weights = {"easy_vqa": 0.5, "synth_scenes": 0.3, "pydoc": 0.2}
    direct = loader(mix(weights), lanes=3)
    steps = [direct.next_step() for _ in range(6)]
    workers = loader(mix(weights, prefetch="process", workers=2), lanes=3)
    assert same_steps([workers.next_step() for _ in range(4)], steps[:4])
    state = workers.state_dict()
    workers.close()
    assert same_steps([workers.next_step() for _ in range(2)], steps[4:])  # goes on from what was consumed
    assert state == {**state, "lanes": loader_state_at(direct, loader, mix(weights), 4)}


def loader_state_at(_, loader, config, steps):
    one = loader(config, lanes=3)
    for _ in range(steps):
        one.next_step()
    return one.state_dict()["lanes"]


@pytest.mark.slow
def test_a_killed_data_process_is_reported_and_not_waited_for(loader, mix):
    one = loader(mix({"pydoc": 1.0}, prefetch="process", prefetch_steps=1))
    one.next_step()
    worker = one._feed._workers[0]
    worker.kill()
    worker.join()
    with pytest.raises(DataError, match="ended with code -9"):
        for _ in range(64):
            one.next_step()


@pytest.mark.slow
def test_an_error_in_a_data_process_arrives_as_itself(loader, mix, broken_folder):
    config = folder_config(broken_folder, prefetch="process")
    with pytest.raises(BadSample, match=r"broken\.png|latin\.md|huge\.png"):
        loader(config).next_step()


def test_realised_token_shares_are_the_weights_within_two_percent(loader, mix):
    one = loader(mix(), lanes=2, tokens=1024, length=256)
    for _ in range(120):
        one.next_step()
    shares = one.stats()["shares"]
    total = sum(config.weight for config in mix().sources)
    for config in mix().sources:
        assert abs(shares[config.name] - config.weight / total) < 0.02
    assert sum(one.stats()["tokens"].values()) > 100_000


@pytest.mark.parametrize("seed", [0, 1])
def test_fill_of_the_standard_mix_at_1k_is_at_least_95_percent(loader, mix, seed):
    one = loader(mix(seed=seed), tokens=1024, length=1024, max_patches=4096)
    fills = [batch.fill for _ in range(60) for batch in one.next_step()]
    assert sum(fills) / len(fills) >= 0.95
    assert one.stats()["fill"] == pytest.approx(sum(fills) / len(fills))


def test_every_batch_keeps_its_budgets_and_counts(loader, tokenizer):
    one = loader(lanes=2, max_patches=600)
    special = {i for name, i in tokenizer.special_ids.items() if name not in ("[EOS]", "<|end_of_msg|>")}
    for _ in range(20):
        for batch in one.next_step():
            assert (
                batch.ids.shape == (512,) and batch.segments.total == 512 and batch.segments.max_length <= 192
            )
            assert batch.num_patches == sum(map(num_patches, batch.grids)) <= 600
            assert len(batch.media_positions) == sum(map(num_tokens, batch.grids))
            assert (batch.ids == tokenizer.media_pad_id).nonzero()[
                :, 0
            ].tolist() == batch.media_positions.tolist()
            assert not special & set(batch.labels.tolist())
            assert bool(((batch.labels == -100) == (batch.loss_weights == 0)).all())


def test_one_epoch_gives_every_token_of_every_document_once(loader, mix, tokenizer, vision):
    """Concatenated by document and place, the pieces of all lanes are the encoded training documents."""
    config = DataConfig(sources=[SourceConfig(name="pydoc", kind="pydoc", max_epochs=1)], prefetch="none")
    one = loader(config, lanes=3)
    pieces = {}
    with pytest.raises(DataExhausted, match="reached its max_epochs"):
        while True:
            for batch in one.next_step():
                collect(batch, pieces)
    for lane in [
        loader(config, lanes=3, rank=r, world_size=3) for r in range(3)
    ]:  # the tails of the longer lanes
        with pytest.raises(DataExhausted):
            while True:
                for batch in lane.next_step():
                    collect(batch, pieces)
    source = one.sources["pydoc"]
    for index in range(len(source)):
        document = encode(source.get(index, 0), tokenizer, vision)
        found = pieces.pop(document.key)
        ids = [i for start in sorted(found) for i in (found[start] if start == 0 else found[start][1:])]
        assert ids == document.ids.tolist()
    assert not pieces


def collect(batch, pieces):
    for key, start, stop in zip(batch.keys, batch.segments.offsets, batch.segments.offsets[1:]):
        name, _, span = key.removeprefix("pydoc:").partition("[")
        pieces.setdefault(name, {})[int(span.split(":")[0]) if span else 0] = batch.ids[start:stop].tolist()


def test_max_epochs_leaves_the_rest_to_the_other_sources(loader, tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"short text number {i}")
    sources = [
        SourceConfig(name="few", kind="folder", path=str(tmp_path), max_epochs=2),
        SourceConfig(name="many", kind="synth_grid"),
    ]
    one = loader(DataConfig(sources=sources, val_fraction=0, prefetch="none"), lanes=2)
    keys = [
        key for _ in range(20) for batch in one.next_step() for key in batch.keys if key.startswith("few")
    ]
    assert sorted(keys) == sorted(2 * [f"few:{i}.txt" for i in range(5)])


def test_new_weights_take_effect_at_the_same_step_whatever_was_prefetched(loader, mix):
    runs = []
    for prefetch in ("none", "thread"):
        one = loader(mix(prefetch=prefetch, lookahead=1))
        steps = [one.next_step() for _ in range(3)]
        one.set_weights({"pydoc": 1.0})
        steps += [one.next_step() for _ in range(6)]
        runs.append(steps)
    assert same_steps(*runs)
    last = runs[0][-1][0]
    assert {key.split(":")[0] for key in last.keys} == {"pydoc"}
    with pytest.raises(DataError, match="did you mean 'pydoc'"):
        loader().set_weights({"pydocs": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"seed": 3}}, r"seed was 0 and is 3"),
        ({"lanes": 4}, "lanes was 2 and is 4"),
        ({"length": 128}, "length was 192 and is 128"),
        ({"config": {"weights": {"easy_vqa": 1.0}}}, "source 'pydoc' is gone"),
        (
            {"config": {"options": {"easy_vqa": {"questions_per_image": 2}}}},
            "source 'easy_vqa' has other options",
        ),
        ({"config": {"weights": {"easy_vqa": 1, "pydoc": 1, "synth_grid": 1}}}, "source 'synth_grid' is new"),
        ({"config": {"weights": {"pydoc": 1, "easy_vqa": 1}}}, "sources are in another order"),
    ],
)
def test_a_resume_with_other_data_is_refused_with_the_difference(loader, mix, change, message):
    base = {"weights": {"easy_vqa": 1.0, "pydoc": 1.0}}
    state = json.loads(json.dumps(loader(mix(**base), lanes=2).state_dict()))
    changed = dict(change)
    config = mix(**{**base, **changed.pop("config", {})})
    with pytest.raises(DataError, match=message):
        loader(config, **{"lanes": 2, **changed}).load_state_dict(state)


def test_a_resume_with_another_tokenizer_is_refused(tokenizer, vision, mix):
    from earlyfusion.data.vocabulary import train_bpe

    other = train_bpe(["some words to learn from"] * 4, 270)
    state = Loader(mix(), tokenizer, vision, **SHAPE).state_dict()
    with pytest.raises(DataError, match="tokenizer was"):
        Loader(mix(), other, vision, **SHAPE).load_state_dict(state)


def test_lanes_that_ranks_cannot_share_are_refused(loader):
    with pytest.raises(DataError, match=r"lanes = 3 cannot be shared by 2 processes.*nearest: 4"):
        loader(lanes=3, world_size=2)
    with pytest.raises(DataError, match="length 600 is more than tokens 512"):
        loader(length=600)


# ---- bad samples


@pytest.fixture
def broken_folder(tmp_path):
    for i in range(12):
        image = PILImage.fromarray(np.full((24, 24, 3), 20 * i, dtype=np.uint8))
        image.save(tmp_path / f"good{i}.png")
        (tmp_path / f"good{i}.txt").write_text(f"shade {i}")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "broken.txt").write_text("never seen")
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    PILImage.new("RGB", (400, 400)).save(tmp_path / "huge.png")
    (tmp_path / "huge.txt").write_text("over the budget")
    return tmp_path


def folder_config(path, **settings):
    source = SourceConfig(name="mine", kind="folder", path=str(path))
    return DataConfig(sources=[source], val_fraction=0.0, **{"prefetch": "none", **settings})


def test_a_bad_sample_stops_the_run_with_its_path(loader, broken_folder):
    with pytest.raises(BadSample, match=r"broken\.png|latin\.md|huge\.png"):
        for _ in range(30):
            loader(folder_config(broken_folder, prefetch="thread")).next_step()


def test_bad_samples_are_skipped_counted_and_named_if_so_configured(loader, broken_folder):
    config = folder_config(broken_folder, on_bad_sample="skip", max_bad_share=0.5)
    one = loader(config)
    keys = {key for _ in range(6) for batch in one.next_step() for key in batch.keys}
    assert keys == {f"mine:good{i}.png" for i in range(12)}
    stats = one.stats()
    reasons = " ".join(stats["skip_reasons"])
    assert stats["skipped"]["mine"] >= 3
    assert "broken.png" in reasons and "latin.md" in reasons and "huge.png" in reasons
    resumed = loader(config)
    resumed.load_state_dict(one.state_dict())
    assert same_steps([resumed.next_step()], [one.next_step()])


def test_a_source_of_nothing_but_bad_samples_does_not_spin_for_ever(loader, tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="samples in a row cannot be used"):
        loader(folder_config(tmp_path, on_bad_sample="skip")).next_step()
