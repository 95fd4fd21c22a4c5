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
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ENVIRONMENT = "EF_ONEDNN"
# Of the kernel shapes oneDNN compiles there are then few.
TILE, STEP = 256, 16  # rows
FEWEST = 32  # rows, and
LEAST = 1 << 21  # multiply-adds from which on a call of oneDNN pays
SAME_BITS = 192  # inner dimension up to which MKL adds in the same order,
NARROW = 16  # if there are as many columns; fewer are always MKL's
INNER = (
    1024  # rows that the gradient of a weight sums at a time: errors grow with the length of a running sum
)

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
    No gradient."""
    if not _by_onednn(x_RA.shape[0], x_RA, w_AB):
        return torch.mm(x_RA, w_AB) if out is None else torch.mm(x_RA, w_AB, out=out)
    return with_onednn(lambda: _in_steps(x_RA, w_AB, out))


def _in_steps(x_RA: Tensor, w_AB: Tensor, out: Tensor | None) -> Tensor:
    rows = x_RA.shape[0]
    # Whole tiles in one call, so that few shapes are ever compiled.
    unit = TILE if rows >= TILE else STEP
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
    choice."""
    rows, shape = left_RB.shape[0], (left_RB.shape[1], right_RA.shape[1])
    whole = rows // TILE * TILE
    if not whole or not _suits(left_RB) or not _pays(rows, *shape):
        return torch.mm(left_RB.T, right_RA) if out is None else torch.mm(left_RB.T, right_RA, out=out)
    sums_BA = left_RB.new_empty(shape) if out is None else out
    # The rest first: it fills the output that whole tiles are added to.
    rest = slice(whole, rows)
    if whole < rows:
        torch.mm(left_RB[rest].T, right_RA[rest], out=sums_BA)
    else:
        sums_BA.zero_()

    def add_whole() -> Tensor:
        for start in range(0, whole, INNER):
            part = slice(start, min(start + INNER, whole))
            sums_BA.addmm_(left_RB[part].T, right_RA[part])
        return sums_BA

    return with_onednn(add_whole)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RA: Tensor, weight_BA: Tensor, bias_B: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RA, weight_BA)
        y_RB = product(x_RA, weight_BA.T)
        return y_RB if bias_B is None else y_RB.add_(bias_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RB: Tensor) -> tuple[Tensor | None, ...]:
        x_RA, weight_BA = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            product(dy_RB, weight_BA) if wants_x else None,
            product_over_rows(dy_RB, x_RA) if wants_weight else None,
            dy_RB.sum(0) if wants_bias else None,
        )


def linear(x: Tensor, weight_BA: Tensor, bias_B: Tensor | None = None) -> Tensor:
    """`F.linear`, [..., A] -> [..., B]. Where oneDNN is used (see the file's head) it is differentiable
    once."""
    # Parametrised or quantised weights have ways of their own.
    plain = type(weight_BA) in (Tensor, torch.nn.Parameter) and weight_BA.dtype == x.dtype and x.dim() > 1
    if not plain or not _suits(x) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_BA, bias_B)
    if torch.is_grad_enabled():
        y_RB: Tensor = _Linear.apply(x.flatten(0, -2), weight_BA, bias_B)
    else:
        y_RB = product(x.flatten(0, -2), weight_BA.T)
        y_RB = y_RB if bias_B is None else y_RB.add_(bias_B)
    return y_RB.view(*x.shape[:-1], weight_BA.shape[0])


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
        return product(a_MK, b_KN)
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
    """The same with the closed-form gradient; on a CPU half the time of what autograd would assemble."""
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
