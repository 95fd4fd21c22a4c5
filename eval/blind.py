"""What may be shown in a picture's place, so that a figure of pictures gets its control:

true      the problem's own pictures and clips
grey      grey ones of the same sizes and times: as many image tokens, which tell the size alone
swapped   those of the next problem asked; the last one shows the first's
none      none at all
"""

from collections.abc import Sequence
from typing import Literal, get_args

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Segment, Video, VideoFile
from earlyfusion.data.video import decode_video
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.vision.config import VisionConfig

Pictures = Literal["true", "grey", "swapped", "none"]
PICTURES: tuple[Pictures, ...] = get_args(Pictures)
GREY = 128
Shown = Sequence[Segment] | None
"""What stands in the place of a prompt's pictures and clips; None leaves them."""


def parse_pictures(text: str) -> tuple[Pictures, ...]:
    """The kinds in "true,grey". Raises DataError for an unknown one."""
    named = tuple(part.strip() for part in text.split(","))
    for one in named:
        if one not in PICTURES:
            raise DataError(f"pictures {one!r}; {did_you_mean(one, PICTURES)}")
    return tuple(dict.fromkeys(named))  # type: ignore[arg-type]


def is_media(segment: Segment) -> bool:
    """Whether a segment is seen and not read."""
    return isinstance(segment, Image | Video | VideoFile)


def grey(segment: Segment, level: int = GREY) -> Segment:
    """A picture or video of the same sizes and times, all pixels grey (0 to 255); anything else as it is."""
    if isinstance(segment, VideoFile):
        # Its frames are known once it is read.
        clip = decode_video(segment, VisionConfig())
        frame = PILImage.new("RGB", clip.original, (level, level, level))
        return Video([frame] * len(clip.timestamps), clip.timestamps)
    if isinstance(segment, Image):
        return Image(PILImage.new("RGB", segment.open().size, (level, level, level)))
    if isinstance(segment, Video):
        frames = [grey(Image(frame), level).image for frame in segment.frames]  # type: ignore[union-attr]
        return Video(frames, segment.timestamps)
    return segment


def instead(prompts: Sequence[Sequence[Segment]], pictures: Pictures) -> list[Shown]:
    """For every prompt what stands in the place of its pictures and clips."""
    own = [[segment for segment in prompt if is_media(segment)] for prompt in prompts]
    if pictures == "true" or not any(own):
        return [None] * len(own)
    if pictures == "none":
        return [()] * len(own)
    if pictures == "grey":
        return [[grey(segment) for segment in media] for media in own]
    # The next prompt that has any: a neighbour in words would show nothing.
    seen = [media for media in own if media]
    turned = iter(seen[1:] + seen[:1])
    return [next(turned) if media else () for media in own]


def replaced(segments: Sequence[Segment], shown: Shown) -> list[Segment]:
    """The segments with `shown` in the places of pictures and clips, one by one; what is left over of either
    stands behind the last place, or goes."""
    if shown is None:
        return list(segments)
    out: list[Segment] = []
    places = [i for i, segment in enumerate(segments) if is_media(segment)]
    for i, segment in enumerate(segments):
        if i not in places:
            out.append(segment)
            continue
        number = places.index(i)
        out += shown[number:] if i == places[-1] else shown[number : number + 1]
    return out
