"""Pictures encoded on other ranks than their own: the same loss and the same gradients as the plain step.

Real gloo processes, DDP, two micro-batches a step under no_sync, the loop's own forward and backward. The
oracle is the plain step of the same processes, and for it one process that takes every micro-batch itself.
"""

import exchange_cases as cases
import exchange_rank
import pytest
import torch
from forked import finish, ranks
from tiny_run import environment, forget_processes

from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.step import PictureExchange
from earlyfusion.vision.balance import plan_step
from earlyfusion.vision.patches import VisionCost

# Gradients in fp64, relative to the norm of all of them: measured up to 6e-15, sums over pictures in another
# order. A picture whose gradient is lost or lands on another picture changes them by 1e-2 and more.
TOLERANCE = 1e-12
WORLDS = (2, 3)
ALL = [(world, name) for world in WORLDS for name in cases.names(world)]
WAYS = ["planned", "scattered", "decoupled"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[int, list[dict]]:
    """world -> what each rank wrote."""
    found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        for code, errors in map(finish, ranks(exchange_rank.main, (str(folder),), environment(), world)):
            assert code == 0, errors[-3000:]
        found[world] = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]
    return found


def assert_same_step(ours, theirs) -> None:
    (loss, gradients), (other_loss, others) = ours, theirs
    assert loss == pytest.approx(other_loss, rel=TOLERANCE)
    assert gradients.keys() == others.keys()
    norm = torch.cat([gradient.flatten() for gradient in others.values()]).norm()
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() <= TOLERANCE * norm, name


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world", "name"), ALL)
def test_an_exchanged_step_is_the_plain_step(seen, world, name, way):
    for rank in seen[world]:
        assert_same_step(rank[name][way], rank[name]["plain"])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), ALL)
def test_the_plain_step_is_that_of_one_process_with_every_micro_batch(seen, world, name):
    forget_processes()
    step, fusion = cases.step_of(world, name), cases.model(len(name), torch.float64)
    parts = [part for rank in range(world) for part in cases.batches(step, rank, len(name))]
    alone = cases.gradients(Runtime(threads=1), fusion, fusion, parts, ())
    for rank in seen[world]:
        assert_same_step(rank[name]["plain"], alone)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), ALL)
def test_pictures_move_where_the_plan_says_so(seen, world, name):
    cost = VisionCost.from_config(cases.config().vision)
    plan = plan_step(cases.grids_of(cases.step_of(world, name)), cost, max_patches=4096)
    for rank in seen[world]:
        assert rank[name]["routes"] == [plan.pays(1.0) and part.moves for part in plan.parts]


@pytest.mark.slow
def test_the_cases_hold_what_they_are_for(seen):
    """Pictures moved to a rank without any, none moved in text-only steps, and vision gradients that
    matter."""
    moved = {place: any(seen[place[0]][0][place[1]]["routes"]) for place in ALL}
    assert [name for (world, name), moves in moved.items() if not moves] == [
        "text only",
        "one picture in all",
        "one clip in all",
    ]
    assert seen[2][0]["exchange in one micro-batch only"]["routes"] == [True, False]
    for (world, name), moves in moved.items():
        gradients = seen[world][0][name]["plain"][1]
        vision = [g.norm() for n, g in gradients.items() if n.startswith(("vision_tower", "mm_projector"))]
        share = torch.stack(vision).norm() / torch.stack([g.norm() for g in gradients.values()]).norm()
        assert share > 0.05 or not moves, name


@pytest.mark.slow
def test_large_pictures_are_shared_by_all_ranks(seen):
    """Those that cost more than an even share, clips among them, in both generations of towers; whoever holds
    them."""
    shares = {name: {rank[name]["shares"] for rank in seen[world]} for world, name in ALL}
    assert all(len(counts) == 1 for counts in shares.values()), "the same on all ranks"
    assert shares["one picture in all"] == shares["one clip in all"] == shares["a clip on three"] == {1}
    assert shares["fewer pictures than ranks"] == {2}
    assert shares["text only"] == shares["clips beside pictures"] == {0}
    assert {len(name) % 2 for name, counts in shares.items() if counts != {0}} == {0, 1}


@pytest.mark.slow
def test_ranks_that_disagree_are_all_told_so(seen):
    expected = {
        "micro-batches": "rank 1 has other micro-batches in this step than rank 0",
        "digest": "rank 1 has other settings than rank 0",
        "setting": "start all ranks with the same recipe",
        "threshold": "rank 1 has other settings than rank 0",
        "patches": "rank 1, micro-batch 0: 19 patches, but its grids hold 20",
    }
    for rank in seen[2]:
        for name, message in expected.items():
            assert message in rank["refusals"][name], (name, rank["refusals"][name])


def test_one_process_never_exchanges():
    forget_processes()
    exchange = PictureExchange(ParallelSection(exchange_pictures="on"), cases.config(), Runtime(threads=1))
    parts = cases.batches(cases.CASES[2]["clips beside pictures"], 0, 0)
    assert exchange.routes(parts, 64) == [None, None]
