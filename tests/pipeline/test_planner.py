"""`plan --gpus`: what is rehearsed without storage is what processes hold and send (pipeline/planner)."""

import json
from collections import Counter
from functools import partial

import planner_cases
import pytest
from forked import finish, ranks
from tiny_run import environment, split

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.parallel.mesh import Sizes
from earlyfusion.pipeline.planner.estimate import link, place
from earlyfusion.pipeline.planner.hardware import GPUS, hardware, this_cpu
from earlyfusion.pipeline.planner.rehearsal import rehearse
from earlyfusion.pipeline.planner.search import candidates, estimate, nearest

# What is resident has pages of libraries and of the allocator in it, and experts are not quite balanced.
MEMORY_RTOL = 0.10
PLANS = {
    "fsdp": "--parallel.dp_shard 2 --stages.joint.lanes 2",
    "fsdp x ep": "--parallel.dp_shard 2 --parallel.ep 2 --stages.joint.lanes 4",
    "cp": "--parallel.cp 2 --stages.joint.lanes 2",
}
PATCHES = 1024


def given(words: str) -> list[tuple[str, str]]:
    found = split([words + " --parallel.exchange_pictures off"])
    return [(key.removeprefix("--"), value) for key, value in zip(found[::2], found[1::2])]


def rehearsed(config, sizes, world, machine=None):
    machine = machine or this_cpu()
    build = partial(meta_model, config)
    settings = {"machine": machine, "stage": config.stages[0], "patches": PATCHES}
    return [rehearse(config, build, sizes, rank=rank, **settings) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_memory_and_traffic_are_those_of_two_processes(plan, tmp_path):
    overrides = given(PLANS[plan])
    call = ("nano", str(tmp_path), PATCHES, *overrides)
    for code, errors in map(finish, ranks(planner_cases.step, call, environment(), 2)):
        assert code == 0, errors[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    config = load_config(["nano"], overrides)
    sizes = Sizes(**{name: getattr(config.parallel, name) for name in ("dp_shard", "ep", "cp")})
    wanted = rehearsed(config, sizes, 2)
    for rank, (mine, theirs) in enumerate(zip(wanted, found)):
        assert theirs["peak"] == pytest.approx(mine.peak, rel=MEMORY_RTOL), (rank, mine, theirs)
    # Of all ranks together to the byte: rows of experts go here or there, but none is lost.
    sent, counted = Counter(), Counter()
    for mine, theirs in zip(wanted, found):
        sent.update({" ".join(key): size for key, size in mine.sent.items()})
        counted.update(theirs["sent"])
    assert sent == counted and sum(sent.values()) > 1e6


def test_replicas_send_their_gradients_once(tmp_path):
    config = load_config(["nano"], given("--stages.joint.lanes 2"))
    (mine,) = rehearsed(config, Sizes(dp_replicate=2), 1)
    assert mine.sent["allreduce", "dp_replicate"] == mine.gradients > 8e6


def test_a_link_lies_in_a_node_or_on_the_network():
    sizes, h200 = Sizes(pp=2, dp_replicate=2, dp_shard=8, cp=2, ep=4), GPUS["h200"]
    assert place("cp", sizes) == (2, 1) and place("dp_shard", sizes) == (8, 2)
    assert place("ep", sizes) == (4, 1) and place("efsdp", sizes) == (4, 4)
    assert place("dp_replicate", sizes) == (2, 16) and place("pp", sizes) == (2, 32)
    inside = link("allgather_base", "cp", 10**9, sizes, h200)
    assert inside.inside and inside.seconds == pytest.approx(1e9 / h200.node_bytes_s)
    # Sixteen ranks two to a node and stride: four of a node share its adapters.
    across = link("reduce_scatter_base", "dp_shard", 16 * 10**9, sizes, h200)
    assert not across.inside and across.seconds == pytest.approx(14e9 / (4 * h200.net_bytes_s))
    one = link("send", "pp", 10**9, sizes, h200)
    assert one.seconds == pytest.approx(1e9 / h200.net_bytes_s)


def test_what_does_not_fit_is_told_with_the_nearest_plan_that_does(capsys, monkeypatch):
    """A GPU that is too small for one shard: the search goes on to more shards."""
    config = load_config(["nano"], given("--stages.joint.lanes 4"))
    build = partial(meta_model, config)
    start = estimate(config, build, Sizes(dp_replicate=4), GPUS["h200"], 0, lambda text: None)
    small = GPUS["h200"].__class__(**{**vars(GPUS["h200"]), "name": "toy", "memory": start.peak / 0.93})
    found = nearest(config, build, start, 4, small, 0, lambda text: None)
    assert found is not None and found.peak <= 0.92 * small.memory < start.peak
    monkeypatch.setitem(GPUS, "toy", small)
    words = "plan nano --gpus 4 --gpu toy --patches 0 --stages.joint.lanes 4".split()
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text and "ask for it: --parallel.dp_shard" in text
    monkeypatch.setitem(GPUS, "toy", small.__class__(**{**vars(small), "memory": 1e6}))
    assert cli.main(words) == 2
    assert "no plan on 4 x toy was found" in capsys.readouterr().err


def test_every_candidate_can_be_run():
    config = load_config(["kimi-linear-48b"])
    found = list(candidates(config, 256, Sizes(dp_replicate=256)))
    assert found and all(sizes.world == 256 for sizes in found) and len(set(found)) == len(found)
    assert found[0].cp * found[0].pp == 2, "128 lanes of the last stage are not 256"


def test_plan_prints_memory_traffic_time_and_owners(capsys):
    assert (
        cli.main("plan nano --gpus 2 --patches 256 --stages.joint.lanes 2 --parallel.dp_shard 2".split()) == 0
    )
    text = capsys.readouterr().out
    for part in (
        "memory of the fullest GPU",
        "reduce_scatter",
        "MFU",
        "who orthogonalises what",
        "GPU hours",
    ):
        assert part in text, part
    assert "where its rows lie" in text and "ranks 0" in text


def test_a_measured_run_scales_the_prediction(tmp_path, capsys):
    run = tmp_path / "run"
    words = "--steps 3 --eval.heldout 0 --eval.samples 0 --track.log_every 1 --train.threads 1"
    assert cli.main(["pretrain", "nano", "--out", str(run), *split([words]), "--eval.tasks", "[]"]) == 0
    assert cli.main(["plan", "nano", "--gpus", "1", "--gpu", "cpu", "--calibrate", str(run)]) == 0
    assert f"as measured in {run}" in capsys.readouterr().out
    assert cli.main(["plan", "nano", "--gpus", "1", "--calibrate", str(tmp_path)]) == 2
    assert "no recipe.toml there" in capsys.readouterr().err


def test_bad_words_are_one_line(capsys):
    with pytest.raises(UserError, match="h200"):
        hardware("h20")
    for words, said in (
        ("--gpus 0", "--gpus"),
        ("--gpus 3 --parallel.dp_shard 2", "does not give 3 processes"),
        ("--gpus 4 --parallel.dp_shard 4 --parallel.ep 3", "parallel.ep = 3"),
    ):
        assert cli.main(["plan", "nano", *split([words])]) == 2
        assert said in capsys.readouterr().err
