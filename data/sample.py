"""Sample: the one currency between sources and the encoder, an ordered list of text, special tokens, media
and grounding.

Sources hand over encoded bytes or paths; nothing is decoded before `encode.encode`, which runs inside the
worker.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image as PILImage

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.picture import Picture, open_picture
from earlyfusion.kernels.errors import one_line

TEXT_BYTES = 24 << 20
"""Most bytes of a text or a JSON that is read at once; the worst JSON takes 25 times as much memory when it
is parsed."""
MEDIA_BYTES = 2 << 30
"""Most bytes of a picture or a video that is read at once (DecodeConfig.video_max_mb may allow less)."""


@contextmanager
def one_sample(where: str) -> Iterator[None]:
    """Whatever goes wrong with the one sample read inside is a BadSample: of reason "unexpected" unless it
    has its own.

    A file made to do harm finds some line that nobody thought of; it costs the run one sample, and is named
    and counted. A DataError passes: it is about a whole source or its configuration, and no other sample
    would fare better.
    """
    # Not BaseException: an interrupt is meant for the run.
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise BadSample(f"{where}: {type(error).__name__}: {one_line(error)}", "unexpected") from error


def within(size: int, limit: int, where: str) -> None:
    """Raise BadSample (too_large) for more than `limit` bytes; asked before anything is read."""
    # Asked before reading: the bytes themselves would be the damage.
    if size > limit:
        raise BadSample(
            f"{where}: {size:,} bytes, more than {limit:,}: split it (text_files: chunk_bytes) or leave"
            " it out",
            "too_large",
        )


def utf8(raw: bytes, where: str = "") -> str:
    """Bytes as text, without a byte order mark; raises BadSample (encoding), `where` before the message."""
    try:
        # A byte order mark is no part of the text.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = f"{where}: " if where else ""
        raise BadSample(
            f"{start}not UTF-8 ({error.reason} at byte {error.start}); convert it", "encoding"
        ) from None


def json_object(raw: bytes | str, where: str = "") -> dict[str, Any]:
    """A JSON object; raises BadSample (encoding, bad_json), `where` before the message."""
    start = f"{where}: " if where else ""
    try:
        # Nested deeply enough, JSON ends in a RecursionError.
        entry = json.loads(utf8(raw, where) if isinstance(raw, bytes) else raw)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadSample):
            raise
        raise BadSample(f"{start}not valid JSON ({error})", "bad_json") from None
    if not isinstance(entry, dict):
        raise BadSample(f"{start}expected a JSON object, got {type(entry).__name__}", "bad_json")
    return entry


def file_below(root: Path, name: str | Path, where: str = "", outside: str = "missing_member") -> Path:
    """The file `name` below `root`, with links followed on both sides; a row must not be able to name other
    files.

    Raises BadSample (missing_member) when there is none and for names that no file can have, (`outside`) when
    it lies elsewhere; `where` stands before the message.
    """
    start = f"{where} " if where else ""
    try:
        # Both sides with their links followed: the folder itself may be one.
        real = root.resolve()
        path = (real / name).resolve()
        found = path.is_file()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # too long, a null character, half a character, a circle of links
        raise BadSample(
            f"{start}{str(name)!r:.100}: no file can be called that ({one_line(error, 100)})",
            "missing_member",
        ) from None
    if not path.is_relative_to(real):
        raise BadSample(
            f"{start}{str(name)!r:.300} lies outside {root}; keep the files below it, links are followed",
            outside,
        )
    if not found:
        raise BadSample(f"{start}{str(name)!r:.300}: no such file below {root}", "missing_member")
    return path


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text. `loss` is the weight of predicting its tokens (0: context only)."""

    text: str
    loss: float = 1.0


@dataclass(frozen=True, slots=True)
class Special:
    """One special token of the tokenizer by its name ("<|open|>"); a Text never makes one. `loss` as in
    Text."""

    token: str
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Image:
    """One picture, decoded or not (bytes and paths stay as they are until encode). Its tokens are never
    predicted."""

    image: Picture

    def open(self) -> PILImage.Image:
        """The decoded picture as it is stored; raises BadSample, naming the path, when it cannot be read."""
        return open_picture(self.image)


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of one size with the time of each, in seconds from the start. Its tokens are never predicted."""

    frames: Sequence[Picture]
    timestamps: Sequence[float]

    def __post_init__(self) -> None:
        # The encoder writes the time of each item's first frame.
        if len(self.frames) != len(self.timestamps) or not self.frames:
            raise BadSample(
                f"video with {len(self.frames)} frames and {len(self.timestamps)} timestamps: "
                "give one timestamp (seconds) for every frame, and at least one frame"
            )


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video as it is stored. encode opens it inside the worker, takes its frames and closes it.

    Frames are sampled evenly at min(`fps`, native rate), at most `max_frames` of them. `suffix` (".mp4") is a
    hint for messages; the container is told by its first bytes. `backend` is decord or pyav; None
    leaves the choice to the configuration (see data/video.py).
    """

    # A path stays a path: a long video is read by the decoder, never copied into a process.
    video: bytes | str | Path
    suffix: str = ""
    max_frames: int | None = None
    fps: float = 2.0
    backend: str | None = None


def question_text(question: str) -> str:
    """How a question stands in a document, up to where the answer begins."""
    # Without a space at the end: most tokenizers put it in front of the next word.
    return f"\nQ: {question}\nA:"


def answer_text(answer: str) -> str:
    """How an answer stands in a document: one leading space, so that most answers are one token."""
    return f" {answer}"


Box = tuple[float, float, float, float]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Region:
    """Something in a picture: a box (left, top, right, bottom) or a point (x, y), in pixels of the original
    picture.

    The original picture is the one after EXIF orientation and before resizing; (0, 0) is its upper left
    corner.
    """

    # In pixels of the file, so that a change of the model's resolution needs no new labels.
    label: str
    box: Box | None = None
    point: Point | None = None

    def __post_init__(self) -> None:
        # One of two: a region with both would be written twice.
        if (self.box is None) == (self.point is None):
            raise BadSample(f"region {self.label!r}: give either a box or a point", reason="box_outside")


@dataclass(frozen=True, slots=True)
class Regions:
    """Where things are in media item number `media` of the sample (pictures and videos counted together, from
    0).

    encode writes them as text (see data/formats.py): "absolute" in pixels of the picture as the
    model sees it (resized, not padded), "normalized" in [0, 1] of the picture, or "both". `loss` is the
    weight of predicting that text.
    """

    regions: Sequence[Region]
    media: int = 0
    form: Literal["absolute", "normalized", "both"] = "both"
    loss: float = 1.0


Segment = Text | Special | Image | Video | VideoFile | Regions


@dataclass(frozen=True, slots=True)
class Sample:
    """One document. `source` is the name of its source, `key` names it inside the source (file, index,
    line)."""

    segments: Sequence[Segment]
    source: str
    key: str

    @property
    def text(self) -> str:
        """All text of the document, without media and regions."""
        # What a model reads of it; regions are written only when a picture is decoded.
        return "".join(segment.text for segment in self.segments if isinstance(segment, Text))
