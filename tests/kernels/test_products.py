"""Float32 products by oneDNN: values against float64, bits against MKL and against themselves, the setting
put back."""

import pytest
import torch
import torch.nn.functional as F

from earlyfusion.kernels import products
from earlyfusion.kernels.products import (
    NARROW,
    SAME_BITS,
    halved_products,
    linear,
    product,
    product_over_rows,
)

ROUNDING = 2e-6
"""Of a float32 sum of up to 4,096 products in the order of its terms, against the sum of their sizes: 2^-24
times a few."""

needs_onednn = pytest.mark.skipif(
    not products.quick(), reason="torch's own choice is the quick one on this processor"
)


@pytest.fixture(params=["onednn", "torch"])
def either(request, monkeypatch):
    """Both ways; oneDNN where the project uses it (elsewhere, as with AMX, it may multiply in bfloat16)."""
    if request.param == "onednn" and not products.quick():
        pytest.skip("the project leaves this processor's products to torch")
    monkeypatch.setattr(products, "quick", lambda: request.param == "onednn")
    # Small shapes, too: otherwise only large ones would go to oneDNN.
    monkeypatch.setattr(products, "LEAST", 1)
    return str(request.param)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(result, left, right):
    """Largest error against float64, by the sum of the sizes of the terms."""
    # Against the sum of sizes: where terms cancel, any order of adding is off.
    exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    return float(((result.double() - exact).abs() / size.clamp_min(1e-30)).max())


SHAPES = [(0, 8, 4), (1, 300, 5), (15, 257, 3), (31, 96, 7), (33, 130, 64), (100, 300, 17), (256, 64, 9)]
SHAPES += [(523, 128, 24), (1030, 7, 2)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_values(either, rows, inner, columns):
    for seed in (0, 1):
        x, w = normal(seed, rows, inner), normal(seed + 9, columns, inner).T
        # What a product forgets to write stays NaN.
        poisoned = torch.full((rows, columns), float("nan"))
        assert product(x, w, out=poisoned).data_ptr() == poisoned.data_ptr()
        assert torch.equal(product(x, w), poisoned)
        if rows:
            assert off(poisoned, x, w) < ROUNDING


@pytest.mark.parametrize("rows", [0, 40, 255, 256, 300, 2048, 4096 + 17])
def test_sums_over_rows(either, rows):
    left, right = normal(rows, rows, 33), normal(rows + 1, rows, 20)
    poisoned = torch.full((33, 20), float("nan"))
    assert torch.equal(product_over_rows(left, right, out=poisoned), product_over_rows(left, right))
    assert off(poisoned, left.T, right) < ROUNDING if rows else not poisoned.any()


def test_strided_operands(either):
    """Slices of wider tensors, as the engine and the experts hand them in."""
    wide, weight, out = normal(0, 300, 200), normal(1, 64, 200), torch.full((310, 80), float("nan"))
    x, w, place = wide[:, 40:160], weight[:, 40:160].T, out[5:305, 7:71]
    product(x, w, out=place)
    assert off(place, x, w) < ROUNDING
    assert (
        out[:5].isnan().all()
        and out[305:].isnan().all()
        and out[:, :7].isnan().all()
        and out[:, 71:].isnan().all()
    )


@needs_onednn
@pytest.mark.parametrize("inner", [16, 128, SAME_BITS])
def test_the_bits_of_mkl(inner):
    """Small products stay with MKL, so both must give a row the same bits."""
    for seed, columns in enumerate((NARROW, 20, 100, 128, 452, 2048)):
        x, w = normal(seed, 1024, inner), normal(seed + 9, columns, inner).T
        assert torch.equal(product(x, w), torch.mm(x, w)), columns


@needs_onednn
@pytest.mark.parametrize("inner", [128, 384, 1000])
def test_a_row_does_not_know_how_many_there_are(inner):
    for columns in (NARROW - 1, NARROW, 256):
        x, w = normal(0, 1100, inner), normal(1, columns, inner).T
        full = product(x, w)
        for rows in (4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100, 250, 255, 256, 257, 300, 523, 1024, 1099):
            assert torch.equal(product(x[:rows], w), full[:rows]), (columns, rows)
            assert torch.equal(product(x[1100 - rows :], w), full[1100 - rows :]), (columns, rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 96), (3, 101, 40), (2049, 24), (0, 12)])
def test_linear_and_its_gradients(either, shape, bias):
    x, weight = normal(0, *shape), normal(1, 56, shape[-1])
    offset = normal(2, 56) if bias else None
    dy = normal(3, *shape[:-1], 56)
    ours = [t.clone().requires_grad_() for t in (x, weight, offset) if t is not None]
    theirs = [t.double().requires_grad_() for t in (x, weight, offset) if t is not None]
    y, expected = linear(*ours), F.linear(*theirs)
    y.backward(dy)
    expected.backward(dy.double())
    assert torch.allclose(y.double(), expected, rtol=0, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(linear(*ours), y)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        scale = max(1.0, float(other.grad.abs().max())) if other.grad.numel() else 1.0
        assert torch.allclose(mine.grad.double(), other.grad, rtol=0, atol=1e-5 * scale)


def test_frozen_parts_get_no_gradient(either):
    x, weight = normal(0, 300, 64), normal(1, 40, 64).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    x.requires_grad_()
    linear(x, weight.detach()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_torch(either, dtype):
    x, w = normal(0, 300, 300).to(dtype), normal(1, 300, 64).to(dtype)
    assert torch.equal(product(x, w), torch.mm(x, w))
    assert torch.equal(linear(x, w.T), F.linear(x, w.T))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x.float(), w.float().T).dtype == torch.bfloat16


def test_the_setting_is_put_back(monkeypatch):
    setting = torch.backends.mkldnn.matmul
    monkeypatch.setattr(products, "quick", lambda: True)
    before = setting.fp32_precision
    x = normal(0, 300, 300)
    product(x, x)
    product_over_rows(x, x)
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError):
        # Shapes that do not fit: the setting must come back all the same.
        product(x, x[:7])
    assert setting.fp32_precision == before
    setting.fp32_precision = "bf16"
    try:
        product(x, x)
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


# ---- bfloat16 operands ----

HALF = 2**-8
"""Twice what a rounding to the nearest of 8 bits may be off: that of the result, and the sums before it."""


@pytest.fixture
def halved(monkeypatch):
    monkeypatch.setattr(products, "LEAST", 1)
    with halved_products():
        yield


def rounded(x):
    return x.bfloat16().double()


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 30, 5), (127, 64, 17), (128, 40, 24), (700, 300, 33)]
)
def test_halved_products_round_their_operands_and_their_result_once(halved, rows, inner, columns):
    x, w = normal(0, rows, inner), normal(1, columns, inner).T
    poisoned = torch.full((rows, columns), float("nan"))
    assert product(x, w, out=poisoned).dtype == torch.float32 and torch.equal(poisoned, product(x, w))
    exact = rounded(x) @ rounded(w)
    assert ((poisoned - exact).abs() <= HALF * exact.abs() + ROUNDING * (x.abs() @ w.abs())).all()
    assert not torch.equal(poisoned, torch.mm(x, w))
    sums = product_over_rows(x, normal(2, rows, 9))
    assert sums.dtype == torch.float32 and off(sums, rounded(x).T, rounded(normal(2, rows, 9))) < HALF


def test_a_halved_linear_and_its_gradients_wherever_the_backward_runs(monkeypatch):
    monkeypatch.setattr(products, "LEAST", 1)
    for seed in (0, 1):
        x, weight, dy = normal(seed, 300, 96), normal(seed + 1, 56, 96), normal(seed + 2, 300, 56)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with halved_products():
            y = linear(*leaves)
        y.backward(dy)
        expected = rounded(x) @ rounded(weight).T, rounded(dy) @ rounded(weight), rounded(dy).T @ rounded(x)
        for ours, exact in zip((y, *(leaf.grad for leaf in leaves)), expected, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - exact).abs().max() < HALF * exact.abs().max()


def test_what_is_small_wide_or_outside_is_not_halved(monkeypatch):
    x, w = normal(0, 300, 300), normal(1, 300, 64)
    plain = product(x, w)
    with halved_products():
        assert torch.equal(product(x[:20, :30], w[:30]), torch.mm(x[:20, :30], w[:30]))
        assert torch.equal(product(x.double(), w.double()), torch.mm(x.double(), w.double()))
        with halved_products(False):
            assert torch.equal(product(x, w), plain)
        assert not torch.equal(product(x, w), plain)
    assert torch.equal(product(x, w), plain)


@pytest.mark.parametrize(("gain", "instructions"), [(3, True), (1, True), (3, False)])
def test_halves_pay_where_they_were_quicker(monkeypatch, gain, instructions):
    """By a clock that says so, and never on a CPU without the instructions."""
    monkeypatch.setattr(torch.cpu, products.HALVES_BY[0], lambda: instructions)
    monkeypatch.setattr(torch.cpu, products.HALVES_BY[1], lambda: False)
    now = [0.0]

    def multiply(x, w):
        now[0] += 1.0 / (gain if products._halving else 1)

    monkeypatch.setattr(products.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(products, "product", multiply)
    assert products.halves_pay.__wrapped__() == (gain == 3 and instructions)
