"""Kernels trust their pointers: an argument of another shape, dtype or device than the others is refused, by
every Triton form and for every tensor that it takes."""

import pytest
import torch
from cases import needs_interpreter, refused

from earlyfusion.kernels import dispatch
from earlyfusion.kernels.attention.triton import flash
from earlyfusion.kernels.kda import chunk
from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.kernels.kda.triton import kda as triton_kda
from earlyfusion.kernels.moe import grouped, triton_experts
from earlyfusion.kernels.muon import triton_symmetric
from earlyfusion.kernels.segments import Segments

randn, SEGMENTS = torch.randn, Segments((3, 4))
INDEX = torch.zeros(7, 2, dtype=torch.int64)
HEADS, GATES = randn(7, 2, 32), (randn(7, 2), randn(2), randn(2, 32))
LATENTS = randn(2, 2, 24), randn(4, 8, 24), INDEX[:2].int(), torch.tensor([5, 9])
CACHE = DecodeCache.new(2, 1, 2, 16, 24, dtype=torch.float32)
TOKEN = randn(2, 80), randn(2, 2, 16), randn(2, 2), randn(80, 4), randn(2), randn(2, 16)
GATE = {"causal": True, "scale": 1.0}
# operation: (tensors, what stands behind them, options)
GIVEN = {
    "kda": ((HEADS, HEADS, HEADS, HEADS, *GATES), (SEGMENTS,), {}),
    "short_conv": ((randn(7, 6), randn(6, 4)), (SEGMENTS,), {}),
    "attention": ((HEADS, HEADS, HEADS), (SEGMENTS,), GATE),
    "max_logit": ((HEADS, HEADS, randn(7, 2)), (SEGMENTS,), GATE | {"tau": 1.0}),
    "qkv_rope": ((randn(7, 3, 2, 8), torch.zeros(7, 4, dtype=torch.complex64)), (), {}),
    "mla_decode": (LATENTS, (16, 1.0), {}),
    "attnres_step": (
        (randn(7, 32), randn(7), randn(7, 32), randn(7, 32), randn(32), randn(32)),
        (1e-5, 1e-5),
        {},
    ),
    "moe_experts": ((randn(7, 16), INDEX, randn(7, 2), randn(3, 32, 16), randn(3, 16, 16)), (), {}),
    "attnres_phase1": ((randn(2, 7, 32), randn(4, 32)), (1e-5,), {}),
    "kda_decode": ((*TOKEN, *torch.tensor([[0, 1], [3, 4]])), (), {}),
}
CHANGES = {
    "shape": lambda x: x[tuple(slice(size - 1) for size in x.shape)].contiguous(),
    "axes": lambda x: x[None],
    "dtype": lambda x: x.to(torch.complex128),
    "device": lambda x: x.to("meta"),
}


def operation(op):
    """The function of an operation's tensors."""
    if op == "attnres_phase1":
        return lambda sources, *rest: dispatch.load(dispatch.REGISTRY[op]["triton"])([*sources], *rest)
    if op == "kda_decode":
        return lambda *tensors: decode(*tensors[:6], CACHE, *tensors[6:])
    return dispatch.load(dispatch.REGISTRY[op]["triton"])


@needs_interpreter
@pytest.mark.parametrize("op", GIVEN)
def test_what_does_not_fit_is_refused(op):
    tensors, after, options = GIVEN[op]
    function = operation(op)
    function(*tensors, *after, **options)
    for index in range(len(tensors)):
        for change in CHANGES.values():
            given = [*tensors[:index], change(tensors[index]), *tensors[index + 1 :]]
            with pytest.raises(ValueError, match=r": \w+.* (is|has|expected|channels|contiguous)"):
                function(*given, *after, **options)


@needs_interpreter
def test_what_kernels_cannot_hold_is_named():
    kda = lambda *given, segments=SEGMENTS, **options: triton_kda.kda(*given, segments, **options)
    tensors, wide = GIVEN["kda"][0], randn(7, 2, 300)
    # More documents, and more tiles, than a grid has blocks.
    q, b = torch.zeros(65_536, 1, 32), torch.zeros(65_536, 1)
    many, ids = Segments((1,) * 65_536), torch.zeros(65_536 * 16, 1, dtype=torch.int64)
    _, up, down = GIVEN["moe_experts"][0][2:]
    experts = lambda up: grouped.moe_experts(randn(7, 16), INDEX, randn(7, 2), up, down)
    transposed = HEADS.transpose(1, 2).contiguous().transpose(1, 2)
    short = DecodeCache(CACHE.state_SGVK, CACHE.x_SRC[:, 1:].contiguous())
    refused(
        {
            "chunk=48": lambda: kda(*tensors, chunk=48),
            "power of two": lambda: chunk.kda(*tensors, SEGMENTS, chunk=24),
            "lower_bound=1.0": lambda: kda(*tensors, lower_bound=1.0),
            "initial_state_NGKV is": lambda: kda(*tensors, initial_state_NGKV=torch.zeros(1, 2, 32, 32)),
            "k is torch.bfloat16": lambda: kda(HEADS, HEADS.bfloat16(), *tensors[2:]),
            "v has strides": lambda: kda(HEADS, HEADS, transposed, *tensors[3:]),
            "q is 300": lambda: kda(wide, wide, HEADS, wide, *GATES[:2], randn(2, 300)),
            "at most 65,535: split the batch": lambda: kda(
                q, q, q, q, b, b[0], q[0], segments=many, segment_chunks=0
            ),
            r"tiles of 16 rows .* at most 65,535": lambda: triton_experts.make_plan(
                ids, torch.ones(ids.shape), experts=80_000
            ),
            "X_Bsl is .* s = 4": lambda: triton_symmetric.symmetric_product(randn(2, 8, 4), 1.0),
            "gate rows first": lambda: experts(up[:, :9]),
            "3 ring rows": lambda: decode(*TOKEN, short, *torch.tensor([[0, 1], [3, 4]])),
            "v_THV has head dim 300": lambda: flash.attention(HEADS, HEADS, wide, SEGMENTS, **GATE),
            r"not the ends of documents of \(3, 4\) keys": lambda: flash.attention_append(
                HEADS, HEADS, HEADS, Segments((4, 3)), SEGMENTS, scale=1.0
            ),
        }
    )
