import math
import random
from itertools import combinations

import pytest
import torch

from earlyfusion.data.loading.encode import IGNORED, Encoded, Size, assemble, choose, pack_all


def document(rng, source="a", key="0"):
    """A document of random ids and weights with up to two images of 2 x 2 patches, one token each."""
    media, words = rng.randint(0, 2), rng.randint(1, 40)
    return Encoded(
        ids=torch.tensor([1] + [9] * media + [rng.randint(20, 90) for _ in range(words)]),
        loss_weights=torch.tensor([0.0] * (1 + media) + [rng.choice([0.0, 0.25, 1.0]) for _ in range(words)]),
        patches=torch.full((4 * media, 3, 2, 2), rng.randint(0, 255), dtype=torch.uint8) if media else None,
        grids=[(1, 2, 2)] * media,
        spans=[],
        media_positions=torch.arange(1, 1 + media),
        source=source,
        key=key,
    )


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_the_next_token_of_the_same_document(seed):
    rng, factors = random.Random(seed), {"a": 1.0, "b": 0.5}
    documents = [document(rng, rng.choice("ab"), str(i)) for i in range(6)]
    total = sum(map(len, documents)) + 37
    shape = {"tokens": total, "pad_id": 2, "sources": ["a", "b"], "patch_size": 2, "length": 20}
    batch = assemble(documents, **shape, factors=factors)
    rows = []
    for d in documents:  # the definition, token by token
        following = [*zip(d.ids.tolist(), d.loss_weights.tolist()), (0, 0.0)][1:]
        for own, (target, weight) in zip(d.ids.tolist(), following, strict=True):
            label = target if weight > 0 else IGNORED
            rows.append((own, label, weight * factors[d.source], "ab".index(d.source), bool(d.grids)))
    rows += [(2, IGNORED, 0.0, -1, False)] * 37
    columns = (batch.ids, batch.labels, batch.loss_weights, batch.source_ids, batch.has_image)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == rows
    assert batch.segments.lengths == (*(len(d) for d in documents), 20, 17)
    assert batch.media_positions.tolist() == (batch.ids == 9).nonzero()[:, 0].tolist()
    assert batch.num_loss_weight == pytest.approx(sum(row[2] for row in rows))
    assert batch.num_tokens == total - 37


@pytest.mark.parametrize("seed", range(20))
def test_the_second_half_is_an_exact_subset_sum(seed):
    rng = random.Random(seed)
    lengths = [60] + [rng.randint(3, 60) for _ in range(10)]
    chosen = choose([Size(length) for length in lengths], Size(100))
    assert chosen[0] == 0  # the oldest is always taken
    groups = [group for k in range(11) for group in combinations(lengths[1:], k)]
    best = max(sum(group) for group in groups if sum(group) <= 40)
    assert sum(lengths[i] for i in chosen) == 60 + best


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("most_patches", "most_cost"), [(64, math.inf), (10_000, 6_000.0)])
def test_choice_keeps_every_budget_and_the_oldest_and_still_fills(seed, most_patches, most_cost):
    """Many cheap and some dear pictures: text fills what is left exactly."""
    rng = random.Random(seed)
    pool = []
    for _ in range(80):
        patches = rng.choice([0, 0, 16, 64])
        pool.append(Size(rng.randint(5, 40), patches, float(patches**2)))
    chosen = choose(pool, Size(256, most_patches, most_cost))
    assert chosen[0] == 0 and chosen == sorted(set(chosen))
    assert sum(pool[i].tokens for i in chosen) == 256
    assert sum(pool[i].patches for i in chosen) <= most_patches
    assert sum(pool[i].cost for i in chosen) <= most_cost


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_of_equal_aim_cost_about_the_same_and_nothing_waits_for_ever(seed):
    """Short documents with pictures of three sizes, text of up to a tenth of the row; 200 micro-batches."""
    rng, spread = random.Random(seed), {}
    for aimed in (False, True):
        pool, costs, waits = [], [], []
        for step in range(200):
            while sum(size.tokens for _, size in pool) < 4 * 4096:
                patches = rng.choice([0, 16, 64, 144])
                tokens = rng.randint(20, 60) if patches else rng.randint(100, 400)
                pool.append((step, Size(tokens, patches, float(patches * (100 + patches)))))
            sizes = [size for _, size in pool]
            aim = sum(size.cost for size in sizes) * 4096 / sum(size.tokens for size in sizes)
            chosen = choose(sizes, Size(4096, 10**6, math.inf), aim if aimed else None)
            assert sum(sizes[i].tokens for i in chosen) == 4096
            costs.append(sum(sizes[i].cost for i in chosen))
            waits += [step - pool.pop(i)[0] for i in reversed(chosen)]
        spread[aimed] = max(costs[10:]) / (sum(costs[10:]) / 190)
        assert max(waits) <= 16
    assert spread[True] < 1 + 0.7 * (spread[False] - 1), spread


@pytest.mark.parametrize("seed", [0, 1])
def test_pack_all_delivers_every_document_exactly_once(seed):
    rng = random.Random(seed)
    documents = [document(rng, key=str(i)) for i in range(150)]
    batches = list(pack_all(documents, tokens=96, max_patches=48, pad_id=2, sources=["a"], patch_size=2))
    assert sorted(key for batch in batches for key in batch.keys) == sorted(f"a:{i}" for i in range(150))
    assert all(batch.num_patches <= 48 and len(batch.ids) == 96 for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(map(len, documents))
