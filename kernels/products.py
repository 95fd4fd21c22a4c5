"""Products of float32 matrices on a CPU, by oneDNN where that is the quicker multiplier.

torch hands float32 products to MKL, which on a processor that is not Intel's uses its AVX2 kernels: 100
GFLOP/s on a Zen 5 core that can do 230 with AVX-512. oneDNN looks at the instructions alone. torch lets it
have a product while `torch.backends.mkldnn.matmul.fp32_precision` is "bf16", which permits bfloat16 inside;
without AMX oneDNN has no such kernel and multiplies in float32 (tests/kernels/test_products.py holds it to
the bits of MKL for inner dimensions up to SAME_BITS; with a longer one, all products go one way). The setting
is process-wide and put back after every product.

oneDNN compiles a kernel for each new shape, which takes 0.2 ms and more, and keeps a thousand. So it gets
rows in a coarse grid: whole TILEs of them in one product (of fewer than a TILE, whole STEPs), and a second
product for what is left, filled up to whole STEPs by rows before it that are computed twice. Its inner sums
run in order from the first to the last column, so that a row's bits depend neither on how many rows there are
nor on where it stands.

Inside `halved_products` the operands of large products are rounded to bfloat16 first, and the result is once
more (oneDNN keeps the sums in float32, as under autocast); everything between products stays float32. A core
with AVX512-BF16 multiplies nearly twice as fast that way; on one with AMX it has not been measured.

Legend: R rows, A inner dimension, B columns.

Which dtype a kernel multiplies in, and which it accumulates in.

An ``autograd.Function`` and a direct aten call both step around autocast, so every kernel states its dtypes
itself: the operands of matrix products are brought to ``compute_dtype`` (what ``F.linear`` would use in the
same place), and statistics (softmax sums, norms, logits) are kept in ``accumulate_dtype``.

RMS normalisation, plain or gated: y = x / sqrt(mean(x^2) + eps) * w (* sigmoid(gate)).

Statistics in float32 (float64 for float64); the result is in the dtype that the following products compute
in, so that several projections of one normed input share a single cast.

Shapes: any number of leading dimensions, the last one is normalised.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.rowwise import RmsNorm, serves

ENVIRONMENT = "EF_ONEDNN"
# Of the kernel shapes oneDNN compiles there are then few.
TILE, HALF_TILE, STEP = 256, 128, 16  # rows
FEWEST = 32  # rows, and
LEAST = 1 << 21  # multiply-adds from which on a call of oneDNN pays
SAME_BITS = 192  # inner dimension up to which MKL adds in the same order,
NARROW = 16  # if there are as many columns; fewer are always MKL's
INNER = (
    1024  # rows that the gradient of a weight sums at a time: errors grow with the length of a running sum
)
HALVES_BY = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # of torch.cpu
HALVES_GAIN = 1.2  # by how much bfloat16 must be quicker before a run takes it
HALVED = "products in bfloat16"  # what a run that takes it says

_halving = False  # a switch of the process: a backward pass may run in a thread of autograd's

Product = Callable[..., Tensor]


@cache
def quick() -> bool:
    """oneDNN multiplies float32 more quickly than torch's own choice on this machine, and in float32.
    EF_ONEDNN=0: never."""
    if os.environ.get(ENVIRONMENT) == "0":
        return False
    if not hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"):
        return False
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        # An Intel processor is served well by MKL; with AMX oneDNN would round to bfloat16.
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return False
    return "AuthenticAMD" in processor and "amx_tile" not in processor


def _suits(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_compiling() and quick()
    )


def _pays(rows: int, inner: int, columns: int) -> bool:
    return rows >= FEWEST and rows * inner * columns >= LEAST


def _by_onednn(rows: int, x: Tensor, w_AB: Tensor) -> bool:
    """Whether the product of `rows` rows like x's with w goes to oneDNN."""
    inner, columns = w_AB.shape
    return _suits(x) and columns >= NARROW and (inner > SAME_BITS or _pays(rows, inner, columns))


def with_onednn(multiply: Callable[[], Tensor]) -> Tensor:
    """What `multiply` returns, its products on a CPU by oneDNN, which may use bfloat16 inside where there is
    AMX."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    # A process-wide switch: it is put back whatever happens.
    before = setting.fp32_precision
    if before == "bf16":  # another thread's, or the user's
        return multiply()
    setting.fp32_precision = "bf16"
    try:
        return multiply()
    finally:
        setting.fp32_precision = before


def product(x_RA: Tensor, w_AB: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x w, into `out` [R, B] if there is one: as the file's head says in float32 on a CPU, else `torch.mm`.
    x may be an `operand`. No gradient."""
    x_RA = operand(x_RA, x_RA.shape[0] * w_AB.numel())
    if _halved(x_RA, w_AB):
        y_RB = in_steps(x_RA, w_AB.bfloat16())
        return y_RB.float() if out is None else out.copy_(y_RB)
    return wide_product(x_RA, w_AB, out=out)


def wide_product(x_RA: Tensor, w_AB: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same, whose operands are taken as they are."""
    if not _by_onednn(x_RA.shape[0], x_RA, w_AB):
        return torch.mm(x_RA, w_AB) if out is None else torch.mm(x_RA, w_AB, out=out)
    return with_onednn(lambda: in_steps(x_RA, w_AB, out=out))


def in_steps(x_RA: Tensor, w_AB: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x w by torch.mm with as few different numbers of rows as the file's head says."""
    rows = x_RA.shape[0]
    # Whole tiles in one call, so that few shapes are ever compiled.
    tile = TILE if x_RA.dtype == torch.float32 else HALF_TILE
    unit = tile if rows >= tile else STEP
    whole = rows // unit * unit
    if whole == rows or not whole:
        return torch.mm(x_RA, w_AB) if out is None else torch.mm(x_RA, w_AB, out=out)
    if out is None:
        out = x_RA.new_empty(rows, w_AB.shape[1])
    torch.mm(x_RA[:whole], w_AB, out=out[:whole])
    # Rows are computed twice rather than in a shape of their own.
    low = rows - -(-(rows - whole) // STEP) * STEP
    out[whole:] = torch.mm(x_RA[low:], w_AB)[whole - low :]
    return out


def product_over_rows(left_RB: Tensor, right_RA: Tensor, *, out: Tensor | None = None) -> Tensor:
    """left^T right [B, A]: whole TILEs of rows by oneDNN, INNER at a time, and what is left by torch's own
    choice. left may be an `operand`, if `out` is float32, and then right as well."""
    rows, shape = left_RB.shape[0], (left_RB.shape[1], right_RA.shape[1])
    sums_BA = left_RB.new_empty(shape) if out is None else out
    left_RB = operand(left_RB, rows * shape[0] * shape[1])
    right_RA = right_RA.to(left_RB.dtype)
    halved = left_RB.dtype != sums_BA.dtype
    tile = HALF_TILE if halved else TILE
    whole = rows // tile * tile
    if not halved and not (whole and _suits(left_RB) and _pays(rows, *shape)):
        return torch.mm(left_RB.T, right_RA, out=sums_BA)
    # The rest first: it fills the output that whole tiles are added to.
    rest = slice(whole, rows)
    if whole < rows:
        torch.mm(left_RB[rest].T.to(sums_BA.dtype), right_RA[rest].to(sums_BA.dtype), out=sums_BA)
    else:
        sums_BA.zero_()

    # One product: a rounding of its result is larger than what long sums in float32 lose.
    if halved:
        return sums_BA.add_(torch.mm(left_RB[:whole].T, right_RA[:whole])) if whole else sums_BA

    def add_whole() -> Tensor:
        for start in range(0, whole, INNER):
            part = slice(start, min(start + INNER, whole))
            sums_BA.addmm_(left_RB[part].T, right_RA[part])
        return sums_BA

    return with_onednn(add_whole)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RA: Tensor, weight_BA: Tensor, bias_B: Tensor | None) -> Tensor:
        x_RA = operand(x_RA, x_RA.shape[0] * weight_BA.numel())
        ctx.save_for_backward(x_RA, weight_BA)
        y_RB = product(x_RA, weight_BA.T)
        return y_RB if bias_B is None else y_RB.add_(bias_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RB: Tensor) -> tuple[Tensor | None, ...]:
        x_RA, weight_BA = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dbias_B = dy_RB.sum(0) if wants_bias else None
        # As in the forward, whatever is wanted by now.
        dy_RB, dweight_BA = dy_RB.to(x_RA.dtype), None
        if wants_weight:
            dweight_BA = product_over_rows(dy_RB, x_RA, out=torch.empty_like(weight_BA))
        return product(dy_RB, weight_BA) if wants_x else None, dweight_BA, dbias_B


def linear(x: Tensor, weight_BA: Tensor, bias_B: Tensor | None = None) -> Tensor:
    """`F.linear`, [..., A] -> [..., B]. Where this file multiplies (see its head) it is differentiable
    once."""
    # Parametrised or quantised weights have ways of their own.
    plain = type(weight_BA) in (Tensor, torch.nn.Parameter) and weight_BA.dtype == x.dtype and x.dim() > 1
    ours = _suits(x) or _rounds(x, x.numel() * weight_BA.shape[0])
    if not plain or not ours or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_BA, bias_B)
    if torch.is_grad_enabled():
        y_RB: Tensor = _Linear.apply(x.flatten(0, -2), weight_BA, bias_B)
    else:
        y_RB = product(x.flatten(0, -2), weight_BA.T)
        y_RB = y_RB if bias_B is None else y_RB.add_(bias_B)
    return y_RB.view(*x.shape[:-1], weight_BA.shape[0])


# ---- bfloat16 operands ----


@cache
def halves_pay() -> bool:
    """Whether products with bfloat16 operands, the roundings included, are HALVES_GAIN times as quick as
    without on this CPU: where it has instructions for them, by the best of twenty tries each."""
    if not any(getattr(torch.cpu, name, bool)() for name in HALVES_BY):
        return False
    x, w = torch.ones(2048, 256), torch.ones(256, 256)
    best = {True: float("inf"), False: float("inf")}
    # In turn: whatever else the machine does then meets both.
    for halved in (True, False) * 20:
        start = time.perf_counter()
        with halved_products(halved):
            product(x, w)
        best[halved] = min(best[halved], time.perf_counter() - start)
    return best[True] * HALVES_GAIN < best[False]


@contextmanager
def halved_products(wanted: bool = True) -> Iterator[None]:
    """Large products of float32 matrices on a CPU take bfloat16 operands here (see the file's head)."""
    global _halving
    before, _halving = _halving, wanted
    try:
        yield
    finally:
        _halving = before


def _rounds(x: Tensor, size: int) -> bool:
    if not _halving or size < LEAST or torch.compiler.is_compiling():
        return False
    return x.dtype == torch.float32 and x.device.type == "cpu"


def operand(x: Tensor, size: int) -> Tensor:
    """x in the dtype that products of `size` multiply-adds with it take: rounded once for several of them."""
    return x.bfloat16() if _rounds(x, size) else x


def _halved(x_RA: Tensor, w_AB: Tensor) -> bool:
    """An `operand` was rounded for this product, whose result is wanted in float32."""
    return x_RA.dtype == torch.bfloat16 and w_AB.dtype == torch.float32


# ---- dtypes of kernels ----


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 (so that gradient checks mean something), float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any argument is float64, else float32: gates, states and sums are never kept in half
    precision."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on for the tensors' device, else their promoted dtype.

    float64 is left alone by autocast, as in torch.
    """
    promoted = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    device = tensors[0].device.type
    if promoted != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return promoted


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A context in which operations on the tensor's device keep the dtypes they are given."""
    device = tensor.device.type
    return torch.autocast("cpu" if device == "meta" else device, enabled=False)


def wide_bmm(a_BMK: Tensor, b_BKN: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha * a @ b`` of operands in one dtype, accumulated and returned in ``accumulate_dtype`` (no
    rounding back).

    On a CPU, products of bfloat16 operands go to oneDNN with float32 output
    (:mod:`earlyfusion.kernels.products`). Where it multiplies in bfloat16 (AMX) that is exact up to the order
    of the sums: the operands already are bfloat16 values.
    """
    wide = accumulate_dtype(a_BMK.dtype)
    # cuBLAS can give its float32 sums as they are.
    if a_BMK.device.type == "cuda" and a_BMK.dtype != wide:
        out_BMN = torch.bmm(a_BMK, b_BKN, out_dtype=wide)
        return out_BMN if alpha == 1 else out_BMN.mul_(alpha)
    out_BMN = a_BMK.new_empty(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2], dtype=wide)
    if a_BMK.device.type != "cpu" or a_BMK.dtype != torch.bfloat16:
        return torch.baddbmm(out_BMN, a_BMK.to(wide), b_BKN.to(wide), beta=0, alpha=alpha)
    return with_onednn(lambda: torch.baddbmm(out_BMN, a_BMK.to(wide), b_BKN.to(wide), beta=0, alpha=alpha))


def wide_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """:func:`wide_bmm` for two matrices."""
    if a_MK.dtype == torch.float32:
        return wide_product(a_MK, b_KN)
    return wide_bmm(a_MK[None], b_KN[None])[0]


def softmax_with_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis and its log-sum-exp.

    The normaliser is read off the largest entry, p_max = exp(s_max - lse) >= 1 / size, which costs two maxima
    instead of another pass of exponentials and does not underflow.
    """
    p = torch.softmax(logits, dim=-1)
    return p, logits.amax(dim=-1) - p.amax(dim=-1).log()


def rms_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """The definition."""
    wide = accumulate_dtype(x.dtype)
    # Cast first: statistics of 8-bit mantissas would be noise.
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    # In the dtype of the gate: it may be wider than x.
    if gate is not None:
        y = y * gate.to(accumulate_dtype(gate.dtype)).sigmoid()
    return y.to(compute_dtype(x))


def rms_norm_closed(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """The same with the closed-form gradient; on a CPU half the time of what autograd would assemble, and in
    float32 there C++ in .3 of that."""
    if torch.is_grad_enabled() and serves(x, weight, gate) and compute_dtype(x) == torch.float32:
        return RmsNorm.apply(x, weight, gate, eps)
    return _RmsNorm.apply(x, weight, gate, eps)


def rms_norm_on_gpu(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """By torch's own kernels, which have a gradient of their own; with a gate as :func:`rms_norm_closed`."""
    form = rms_norm if gate is None else rms_norm_closed
    return form(x, weight, gate, eps)


class _RmsNorm(torch.autograd.Function):
    """dx = r (u - x^ mean(u x^)),   dw = sum dn x^,   dgate = dy n s (1 - s)

    for r = (mean(x^2) + eps)^-1/2, x^ = x r, n = x^ w, s = sigmoid(gate), dn = dy s, u = dn w.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        return rms_norm(x, weight, gate, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        fp = x.to(accumulate_dtype(x.dtype))
        size, w = fp.shape[-1], weight.to(fp.dtype)
        r = torch.linalg.vecdot(fp, fp).div_(size).add_(ctx.eps).rsqrt_().unsqueeze(-1)
        # From x again: the normed input is not kept.
        unit, dn, dgate = fp * r, dy.to(fp.dtype), None
        if gate is not None:
            s = gate.to(accumulate_dtype(gate.dtype)).sigmoid()
            dn = dn * s
            dgate = (dn * unit).mul_(w).mul_(s.neg_().add_(1.0)).to(gate.dtype)

        dweight = (dn * unit).view(-1, size).sum(0).to(weight.dtype)
        # What lies along x changes nothing but its length, which the norm takes away.
        u = dn * w
        mean = torch.linalg.vecdot(u, unit).unsqueeze(-1).div_(-size)
        return u.addcmul_(unit, mean).mul_(r).to(x.dtype), dweight, dgate, None
