"""Sample -> Encoded: token ids, the weight of predicting each, uint8 patches; and the splitting of long
documents.

    document   [BOS] segment segment ... [EOS]
    image      <|media_begin|>image<|media_content|> <|media_pad|> * tokens <|media_end|>
    video      for every item of up to four frames: HH:MM:SS.mmm, then the same with the word "video"
    regions    lines of JSON (data/formats.py)

Media tokens and timestamps have weight 0. [EOS] has the weight of the last text, so that a model asked for an
answer learns to end it. Sources: Kimi K2.5 and K3 processors, as in transformers' kimi_k25.

Legend: n tokens, P patches, p patch side in pixels, M media pads (= merged vision tokens).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
from earlyfusion.vision.balance import VisionCost
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

MAX_TEXT_CHARS = 2_000_000
"""Most characters of text in one document: 0.5 million tokens; a tokenizer takes about 200 bytes of memory
for each."""


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


def next_cut(
    document: Encoded,
    start: int,
    length: int,
    max_patches: int,
    newline: np.ndarray,
    cost: VisionCost | None = None,
    max_cost: float = math.inf,
) -> int:
    """Where the piece that begins at `start` ends: at most `length` tokens ([BOS] counted), `max_patches`
    patches and `max_cost` FLOPs of the vision tower.

    Never inside a media span. A short rest is shared by the last two pieces. Prefers the last line end in the
    second half of the window (`newline[id]`: the token ends with a line feed), else the latest allowed
    position. Raises BadSample when one media item alone is over a limit.
    """
    total = len(document)
    # A piece from the middle begins with [BOS] of its own, which takes a place.
    limit = min(start + length - int(start > 0), total)
    patches, spent = 0, 0.0
    for (first, stop), grid in zip(document.spans, document.grids):
        if first < start:
            continue
        patches += num_patches(grid)
        # Asked for only where there is a limit: the sum over a document of many pictures costs time.
        if cost is not None and max_cost < math.inf:
            spent += cost.of([grid])
        if stop > limit or patches > max_patches or spent > max_cost:
            limit = min(limit, first)
            # A cut before the first token, or behind [BOS] alone, would never end.
            if first <= max(start, 1):
                raise BadSample(
                    f"{document.source} {document.key}: an image takes {stop - first} tokens and"
                    f" {num_patches(grid)} patches; length = {length} and max_patches = {max_patches}"
                    f" allow less (or max_vision_flops = {max_cost:.3g}): raise them or lower"
                    " vision.in_patch_limit",
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
