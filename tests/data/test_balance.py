import random
from itertools import product

import pytest

from earlyfusion.model.flops import vision_flops
from earlyfusion.vision.balance import assign, exchange, imbalance, loads
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import VisionCost, num_patches, num_tokens

V2 = VisionCost.from_config(VisionConfig.preset("moonvit_v2"))


@pytest.mark.parametrize("preset", ["tiny", "moonvit", "moonvit_v2"])
def test_the_cost_of_pictures_is_that_of_the_models_own_count(preset):
    config = VisionConfig.preset(preset)
    grids = [(1, 4, 6), (4, 8, 10), (1, 2, 2), (3, 6, 4)]
    assert VisionCost.from_config(config).of(grids) == pytest.approx(
        vision_flops(config, 64, grids)["vision"], rel=1e-12
    )
    assert VisionCost.from_config(config).of([]) == 0


def test_the_coefficients_are_the_published_ones():
    """MoonViT SO-400M: 823.5 MFLOP a patch and 124,416 N; equal patches cost 3.35 times as much in one large
    picture."""
    moonvit = VisionCost.from_config(VisionConfig.preset("moonvit"))
    assert moonvit.per_patch == pytest.approx(823.5e6, rel=1e-3) and moonvit.per_pair == 124_416
    small, large = moonvit.of([(1, 16, 16)] * 64), moonvit.of([(1, 128, 128)])
    assert small == pytest.approx(14.0e12, rel=0.005) and large == pytest.approx(46.9e12, rel=0.005)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_has_more_than_four_thirds_of_the_best_possible(seed):
    rng = random.Random(seed)
    ranks, costs = (
        rng.randint(1, 3),
        [rng.choice([0.0, rng.random(), 5 * rng.random()]) for _ in range(rng.randint(0, 7))],
    )
    best = min(max(loads(costs, owner, ranks)) for owner in product(range(ranks), repeat=len(costs)))
    found = max(loads(costs, assign(costs, ranks), ranks))
    assert found <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-12


def test_ranks_without_pictures_and_steps_without_pictures_are_ordinary():
    assert assign([], 4) == []
    assert sorted(assign([3.0, 1.0], 4)) != [0, 0]
    assert imbalance([0.0, 0.0]) == 1.0
    plan = exchange([[], [], []], V2)
    assert plan.owner == ((), (), ()) and plan.held(1) == []
    plan = exchange([[(1, 8, 8)], [], []], V2)
    assert plan.owner == ((0,), (), ()) and plan.patches == [[64, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_exchange_sends_every_picture_to_one_rank_and_every_feature_home(seed):
    rng = random.Random(seed)
    grids = [
        [(1, 2 * rng.randint(1, 20), 2 * rng.randint(1, 20)) for _ in range(rng.randint(0, 6))]
        for _ in range(5)
    ]
    plan = exchange(grids, V2)
    held = [place for owner in range(5) for place in plan.held(owner)]
    assert sorted(held) == [(r, i) for r, row in enumerate(grids) for i in range(len(row))]
    for r, row in enumerate(grids):
        assert sum(plan.patches[r]) == sum(map(num_patches, row)) and sum(plan.features[r]) == sum(
            map(num_tokens, row)
        )
        assert [plan.owner[r][i] for i in plan.order(r)] == sorted(plan.owner[r])
        for owner in range(5):
            mine = [row[i] for i in range(len(row)) if plan.owner[r][i] == owner]
            assert plan.patches[r][owner] == sum(map(num_patches, mine))
            sent = [i for i in plan.order(r) if plan.owner[r][i] == owner]
            assert sent == [i for home, i in plan.held(owner) if home == r], (
                "arrives in the order it was sent"
            )
    assert imbalance(plan.work) <= imbalance([V2.of(row) for row in grids])
    assert exchange(grids, V2) == plan, "every rank comes to the same plan"
