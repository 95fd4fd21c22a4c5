"""The plan of a step: what it gains, when it is worth it, and what it keeps to (the exchange itself:
tests/pipeline/test_picture_exchange.py)."""

import random
from itertools import product

import pytest

from earlyfusion.model.flops import vision_flops
from earlyfusion.vision.balance import assign, exchange, imbalance, loads, plan_step
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import VisionCost, num_patches

COST = VisionCost.from_config(VisionConfig.preset("moonvit_v2"))
BIG, SMALL = (1, 64, 64), (1, 8, 8)


def random_grids(rng, ranks, most=6):
    return [
        [
            (rng.choice([1, 1, 4]), 2 * rng.randint(1, 20), 2 * rng.randint(1, 20))
            for _ in range(rng.randint(0, most))
        ]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_without_exchange_takes_its_slowest_rank_and_with_it_every_slowest_micro_batch(seed):
    """In times: ranks run through their micro-batches alone, or meet in every one."""
    rng = random.Random(seed)
    ranks, parts = rng.randint(2, 5), rng.randint(1, 4)
    grids = [random_grids(rng, parts) for _ in range(ranks)]
    plan = plan_step(grids, COST)
    alone = [sum(COST.of(part) for part in rank) for rank in grids]
    mean = sum(alone) / ranks
    meeting = 0.0
    for k, part in enumerate(plan.parts):
        held = [[part.grids[r][i] for r, i in part.held(owner)] for owner in range(ranks)]
        meeting += max(COST.of(pictures) for pictures in held)
        assert [COST.of(pictures) for pictures in held] == pytest.approx(list(part.work))
        assert part.grids == tuple(tuple(rank[k]) for rank in grids)
    assert plan.before == pytest.approx(max(alone) / mean) and plan.after == pytest.approx(meeting / mean)


def test_micro_batches_that_even_out_over_the_step_are_left_alone():
    """Each is uneven, the step is not: waiting for one another in both would cost what the exchange gains."""
    plan = plan_step([[[BIG], []], [[], [BIG]]], COST)
    assert plan.before == 1.0 and not plan.pays(1.0)
    plan = plan_step([[[BIG, BIG], []], [[], []]], COST)
    assert plan.before == 2.0 and plan.after == 1.0 and plan.pays(1.9) and not plan.pays(2.0)
    for grids in ([[[]], [[]]], [[[]], [[BIG]]]):  # text only, and a single picture
        assert not plan_step(grids, COST).pays(1.0)


def test_the_limit_of_patches_bites_where_small_pictures_weigh_little():
    """One large picture costs as much as three times its patches in small ones, which then do not fit one
    rank."""
    grids = [[(1, 96, 96)] + [SMALL] * 20, [SMALL] * 160]
    room = max(sum(map(num_patches, row)) for row in grids)
    for limit in (None, room):
        plan = exchange(grids, COST, max_patches=limit)
        most = max(sum(num_patches(grids[r][i]) for r, i in plan.held(owner)) for owner in range(2))
        assert most > room if limit is None else most <= room


@pytest.mark.parametrize("seed", range(10))
def test_shares_go_where_most_of_them_lies_already(seed):
    """The loads are those of LPT, and with two ranks at least half of the patches stay where they were
    read."""
    rng = random.Random(seed)
    grids = random_grids(rng, 2, most=20)
    plan = exchange(grids, COST)
    items = [(r, grid) for r, row in enumerate(grids) for grid in row]
    costs = [COST.of([grid]) for _, grid in items]
    lpt = loads(costs, assign(costs, 2), 2)
    assert max(plan.work) == pytest.approx(min(max(lpt), max(COST.of(row) for row in grids)))
    moved = plan.patches[0][1] + plan.patches[1][0]
    assert 2 * moved <= sum(map(sum, plan.patches))


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
    plan = exchange([[], [], []], COST)
    assert plan.owner == ((), (), ()) and plan.held(1) == []
    plan = exchange([[(1, 8, 8)], [], []], COST)
    assert plan.owner == ((0,), (), ()) and plan.patches == [[64, 0, 0], [0, 0, 0], [0, 0, 0]]
