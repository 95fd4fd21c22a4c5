"""QK-Clip: logits fall to tau in one step, other heads do not change by a bit, and ranks agree."""

import os

import muon_rank
import pytest
import torch
from forked import Forked, finish
from tiny_mla import TinyMLA, TinyModel, fill_gradients
from tiny_run import tiny_text

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.mixers import MultiHeadLatentAttention
from earlyfusion.pipeline import build
from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.qk_clip import QKClip, head_factors
from earlyfusion.pipeline.optim.routing import build_param_groups

LOGIT_TOL = 1e-5  # relative, fp32: sqrt(gamma) twice against gamma


def blown_up(
    seed: int, low_rank_query: bool = False, heads_up: tuple[int, ...] = (1,)
) -> tuple[TinyMLA, torch.Tensor]:
    """A module whose chosen heads have logits far above 1, and its input."""
    torch.manual_seed(seed)
    module = TinyMLA(low_rank_query=low_rank_query)
    query = module.q_b_proj if low_rank_query else module.q_proj
    with torch.no_grad():
        for head in heads_up:
            query.weight[head * 12 : (head + 1) * 12] *= 60.0
            module.kv_b_proj.weight[head * 16 : head * 16 + 8] *= 60.0
    return module, torch.randn(9, 24)


@pytest.mark.parametrize("low_rank_query", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_blown_up_head_comes_down_to_tau_in_one_step(low_rank_query, seed):
    module, x = blown_up(seed, low_rank_query)
    tau = 5.0
    before = module.measure(x)
    assert before[1] > 10 * tau and (before[[0, 2, 3]] < tau).all()
    old = {n: p.detach().clone() for n, p in module.named_parameters()}
    QKClip(module, tau).apply()
    after = module.logits(x).amax(dim=1)
    assert after[1].item() == pytest.approx(tau, rel=LOGIT_TOL)
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    gamma = tau / before[1]
    query = "q_b_proj.weight" if low_rank_query else "q_proj.weight"
    rows = torch.ones(48)
    rows[12:20], rows[20:24] = gamma.sqrt(), gamma  # without position, with position
    want = {query: old[query] * rows[:, None]}
    rows = torch.ones(64)
    rows[16:24] = gamma.sqrt()  # keys of head 1; its values stay
    want["kv_b_proj.weight"] = old["kv_b_proj.weight"] * rows[:, None]
    for name, weight in module.named_parameters():  # bit for bit: what is not clipped is multiplied by 1
        assert torch.equal(weight, want.get(name, old[name])), name


def test_factors_are_one_for_everything_that_must_not_be_clipped():
    S = torch.tensor([-float("inf"), -3.0, 0.0, 4.9, 5.0, 10.0, float("inf"), float("nan")])
    assert head_factors(S, 5.0).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0]


def test_maximum_runs_over_micro_batches_and_starts_again_after_the_step():
    module, x = blown_up(3)
    clip = QKClip(module, 5.0)
    largest = torch.maximum(module.measure(x), module.measure(0.5 * x))
    clip.apply()
    assert clip.metrics()["max_logit"][""] == largest.tolist()
    assert clip.metrics()["clipped_heads"] == 1
    assert torch.equal(module.max_logit, torch.full((4,), float("-inf")))
    old = module.q_proj.weight.detach().clone()
    clip.apply()  # nothing measured since
    assert torch.equal(module.q_proj.weight, old)
    assert clip.metrics() == {"max_logit": {}, "clipped_heads": 0}
    module.measure(1e3 * x)
    clip.reset()  # a skipped step
    clip.apply()
    assert torch.equal(module.q_proj.weight, old)


def test_it_runs_after_every_step_of_adamw():
    module, x = blown_up(4)
    opt = build.optimizer(OptimSection(name="adamw", lr=1e-9, qk_clip=5.0), module)
    fill_gradients(module, 0)
    module.measure(x)
    opt.step()
    assert module.logits(x).amax().item() == pytest.approx(5.0, rel=LOGIT_TOL)


def test_muonclip_clips_after_its_update_and_leaves_momentum_alone():
    results = []
    for tau in (None, 1.0):
        torch.manual_seed(0)
        model = TinyModel()
        groups = build_param_groups(model, lr=0.02, weight_decay=0.1)
        opt = MuonClip(groups, model, qk_clip=tau)
        fill_gradients(model, 0)
        attention = model.layers[1].self_attn
        attention.max_logit.copy_(torch.tensor([0.5, 4.0, 0.5, 0.5]))
        opt.step()
        results.append(
            (attention.q_proj.weight.detach(), opt.state[attention.q_proj.weight]["momentum_buffer"])
        )
    (free, momentum), (clipped, same) = results
    rows = torch.ones(48)
    rows[12:20], rows[20:24] = 0.5, 0.25
    assert torch.equal(clipped, free * rows[:, None]) and torch.equal(momentum, same)
    metrics = opt.qk_clip.metrics()
    assert metrics["max_logit"] == {"1": [0.5, 4.0, 0.5, 0.5]} and metrics["clipped_heads"] == 1


@pytest.mark.parametrize("q_lora_rank", [None, 16])
def test_the_real_attention_layer_comes_down_to_tau(q_lora_rank):
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(tiny_text(q_lora_rank=q_lora_rank))
    query = layer.q_proj if q_lora_rank is None else layer.q_b_proj
    with torch.no_grad():
        for param in layer.parameters():
            if param.ndim == 2:
                param.normal_(0, 0.2)
        query.weight[12:].mul_(300.0)  # head 1
    segments = Segments.from_lengths([7, 5])
    x = torch.randn(12, 32)
    clip = QKClip(layer, tau=20.0)
    assert layer.qk_clip_tau == 20.0
    layer.train()
    layer(x, segments).sum().backward()
    before = layer.max_logit.clone()
    assert before[1] > 100.0 and before[0] < 20.0
    clip.apply()
    layer(x, segments)
    assert layer.max_logit[1].item() == pytest.approx(20.0, rel=1e-4)
    assert layer.max_logit[0] == before[0]


def test_two_processes_equal_one(tmp_path):
    """One MAX all-reduce makes both ranks clip by the global maximum."""
    processes = [Forked(muon_rank.main, (rank, str(tmp_path)), {**os.environ}) for rank in range(2)]
    for code, errors in map(finish, processes):
        assert code == 0, errors
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    weights, metrics = muon_rank.clipped_alone([0, 1])
    assert metrics["clipped_heads"] > 0
    for rank in range(2):
        alone, _ = muon_rank.clipped_alone([rank])
        assert any(not torch.equal(alone[n], weights[n]) for n in weights)  # its own batch is not enough
        assert all(torch.equal(ranks[rank]["clip"][n], weights[n]) for n in weights)
        assert ranks[rank]["metrics"] == metrics
        assert ranks[rank]["reduced"] == 1, "one message for all layers"
        assert "Muon takes Replicate and Shard(0)" in ranks[rank]["refusal"]
