"""Every objective against its derivative worked out by hand, finite differences, and what its paper claims of
it."""

import math

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.rl.objectives.losses import PRESETS, ObjectiveConfig, policy_loss, totals

EXACT = 1e-12  # float64, sums of a few dozen terms
SINGLE = 2e-6  # float32 against float64, gradients of order 1 / tokens
V = 7
LENGTHS = (3, 1, 6, 4, 2, 5)
MEMBERS = sorted(PRESETS)


def config(name, **given):
    if name == "dr_grpo":
        given = {"constant_tokens": 9, **given}
    return ObjectiveConfig(name=name, **given)


class Case:
    """Random answers of LENGTHS tokens over V words, log ratios wide enough to leave every trust region."""

    def __init__(self, seed, spread=0.8, masked=True, dtype=torch.float64):
        g = torch.Generator().manual_seed(seed)
        self.segments = Segments(LENGTHS)
        total = self.segments.total
        self.logits = torch.randn(total, V, generator=g, dtype=torch.float64).to(dtype)
        self.ids = torch.randint(V, (total,), generator=g)
        self.old = self.logp(self.logits) + spread * torch.randn(total, generator=g, dtype=torch.float64).to(
            dtype
        )
        self.A = torch.tensor([1.0, -0.5, 0.75, -1.25, 0.0, 2.0], dtype=dtype)
        self.mask = torch.rand(total, generator=g) > 0.2 if masked else torch.ones(total, dtype=torch.bool)
        self.mask[0] = True

    def logp(self, logits):
        return logits.log_softmax(-1).gather(1, self.ids[:, None])[:, 0]

    def loss(self, cfg, logits=None, A=None, **kw):
        logp = self.logp(self.logits if logits is None else logits)
        kw = {"mask_T": self.mask, **kw}
        return policy_loss(cfg, logp, self.old, self.A if A is None else A, self.segments, **kw)


def slope_by_hand(cfg, l, A, mask):
    """d loss / d log pi of every token: plain Python over lists, one answer after the other, from the table
    of papers."""
    answers = [[l[t] for t in span if mask[t]] for span in spans()]
    S = sum(bool(a) for a in answers)
    M = sum(len(a) for a in answers)
    slopes = []
    for j, span in enumerate(spans()):
        n, L = len(answers[j]), sum(answers[j])
        for t in span:
            if not mask[t]:
                slopes.append(0.0)
                continue
            rho, a = math.exp(l[t]), A[j]
            if cfg.name == "k1.5":
                slope = -(a - cfg.tau * L) / S
            elif cfg.name == "k2":
                slope = -2 * cfg.tau * (a - cfg.tau * L) / S
            elif cfg.name in ("k2.5", "k3"):
                inside = cfg.log_low <= l[t] <= cfg.log_high
                slope = (-(rho * a if inside else 0.0) + 2 * cfg.tau * l[t]) / M
            elif cfg.name == "cispo":
                slope = -min(rho, cfg.weight_high) * a / M
            elif cfg.name == "gspo":
                s = math.exp(L / n)
                slope = -s * a * active(cfg, s, a) / (n * S)
            else:
                share = {"grpo": n * S, "dr_grpo": S * 9, "dapo": M}[cfg.name]
                slope = -rho * a * active(cfg, rho, a) / share
            slopes.append(slope)
    return slopes


def active(cfg, ratio, a):
    return not ((a > 0 and ratio > 1 + cfg.clip_high) or (a < 0 and ratio < 1 - cfg.clip_low))


def spans():
    start = 0
    for length in LENGTHS:
        yield range(start, start + length)
        start += length


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MEMBERS)
def test_gradient_by_logits_equals_the_one_derived_by_hand(name, seed):
    case, cfg = Case(seed), config(name)
    logits = case.logits.clone().requires_grad_()
    case.loss(cfg, logits).loss.backward()
    p = case.logits.softmax(-1)
    log_ratio = (case.logp(case.logits) - case.old).tolist()
    slopes = torch.tensor(
        slope_by_hand(cfg, log_ratio, case.A.tolist(), case.mask.tolist()), dtype=torch.float64
    )
    by_hand = slopes[:, None] * (torch.nn.functional.one_hot(case.ids, V) - p)  # d log p_i / d z = onehot - p
    torch.testing.assert_close(logits.grad, by_hand, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "cispo"])  # its weight is a constant
def test_gradient_equals_finite_differences_of_the_value(name):
    case, cfg = Case(3), config(name)
    assert torch.autograd.gradcheck(lambda z: case.loss(cfg, z).loss, case.logits.clone().requires_grad_())


@pytest.mark.parametrize("name", MEMBERS)
def test_packing_order_and_poisoned_padding_change_nothing(name):
    case, cfg = Case(7), config(name)
    logp = case.logp(case.logits).requires_grad_()
    whole = policy_loss(cfg, logp, case.old, case.A, case.segments, mask_T=case.mask).loss
    (grad,) = torch.autograd.grad(whole, logp)

    order = [4, 2, 0, 5, 1, 3]
    places = list(spans())
    index = torch.tensor([t for j in order for t in places[j]])
    bad = torch.full((3,), float("nan"), dtype=torch.float64)
    poisoned = lambda values: torch.cat([values[index], bad])
    packed = poisoned(logp.detach()).requires_grad_()
    segments = Segments((*(LENGTHS[j] for j in order), 3))
    A = torch.cat([case.A[order], bad[:1]])
    mask = torch.cat([case.mask[index], torch.zeros(3, dtype=torch.bool)])
    weight = poisoned(torch.ones_like(case.old))
    moved = policy_loss(cfg, packed, poisoned(case.old), A, segments, mask_T=mask, weight_T=weight)
    moved.loss.backward()
    torch.testing.assert_close(moved.loss, whole, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(packed.grad[:-3], grad[index], atol=EXACT, rtol=EXACT)
    assert (packed.grad[-3:] == 0).all() and all(torch.isfinite(value) for value in moved)


@pytest.mark.parametrize("name", MEMBERS)
def test_pieces_with_the_totals_of_the_batch_sum_to_the_whole(name):
    case, cfg = Case(8), config(name)
    whole = case.loss(cfg)
    batch, cut = totals(case.mask, case.segments), sum(LENGTHS[:2])
    assert batch == (case.mask.sum(), sum(bool(case.mask[list(span)].any()) for span in spans()))
    losses = []
    for rows, answers in ((slice(0, cut), slice(0, 2)), (slice(cut, None), slice(2, 6))):
        logp, segments = case.logp(case.logits)[rows], Segments(LENGTHS[answers])
        given = (logp, case.old[rows], case.A[answers], segments)
        losses.append(policy_loss(cfg, *given, mask_T=case.mask[rows], batch=batch))
    torch.testing.assert_close(sum(part.loss for part in losses), whole.loss, atol=EXACT, rtol=EXACT)
    assert sum(int(part.outside) for part in losses) == int(whole.outside)
    assert float(sum(part.k3 for part in losses)) == pytest.approx(float(whole.k3))


@pytest.mark.parametrize("name", MEMBERS)
def test_nothing_to_train_is_zero_loss_and_zero_gradient(name):
    case = Case(9)
    logits = case.logits.clone().requires_grad_()
    out = case.loss(config(name), logits, mask_T=torch.zeros(case.segments.total, dtype=torch.bool))
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and not logits.grad.any() and int(out.tokens) == 0
    none = torch.zeros(0, requires_grad=True)
    assert policy_loss(config(name), none, torch.zeros(0), torch.zeros(0), Segments(())).loss == 0


@pytest.mark.parametrize("name", MEMBERS)
def test_absurd_ratios_give_finite_gradients(name):
    logp = torch.tensor([-0.1, -900.0, -0.1, -900.0], requires_grad=True)
    old = torch.tensor([-900.0, -0.1, -900.0, -0.1])
    out = policy_loss(config(name), logp, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), Segments((1,) * 4))
    out.loss.backward()
    assert torch.isfinite(logp.grad).all() and all(torch.isfinite(value) for value in out)


@pytest.mark.parametrize("name", ["k2.5", "dapo", "grpo", "cispo", "gspo", "k1.5"])
def test_correction_weights_scale_the_policy_term_and_take_no_gradient(name):
    case, cfg = Case(10), config(name, **({"tau": 0.0} if name == "k2.5" else {}))
    weights_N = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0, 0.25], dtype=torch.float64)
    weight = weights_N[case.segments.ids().long()].requires_grad_()
    logp = case.logp(case.logits).requires_grad_()
    plain = policy_loss(cfg, logp, case.old, case.A, case.segments, mask_T=case.mask).loss
    weighed = policy_loss(cfg, logp, case.old, case.A, case.segments, mask_T=case.mask, weight_T=weight).loss
    (expected,) = torch.autograd.grad(plain, logp)
    got, by_weight = torch.autograd.grad(weighed, [logp, weight], allow_unused=True)
    torch.testing.assert_close(got, expected * weight.detach(), atol=EXACT, rtol=EXACT)
    assert by_weight is None
