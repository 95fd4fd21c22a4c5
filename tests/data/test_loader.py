"""What a loader delivers: its budgets, shares and epochs, every token once, and what a resume refuses."""

import json

import pytest

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, DataExhausted
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sources.base import SourceConfig
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.vision.patches import num_patches, num_tokens

from .conftest import folder_config


def test_realised_token_shares_are_the_weights_within_two_percent(loader, mix):
    one = loader(mix(), lanes=2, tokens=1024, length=256)
    for _ in range(120):
        one.next_step()
    weights = {config.name: config.weight for config in mix().sources}
    for name, weight in weights.items():
        assert abs(one.stats()["shares"][name] - weight / sum(weights.values())) < 0.02
    assert sum(one.stats()["tokens"].values()) > 100_000


def test_every_batch_keeps_its_budgets_and_counts(loader, tokenizer):
    one = loader(lanes=2, max_patches=600)
    special = {i for name, i in tokenizer.special_ids.items() if name not in ("[EOS]", "<|end_of_msg|>")}
    for batch in [batch for _ in range(20) for batch in one.next_step()]:
        assert batch.ids.shape == (512,) and batch.segments.total == 512 and batch.segments.max_length <= 192
        assert batch.num_patches == sum(map(num_patches, batch.grids)) <= 600
        assert len(batch.media_positions) == sum(map(num_tokens, batch.grids))
        pads = (batch.ids == tokenizer.media_pad_id).nonzero().flatten()
        assert pads.equal(batch.media_positions)
        assert not special & set(batch.labels.tolist())
        assert bool(((batch.labels == -100) == (batch.loss_weights == 0)).all())


def test_one_epoch_gives_every_token_of_every_document_once(loader, tokenizer, vision):
    """Put together by document and place, the pieces of all lanes are the encoded training documents."""
    config = DataConfig(sources=[SourceConfig(name="pydoc", kind="pydoc", max_epochs=1)], prefetch="none")
    pieces = {}
    for rank in range(3):
        one = loader(config, lanes=3, rank=rank, world_size=3)
        with pytest.raises(DataExhausted, match="reached its max_epochs"):
            while True:
                collect(one.next_step()[0], pieces)
    source = one.sources["pydoc"]
    for index in range(len(source)):
        document = encode(source.get(index, 0), tokenizer, vision)
        ids = []
        for start, piece in sorted(pieces.pop(document.key).items()):
            ids += piece if start == 0 else piece[1:]
        assert ids == document.ids.tolist()
    assert not pieces


def collect(batch, pieces):
    for key, start, stop in zip(batch.keys, batch.segments.offsets, batch.segments.offsets[1:]):
        name, _, span = key.removeprefix("pydoc:").partition("[")
        first = int(span.split(":")[0] or 0)
        assert first not in pieces.setdefault(name, {})
        pieces[name][first] = batch.ids[start:stop].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"seed": 3}}, "seed was 0 and is 3"),
        ({"lanes": 4}, "lanes was 2 and is 4"),
        ({"length": 128}, "length was 192 and is 128"),
        (
            {"data": {"weights": {"easy_vqa": 1.0}}},
            "files of source 'pydoc' was .* and is None; order of the sources was",
        ),
        ({"data": {"weights": {"pydoc": 1, "easy_vqa": 1}}}, "order of the sources was"),
        (
            {"data": {"options": {"easy_vqa": {"questions_per_image": 2}}}},
            "options or files of .*'easy_vqa' was",
        ),
        ({"tokenizer": True}, "tokenizer was"),
    ],
)
def test_a_resume_with_other_data_is_refused_with_the_difference(tokenizer, vision, mix, change, message):
    base = {"weights": {"easy_vqa": 1.0, "pydoc": 1.0}}
    shape = {"length": 192, "tokens": 512, "max_patches": 2048, "lanes": 2}
    state = json.loads(json.dumps(Loader(mix(**base), tokenizer, vision, **shape).state_dict()))
    config = mix(**base | change.pop("data", {}))
    words = train_bpe(["some words to learn from"] * 4, 270) if change.pop("tokenizer", False) else tokenizer
    with pytest.raises(DataError, match=message):
        Loader(config, words, vision, **shape | change).load_state_dict(state)


def test_lanes_that_ranks_cannot_share_are_refused(loader):
    with pytest.raises(DataError, match=r"lanes = 3 cannot be shared by 2 processes.*nearest: 4"):
        loader(lanes=3, world_size=2)


@pytest.mark.parametrize("prefetch", ["none", "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_bad_sample_stops_the_run_with_its_path(loader, tmp_path, prefetch):
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    with pytest.raises(BadSample, match=r"latin\.md"):
        loader(folder_config(tmp_path, prefetch=prefetch)).next_step()


def test_a_source_of_nothing_but_bad_samples_does_not_spin_for_ever(loader, tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="samples in a row cannot be used"):
        loader(folder_config(tmp_path, on_bad_sample="skip")).next_step()
