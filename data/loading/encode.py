"""Sample -> Encoded -> PackedBatch: token ids, the weight of predicting each, uint8 patches; the splitting of
long documents; and exactly `tokens` positions of documents side by side, filler at the end.

    document   [BOS] segment segment ... [EOS]
    image      <|media_begin|>image<|media_content|> <|media_pad|> * tokens <|media_end|>
    video      for every item of up to four frames: HH:MM:SS.mmm, then the same with the word "video"
    regions    lines of JSON (data/formats.py)

Media tokens and timestamps have weight 0. [EOS] has the weight of the last text, so that a model asked for an
answer learns to end it. Sources: Kimi K2.5 and K3 processors, as in transformers' kimi_k25.

Legend: n tokens of a document, T positions of a micro-batch, P patches, p patch side in pixels, M media pads
(= merged vision tokens).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from earlyfusion.data.decode import Media, decode_frames, decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats import write_regions
from earlyfusion.data.sample import Image, Regions, Sample, Special, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video import decode_video
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

MAX_TEXT_CHARS = 2_000_000
"""Most characters of text in one document: 0.5 million tokens; a tokenizer takes about 200 bytes of memory
for each."""
IGNORED = -100
"""Label of a position that is not trained."""
EXACT = 2048
"""Positions that are filled by an exact subset sum."""
CANDIDATES = 96
"""Documents that the exact sum chooses from."""
LOOKAHEAD = 4
"""Micro-batches of documents that a finite stream is packed from."""


@dataclass(slots=True)
class Encoded:
    """One document, or one piece of a long one, ready for packing."""

    ids: Tensor
    """int64 [n]"""
    loss_weights: Tensor
    """float32 [n]: weight of PREDICTING this token (the packer shifts it)"""
    patches: Tensor | None
    """uint8 [P, 3, p, p] of all media in order, or None"""
    grids: list[Grid]
    """(frames, rows, columns) in patches of every media item"""
    spans: list[tuple[int, int]]
    """[start, stop) of every media item in `ids`, from <|media_begin|> to <|media_end|>"""
    media_positions: Tensor
    """int64 [M]: where the <|media_pad|> tokens stand, in feature order"""
    source: str
    key: str

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def num_patches(self) -> int:
        """P."""
        return sum(map(num_patches, self.grids))

    def piece(self, start: int, stop: int) -> Encoded:
        """Tokens [start, stop) with the media inside; a piece from the middle begins with [BOS] of its own.

        So every token but [BOS] is predicted exactly once, in whichever piece it falls. The document must
        have been encoded with [BOS]; neither edge may lie inside a media span (see `cuts`).
        """
        if start == 0 and stop == len(self):
            return self
        # The [BOS] that a later piece gets moves everything behind it by one.
        lead = int(start > 0)
        shift = lead - start
        inside = [i for i, (a, b) in enumerate(self.spans) if start <= a and b <= stop]

        patches = None
        if inside and self.patches is not None:
            # Patches of all media lie end to end; those of a piece are one stretch of them.
            edges = np.cumsum([0] + [num_patches(grid) for grid in self.grids])
            patches = self.patches[int(edges[inside[0]]) : int(edges[inside[-1] + 1])]
        pads = self.media_positions
        return Encoded(
            ids=torch.cat([self.ids[:lead], self.ids[start:stop]]),
            loss_weights=torch.cat([self.loss_weights[:lead], self.loss_weights[start:stop]]),
            patches=patches,
            grids=[self.grids[i] for i in inside],
            spans=[(self.spans[i][0] + shift, self.spans[i][1] + shift) for i in inside],
            media_positions=pads[(pads >= start) & (pads < stop)] + shift,
            source=self.source,
            key=f"{self.key}[{start}:{stop}]",
        )


def timestamp(seconds: float) -> str:
    """HH:MM:SS.mmm, as Kimi K2.5 writes it before a group of frames."""
    total_ms = round(seconds * 1000)
    hours, rest = divmod(total_ms, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


def encode(
    sample: Sample,
    tokenizer: Tokenizer,
    vision_cfg: VisionConfig,
    *,
    eos: bool = True,
    decode: DecodeConfig | None = None,
) -> Encoded:
    """Tokens and patches of one document; `eos=False` leaves it open, as a prompt for generation.

    Pictures and videos are decoded here, all of them before the first text, since regions may be named before
    the picture they lie in. Special-token strings inside a text stay text. Raises BadSample, with source, key
    and reason, for media that cannot be read or are over a limit of `decode`, and for regions outside their
    picture.
    """
    try:
        return _encode(sample, tokenizer, vision_cfg, decode or DecodeConfig(), eos)
    # What went wrong is said once, with the name of the sample in front.
    except BadSample as error:
        raise BadSample(f"{sample.source} {sample.key}: {error}", error.reason) from None


def _encode(
    sample: Sample, tokenizer: Tokenizer, cfg: VisionConfig, decode: DecodeConfig, eos: bool
) -> Encoded:
    if len(sample.text) > MAX_TEXT_CHARS:
        raise BadSample(
            f"{len(sample.text):,} characters of text, more than {MAX_TEXT_CHARS:,}: cut it into documents "
            "(text_files does with chunk_bytes)",
            "too_large",
        )
    # Decoded first: a text may name regions of a picture that comes after it.
    media: list[Media] = []
    for segment in sample.segments:
        if isinstance(segment, Image):
            media.append(decode_picture(segment.image, cfg, decode))
        elif isinstance(segment, VideoFile):
            media.append(decode_video(segment, cfg, decode))
        elif isinstance(segment, Video):
            media.append(decode_frames(segment.frames, segment.timestamps, cfg, decode))

    # Lists, because a document is made of many short runs.
    ids, weights, last_weight = [tokenizer.bos_id], [0.0], 0.0
    spans: list[tuple[int, int]] = []
    pads: list[int] = []
    following = iter(media)
    for segment in sample.segments:
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
        elif isinstance(segment, Special):
            ids.append(_special_id(segment.token, tokenizer))
        elif isinstance(segment, Regions):
            ids += tokenizer.encode(_regions_text(segment, media))
        else:
            _add_media(next(following), tokenizer, cfg.merge_kernel_size, ids, spans, pads)
            weights += [0.0] * (len(ids) - len(weights))
            continue
        weights += [segment.loss] * (len(ids) - len(weights))
        last_weight = segment.loss
    # The end of an answer is as much to be learned as the answer.
    if eos:
        ids.append(tokenizer.eos_id)
        weights.append(last_weight)

    items = [item for medium in media for item in medium.items]
    return Encoded(
        ids=torch.tensor(ids, dtype=torch.int64),
        loss_weights=torch.tensor(weights, dtype=torch.float32),
        # None rather than an empty tensor: a text needs no patch size.
        patches=torch.cat([patches for patches, _ in items]) if items else None,
        grids=[grid for _, grid in items],
        spans=spans,
        media_positions=torch.tensor(pads, dtype=torch.int64),
        source=sample.source,
        key=sample.key,
    )


def _add_media(
    media: Media,
    tokenizer: Tokenizer,
    merge: tuple[int, int],
    ids: list[int],
    spans: list[tuple[int, int]],
    pads: list[int],
) -> None:
    """Append the markup of a picture or a video to `ids`, with its place and those of its features."""
    word, frame = "image", 0
    for _, grid in media.items:
        # Only a video has times; each item begins with that of its first frame.
        if media.timestamps:
            word = "video"
            ids += tokenizer.encode(timestamp(media.timestamps[frame]))
            frame += grid[0]
        # The span covers the markup too: a cut inside it would leave half a picture.
        start, count = len(ids), num_tokens(grid, merge)
        ids += [tokenizer.media_begin_id, *tokenizer.encode(word), tokenizer.media_content_id]
        pads += range(len(ids), len(ids) + count)
        ids += [tokenizer.media_pad_id] * count + [tokenizer.media_end_id]
        spans.append((start, len(ids)))


def _special_id(name: str, tokenizer: Tokenizer) -> int:
    """The id of a special token; those of media are refused, since only pictures and videos may make them."""
    allowed = {known: i for known, i in tokenizer.special_ids.items() if not known.startswith("<|media")}
    if name not in allowed:
        raise BadSample(f"no special token {name!r} for text; {did_you_mean(name, allowed)}", "bad_json")
    return allowed[name]


def _regions_text(regions: Regions, media: list[Media]) -> str:
    if not 0 <= regions.media < len(media):
        raise BadSample(
            f"regions of media item {regions.media}, but the sample has {len(media)}", "missing_member"
        )
    return write_regions(regions, media[regions.media].original, media[regions.media].resized)


def next_cut(document: Encoded, start: int, length: int, max_patches: int, newline: np.ndarray) -> int:
    """Where the piece that begins at `start` ends: at most `length` tokens ([BOS] counted) and `max_patches`
    patches.

    Never inside a media span. A short rest is shared by the last two pieces. Prefers the last line end in the
    second half of the window (`newline[id]`: the token ends with a line feed), else the latest allowed
    position. Raises BadSample when one media item alone is over a limit.
    """
    total = len(document)
    # A piece from the middle begins with [BOS] of its own, which takes a place.
    limit = min(start + length - int(start > 0), total)
    patches = 0
    for (first, stop), grid in zip(document.spans, document.grids):
        if first < start:
            continue
        patches += num_patches(grid)
        if stop > limit or patches > max_patches:
            limit = min(limit, first)
            # A cut before the first token, or behind [BOS] alone, would never end.
            if first <= max(start, 1):
                raise BadSample(
                    f"{document.source} {document.key}: an image takes {stop - first} tokens and"
                    f" {num_patches(grid)} patches; length = {length} and max_patches = {max_patches}"
                    " allow less: raise them or lower vision.in_patch_limit",
                    "over_budget",
                )
            break
    if limit == total:
        return total

    def inside(cut: int) -> bool:
        return any(a < cut < b for a, b in document.spans)

    # A last piece of a few tokens would be nearly all filler: two halves instead.
    middle = (start + total) // 2
    if middle < limit and total - limit < length // 4 and not inside(middle):
        limit = middle
    # A line end late in the window makes whole lines of both pieces.
    half = start + (limit - start) // 2
    for end in np.flatnonzero(newline[document.ids[half:limit].numpy()])[::-1]:
        cut = half + int(end) + 1
        if not inside(cut):
            return cut
    return limit


def refuse_longer(document: Encoded, length: int) -> None:
    """Raises BadSample (over_budget) for a document of more than `length` tokens, for sources that are not to
    be cut."""
    if len(document) > length:
        raise BadSample(
            f"{document.source} {document.key}: {len(document)} tokens are more than length = {length};"
            ' raise the stage\'s length, shorten the sample, or set data.overlong = "split"',
            "over_budget",
        )


def cuts(document: Encoded, length: int, max_patches: int, newline: np.ndarray) -> list[tuple[int, int]]:
    """Token ranges within `length` and `max_patches` that together are the whole document (see
    `next_cut`)."""
    # The same steps as a lane makes one at a time, with the document in memory.
    ranges, start = [], 0
    while start < len(document):
        stop = next_cut(document, start, length, max_patches, newline)
        ranges.append((start, stop))
        start = stop
    return ranges


# ---- packing


@dataclass
class PackedBatch:
    """One micro-batch.

    Filler is [PAD] in documents of its own at the end, with `source_ids` -1 and no labels.
    """

    ids: Tensor
    """int64 [T]"""
    labels: Tensor
    """int64 [T]: the id to predict at t, already shifted inside its document; -100 = no loss"""
    loss_weights: Tensor
    """float32 [T], aligned with labels; 0 where the label is -100"""
    segments: Segments
    """document lengths, filler included"""
    patches: Tensor
    """uint8 [P, 3, p, p]"""
    grids: list[Grid]
    """(frames, rows, columns) of every media item, in order"""
    media_positions: Tensor
    """int64 [M]: position in ids of every <|media_pad|>, in feature order"""
    source_ids: Tensor
    """int32 [T]: index into sources, -1 for filler"""
    sources: list[str]
    has_image: Tensor
    """bool [T]: the token's document holds an image or video"""
    keys: list[str] = field(default_factory=list)
    """source and key of every document, filler left out"""
    num_filler: int = 0
    """positions of filler"""
    num_loss_weight: float = 0.0
    """sum of loss_weights, known on the host"""

    @property
    def num_tokens(self) -> int:
        """Positions that hold data: T without filler."""
        return self.ids.shape[0] - self.num_filler

    @property
    def num_patches(self) -> int:
        """P."""
        return self.patches.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        # Every tensor it has, so that a new field is not forgotten here.
        moved = replace(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device, non_blocking=non_blocking))
        return moved


def assemble(
    documents: Sequence[Encoded],
    *,
    tokens: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
    factors: Mapping[str, float] | None = None,
) -> PackedBatch:
    """Put documents side by side in `tokens` positions and fill the rest with [PAD] documents of at most
    `length`.

    factors: of the loss weights, by source.

    Raises ValueError when the documents do not fit.
    """
    # One concatenation a column: a loop over slices took as long as decoding.
    lengths = [len(document) for document in documents]
    filler = tokens - sum(lengths)
    if filler < 0:
        raise ValueError(
            f"assemble: {len(documents)} documents of {sum(lengths)} tokens do not fit in {tokens} positions"
        )
    starts = [0, *accumulate(lengths)]
    counts = torch.tensor([*lengths, filler])
    index, factors = list(sources), factors or {}

    # Weight t is that of predicting token t + 1; a document's first token is predicted by nobody.
    ids_T = torch.cat([*(document.ids for document in documents), torch.full((filler,), pad_id)])
    learned_T = torch.cat([*(document.loss_weights for document in documents), torch.zeros(filler)])
    learned_T[starts[:-1]] = 0
    learned_T = learned_T.roll(-1)
    factor = torch.tensor([*(factors.get(document.source, 1.0) for document in documents), 0.0])
    weights_T = learned_T * factor.repeat_interleave(counts)

    source = torch.tensor([*(index.index(document.source) for document in documents), -1], dtype=torch.int32)
    has_image = torch.tensor([*(bool(document.grids) for document in documents), False])
    # Empty ones in front, since there may be none at all.
    patches = [torch.empty(0, 3, patch_size, patch_size, dtype=torch.uint8)]
    patches += [document.patches for document in documents if document.patches is not None]
    media = [torch.empty(0, dtype=torch.int64)]
    media += [document.media_positions + start for document, start in zip(documents, starts)]
    # Filler is in documents of its own, none longer than a real one: kernels plan by the longest.
    whole, rest = divmod(filler, length or tokens)
    return PackedBatch(
        ids=ids_T,
        labels=torch.where(learned_T > 0, ids_T.roll(-1), IGNORED),
        loss_weights=weights_T,
        segments=Segments.from_lengths(lengths + [length or tokens] * whole + [rest] * (rest > 0)),
        patches=torch.cat(patches),
        grids=[grid for document in documents for grid in document.grids],
        media_positions=torch.cat(media),
        source_ids=source.repeat_interleave(counts),
        sources=index,
        has_image=has_image.repeat_interleave(counts),
        keys=[f"{document.source}:{document.key}" for document in documents],
        num_filler=filler,
        num_loss_weight=float(weights_T.sum()),
    )


class Size(NamedTuple):
    """What the packer needs to know of a document, or what is left of the budgets."""

    tokens: int
    patches: int = 0
    cost: float = 0.0
    """Vision FLOPs (patches.VisionCost)."""

    def fits(self, left: Size) -> bool:
        """Whether nothing of it is more than is left."""
        return all(map(operator.le, self, left))

    def less(self, taken: Size) -> Size:
        """What is left when `taken` is taken away."""
        return Size(*map(operator.sub, self, taken))


def choose(sizes: Sequence[Size], budget: Size, aim: float | None = None) -> list[int]:
    """Indices of the documents, oldest first, that share the next micro-batch: a knapsack of three budgets.

    The oldest documents that fit are taken down to a rest of at most 2,048 positions (and at most half), so
    nothing waits for ever; the rest is an exact subset sum over the next 96 documents (a bit set in a Python
    integer: bit s says that s tokens can be reached). Where that selection breaks a budget, documents with
    pictures come longest first as far as they fit, and the exact sum goes over those without.

    aim: cost the micro-batch should come to; rich and poor documents then take turns, oldest first in each,
    so that micro-batches of equal aim cost about the same.
    """
    # Oldest first, so that nothing waits for ever.
    order: Sequence[int] = range(len(sizes))
    if aim is not None and sizes:
        order = _steer(sizes, aim / budget.tokens)
    left, chosen, rest = budget, [], []
    for i in order:
        if left.tokens > min(budget.tokens // 2, EXACT) and sizes[i].fits(left):
            chosen.append(i)
            left = left.less(sizes[i])
        else:
            rest.append(i)

    # An exact sum over all of a large pool would take as long as a training step.
    rest = [i for i in rest if sizes[i].fits(left)][:CANDIDATES]
    extra = _subset_sum(sizes, rest, left.tokens)
    if not Size(0, sum(sizes[i].patches for i in extra), sum(sizes[i].cost for i in extra)).fits(left):
        # Pictures first, since text alone can fill whatever they leave.
        extra = []
        for i in sorted(rest, key=lambda i: (-sizes[i].tokens, i)):
            if sizes[i].patches and sizes[i].fits(left):
                extra.append(i)
                left = left.less(sizes[i])
        extra += _subset_sum(sizes, [i for i in rest if not sizes[i].patches], left.tokens)
    return sorted(chosen + extra)


def _steer(sizes: Sequence[Size], per_token: float) -> list[int]:
    """All documents, the oldest first, in an order in which the first s tokens cost about per_token * s.

    Those with pictures and those without each keep their order.
    """
    # The oldest document comes first whatever it costs.
    order, used, spent = [0], sizes[0].tokens, sizes[0].cost
    newest_first = range(len(sizes) - 1, 0, -1)
    rich = [i for i in newest_first if sizes[i].cost > 0]
    poor = [i for i in newest_first if not sizes[i].cost > 0]

    def miss(tail: list[int]) -> float:
        size = sizes[tail[-1]]
        return abs(spent + size.cost - per_token * (used + size.tokens))

    while rich or poor:
        # Whichever leaves the cost nearer to the line; a long text comes when pictures are half of it ahead.
        tail = min((tail for tail in (rich, poor) if tail), key=miss)
        order.append(tail.pop())
        used, spent = used + sizes[order[-1]].tokens, spent + sizes[order[-1]].cost
    return order


def _subset_sum(sizes: Sequence[Size], candidates: Sequence[int], room: int) -> list[int]:
    """The candidates whose tokens sum as near to `room` as possible without going over, whatever else they
    need; early ones are preferred."""
    # One integer holds every sum that can be reached; a shift adds a length to all of them.
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for i in candidates:
        reach.append((reach[-1] | (reach[-1] << sizes[i].tokens)) & mask)
        if reach[-1] >> room:
            break

    # Backwards: a length was taken where the sum cannot be reached without it.
    total = reach[-1].bit_length() - 1
    taken = []
    for before, i in reversed(list(zip(reach[:-1], candidates))):
        if not before >> total & 1:
            taken.append(i)
            total -= sizes[i].tokens
    return taken[::-1]


def pack_all(
    documents: Iterable[Encoded],
    *,
    tokens: int,
    max_patches: int,
    pad_id: int,
    sources: Sequence[str],
    patch_size: int,
    length: int | None = None,
) -> Iterator[PackedBatch]:
    """Pack a finite stream of documents (each at most `tokens` long, within `max_patches`): every one exactly
    once."""
    stream, pool = iter(documents), list[Encoded]()
    while True:
        for document in stream:
            pool.append(document)
            if sum(map(len, pool)) >= LOOKAHEAD * tokens:
                break
        if not pool:
            return
        # Evaluation has no ranks to balance: costs do not count.
        sizes = [Size(len(document), document.num_patches) for document in pool]
        chosen = choose(sizes, Size(tokens, max_patches))
        if not chosen:
            raise ValueError(
                f"pack_all: {pool[0].key} of {len(pool[0])} tokens fits no batch of {tokens} positions"
            )
        batch = [pool.pop(i) for i in reversed(chosen)][::-1]
        yield assemble(
            batch, tokens=tokens, pad_id=pad_id, sources=sources, patch_size=patch_size, length=length
        )
