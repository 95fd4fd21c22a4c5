import random
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch

from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.loading.pack import IGNORED, assemble, choose, pack_all
from earlyfusion.vision.patches import num_tokens


def document(rng, source="a", key="0", longest=40):
    """A document of random ids and weights with up to two images of 2 x 2 patches for each token."""
    ids, weights, media, grids = [1], [0.0], [], []
    for _ in range(rng.randint(0, 2)):
        h, w = 2 * rng.randint(1, 2), 2 * rng.randint(1, 2)
        count = num_tokens((1, h, w))
        media += range(len(ids), len(ids) + count)
        ids += [9] * count
        weights += [0.0] * count
        grids.append((1, h, w))
    for _ in range(rng.randint(1, longest)):
        ids.append(rng.randint(20, 90))
        weights.append(rng.choice([0.0, 0.25, 1.0]))
    patches = sum(h * w for _, h, w in grids)
    return Encoded(
        ids=torch.tensor(ids),
        loss_weights=torch.tensor(weights),
        patches=torch.full((patches, 3, 2, 2), rng.randint(0, 255), dtype=torch.uint8) if grids else None,
        grids=grids,
        spans=[],
        media_positions=torch.tensor(media, dtype=torch.int64),
        source=source,
        key=key,
    )


@dataclass
class Stub:
    length: int
    num_patches: int = 0

    def __len__(self):
        return self.length


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_the_next_token_of_the_same_document(seed):
    rng = random.Random(seed)
    documents = [document(rng, rng.choice("ab"), str(i)) for i in range(6)]
    total = sum(map(len, documents)) + 37
    shape = {"tokens": total, "pad_id": 2, "sources": ["a", "b"], "patch_size": 2, "length": 20}
    batch = assemble(documents, **shape, factors={"b": 0.5})
    labels, weights, sources, images = [], [], [], []
    for d in documents:  # the definition, token by token
        for t in range(len(d)):
            trained = t + 1 < len(d) and d.loss_weights[t + 1] > 0
            labels.append(int(d.ids[t + 1]) if trained else IGNORED)
            weights.append(float(d.loss_weights[t + 1]) * {"a": 1.0, "b": 0.5}[d.source] if trained else 0.0)
            sources.append("ab".index(d.source))
            images.append(bool(d.grids))
    assert batch.labels.tolist() == labels + [IGNORED] * 37
    assert batch.loss_weights.tolist() == weights + [0.0] * 37
    assert batch.source_ids.tolist() == sources + [-1] * 37
    assert batch.has_image.tolist() == images + [False] * 37
    assert batch.ids.tolist() == [i for d in documents for i in d.ids.tolist()] + [2] * 37
    assert batch.segments.lengths == (*(len(d) for d in documents), 20, 17)
    assert batch.media_positions.tolist() == (batch.ids == 9).nonzero()[:, 0].tolist()
    assert len(batch.media_positions) == sum(num_tokens(grid) for grid in batch.grids)
    assert batch.num_loss_weight == pytest.approx(sum(weights))
    assert (batch.num_tokens, batch.num_filler, batch.fill) == (total - 37, 37, (total - 37) / total)
    assert not batch.labels[batch.ids == 2].ne(IGNORED).any()


def test_a_batch_without_images_has_empty_patches_of_the_right_shape():
    text = Encoded(
        torch.tensor([1, 5]), torch.ones(2), None, [], [], torch.empty(0, dtype=torch.int64), "a", "0"
    )
    batch = assemble([text], tokens=4, pad_id=2, sources=["a"], patch_size=8)
    assert batch.patches.shape == (0, 3, 8, 8) and batch.patches.dtype == torch.uint8
    assert batch.media_positions.shape == (0,) and batch.num_patches == 0


def test_to_moves_every_tensor_and_keeps_the_rest():
    batch = assemble([document(random.Random(0))], tokens=64, pad_id=2, sources=["a"], patch_size=2)
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7 and all(t.device.type == "meta" for t in tensors)
    assert moved.segments is batch.segments and moved.num_loss_weight == batch.num_loss_weight


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit in 3 positions"):
        assemble([document(random.Random(0))], tokens=3, pad_id=2, sources=["a"], patch_size=2)


@pytest.mark.parametrize("seed", range(20))
def test_the_second_half_is_an_exact_subset_sum(seed):
    rng = random.Random(seed)
    pool = [Stub(60)] + [Stub(rng.randint(3, 60)) for _ in range(10)]
    chosen = choose(pool, 100, 0)
    first = chosen[0]
    assert first == 0  # the oldest is always taken
    best = max(
        sum(len(pool[i]) for i in group)
        for k in range(11)
        for group in combinations(range(1, 11), k)
        if sum(len(pool[i]) for i in group) <= 40
    )
    assert sum(len(pool[i]) for i in chosen) == 60 + best


@pytest.mark.parametrize("seed", range(20))
def test_choice_keeps_both_budgets_and_the_oldest(seed):
    rng = random.Random(seed)
    pool = [Stub(rng.randint(1, 100), rng.choice([0, 10, 60])) for _ in range(40)]
    chosen = choose(pool, 100, 64)
    assert chosen[0] == 0 and chosen == sorted(set(chosen))
    assert sum(len(pool[i]) for i in chosen) <= 100
    assert sum(pool[i].num_patches for i in chosen) <= 64


@pytest.mark.parametrize("seed", range(20))
def test_choice_keeps_a_budget_of_vision_flops_and_still_fills(seed):
    """Many cheap and some dear pictures: the cost stays below its limit, text fills what is left exactly."""
    rng = random.Random(seed)
    pool = [Stub(rng.randint(5, 40), rng.choice([0, 0, 16, 64])) for _ in range(80)]
    costs = [float(document.num_patches**2) for document in pool]
    chosen = choose(pool, 256, 10_000, costs=costs, max_cost=6_000.0)
    assert sum(costs[i] for i in chosen) <= 6_000
    assert chosen[0] == 0 and sum(len(pool[i]) for i in chosen) == 256


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_of_equal_aim_cost_about_the_same_and_nothing_waits_for_ever(seed):
    """Short documents with pictures of three sizes, text of up to a tenth of the row; 200 micro-batches."""
    rng = random.Random(seed)

    def fresh(born):
        patches = rng.choice([0, 16, 64, 144])
        return born, Stub(rng.randint(100, 400) if not patches else rng.randint(20, 60), patches)

    spread = {}
    for aimed in (False, True):
        pool, costs, waits = [], [], []
        for step in range(200):
            while sum(len(d) for _, d in pool) < 4 * 4096:
                pool.append(fresh(step))
            cost = [float(d.num_patches * (100 + d.num_patches)) for _, d in pool]
            aim = sum(cost) * 4096 / sum(len(d) for _, d in pool) if aimed else None
            chosen = set(choose([d for _, d in pool], 4096, 10**6, costs=cost, aim=aim))
            assert sum(len(pool[i][1]) for i in chosen) == 4096
            costs.append(sum(cost[i] for i in chosen))
            waits += [step - pool[i][0] for i in chosen]
            pool = [entry for i, entry in enumerate(pool) if i not in chosen]
        spread[aimed] = max(costs[10:]) / (sum(costs[10:]) / 190)
        assert max(waits) <= 16
    assert spread[True] < 1 + 0.7 * (spread[False] - 1), spread


def test_a_long_row_of_short_documents_is_filled():
    """Far more documents than the exact sum looks at."""
    rng = random.Random(0)
    pool = [Stub(rng.randint(20, 80), 64) for _ in range(2500)]
    assert sum(len(pool[i]) for i in choose(pool, 32768, 10**9)) == 32768


@pytest.mark.parametrize("seed", [0, 1])
def test_pack_all_delivers_every_document_exactly_once(seed):
    rng = random.Random(seed)
    documents = [document(rng, key=str(i)) for i in range(150)]
    batches = list(pack_all(documents, tokens=96, max_patches=48, pad_id=2, sources=["a"], patch_size=2))
    assert sorted(key for batch in batches for key in batch.keys) == sorted(f"a:{i}" for i in range(150))
    assert all(batch.num_patches <= 48 and len(batch.ids) == 96 for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(map(len, documents))


def test_pack_all_names_a_document_that_fits_nowhere():
    with pytest.raises(ValueError, match="big of 50 tokens fits no batch"):
        long = Encoded(
            torch.ones(50, dtype=torch.int64), torch.ones(50), None, [], [], torch.empty(0), "a", "big"
        )
        list(pack_all([long], tokens=40, max_patches=0, pad_id=2, sources=["a"], patch_size=2))
