"""Rollouts: groups, and how near the trainer is to the engine, with and without replayed routing."""

import pytest
import torch
from engine_cases import TOKENIZER, all_returned, drawn, model, pictured, serve, tokens
from rl_cases import flat, mismatch, trained_logprobs

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.layers import moe_layers, recording_routing
from earlyfusion.rl.rollouts.packing import Trajectory, pack, rollout

KL_BAR = 1e-4  # nats per token, fp32


def engine_of(net, **options) -> Engine:
    return Engine(net, TOKENIZER, **{"max_slots": 8, "page_size": 8, "prefill_chunk": 32, **options})


def some_prompts(seed: int = 0):
    return [tokens(9, seed), tokens(33, seed), pictured(seed), tokens(1, seed)]


def sampled(net, longest: int, seed: int = 0, engine: Engine | None = None) -> list[Trajectory]:
    """Two answers of `longest` tokens to every prompt, with their routing."""
    params = SamplingParams(longest, ignore_eos=True)
    groups = rollout(
        engine or engine_of(net), some_prompts(seed), group_size=2, params=params, capture_routing=True
    )
    return flat(groups)


@pytest.mark.parametrize("seed", [0, 1])
def test_trainer_and_engine_agree_and_other_weights_are_seen(seed):
    """Mismatch KL under the bar, and every single log-probability within 1e-4; half a percent of noise on the
    weights is far above."""
    net = model(seed)
    engine = engine_of(net)
    every = sampled(net, 16, seed, engine)
    row, places = pack(net, every)
    trained = trained_logprobs(net, row, places)
    kl, largest = mismatch(every, trained.detach())
    assert trained.shape == (4 * 2 * 16,) and trained.requires_grad
    assert 0 <= kl < KL_BAR and largest < 1e-4
    all_returned(engine)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1 + 0.005 * torch.randn_like(parameter))
    kl, largest = mismatch(every, trained_logprobs(net, row, places).detach())
    assert largest > 1e-2 and kl > 1e-6


# ---- routing replay
# -------------------------------------------------------------------------------------------------


def test_captured_routing_is_what_the_layers_chose():
    """Chunks, forks, decode steps and pauses put every token's experts where the one uncached forward has
    them."""
    net = model()
    prompt = tokens(40)
    engine = engine_of(net, prefill_chunk=16)
    handle = engine.submit(Request("r", prompt, drawn(9, n=3), capture_routing=True))
    for _ in range(7):
        engine.step()
    handle = engine.resume(engine.pause("r"))
    while engine.has_work:
        engine.step()
    for completion in handle.completions:
        assert completion.routing.dtype == "uint8" and completion.routing.shape == (
            40 + 8,
            len(moe_layers(net)),
            2,
        )
        whole = torch.cat([prompt.ids, torch.tensor(completion.ids[:-1])])
        with torch.no_grad(), recording_routing(net) as take:
            net.decoder(net.decoder.embed_tokens(whole), Segments((len(whole),)))
            chosen = take()
        assert torch.equal(
            chosen.sort(-1).values, torch.from_numpy(completion.routing).long().sort(-1).values
        )
    assert all(layer.gate.recorded is None for layer in moe_layers(net))


def test_replayed_routing_uses_the_old_experts_with_fresh_weights():
    """After the router has moved, replay keeps the choice; the gates' weights and gradients are those of
    now."""
    net = model()
    every = sampled(net, 8)
    row, places = pack(net, every)
    captured = places.routing_TLJ
    assert captured.shape == (row.ids.shape[0], 3, 2) and (captured[-1] == -1).all()  # never fed
    with torch.no_grad():
        for layer in moe_layers(net):
            layer.gate.e_score_correction_bias.normal_(0.0, 1.0)
            layer.gate.weight.add_(0.05 * torch.randn_like(layer.gate.weight))
    known = (captured >= 0).all(-1).all(-1)

    def chosen(replay: bool) -> torch.Tensor:
        with recording_routing(net) as take:
            trained_logprobs(net, row, places, replay=replay)
            return take()

    kept, free = chosen(True), chosen(False)
    assert torch.equal(kept[known], captured[known].long())
    assert (free[known].sort(-1).values != captured[known].long().sort(-1).values).any(
        -1
    ).float().mean() > 0.3
    assert torch.equal(kept[~known][:, 0], free[~known][:, 0])  # a token never fed chooses for itself
    trained_logprobs(net, row, places).sum().backward()
    assert all(layer.gate.weight.grad.abs().max() > 0 for layer in moe_layers(net))
    assert all(layer.gate.replayed_TJ is None for layer in moe_layers(net))


def test_replay_brings_the_trainer_back_to_the_engine_when_choices_flip():
    """With near ties in the router, a disturbed trainer flips experts; replay removes what the flips add."""
    net = model()
    with torch.no_grad():
        for layer in moe_layers(net):
            layer.gate.weight.mul_(1e-4)  # all scores within rounding of one half
            layer.gate.e_score_correction_bias.zero_()
    every = sampled(net, 8)
    with torch.no_grad():
        for layer in moe_layers(net):
            layer.gate.weight.add_(1e-4 * torch.randn_like(layer.gate.weight))
    row, places = pack(net, every)
    replayed = mismatch(every, trained_logprobs(net, row, places).detach())[1]
    free = mismatch(every, trained_logprobs(net, row, places, replay=False).detach())[1]
    assert free > 0.05 and replayed < free / 20


# ---- new weights
# ----------------------------------------------------------------------------------------------------


def test_new_weights_between_two_steps_are_stamped_and_go_on_from_the_old_states():
    old, new, prompt = model(0), model(1), tokens(30)
    before = serve(old, [Request("r", prompt, drawn(12, n=2))])
    engine = engine_of(old)
    handle = engine.submit(Request("r", prompt, drawn(12, n=2)))
    for _ in range(5):
        engine.step()
    engine.load_weights(new.state_dict(), version=3)
    while engine.has_work:
        engine.step()
    all_returned(engine)
    for completion in handle.completions:
        assert completion.versions == [0] * 5 + [3] * 7
        assert completion.ids[:5] == before["r", completion.index].ids[:5]
    # what the new weights say of the whole text is something else
    row, places = pack(new, [Trajectory(prompt, c) for c in handle.completions])
    trained = trained_logprobs(new, row, places).detach().view(2, 12)
    got = torch.tensor([c.logprobs1 for c in handle.completions])
    assert (trained - got)[:, 5:].abs().max() > 1e-2


def test_weights_of_another_model_change_nothing():
    served = model(0)
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    engine = engine_of(served)
    state = model(1).state_dict()
    state.pop("decoder.norm.weight")
    state["decoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"][:5]
    with pytest.raises(ValueError, match="2 tensors are missing, unknown or of another shape"):
        engine.load_weights(state, version=1)
    assert engine.stats()["version"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())
