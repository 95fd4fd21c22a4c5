"""Objectives on what the engine really sampled: the trainer's log-probabilities, packed, one step in the
right direction."""

import pytest
import torch
from engine_cases import TOKENIZER, model, pictured, tokens
from rl_cases import flat, trained_logprobs

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import SamplingParams
from earlyfusion.rl.objectives.advantages import advantages
from earlyfusion.rl.objectives.corrections import CorrectionConfig, importance_weights
from earlyfusion.rl.objectives.losses import ObjectiveConfig, policy_loss
from earlyfusion.rl.objectives.sequences import sequence_sums
from earlyfusion.rl.rollouts.packing import pack, rollout


@pytest.mark.parametrize("name", ["k2.5", "k1.5", "dapo", "gspo"])
def test_a_step_on_text_and_image_rollouts_makes_better_answers_likelier(name):
    net = model(1)
    engine = Engine(net, TOKENIZER, max_slots=8, page_size=8, prefill_chunk=32)
    params = SamplingParams(8, ignore_eos=True)
    every = flat(
        rollout(engine, [tokens(9, 1), pictured(1)], group_size=4, params=params, capture_routing=True)
    )
    rewards = torch.tensor([t.ids[0] % 7 / 7 for t in every])
    groups = torch.arange(2).repeat_interleave(4)
    segments = Segments(tuple(len(t.ids) for t in every))
    engine_logp = torch.tensor([p for t in every for p in t.completion.logprobs1])

    cfg = ObjectiveConfig(name=name)
    A = advantages(cfg, rewards, groups)
    assert A.any()
    row, places = pack(net, every)
    logp = trained_logprobs(net, row, places)
    gap = importance_weights(
        CorrectionConfig(mode="mis", level="geometric"), logp.detach(), engine_logp, segments
    )
    out = policy_loss(cfg, logp, engine_logp, A, segments, weight_T=gap.weight_T)
    out.loss.backward()
    assert int(out.tokens) == 64 and int(gap.touched) == 0 and abs(float(out.k3)) < 64 * 1e-4
    with torch.no_grad():
        weight = lambda values: (sequence_sums(values, segments) * A).sum()
        before = weight(logp)
        norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / norm
        assert weight(trained_logprobs(net, row, places)) > before
    assert any(p.grad is not None and p.grad.any() for n, p in net.named_parameters() if "vision" in n)
