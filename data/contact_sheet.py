"""A contact sheet: samples as the model gets them, in one HTML file without any other.

Pictures are put together again from the encoded patches, so resizing and padding are seen as they are; boxes
and points lie over them; text without loss is grey. The page shows what is in the data and runs none of it:
everything is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from PIL import Image as PILImage

from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import encode, timestamp
from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Region, Regions, Sample, Special, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, navit_size, num_patches, num_tokens, unpatchify

LONGEST_TEXT = 1500
"""Characters of one text shown; the rest is cut with a note."""
MOST_FRAMES = 16
"""Frames of one video shown."""
_SIDE = 480

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px;background:#f6f6f4;color:#1b1b1b}
h1{font-size:20px}h2{font-size:16px;margin:28px 0 8px}.sheet{display:flex;flex-wrap:wrap;gap:14px;align-items:flex-start}
.card{background:#fff;border:1px solid #ddd;border-radius:8px;padding:10px;max-width:500px;overflow-wrap:anywhere}
.key{font:12px ui-monospace,monospace;color:#555;margin-bottom:6px}.bad{border-color:#c33;color:#a11}
.pic{position:relative;display:inline-block;line-height:0;margin:2px 0}.pic img{max-width:100%;min-width:64px}
.box{position:absolute;border:2px solid #e6007a;box-sizing:border-box}
.dot{position:absolute;width:8px;height:8px;margin:-4px;border-radius:50%;background:#e6007a}
.box span,.dot span{position:absolute;left:0;top:0;background:#e6007a;color:#fff;font:11px/1.3 system-ui;padding:0 3px;white-space:nowrap}
.dot span{left:9px;top:-4px}.frames{display:flex;flex-wrap:wrap;gap:4px}.frames figure{margin:0;font:11px monospace;width:110px}
pre{white-space:pre-wrap;margin:4px 0;font:13px/1.4 ui-monospace,monospace;max-height:320px;overflow:auto}.quiet{color:#8a8a8a}
.facts{font-size:12px;color:#555;margin-top:6px}
"""


@dataclass
class Card:
    """One sample of the sheet, as HTML, with its counts; `bad` when it cannot be used."""

    source: str
    html: str
    tokens: int = 0
    patches: int = 0
    vision_tokens: int = 0
    kind: str = ""
    bad: str = ""
    pictures: int = 0
    parts: list[str] = field(default_factory=list)


def make_card(sample: Sample, tokenizer: Tokenizer, vision: VisionConfig, kind: str = "") -> Card:
    """The card of one sample; one that cannot be encoded gives a card that says why."""
    try:
        document = encode(sample, tokenizer, vision)
        card = Card(
            sample.source, "", len(document), document.num_patches, len(document.media_positions), kind
        )
        _fill(card, sample, tokenizer, vision)
    except BadSample as error:
        return bad_card(sample.source, sample.key, error)
    card.kind = kind or _kind_of(sample)
    text = card.tokens - card.vision_tokens
    facts = f"{card.tokens:,} tokens ({text:,} text, {card.vision_tokens:,} vision), {card.patches:,} patches"
    card.html = (
        f'<div class="card"><div class="key">{escape(sample.key)} · {escape(card.kind)}</div>'
        f'{"".join(card.parts)}<div class="facts">{facts}</div></div>'
    )
    return card


def bad_card(source: str, key: str, error: BadSample) -> Card:
    """The card of a sample that cannot be used."""
    html = (
        f'<div class="card bad"><div class="key">{escape(key)}</div>left out: <b>{escape(error.reason)}</b>'
        f"<pre>{escape(str(error))}</pre></div>"
    )
    return Card(source, html, bad=error.reason)


def _kind_of(sample: Sample) -> str:
    names = {
        Image: "image",
        Video: "video",
        VideoFile: "video",
        Text: "text",
        Special: "text",
        Regions: "regions",
    }
    return " + ".join(dict.fromkeys(names[type(segment)] for segment in sample.segments)) or "nothing"


def _fill(card: Card, sample: Sample, tokenizer: Tokenizer, vision: VisionConfig) -> None:
    regions: dict[int, list[Region]] = {}
    for segment in sample.segments:
        if isinstance(segment, Regions):
            regions.setdefault(segment.media, []).extend(segment.regions)
    medium = 0
    for segment in sample.segments:
        if isinstance(segment, Text):
            card.parts.append(_text(segment.text, segment.loss))
        elif isinstance(segment, Special):
            card.parts.append(_text(segment.token, segment.loss))
        elif isinstance(segment, Regions):
            names = ", ".join(region.label for region in segment.regions)
            card.parts.append(_text(f"[{len(segment.regions)} regions: {names}]", segment.loss))
        else:
            card.parts.append(_medium(segment, regions.get(medium, []), sample, tokenizer, vision))
            card.pictures += 1
            medium += 1


def _text(text: str, loss: float) -> str:
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text):,} characters)"
    return (
        f'<pre class="{"quiet" if loss == 0 else ""}" title="loss weight'
        f' {loss:g}">{escape(shown.strip())}</pre>'
    )


def _medium(
    segment: Image | Video | VideoFile,
    regions: Sequence[Region],
    sample: Sample,
    tokenizer: Tokenizer,
    vision: VisionConfig,
) -> str:
    encoded = encode(Sample([segment], sample.source, sample.key), tokenizer, vision, bos=False, eos=False)
    assert encoded.patches is not None
    frames: list[PILImage.Image] = []
    start = 0
    for grid in encoded.grids:
        stop = start + num_patches(grid)
        frames += [PILImage.fromarray(frame) for frame in unpatchify(encoded.patches[start:stop], grid)]
        start = stop
    if isinstance(segment, Image):
        return _picture(segment, frames[0], encoded.grids[0], regions, vision)
    times = _timestamps(tokenizer.decode(encoded.ids.tolist()))
    shown = [
        f"<figure>{_img(f)}{'' if i % vision.pos_emb_time else _time(times, i, vision)}</figure>"
        for i, f in enumerate(frames)
    ]
    note = f" (first {MOST_FRAMES})" if len(frames) > MOST_FRAMES else ""
    return (
        f'<div class="frames">{"".join(shown[:MOST_FRAMES])}</div><div class="facts">{len(frames)}'
        f" frames{note}</div>"
    )


def _timestamps(text: str) -> list[str]:
    import re

    return re.findall(r"\d\d:\d\d:\d\d\.\d{3}", text)


def _time(times: list[str], frame: int, vision: VisionConfig) -> str:
    item = frame // vision.pos_emb_time
    return times[item] if item < len(times) else timestamp(0.0)


def _picture(
    segment: Image, seen: PILImage.Image, grid: Grid, regions: Sequence[Region], vision: VisionConfig
) -> str:
    width, height = _size(segment)
    size = navit_size(width, height, vision)
    across, down = size.new_w / seen.width / width * 100, size.new_h / seen.height / height * 100
    marks = []
    for region in regions:
        label = f"<span>{escape(region.label[:60])}</span>"
        if region.box is not None:
            x0, y0, x1, y1 = region.box
            place = f"left:{x0 * across:.2f}%;top:{y0 * down:.2f}%;width:{(x1 - x0) * across:.2f}%;height:{(y1 - y0) * down:.2f}%"
            marks.append(f'<div class="box" style="{place}">{label}</div>')
        elif region.point is not None:
            place = f"left:{region.point[0] * across:.2f}%;top:{region.point[1] * down:.2f}%"
            marks.append(f'<div class="dot" style="{place}">{label}</div>')
    shrunk = "" if (size.new_w, size.new_h) == (width, height) else f" → {size.new_w}×{size.new_h}"
    facts = (
        f"{width}×{height}{shrunk}, {grid[2]}×{grid[1]} patches, {num_tokens(grid, vision.merge_kernel_size)}"
        " tokens"
    )
    return f'<div class="pic">{_img(seen)}{"".join(marks)}</div><div class="facts">{facts}</div>'


def _size(segment: Image) -> tuple[int, int]:
    """(width, height) of the original after EXIF orientation."""
    picture = open_picture(segment.image)
    turned = picture.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (picture.height, picture.width) if turned else picture.size


def _img(picture: PILImage.Image) -> str:
    small = picture.copy()
    small.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode("ascii")}">'


def sheet(title: str, cards: Sequence[Card]) -> str:
    """The page of all cards, source by source."""
    body = []
    for source in dict.fromkeys(card.source for card in cards):
        mine = [card for card in cards if card.source == source]
        body.append(
            f'<h2>{escape(source)}</h2><div class="sheet">{"".join(card.html for card in mine)}</div>'
        )
    policy = (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src'
        " 'unsafe-inline'\">"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{policy}<title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(body)}</body></html>\n"
    )
