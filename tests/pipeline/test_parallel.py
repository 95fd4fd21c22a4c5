"""Every plan takes the steps of one process: FSDP2, HSDP, experts, contexts and pipelines, alone and together
(pipeline/parallel).

Four lanes are four micro-batches of one step; some hold pictures and some do not, so that ranks with and
without pictures meet in every plan. Sums are formed in another order, so numbers agree to fp32 rounding.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import parallel_cases
import pytest
import tiny_run
import torch
from forked import finish, ranks
from test_distributed import FIRST_RTOL, STEP_ATOL, steps_of
from tiny_run import MODULE, REPOSITORY, environment, run_here, split, weights

from earlyfusion.kernels.errors import UserError
from earlyfusion.model.config import ModelConfig
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import ParallelSection
from earlyfusion.pipeline.parallel.encoder import DecoupledEncoder
from earlyfusion.pipeline.parallel.mesh import (
    Layout,
    Sizes,
    check_encoder,
    check_model,
    check_stage,
    sizes_of,
)
from earlyfusion.pipeline.parallel.stages import cuts
from earlyfusion.pipeline.state import weights as stored
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.vision import balance
from earlyfusion.vision.patches import Share

STEPS = 20
# What rounding changes (1e-7 in a step) grows, because Muon lifts small singular values and routing near a
# tie flips (test_distributed.py): measured here 3e-4 at worst in twenty steps. A lane that is left out
# changes the loss by 5e-3 in the first five.
LOSS_RTOL = 2e-3
NORM_RTOL = 5e-2
WEIGHT_RTOL = 0.2
MOST = 0.06  # the farthest that AdamW takes a weight in twenty steps of 3e-3: what begins at zero has no norm

# Some of them compute activations again in the backward pass, collectives and all.
PLANS = {
    "fsdp2": (2, "--parallel.dp_shard 2"),
    "fsdp4": (4, "--parallel.dp_shard 4 --parallel.exchange_pictures on"),
    "dep": (2, "--parallel.encoder decoupled --train.recompute block"),
    "dep x fsdp x ep": (4, "--parallel.encoder decoupled --parallel.dp_shard 4 --parallel.ep 2"),
    "hsdp": (4, "--parallel.dp_shard 2 --parallel.dp_replicate 2"),
    "fsdp x ep": (4, "--parallel.dp_shard 4 --parallel.ep 2"),
    "fsdp x cp": (4, "--parallel.dp_shard 2 --parallel.cp 2"),
    "cp": (2, "--parallel.cp 2"),
    "cp x ep": (4, "--parallel.dp_shard 2 --parallel.cp 2 --parallel.ep 4 --train.recompute layer"),
    "pp": (2, "--parallel.pp 2"),
    "pp x fsdp": (4, "--parallel.pp 2 --parallel.dp_shard 2 --parallel.exchange_pictures on"),
    "pp virtual": (2, "--parallel.pp 2 --parallel.pp_virtual 2"),
    "pp virtual x cp": (4, "--parallel.pp 2 --parallel.pp_virtual 2 --parallel.cp 2 --train.recompute block"),
}


@pytest.fixture(scope="module")
def recipe(folder, tokenizer):
    stage = {"name": "all", "steps": 40, "length": 96, "tokens": 112, "lanes": 4, "warmup_steps": 2}
    heads = {"num_heads": 2, "head_dim": 8, "gate_lower_bound": -5.0}
    changes = {"stages": [stage], "optim__lr": 3e-3, "checkpoint__every": 0, "eval__heldout": 2}
    changes |= {"model__tie_word_embeddings": False, "model__num_hidden_layers": 4}
    changes |= {"model__linear_attn_config": heads}
    return tiny_run.write_recipe(folder / "tiny.toml", tiny_run.tiny_recipe(tokenizer, **changes))


@pytest.fixture(scope="module")
def alone(folder, recipe):
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(recipe, folder / "alone", "--steps", str(STEPS), monkeypatch=patch) == 0
    return folder / "alone"


@pytest.fixture(scope="module")
def stepped(folder, recipe):
    """One step of one process."""
    with pytest.MonkeyPatch.context() as patch:
        words = ("--steps 1 --eval.heldout 0",)
        assert run_here(recipe, folder / "stepped", *words, monkeypatch=patch) == 0
    return folder / "stepped"


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_like_one_process(plan, recipe, alone, tmp_path):
    world, words = PLANS[plan]
    given = ["pretrain", str(recipe), "--out", str(tmp_path), "--steps", str(STEPS), *split([words])]
    main = parallel_cases.shared if "dep" in plan else cli.main
    for code, errors in map(finish, ranks(main, (given,), environment(), world)):
        assert code == 0, errors[-4000:]

    ours, theirs = (read_metrics(out / "metrics.jsonl", "train") for out in (tmp_path, alone))
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        first = mine["step"] == 1
        assert mine["loss"] == pytest.approx(other["loss"], rel=FIRST_RTOL if first else LOSS_RTOL)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=FIRST_RTOL if first else NORM_RTOL)
        for key in ("tokens", "patches", "samples", "lr"):
            assert mine[key] == pytest.approx(other[key], rel=1e-12), (mine["step"], key)
        # Every layer's, whichever stage it lies on.
        for key in ("expert_load", "max_logit"):
            assert mine[key].keys() == other[key].keys(), key
        assert mine["expert_max_violation"] == pytest.approx(other["expert_max_violation"], abs=0.2)
    assert mine["loss"] < 0.85 * ours[0]["loss"], "it learns"

    # What is evaluated and written is the whole model.
    measured, theirs = (read_metrics(out / "metrics.jsonl", "eval")[-1] for out in (tmp_path, alone))
    for key in [key for key in theirs if key.startswith("heldout/")]:
        assert measured[key] == pytest.approx(theirs[key], rel=WEIGHT_RTOL / 10), key
    mine, other = weights(tmp_path), weights(alone)
    assert mine.keys() == other.keys()
    for name in mine:
        if not name.endswith("e_score_correction_bias"):
            want = other[name].float()
            far = (mine[name] - want).norm() / want.norm().clamp_min(MOST * want.numel() ** 0.5)
            assert far < WEIGHT_RTOL, (name, float(far))


LAUNCHED = {
    "one-gpu": ("", "", "1 x 1 threads"),
    "eight-gpus": ("--num_processes 2", "", "dp_replicate 1 x dp_shard 2"),
    "several-nodes": (
        "--num_machines 1 --num_processes 4 --machine_rank 0 --main_process_port 0"
        " --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2",
        "--parallel.ep 2",
        "dp_replicate 2 x dp_shard 2 x cp 1 x ep 2",
    ),
}
"""Shipped files of accelerate: what makes them smaller, words of the recipe, what the run's head says."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_the_shipped_files_of_accelerate_take_the_step_of_one_process(name, recipe, stepped, tmp_path):
    """FSDP2 and HSDP with shared experts, with micro-batches that are added up: the first optimizer step ends
    in the same weights."""
    smaller, words, said = LAUNCHED[name]
    file = REPOSITORY / "pipeline" / "recipes" / "accelerate" / f"{name}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += [*smaller.split(), "-m", MODULE, str(recipe), "--out", str(tmp_path)]
    command += ["--steps", "1", "--eval.heldout", "0", *words.split()]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert said in done.stdout + done.stderr
    mine, other = weights(tmp_path), weights(stepped)
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=STEP_ATOL, msg=name)


@pytest.mark.slow
def test_other_processes_under_another_plan_go_on(recipe, alone, tmp_path):
    """Four ranks of shards and experts, then a pipeline of two, then one process: the curve of one
    process."""
    every = "--checkpoint.every 2 --checkpoint.keep 9"
    none = "--parallel.dp_shard 1 --parallel.ep 1 --parallel.pp 1"
    legs = [
        (4, f"--steps 4 {every} --parallel.dp_shard 4 --parallel.ep 2"),
        (2, f"--steps 7 {every} --resume {none} --parallel.pp 2"),
        (1, f"--steps 9 {every} --resume {none}"),
    ]
    for world, words in legs:
        given = ["pretrain", str(recipe), "--out", str(tmp_path), *words.split()]
        for code, errors in map(finish, ranks(cli.main, (given,), environment(), world)):
            assert code == 0, errors[-4000:]
    ours, theirs = (read_metrics(out / "metrics.jsonl", "train") for out in (tmp_path, alone))
    assert [record["step"] for record in ours] == list(range(1, 10))
    for mine, other in zip(ours, theirs):
        assert mine["loss"] == pytest.approx(other["loss"], rel=LOSS_RTOL), mine["step"]

    # Any of them is a model directory: by four ranks, and by one.
    for step in (4, 9):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:06d}"
        assert cli.main(["export", str(checkpoint), "--to", str(tmp_path / f"at-{step}")]) == 0
    assert (tmp_path / "at-9" / "model.safetensors").read_bytes() == (
        tmp_path / "model" / "model.safetensors"
    ).read_bytes()
    written, read = weights(tmp_path, "at-4"), stored(tmp_path / "checkpoints" / "step-000004")
    assert torch.equal(written["language_model.model.norm.weight"], read["decoder.norm.weight"]) and len(
        load_model(tmp_path / "at-4").state_dict()
    ) == len(read)


@pytest.mark.slow
def test_four_shards_hold_a_third_of_one_process_at_most(recipe, tmp_path):
    """Weights, gradients and optimizer state; a quarter, and what rows do not divide."""
    sizes = {}
    for world in (1, 4):
        out = tmp_path / str(world)
        given = (str(recipe), str(out), ("parallel.dp_shard", world))
        for code, errors in map(finish, ranks(parallel_cases.held, given, environment(), world)):
            assert code == 0, errors[-3000:]
        sizes[world] = [json.loads((out / f"bytes-{rank}.json").read_text()) for rank in range(world)]
    for key, whole in sizes[1][0].items():
        assert 0 < max(one[key] for one in sizes[4]) <= 0.35 * whole, key
        assert sum(one[key] for one in sizes[4]) >= whole, key


def test_the_plans_meet_rows_with_and_without_pictures(recipe, monkeypatch):
    """In the steps that are compared: ranks with pictures beside ranks of text alone, however four lanes are
    dealt to two and four ranks, and a rank that has both kinds; pictures that ranks share in some, and
    none in others."""
    seen, shares = [], set()
    monkeypatch.setattr(balance, "LEAST_SHARE", 4)
    config = load_config([str(recipe)])
    for micro_batches in steps_of(config, STEPS):
        seen.append([batch.num_patches > 0 for batch in micro_batches])
        grids = [batch.grids for batch in micro_batches]
        plan = balance.exchange(grids, balance.VisionCost.from_config(config.vision), shared=True)
        shares.add(any(isinstance(grid, Share) for row in plan.grids for grid in row))
    assert shares == {False, True}
    assert any(len(set(lanes)) == 2 for lanes in seen), "four ranks"
    assert any(any(lanes[0::2]) != any(lanes[1::2]) for lanes in seen), "two ranks"
    assert any(len(set(lanes[0::2])) == 2 for lanes in seen), "one rank, in one of two micro-batches"


def section(**sizes):
    return ParallelSection(**sizes)


def test_sizes_multiply_to_the_processes():
    assert sizes_of(section(), 4, {}) == Sizes(dp_replicate=4) and sizes_of(section(), 4, {}).plain
    assert sizes_of(section(dp_shard=2, cp=2), 8, {}) == Sizes(dp_replicate=2, dp_shard=2, cp=2)
    assert sizes_of(section(pp=2, dp_shard=4, ep=4), 8, {}).world == 8
    with pytest.raises(UserError, match=r"dp_shard 3 .* does not give 4 processes; start 3"):
        sizes_of(section(dp_shard=3), 4, {})
    with pytest.raises(UserError, match=r"dp_replicate 3 does not give 8 processes; start 6"):
        sizes_of(section(dp_shard=2, dp_replicate=3), 8, {})
    with pytest.raises(UserError, match=r"parallel.ep = 3 does not divide dp_shard x cp = 4"):
        sizes_of(section(dp_shard=4, ep=3), 4, {})


def test_accelerate_means_the_same_sizes():
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "OTHER": "1"}
    assert sizes_of(section(), 4, fsdp) == Sizes(dp_shard=4)
    assert fsdp == {"OTHER": "1"}, "accelerate itself must not see them"
    words = {"DP_REPLICATE_SIZE": "2", "DP_SHARD_SIZE": "2", "CP_SIZE": "2", "TP_SIZE": "1"}
    told = {f"PARALLELISM_CONFIG_{key}": value for key, value in words.items()}
    both = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert sizes_of(section(cp=2), 8, told | both) == Sizes(dp_replicate=2, dp_shard=2, cp=2)
    with pytest.raises(
        UserError, match=r"parallel.cp is 4 in the recipe, but accelerate was configured for 2"
    ):
        sizes_of(section(cp=4), 8, told | both)
    with pytest.raises(UserError, match="tp_size 2"):
        sizes_of(section(), 8, told | both | {"PARALLELISM_CONFIG_TP_SIZE": "2"})
    with pytest.raises(UserError, match="FSDP 1"):
        sizes_of(section(), 2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"})
    with pytest.raises(UserError, match="offload"):
        sizes_of(
            section(),
            2,
            {**fsdp, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
        )


@pytest.mark.parametrize(
    ("sizes", "changes", "said"),
    [
        ({"ep": 3, "dp_shard": 3}, {}, "parallel.ep = 3 does not divide 256 experts"),
        ({"ep": 2, "dp_shard": 2}, {"num_experts": 0}, "the model has no experts"),
        ({"cp": 3}, {}, "parallel.cp = 3 does not divide 32 attention heads"),
        ({"pp": 10}, {"attn_res": "block"}, "would cut an AttnRes block of 3 layers .* at most 9"),
        ({"pp": 2}, {"tie_word_embeddings": True}, "tie_word_embeddings = false"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(sizes, changes, said):
    with pytest.raises(UserError, match=said):
        check_model(Sizes(**sizes), ModelConfig(**changes))
    check_model(Sizes(pp=9, dp_shard=8, ep=8, cp=2), ModelConfig(attn_res="block"))


def test_the_pictures_of_a_step_are_encoded_in_pieces_of_bounded_size():
    """Every picture once, in order; as many pieces as another rank has, the last ones empty; then what is
    shared, a picture at a time."""
    share = Share((1, 8, 8), 1, 2)
    encoder = object.__new__(DecoupledEncoder)
    encoder.runtime, encoder.limit = SimpleNamespace(agree=lambda own: max(own, 5)), 70
    encoder.held = ((1, 4, 4), share, (1, 8, 8), (1, 2, 2), share, (1, 6, 6))
    encoder.patches = [torch.zeros(size) for size in (16, 32, 64, 4, 32, 36, 0)]
    assert [*encoder.pieces()] == [[0], [2, 3], [5], [], [], [1], [4]]


def test_the_decoupled_encoder_is_refused_where_it_has_no_way():
    with pytest.raises(UserError, match="not with cp or pp"):
        check_encoder(Sizes(cp=2), "decoupled")
    check_encoder(Sizes(dp_shard=4, ep=2), "decoupled")


def test_rows_and_lanes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"stages.all.tokens = 100 cannot be cut for parallel.cp = 8"):
        check_stage(Sizes(cp=8), "all", 100, 4)
    with pytest.raises(UserError, match=r"4 lanes cannot be shared evenly by 3 processes"):
        check_stage(Sizes(dp_replicate=3), "all", 128, 4)
    with pytest.raises(
        UserError, match=r"2 micro-batches a data group do not fill 4 pipeline stages; set it to 8"
    ):
        check_stage(Sizes(pp=4, dp_shard=2), "all", 128, 4)


def test_every_process_has_one_place():
    sizes = Sizes(pp=2, dp_replicate=2, dp_shard=3, cp=2)
    places = [Layout(sizes, rank) for rank in range(sizes.world)]
    found = {(place.pp_rank, place.data_rank, place.cp_rank) for place in places}
    assert len(found) == sizes.world == 24 and {place.data_world for place in places} == {6}
    assert sum(place.counts for place in places) == 6


@pytest.mark.parametrize(
    ("blocks", "stages", "unit"), [(9, 2, 1), (9, 9, 1), (16, 3, 1), (16, 3, 2), (7, 2, 1)]
)
def test_stages_share_out_all_blocks_in_order(blocks, stages, unit):
    parts = cuts(blocks, stages, unit)
    assert [i for part in parts for i in part] == list(range(blocks)) and len(parts) == stages
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= unit and all(part.start % unit == 0 for part in parts)
