"""Gradients of the learner against the plain way: every answer by itself, no sharing, one loss over all."""

import pytest
import torch
from rl_cases import PTX, flat, model_directory, training

from earlyfusion.eval.rewards import Scored
from earlyfusion.kernels.segments import Segments
from earlyfusion.rl.learn import Sums, distinct
from earlyfusion.rl.objectives.losses import policy_loss
from earlyfusion.rl.rollouts.experience import experience
from earlyfusion.rl.rollouts.packing import pack, used_experts

GRAD_RTOL = 2e-4
"""fp32 sums in another order, through twelve small layers; a wrong weight of a token is off by a tenth at
least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


def asked(folder, tmp_path, objective, temperature=1.0, **rollout):
    """(run, experience) of a few groups, some answers made equal by a low temperature."""
    made = training(
        folder,
        tmp_path / "run",
        objective={**objective, "reset_optimizer": False},
        rollout={"prompts": 5, "group_size": 6, **rollout},
        temperature={"start": temperature, "end": temperature},
    )
    made.refresh_engine()
    groups = made.collector.collect(0, temperature, 5)
    answers = [t for g in groups for t in g.trajectories]
    scored = [Scored((sum(t.ids) % 11) / 10) for t in answers]
    return made, experience(made.config, groups, scored, 0, {})


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def plain(made, seen, temperature):
    """The same by definition: all answers packed one by one, a log-softmax over the logits at the
    temperature."""
    net, every = made.model, flat([g.trajectories for g in seen.groups])
    kept = [n for n, t in enumerate(every) if t.ids]
    logp = []
    for n in kept:
        row, places = pack(net, [every[n]])
        with used_experts(net, places):
            logits = net.logits(net.hidden(row).index_select(0, places.positions_M)).float() / temperature
        logits[:, sorted(made.engine.rules.banned_ids)] = float("-inf")
        logp.append(logits.log_softmax(-1).gather(1, places.ids_M[:, None]).squeeze(1))
    old = torch.tensor([p for n in kept for p in every[n].completion.logprobs])
    segments = Segments(tuple(len(every[n].ids) for n in kept))
    out = policy_loss(made.config.objective, torch.cat(logp), old, seen.advantages_N[kept], segments)
    out.loss.backward()
    return float(out.loss.detach())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", ["k2.5", "k1.5", "grpo", "gspo", "cispo"])
def test_shared_answers_and_pictures_give_the_gradients_of_every_answer_by_itself(
    folder, tmp_path, name, temperature
):
    made, seen = asked(folder, tmp_path, {"name": name}, temperature)
    pieces = distinct(seen, range(len(seen.groups)))
    assert sum(len(p.answers) for p in pieces) == sum(
        bool(t.ids) for g in seen.groups for t in g.trajectories
    )
    net = made.model.train()
    want_loss = plain(made, seen, temperature)
    want = gradients(net)
    for row_tokens in (40, 100_000):  # every piece in a row of its own, and all in one
        object.__setattr__(made.config.train, "row_tokens", row_tokens)
        net.zero_grad(set_to_none=True)
        sums = Sums()
        made.learner.gradients(seen, range(len(seen.groups)), 0, sums)
        assert sums.reduced(made.runtime)["loss"] == pytest.approx(want_loss, rel=2e-5, abs=1e-6)
        got = gradients(net)
        for key, grad in want.items():
            error = (got[key] - grad).norm() / grad.norm().clamp(min=1e-7)
            assert error < GRAD_RTOL or (got[key] - grad).abs().max() < 1e-8, (
                row_tokens,
                key,
                float(error),
            )


def test_equal_answers_of_other_weights_are_two(folder, tmp_path):
    _, seen = asked(folder, tmp_path, {"name": "k2.5"}, temperature=0.02)
    both = [t for group in seen.groups for t in group.trajectories]
    pieces = distinct(seen, range(len(seen.groups)))
    shared = next(piece for piece in pieces if len(piece.answers) > 1)
    both[shared.answers[-1]].completion.versions[0] -= 1
    split = distinct(seen, range(len(seen.groups)))
    assert len(split) == len(pieces) + 1


def test_curated_rows_are_divided_by_their_own_weights(folder, tmp_path):
    """Oracle: coef times the weighted mean loss of all rows together, whatever row a token stands in."""
    made = training(folder, tmp_path / "run", **{**PTX, "ptx": {"coef": 0.3, "tokens": 192, "length": 96}})
    batches = [*made.curated.next_step(), *made.curated.next_step()]
    net = made.model.train()
    outs = [net(batch) for batch in batches]
    mean = sum(out.loss_sum for out in outs) / sum(out.weight_sum for out in outs)
    (0.3 * mean).backward()
    expected, sums = gradients(net), Sums()
    net.zero_grad(set_to_none=True)
    assert made.learner.ptx_gradients(batches, 0.3, sums) == pytest.approx(mean.item(), rel=1e-5)
    for name, grad in gradients(net).items():
        torch.testing.assert_close(grad, expected[name], rtol=GRAD_RTOL, atol=1e-7)
