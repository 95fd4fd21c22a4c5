"""From the files of one sample (a picture, a text, a JSON ...) to segments. Nothing is decoded here.

The format is told by the members, or named by the option `format`:

    caption       picture + .txt, or + .json {"caption" | "text": str or list of str (one an epoch)}
    qa            picture + .json {"question", "answer"} or {"questions": [{"question", "answer"}, ...]}
    conversation  .json {"conversations": [{"from", "value"}]} (LLaVA) or {"messages": [{"role", "content"}]},
                  any media
    interleaved   .json {"texts", "images"} (OBELICS) or {"text_list", "image_info"} (MMC4), any number of
                  pictures
    grounding     picture + .json with "boxes", "points", "regions" or "objects"
    ocr           picture + .json {"ocr": str, or list of {"text", "box"}}, or + .txt
    video         .mp4 .webm .avi .mkv .mov .gif + .txt or .json
    code          picture + .html, .svg or another source text, without a caption beside them
    text          .txt, .md or .json {"text": str} alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from earlyfusion.data.formats import dialogue, regions
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, Group
from earlyfusion.data.sample import Image, Segment, Text


def detect(group: Group, entry: Mapping[str, Any] | None) -> str:
    """The format of a group, by its members and the keys of its JSON."""
    keys = set(entry or ())
    if keys & {"conversations", "messages"}:
        return "conversation"
    if {"texts", "images"} <= keys or "text_list" in keys:
        return "interleaved"
    picture = group.first(PICTURES)
    if keys & {"boxes", "bboxes", "points", "regions", "objects"} and picture:
        return "grounding"
    if "ocr" in keys and picture:
        return "ocr"
    if keys & {"questions", "question"}:
        return "qa"
    if picture and group.first(CODE) and not (group.first(TEXTS) or keys & {"caption", "text"}):
        return "code"
    if group.first(VIDEOS) and not picture:
        return "video"
    return "caption" if picture else "text"


def describe(group: Group, options: Any) -> tuple[str, dict[str, Any] | None]:
    """(format, parsed JSON or None)."""
    entry = group.json() if "json" in group.sizes else None
    return (detect(group, entry) if options.format == "auto" else options.format), entry


def build(group: Group, options: Any, epoch: int = 0) -> list[Segment]:
    """The segments of one sample; raises BadSample, naming shard, key and reason. `options` are
    ShardsOptions."""
    kind, entry = describe(group, options)
    return BUILDERS[kind](group, entry, options, epoch)


def words(group: Group, entry: Mapping[str, Any] | None, options: Any, epoch: int = 0) -> str:
    """The text of a sample: its .txt, else the first of `text_fields` in its JSON (a list gives one each
    epoch)."""
    for name in options.text_fields:
        if entry is not None and name in entry:
            value = entry[name]
            if isinstance(value, list) and value:
                value = value[epoch % len(value)]
            return group.filled(value, f'"{name}"').strip()
    member = group.first(TEXTS)
    if member is None:
        raise group.bad(
            f"no text: expected .txt or .json with one of {list(options.text_fields)}", "missing_member"
        )
    return group.text(member)


def picture_of(group: Group) -> Image:
    """The first picture; raises BadSample when there is none."""
    member = group.first((*PICTURES, "gif"))
    if member is None:
        raise group.bad(
            f"no picture ({', '.join(PICTURES)}) beside {', '.join(group.sizes)}", "missing_member"
        )
    return Image(group.read(member))


def _caption(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    return [picture_of(group), Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _text(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(CODE)
    has_text = entry is not None or group.first(TEXTS) is not None
    text = group.text(member) if member and not has_text else words(group, entry, options, epoch)
    return [Text(text, options.text_loss)]


def _video(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(VIDEOS)
    if member is None:
        raise group.bad(f"no video ({', '.join(VIDEOS)}) beside {', '.join(group.sizes)}", "missing_member")
    return [group.media(member, options), Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _code(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    member = group.first(CODE)
    text = group.text(member) if member else words(group, entry, options, epoch)
    return [picture_of(group), Text("\n" + text, options.text_loss)]


BUILDERS: dict[str, Callable[[Group, dict[str, Any] | None, Any, int], list[Segment]]] = {
    "caption": _caption,
    "qa": dialogue.questions,
    "conversation": dialogue.conversation,
    "interleaved": dialogue.interleaved,
    "grounding": regions.grounding,
    "ocr": regions.ocr,
    "video": _video,
    "code": _code,
    "text": _text,
}
"""Format -> function(group, JSON, options, epoch)."""


def chosen_format(manifest: Mapping[str, Any] | None) -> str:
    """The format that a preparation was told to take (prepare --format); "auto" where it was told none."""
    chosen = (manifest or {}).get("format")
    return chosen if isinstance(chosen, str) and chosen in BUILDERS else "auto"
