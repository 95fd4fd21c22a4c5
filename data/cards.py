"""Samples as the model gets them, as plain dicts for a page.

Pictures are put together again from the encoded patches, so resizing and padding are seen as they are; boxes
and points are given in percent of them.
"""

import re
from collections.abc import Sequence

from PIL import Image as PILImage

from earlyfusion.data.errors import BadSample
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.picture import open_picture
from earlyfusion.data.sample import Image, Region, Regions, Sample, Special, Text, Video, VideoFile
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import navit_size, num_patches, num_tokens, unpatchify

MOST_FRAMES = 16
"""Frames of one video shown."""
# Pages hold hundreds of samples.
SIDE = 480
"""Longest side of a picture on a page, in pixels."""
Card = Record
"""source, key; bad: the reason of a sample that cannot be used, with its `why`. Else kind, parts (text,
picture or frames), and counts: tokens, patches, vision_tokens."""
NAMES = {
    Image: "image",
    Video: "video",
    VideoFile: "video",
    Text: "text",
    Special: "text",
    Regions: "regions",
}


def make_card(sample: Sample, tokenizer: Tokenizer, vision: VisionConfig, kind: str = "") -> Card:
    """The card of one sample; one that cannot be encoded gives a card that says why."""
    # Regions may stand anywhere in a sample; they lie over the medium that they name.
    regions: dict[int, list[Region]] = {}
    for segment in sample.segments:
        if isinstance(segment, Regions):
            regions.setdefault(segment.media, []).extend(segment.regions)

    parts: list[Record] = []
    medium = 0
    try:
        document = encode(sample, tokenizer, vision)
        for segment in sample.segments:
            if isinstance(segment, Image | Video | VideoFile):
                # By itself, so that its patches are known among those of the document.
                part = encode(Sample([segment], "", ""), tokenizer, vision, eos=False)
                if isinstance(segment, Image):
                    parts.append(_picture(segment, part, regions.get(medium, []), vision))
                else:
                    parts.append(_video(part, tokenizer, vision))
                medium += 1
            elif isinstance(segment, Regions):
                names = ", ".join(region.label for region in segment.regions)
                parts.append({"text": f"[{len(segment.regions)} regions: {names}]", "loss": segment.loss})
            else:
                text = segment.text if isinstance(segment, Text) else segment.token
                parts.append({"text": text.strip(), "loss": segment.loss})
    except BadSample as error:
        return bad_card(sample.source, sample.key, error)
    # Without a format of shards the kinds of its segments say what it is.
    kinds = dict.fromkeys(NAMES[type(segment)] for segment in sample.segments)
    return {
        "source": sample.source,
        "key": sample.key,
        "bad": "",
        "kind": kind or " + ".join(kinds),
        "parts": parts,
        "tokens": len(document),
        "patches": document.num_patches,
        "vision_tokens": len(document.media_positions),
    }


def bad_card(source: str, key: str, error: BadSample) -> Card:
    """The card of a sample that cannot be used."""
    return {"source": source, "key": key, "bad": error.reason, "why": str(error)}


def _frames(document: Encoded) -> list[PILImage.Image]:
    """The pictures that the patches hold, made smaller for a page."""
    frames, start = [], 0
    # Patches of all frames lie behind each other.
    for grid in document.grids:
        stop = start + num_patches(grid)
        for pixels in unpatchify(document.patches[start:stop], grid):  # type: ignore[index]
            frame = PILImage.fromarray(pixels)
            frame.thumbnail((SIDE, SIDE))
            frames.append(frame)
        start = stop
    return frames


def _video(document: Encoded, tokenizer: Tokenizer, vision: VisionConfig) -> Record:
    """The first frames, each with the timestamp in the text of the item that it begins."""
    frames = _frames(document)
    # The timestamps are in the text that the model reads.
    times = re.findall(r"\d\d:\d\d:\d\d\.\d{3}", tokenizer.decode(document.ids.tolist()))
    shown = []
    for number, frame in enumerate(frames[:MOST_FRAMES]):
        item, inside = divmod(number, vision.pos_emb_time)
        shown.append((frame, times[item] if not inside and item < len(times) else ""))
    return {"frames": shown, "count": len(frames)}


def _picture(segment: Image, document: Encoded, regions: Sequence[Region], vision: VisionConfig) -> Record:
    original = open_picture(segment.image)
    width, height = original.size
    if original.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # EXIF orientation: lies on its side
        width, height = height, width

    # The picture fills a part of its patches; the rest is padding.
    size, grid = navit_size(width, height, vision), document.grids[0]
    across = 100 * size.new_w / (grid[2] * vision.patch_size * width)
    down = 100 * size.new_h / (grid[1] * vision.patch_size * height)
    marks = []
    for region in regions:
        # A point is a box without a size.
        ends: tuple[float, ...] = region.box or (region.point or ()) * 2
        x0, y0, x1, y1 = ends
        place = {"left": x0 * across, "top": y0 * down, "width": (x1 - x0) * across}
        place["height"] = (y1 - y0) * down
        marks.append({"label": region.label, "kind": "box" if region.box else "dot", **place})
    return {
        "picture": _frames(document)[0],
        "marks": marks,
        "size": (width, height),
        "shrunk": (size.new_w, size.new_h),
        "grid": grid,
        "tokens": num_tokens(grid, vision.merge_kernel_size),
    }
