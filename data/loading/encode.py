"""Sample -> Encoded: token ids, the weight of predicting each, uint8 patches; and the splitting of long
documents.

    document   [BOS] segment segment ... [EOS]
    image      <|media_begin|>image<|media_content|> <|media_pad|> * tokens <|media_end|>
    video      for every item of up to four frames: HH:MM:SS.mmm, then the same with the word "video"
    regions    lines of JSON (data/formats/grounding.py)

Media tokens and timestamps have weight 0. [EOS] has the weight of the last text, so that a model asked for an
answer learns to end it. Sources: Kimi K2.5 and K3 processors, as in transformers' kimi_k25.

Legend: n tokens, P patches, p patch side in pixels, M media pads (= merged vision tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from earlyfusion.data.decode import Media, decode_picture
from earlyfusion.data.decode_config import DecodeConfig
from earlyfusion.data.errors import BadSample
from earlyfusion.data.formats.grounding import write_regions
from earlyfusion.data.sample import (
    Image,
    Regions,
    Sample,
    Segment,
    Special,
    Text,
    Video,
    VideoFile,
    open_picture,
)
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.video.read import decode_video
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, navit_size, num_patches, num_tokens, orientation, prepare_frames

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
        return 0 if self.patches is None else self.patches.shape[0]

    def piece(self, start: int, stop: int) -> Encoded:
        """Tokens [start, stop) with the media inside; a piece from the middle begins with [BOS] of its own.

        So every token but [BOS] is predicted exactly once, in whichever piece it falls. The document must
        have been encoded with [BOS]; neither edge may lie inside a media span (see `cuts`).
        """
        if start == 0 and stop == len(self):
            return self
        lead = int(start > 0)
        inside = [i for i, (a, b) in enumerate(self.spans) if start <= a and b <= stop]
        patches = None
        if inside and self.patches is not None:
            edges = np.cumsum([0] + [num_patches(grid) for grid in self.grids])
            patches = self.patches[int(edges[inside[0]]) : int(edges[inside[-1] + 1])]
        where, shift = self.media_positions, lead - start
        return Encoded(
            ids=torch.cat([self.ids[:lead], self.ids[start:stop]]),
            loss_weights=torch.cat([self.loss_weights[:lead], self.loss_weights[start:stop]]),
            patches=patches,
            grids=[self.grids[i] for i in inside],
            spans=[(self.spans[i][0] + shift, self.spans[i][1] + shift) for i in inside],
            media_positions=where[(where >= start) & (where < stop)] + shift,
            source=self.source,
            key=f"{self.key}[{start}:{stop}]",
        )


class _Builder:
    """Collects tokens and media in order."""

    def __init__(self, tokenizer: Tokenizer, cfg: VisionConfig) -> None:
        self.tokenizer, self.cfg = tokenizer, cfg
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.patches: list[Tensor] = []
        self.grids: list[Grid] = []
        self.spans: list[tuple[int, int]] = []
        self.media: list[range] = []

    def add(self, ids: Sequence[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def add_media(self, word: str, patches: Tensor, grid: Grid) -> None:
        token = self.tokenizer
        start, count = len(self.ids), num_tokens(grid, self.cfg.merge_kernel_size)
        self.add([token.media_begin_id, *token.encode(word), token.media_content_id], 0.0)
        self.media.append(range(len(self.ids), len(self.ids) + count))
        self.add([token.media_pad_id] * count + [token.media_end_id], 0.0)
        self.spans.append((start, len(self.ids)))
        self.grids.append(grid)
        self.patches.append(patches)

    def build(self, source: str, key: str) -> Encoded:
        return Encoded(
            ids=torch.tensor(self.ids, dtype=torch.int64),
            loss_weights=torch.tensor(self.weights, dtype=torch.float32),
            patches=torch.cat(self.patches) if self.patches else None,
            grids=self.grids,
            spans=self.spans,
            media_positions=torch.tensor([i for span in self.media for i in span], dtype=torch.int64),
            source=source,
            key=key,
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
    bos: bool = True,
    eos: bool = True,
    decode: DecodeConfig | None = None,
) -> Encoded:
    """Tokens and patches of one document; `eos=False` leaves it open, as a prompt for generation.

    Pictures and videos are decoded here, all of them before the first text, since regions may be named before
    the picture they lie in. Special-token strings inside a text stay text. Raises BadSample, with source, key
    and reason, for media that cannot be read or are over a limit of `decode`, and for regions outside their
    picture.
    """
    builder = _Builder(tokenizer, vision_cfg)
    decode = decode or DecodeConfig()
    try:
        media = [
            _decoded(s, vision_cfg, decode)
            for s in sample.segments
            if isinstance(s, Image | Video | VideoFile)
        ]
        _fill(builder, sample.segments, media, bos=bos, eos=eos)
    except BadSample as error:
        raise BadSample(f"{sample.source} {sample.key}: {error}", error.reason) from None
    return builder.build(sample.source, sample.key)


def _fill(
    builder: _Builder, segments: Sequence[Segment], media: list[Media], *, bos: bool, eos: bool
) -> None:
    token, last_weight = builder.tokenizer, 0.0
    length = sum(len(segment.text) for segment in segments if isinstance(segment, Text))
    if length > MAX_TEXT_CHARS:
        raise BadSample(
            f"{length:,} characters of text, more than {MAX_TEXT_CHARS:,}: cut it into documents "
            "(text_files does with chunk_bytes)",
            "too_large",
        )
    following = iter(media)
    if bos:
        builder.add([token.bos_id], 0.0)
    for segment in segments:
        if isinstance(segment, Text):
            builder.add(token.encode(segment.text), segment.loss)
            last_weight = segment.loss
        elif isinstance(segment, Special):
            builder.add([_special_id(segment, token)], segment.loss)
            last_weight = segment.loss
        elif isinstance(segment, Regions):
            builder.add(token.encode(_regions_text(segment, media)), segment.loss)
            last_weight = segment.loss
        elif isinstance(segment, Image):
            builder.add_media("image", *next(following).items[0])
        else:
            _add_video(builder, next(following))
    if eos:
        builder.add([token.eos_id], last_weight)


def _special_id(segment: Special, token: Tokenizer) -> int:
    """The id of a special token; those of media are refused, since only pictures and videos may make them."""
    allowed = {name: i for name, i in token.special_ids.items() if not name.startswith("<|media")}
    if segment.token not in allowed:
        raise BadSample(
            f"no special token {segment.token!r} for text; {did_you_mean(segment.token, allowed)}", "bad_json"
        )
    return allowed[segment.token]


def _decoded(segment: Image | Video | VideoFile, cfg: VisionConfig, decode: DecodeConfig) -> Media:
    if isinstance(segment, Image):
        return decode_picture(segment.image, cfg, decode)
    if isinstance(segment, VideoFile):
        return decode_video(segment, cfg, decode)
    try:
        frames = [open_picture(frame, decode.max_pixels) for frame in segment.frames]
        items = prepare_frames(frames, cfg, exact=not decode.fast)
    except BadSample:
        raise
    except (ValueError, OSError) as error:
        raise BadSample(f"the video cannot be prepared: {error}", "corrupt_video") from None
    original = frames[0].size[::-1] if orientation(frames[0]) >= 5 else frames[0].size
    size = navit_size(*original, cfg, patch_limit=cfg.in_patch_limit_each_frame)
    return Media(items, original, (size.new_w, size.new_h), list(segment.timestamps))


def _regions_text(regions: Regions, media: list[Media]) -> str:
    if not 0 <= regions.media < len(media):
        raise BadSample(
            f"regions of media item {regions.media}, but the sample has {len(media)}", "missing_member"
        )
    return write_regions(regions, media[regions.media].original, media[regions.media].resized)


def _add_video(builder: _Builder, media: Media) -> None:
    frame = 0
    for patches, grid in media.items:
        builder.add(builder.tokenizer.encode(timestamp(media.timestamps[frame])), 0.0)
        builder.add_media("video", patches, grid)
        frame += grid[0]


def next_cut(document: Encoded, start: int, length: int, max_patches: int, newline: np.ndarray) -> int:
    """Where the piece that begins at `start` ends: at most `length` tokens ([BOS] counted) and `max_patches`
    patches.

    Never inside a media span. A short rest is shared by the last two pieces. Prefers the last line end in the
    second half of the window (`newline[id]`: the token ends with a line feed), else the latest allowed
    position. Raises BadSample when one media item alone is over a limit.
    """
    total = len(document)
    limit = min(start + length - int(start > 0), total)
    patches = 0
    for (a, b), grid in zip(document.spans, document.grids):
        if a < start:
            continue
        patches += num_patches(grid)
        if b > limit or patches > max_patches:
            limit = min(limit, a)
            break
    if limit == total:
        return total
    if limit <= start + int(start == 0):
        _refuse(document, max(start, 1), length, max_patches)
    middle = (start + total) // 2
    if middle < limit and total - limit < length // 4 and not _inside(document, middle):
        limit = middle
    half = start + (limit - start) // 2
    ends = np.flatnonzero(newline[document.ids[half:limit].numpy()])
    return next((cut for end in ends[::-1] if not _inside(document, cut := half + int(end) + 1)), limit)


def _inside(document: Encoded, cut: int) -> bool:
    return any(a < cut < b for a, b in document.spans)


def _refuse(document: Encoded, start: int, length: int, max_patches: int) -> None:
    item = next(i for i, span in enumerate(document.spans) if span[0] == start)
    a, b = document.spans[item]
    raise BadSample(
        f"{document.source} {document.key}: an image takes {b - a} tokens and"
        f" {num_patches(document.grids[item])} patches; length = {length} and max_patches = {max_patches}"
        " allow less: raise them or lower vision.in_patch_limit",
        "over_budget",
    )


def refuse_longer(document: Encoded, length: int) -> None:
    """Raises BadSample (over_budget) for a document of more than `length` tokens, for sources that are not to
    be cut."""
    if len(document) <= length:
        return
    inside = next(((a, b) for a, b in document.spans if a < length < b), None)
    where = f" and would be cut inside the image at tokens {inside[0]} to {inside[1]}" if inside else ""
    raise BadSample(
        f"{document.source} {document.key}: {len(document)} tokens are more than length = {length}{where};"
        ' raise the stage\'s length, shorten the sample, or set data.overlong = "split"',
        "over_budget",
    )


def cuts(document: Encoded, length: int, max_patches: int, newline: np.ndarray) -> list[tuple[int, int]]:
    """Token ranges within `length` and `max_patches` that together are the whole document (see
    `next_cut`)."""
    ranges, start = [], 0
    while start < len(document):
        stop = next_cut(document, start, length, max_patches, newline)
        ranges.append((start, stop))
        start = stop
    return ranges
