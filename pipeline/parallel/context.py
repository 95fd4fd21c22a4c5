"""Context parallelism: the tokens of a packed row lie on `cp` ranks, one stretch each.

Everything that looks at one token at a time (norms, feed-forwards, experts, Attention Residuals, the loss) is
the same on a stretch. Three things look further, and exchange:

    short convolution   the last W - 1 inputs of the stretch before
    KDA                 what a stretch makes of the state that enters it is affine: S -> M S + S_0. Every rank
                        runs its stretch from zero, and the first document once more from the identity, which
                        gives M and what each token reads of the entering state. One all-gather of (S_0, M)
                        later every rank knows its own. Exact, as the recurrence is linear in the state.
    MLA                 latents are gathered (one vector a token), queries change places from tokens to heads:
                        every rank attends over the whole row with its share of the heads. No rank has the
                        cheap beginning of a causal row to itself.

Pictures are dealt out over the ranks of a row by their cost, and their features gathered.

Shapes: T tokens of the row, L of a stretch, D hidden, H heads, K head dim, W convolution width, N documents.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.mixers import KimiDeltaAttention, MultiHeadLatentAttention
from earlyfusion.vision.balance import all_to_all, assign
from earlyfusion.vision.patches import Grid, VisionCost, num_patches, num_tokens


@dataclass(frozen=True)
class Stretch(Segments):
    """The documents of one rank's stretch, and the row that it is cut from. counted_T: bool, tokens of the
    row that count for QK-Clip's maximum; earlier: tokens of the first document on ranks before this one;
    group: the ranks of the row."""

    whole: Segments = field(default_factory=partial(Segments, ()))
    counted_T: Tensor | None = None
    earlier: int = 0
    group: Any = None


def stretch(batch: PackedBatch, rank: int, group: Any, pad_id: int) -> Stretch:
    """The part of a row's documents on `rank`."""
    row, ranks = batch.segments, group.size()
    length = row.total // ranks
    low, high = rank * length, (rank + 1) * length
    parts = [(max(a, low), min(b, high)) for a, b in pairwise(row.offsets)]
    first = next(i for i, (a, b) in enumerate(parts) if a < b)
    return Stretch(
        tuple(b - a for a, b in parts if a < b),
        whole=row,
        counted_T=batch.ids != pad_id,
        earlier=low - row.offsets[first],
        group=group,
    )


def cut(
    batch: PackedBatch, rank: int, group: Any, pad_id: int, cost: VisionCost, merge: tuple[int, int]
) -> tuple[PackedBatch, "Dealt"]:
    """(this rank's part of a packed row, the way of its pictures)."""
    own = stretch(batch, rank, group, pad_id)
    low, high = rank * own.total, (rank + 1) * own.total
    columns = ("ids", "labels", "loss_weights", "source_ids", "has_image")
    tensors = {name: getattr(batch, name)[low:high] for name in columns}
    here_M = (batch.media_positions >= low) & (batch.media_positions < high)
    owner = tuple(assign([cost.of([grid]) for grid in batch.grids], group.size()))
    dealt = Dealt(tuple(batch.grids), owner, rank, group, merge, here_M.nonzero()[:, 0])
    # Filler stands at the end of a row.
    filler = own.total - min(max(batch.num_tokens - low, 0), own.total)
    media = batch.media_positions[here_M] - low
    return replace(batch, **tensors, segments=own, media_positions=media, num_filler=filler), dealt


@dataclass(frozen=True)
class Dealt:
    """The pictures of one row, which all its ranks hold, and who encodes which; what vision.balance.Route is
    to pictures that lie on different ranks."""

    grids: tuple[Grid, ...]
    owner: tuple[int, ...]
    rank: int
    group: Any
    merge: tuple[int, int]
    own_M: Tensor

    @cached_property
    def order(self) -> list[int]:
        """Pictures by owner."""
        return sorted(range(len(self.grids)), key=self.owner.__getitem__)

    @property
    def held(self) -> tuple[Grid, ...]:
        return tuple(self.grids[i] for i in self.order if self.owner[i] == self.rank)

    def send_patches(self, patches: Tensor) -> Tensor:
        """The patches that this rank encodes, of all."""
        parts = patches.split([num_patches(grid) for grid in self.grids])
        return torch.cat([patches[:0], *(parts[i] for i in self.order if self.owner[i] == self.rank)])

    def bring_home(self, features: Tensor) -> Tensor:
        """The features of this stretch's tokens; differentiable."""
        ranks = self.group.size()
        sizes = [num_tokens(grid, self.merge) for grid in self.grids]
        arriving = [0] * ranks
        for size, owner in zip(sizes, self.owner):
            arriving[owner] += size
        # Everyone's features to everyone: gradients of all copies come back summed.
        every = all_to_all(features.repeat(ranks, 1), [len(features)] * ranks, arriving, self.group)
        pieces = every.split([sizes[i] for i in self.order])
        place = sorted(range(len(sizes)), key=self.order.__getitem__)
        whole_MD = torch.cat([every[:0], *(pieces[i] for i in place)])
        return whole_MD.index_select(0, self.own_M)


def share_rows(model: Any) -> None:
    """Let the token mixers of a model take a `Stretch`, in place."""
    for mixer in model.decoder.modules():
        if not isinstance(mixer, KimiDeltaAttention | MultiHeadLatentAttention):
            continue
        forward: Any = kda if isinstance(mixer, KimiDeltaAttention) else mla
        mixer.forward = partial(forward, mixer)  # type: ignore[method-assign]


def kda(
    mixer: KimiDeltaAttention, x_LD: Tensor, segments: Stretch, past: None = None, counted_T: Any = None
) -> Tensor:
    """`KimiDeltaAttention.forward` on a stretch."""
    heads = (mixer.num_heads, mixer.head_dim)
    joint, weight = mixer.joined_weights()
    qkv, f, gate, beta = mixer.project(x_LD, joint)
    group, earlier = segments.group, segments.earlier
    rank = dist.get_rank(group)

    # What the convolution reads of the stretch before, as far as it is of the same document.
    reach = weight.shape[1] - 1
    tails = gather(qkv[-reach:], group)
    taps_NCW1 = qkv.new_zeros(segments.num, qkv.shape[1], reach)
    if earlier:
        known = min(earlier, reach)
        taps = torch.nn.functional.pad(tails[rank - 1][reach - known :], (0, 0, reach - known, 0))
        taps_NCW1 = torch.cat([taps.T.unsqueeze(0), taps_NCW1[1:]])
    else:
        taps_NCW1 = taps_NCW1 + 0.0 * tails[rank].sum()
    qkv, _ = resolve("short_conv", x_LD)(qkv, weight, segments, initial_taps_NCW1=taps_NCW1)
    q, k, v = (part.unflatten(1, heads) for part in qkv.chunk(3, dim=-1))

    run = partial(resolve("kda", x_LD), lower_bound=mixer.lower_bound, output_final_state=True)
    o_LHV, final_NHKV = run(q, k, v, *mixer.gate(f, beta), segments)
    through, reads, n = torch.zeros_like(final_NHKV[-1]), None, segments.lengths[0]
    if earlier:
        # From the identity and without values: what each token reads of the state that enters, what leaves.
        identity = torch.eye(mixer.head_dim, device=x_LD.device, dtype=final_NHKV.dtype)
        identity_1HKK = identity.expand(1, mixer.num_heads, -1, -1).contiguous()
        first, no_values = (q[:n], k[:n]), torch.zeros_like(v[:n])
        gates = mixer.gate(f[:n], beta[:n])
        reads, passed = run(*first, no_values, *gates, Segments((n,)), initial_state_NGKV=identity_1HKK)
        # Behind a document that ends on this rank nothing is left of what entered.
        through = passed[0] if segments.num == 1 else through

    states = gather(torch.stack([final_NHKV[-1], through]), group)
    # A collective's backward is one as well: every rank takes part in it.
    entering_HKV = 0.0 * states[rank][0]
    for before in range(rank):
        made_HKV, through_HKK = states[before].unbind(0)
        entering_HKV = made_HKV + through_HKK @ entering_HKV
    if reads is not None:
        read = torch.einsum("thk,hkv->thv", reads.to(entering_HKV.dtype), entering_HKV)
        o_LHV = torch.cat([o_LHV[:n] + read.to(o_LHV.dtype), o_LHV[n:]])
    else:
        o_LHV = o_LHV + (0.0 * entering_HKV.sum()).to(o_LHV.dtype)
    return mixer.o_proj(mixer.o_norm(o_LHV, gate.unflatten(1, heads)).flatten(1))


def mla(
    mixer: MultiHeadLatentAttention, x_LD: Tensor, segments: Stretch, past: None = None, counted_T: Any = None
) -> Tensor:
    """`MultiHeadLatentAttention.forward` on a stretch."""
    group, ranks = segments.group, segments.group.size()
    rank, own = dist.get_rank(group), mixer.num_heads // ranks
    heads = slice(rank * own, (rank + 1) * own)

    q_LHQ, c_LR, rope_L1 = mixer.project(x_LD)
    q_ThQ = to_heads(q_LHQ, group)
    latents_LR = torch.cat([c_LR, rope_L1.to(c_LR.dtype)], dim=-1)
    latents_TR = gather(latents_LR, group).flatten(0, 1)
    c_TR, rope_T1 = latents_TR.split([mixer.kv_lora_rank, mixer.qk_rope_head_dim], dim=-1)
    o_ThV = mixer.attend(q_ThQ, c_TR, rope_T1, segments.whole, segments.counted_T, heads)
    return mixer.output(x_LD, to_tokens(o_ThV, group))


class _Gather(torch.autograd.Function):
    """Tensors of all ranks of a group, one after the other; gradients of all copies are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def gather(x: Tensor, group: Any) -> Tensor:
    """Tensors [n, ...] of all ranks in their order: [ranks, n, ...]; differentiable."""
    return _Gather.apply(x, group).unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call]


def to_heads(x_LHQ: Tensor, group: Any) -> Tensor:
    """All heads of a stretch [L, H, Q] -> a share of the heads of the whole row [T, H / ranks, Q]."""
    ranks, (length, heads, width) = group.size(), x_LHQ.shape
    parts = (
        x_LHQ.view(length, ranks, heads // ranks, width).transpose(0, 1).reshape(-1, heads // ranks, width)
    )
    return all_to_all(parts, [length] * ranks, [length] * ranks, group)


def to_tokens(x_ThQ: Tensor, group: Any) -> Tensor:
    """The way back."""
    ranks = group.size()
    length = x_ThQ.shape[0] // ranks
    parts = all_to_all(x_ThQ, [length] * ranks, [length] * ranks, group)
    return parts.view(ranks, length, *x_ThQ.shape[1:]).transpose(0, 1).flatten(1, 2)
