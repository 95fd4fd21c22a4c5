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
from earlyfusion.data.formats.group import CODE, PICTURES, TEXTS, VIDEOS, Entry, Group
from earlyfusion.data.sample import Segment, Text


def detect(group: Group, entry: Entry) -> str:
    """The format of a group, by its members and the keys of its JSON."""
    # Media that stand in a conversation come before what merely lies beside them.
    keys, picture = set(entry), group.first(PICTURES)
    if keys & {"conversations", "messages"}:
        return "conversation"
    if {"texts", "images"} <= keys or "text_list" in keys:
        return "interleaved"
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


def describe(group: Group, options: Any) -> tuple[str, Entry]:
    """(format, parsed JSON or {})."""
    entry = group.json()
    return (detect(group, entry) if options.format == "auto" else options.format), entry


def build(group: Group, options: Any, epoch: int = 0) -> list[Segment]:
    """The segments of one sample; raises BadSample, naming shard, key and reason. `options` are
    ShardsOptions."""
    kind, entry = describe(group, options)
    return BUILDERS[kind](group, entry, options, epoch)


def words(group: Group, entry: Entry, options: Any, epoch: int = 0) -> str:
    """The text of a sample: the first of `text_fields` in its JSON (a list gives one each epoch), else its
    .txt."""
    for name in options.text_fields:
        if name in entry:
            value = entry[name]
            if isinstance(value, list) and value:
                # Every epoch another of the captions, in order: none is seen twice before all are.
                value = value[epoch % len(value)]
            return group.filled(value, f'"{name}"')
    return group.text(group.one(TEXTS, f"text (.txt, or .json with one of {list(options.text_fields)})"))


def _text(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    code = group.first(CODE)
    if code is not None and not entry and not group.first(TEXTS):
        return [Text(group.text(code), options.text_loss)]
    return [Text(words(group, entry, options, epoch), options.text_loss)]


def _caption(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    return [group.picture(), Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _video(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    clip = group.media(group.one(VIDEOS, f"video ({', '.join(VIDEOS)})"), options)
    return [clip, Text("\n" + words(group, entry, options, epoch), options.text_loss)]


def _code(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    code = group.first(CODE)
    text = words(group, entry, options, epoch) if code is None else group.text(code)
    return [group.picture(), Text("\n" + text, options.text_loss)]


BUILDERS: dict[str, Callable[[Group, Entry, Any, int], list[Segment]]] = {
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
    # The manifest is a file of others: what it says may be anything.
    return chosen if isinstance(chosen, str) and chosen in BUILDERS else "auto"
