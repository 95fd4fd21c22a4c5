"""Packing metadata: where the documents (or images) of one packed row begin and end.

A packed row is a tensor whose first axis holds T tokens of N documents, one after the other. Every kernel
takes such tensors and one :class:`Segments`. The lengths are Python integers known on the host before
anything is launched, so no kernel has to copy a device tensor back to find out how much work there is, and
every plan derived from them (cumulative lengths, chunk grids, masks, sort orders) is built once per packed
row and shared by all layers.

Legend: T tokens, N documents.

What operations ask of their arguments. An argument's name says its shape: q_THK is [T, H, K].

Kernels trust their pointers, so what could make one read outside its tensor is refused here. First the checks
that all share, then those of single operations, which every form of one but the definition calls.

Legend: T tokens, H query heads, G key/value heads, K key dim, V value dim; others with their operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
Device = torch.device | str


@dataclass(frozen=True)
class Segments:
    """Lengths (tokens) of the documents of one packed row, with a cache for everything derived from them.

    Two instances are equal when their lengths are equal. The cache is neither compared, copied nor pickled,
    so an instance may cross a process boundary cheaply.

    Raises:
        ValueError: a length is smaller than 1. Leave empty documents out instead.
        TypeError: a length is not an integer.
    """

    lengths: tuple[int, ...]
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A tensor here would be a host sync in every kernel that asks.
        for index, length in enumerate(self.lengths):
            # bool is an int to Python, and a mask given for lengths would pass.
            if not isinstance(length, int) or isinstance(length, bool):
                raise TypeError(
                    f"Segments: document {index} has length {length!r} of type {type(length).__name__};"
                    " lengths are Python ints. Use Segments.from_lengths to convert."
                )
            if length < 1:
                raise ValueError(
                    f"Segments: document {index} has length {length}; every length must be at least 1. "
                    "Drop empty documents before packing."
                )

    def __reduce__(self) -> tuple[type[Segments], tuple[tuple[int, ...]]]:
        return (type(self), (self.lengths,))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor) -> Segments:
        """Build from any sequence of integers (list, tuple, numpy or torch integers)."""
        values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        return cls(tuple(int(value) for value in values))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First token of every document, then T: N + 1 Python ints."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def total(self) -> int:
        """T, the number of tokens of the row."""
        return self.offsets[-1]

    @property
    def num(self) -> int:
        """N, the number of documents."""
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest document; 0 for an empty row."""
        return max(self.lengths, default=0)

    def cached(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """The value stored under ``key``, made by ``build()`` on first use.

        A key names its owner and everything the value depends on besides the lengths, for instance
        ``("kda.grid", chunk, str(device))``. Tensors are made outside inference mode: a plan first built by
        an evaluation must remain usable in a later training step.
        """
        if key not in self._cache:
            with torch.inference_mode(False):
                self._cache[key] = build()
        return self._cache[key]

    def cu_seqlens(self, device: Device = "cpu") -> Tensor:
        """Cumulative lengths, int32 [N + 1]."""
        return self.cached(
            ("cu_seqlens", str(device)), lambda: torch.tensor(self.offsets, dtype=torch.int32, device=device)
        )

    def ids(self, device: Device = "cpu") -> Tensor:
        """Document index of every token, int32 [T]."""

        def build() -> Tensor:
            # Made on the host, then copied once: a repeat on the device would have to know its size.
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
            index = torch.arange(self.num, dtype=torch.int32)
            return torch.repeat_interleave(index, lengths).to(device)

        return self.cached(("ids", str(device)), build)

    def position(self, device: Device = "cpu") -> Tensor:
        """Position of every token inside its own document, int32 [T], counted from 0."""

        def build() -> Tensor:
            starts = torch.tensor(self.offsets[:-1], dtype=torch.int32)
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
            return (
                torch.arange(self.total, dtype=torch.int32) - torch.repeat_interleave(starts, lengths)
            ).to(device)

        return self.cached(("position", str(device)), build)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the Triton kernels read and write
INTEGERS = (torch.int32, torch.int64)


def check_shapes(
    op: str, known: Mapping[str, int] | None = None, /, **tensors: Tensor | None
) -> dict[str, int]:
    """The size of every letter, among them those that are known before; None is left out.

    The letters after an argument's last underscore are its axes; a letter stands for one size throughout, a
    digit for itself.

    Raises:
        ValueError: naming the first argument that does not fit, what was given and what was expected.
    """
    sizes = dict(known or {})
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        # The naming rule of this room is the specification.
        axes = name.rpartition("_")[2]
        expected = [int(axis) if axis.isdigit() else sizes.get(axis) for axis in axes]
        shape = tuple(tensor.shape)
        fits = len(shape) == len(axes)
        for size, wanted in zip(shape, expected):
            fits = fits and wanted in (None, size)
        if not fits:
            fixed = [f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes]
            given = f" with {', '.join(fixed)}" if fixed else ""
            raise ValueError(f"{op}: {name} is {shape}; expected [{', '.join(axes)}]{given}")
        # The first argument that has an axis fixes its size.
        sizes.update(zip(axes, shape))
    return sizes


def check_multiple(op: str, what: str, size: int, of: str, unit: int) -> None:
    """ValueError unless ``size`` whats are a multiple of ``unit`` ofs."""
    if unit < 1 or size % unit:
        raise ValueError(f"{op}: {size} {what} for {unit} {of}; expected a multiple")


def check_tensors(
    op: str,
    like: Tensor,
    dtypes: Sequence[torch.dtype] = FLOATS,
    layout: str = "contiguous",
    /,
    **tensors: Tensor | None,
) -> None:
    """Dtype, device (that of ``like``) and layout: "contiguous", "rows" (unit stride on the last axis) or
    "any".

    Raises:
        ValueError: naming the argument, what was given and what was expected.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            # Text is made only when something is wrong: checks run at every call.
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{op}: {name} is {tensor.dtype}; expected {allowed}")
        if tensor.device != like.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; expected {like.device} like the first")
        dense = layout == "any" or tensor.is_contiguous()
        if layout == "rows" and tensor.ndim:
            dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
        if not dense:
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; pass {name}.contiguous()")


# ---- of single operations ----


class Inputs(NamedTuple):
    """The tensors of a call in their order; also their gradients, or what a kernel takes for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


def check_lower_bound(lower_bound: float | None) -> None:
    """Raise ValueError unless the bound is None or negative."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"KDA gate: lower_bound={lower_bound} given; expected None (unbounded softplus gate) or a"
            " negative number of nats per token such as -5.0"
        )


def check_kda(op: str, x: Inputs, tokens: int, lower_bound: float | None) -> dict[str, int]:
    """Sizes by letter.

    Raises:
        ValueError: naming the argument whose shape does not fit the others or the number of tokens, or a
            bound that is not negative.
    """
    check_lower_bound(lower_bound)
    sizes = check_shapes(
        op,
        {"T": tokens},
        q_THK=x.q,
        k_THK=x.k,
        v_TGV=x.v,
        f_TGK=x.f,
        b_TG=x.b,
        A_log_G=x.A_log,
        dt_bias_GK=x.dt_bias,
    )
    check_multiple(op, "value heads", sizes["G"], "query heads", sizes["H"])
    return sizes


def check_conv(x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments) -> None:
    """ValueError naming the argument whose shape does not fit."""
    sizes = check_shapes("short_conv", {"T": segments.total}, x_TC=x_TC, weight_CW=weight_CW)
    if sizes["W"] < 2:
        raise ValueError(f"short_conv: weight_CW is {tuple(weight_CW.shape)}; expected at least W = 2 taps")
    known = {"N": segments.num, "C": sizes["C"], "P": sizes["W"] - 1}
    check_shapes("short_conv", known, initial_taps_NCP=taps_NCW1)


def check_attention(q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, segments: Segments) -> None:
    """Raise ValueError if the tensors do not describe attention over this packed row."""
    check_shapes("attention", {"T": segments.total}, q_THD=q_THD, k_THD=k_THD, v_THV=v_THV)


def check_append(
    q_THD: Tensor, k_LHD: Tensor, v_LHV: Tensor, segments: Segments, key_segments: Segments
) -> None:
    """Raise ValueError if the tensors are not the newest tokens of documents and all keys of the same
    documents."""
    known = {"T": segments.total, "L": key_segments.total}
    check_shapes("attention_append", known, q_THD=q_THD, k_LHD=k_LHD, v_LHV=v_LHV)
    ends = segments.num == key_segments.num
    for new, length in zip(segments.lengths, key_segments.lengths):
        ends = ends and new <= length
    if not ends:
        raise ValueError(
            f"attention_append: new tokens {segments.lengths} are not the ends of documents of"
            f" {key_segments.lengths} keys; give one length of each per document, the keys' at least as long"
        )


def check_qkv(qkv_T3HD: Tensor, turns_TC: Tensor) -> None:
    """Raise ValueError unless qkv is a floating [T, 3, H, D] with even D and the turns complex [T, D / 2]."""
    sizes = check_shapes("qkv_rope", qkv_T3HD=qkv_T3HD)
    check_multiple("qkv_rope", "channels of a head in qkv_T3HD", sizes["D"], "numbers of a pair", 2)
    check_shapes("qkv_rope", {"T": sizes["T"], "C": sizes["D"] // 2}, turns_TC=turns_TC)
    if not qkv_T3HD.is_floating_point() or not turns_TC.is_complex():
        raise ValueError(
            f"qkv_rope: qkv_T3HD is {qkv_T3HD.dtype}, turns_TC {turns_TC.dtype}; expected floats and complex"
        )


def check_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int
) -> None:
    """Raise ValueError unless the shapes and dtypes belong together."""
    check_shapes(
        "mla_decode", query_BHR=query_BHR, pages_PSR=pages_PSR, table_BN=table_BN, lengths_B=lengths_B
    )
    if not 0 < rank <= query_BHR.shape[2]:
        raise ValueError(
            f"mla_decode: rank is {rank}; expected 1 to {query_BHR.shape[2]}, the width of a latent row"
        )
    check_tensors("mla_decode", query_BHR, INTEGERS, "any", table_BN=table_BN, lengths_B=lengths_B)


def check_sources(sources: Sequence[Tensor], width: int) -> None:
    """Raise ValueError unless there is a source and all are [T, D] of one shape with D = ``width``."""
    if not sources:
        raise ValueError("attention residual: got no sources; the embedding is always the first one")
    for index, source in enumerate(sources):
        known = dict(zip("TD", (len(sources[0]), width)))
        check_shapes("attention residual", known, **{f"sources[{index}]_TD": source})


def check_experts(
    x_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
) -> None:
    """Raise ValueError unless the shapes belong together."""
    sizes = check_shapes(
        "moe_experts",
        x_TD=x_TD,
        expert_ids_TJ=expert_ids_TJ,
        weights_TJ=weights_TJ,
        gate_up_ECD=gate_up_ECD,
        down_EDF=down_EDF,
    )
    if sizes["C"] != 2 * sizes["F"]:
        raise ValueError(f"moe_experts: gate_up_ECD has C = {sizes['C']} ; expected 2 F, gate rows first")


def check_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss_weights_T: Tensor) -> None:
    """Raise ValueError unless shapes and dtypes belong together."""
    check_shapes(
        "linear_cross_entropy",
        h_TD=h_TD,
        weight_VD=weight_VD,
        labels_T=labels_T,
        loss_weights_T=loss_weights_T,
    )
    check_tensors("linear_cross_entropy", labels_T, (torch.int64,), "any", labels_T=labels_T)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"token_log_probs: temperature is {temperature}; expected a positive number")


def check_batch(G_Bmn: Tensor) -> None:
    """Raises ValueError unless G is a floating-point batch of matrices [B, m, n]."""
    check_shapes("newton_schulz", G_Bmn=G_Bmn)
    if not G_Bmn.is_floating_point():
        raise ValueError(f"newton_schulz: G_Bmn is {G_Bmn.dtype}; expected a float dtype")
