"""Questions, conversations and interleaved documents as segments (see data/formats/build.py for the
shapes)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from earlyfusion.data.formats.group import MEDIA, Entry, Group
from earlyfusion.data.sample import Image, Segment, Text, VideoFile, answer_text, question_text

_PLACE = re.compile(r"<image>|<video>")
# LLaVA's names and OpenAI's.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_MARKS = {"user": ("\nQ: ", "\nA:"), "assistant": (" ", ""), "system": ("\n", "")}
"""What stands before and behind the words of a role."""
Part = str | Image | VideoFile | None
"""Words, a named medium, or the place of the next one in order."""


def questions(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """The media, then every question with its answer; a list of answers gives one each epoch."""
    segments: list[Segment] = [group.media(member, options) for member in group.all(MEDIA)]
    turns = group.objects(entry.get("questions", [entry]), '"questions"')
    if not turns:
        raise group.bad('"questions" is empty')
    for turn in turns:
        answer = turn.get("answer", turn.get("answers"))
        if isinstance(answer, list) and answer:
            answer = answer[epoch % len(answer)]
        if isinstance(answer, dict):  # VQAv2 writes {"answer": ..., "answer_id": ...}
            answer = answer.get("answer")
        # Counts are often written as numbers.
        answer = str(answer) if isinstance(answer, int | float) else answer
        asked = group.filled(turn.get("question"), '"question"')
        segments.append(Text(question_text(asked), options.question_loss))
        segments.append(Text(answer_text(group.filled(answer, '"answer"')), options.text_loss))
    return segments


def conversation(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """Turns in order, answers with `text_loss`, the rest with `question_loss`; media stand where the turns
    place them."""
    turns: list[tuple[str, list[Part]]] = []
    for turn in group.objects(entry.get("conversations", entry.get("messages")), "turns"):
        # Either form of a turn, by whichever key is there.
        given = str(turn.get("from", turn.get("role"))).lower()
        if given not in _ROLES:
            raise group.bad(f"a turn of {given!r}; known: {sorted(_ROLES)}")
        parts = _parts(group, turn.get("value", turn.get("content")), options)
        if not parts:
            raise group.bad(f"an empty turn of {given}", "empty_text")
        turns.append((_ROLES[given], parts))
    roles = [role for role, _ in turns]
    if "assistant" not in roles:
        raise group.bad("no turn of the assistant: nothing to learn", "empty_text")

    # Every medium has one place; where nobody said which, they stand before the first word.
    members = _members(group, entry)
    everything = list(chain.from_iterable(parts for _, parts in turns))
    places = everything.count(None)
    named = any(isinstance(part, Image | VideoFile) for part in everything)
    if places == 0 and not named:
        first = roles.index("user") if "user" in roles else 0
        turns[first][1][:0] = [None] * len(members)
    elif places > len(members) or (places < len(members) and not named):
        reason = "missing_member" if places > len(members) else "bad_json"
        raise group.bad(f"{places} places for media, and {len(members)} media members", reason)

    order = iter(members)
    segments: list[Segment] = []
    for role, parts in turns:
        placed = [group.media(next(order), options) if part is None else part for part in parts]
        segments += _turn(role, placed, options)
    return segments


def _parts(group: Group, content: object, options: Any) -> list[Part]:
    """A turn's content, a string with places or a list of parts."""
    if isinstance(content, str):
        parts: list[Part] = []
        pieces = _PLACE.split(group.filled(content, "a turn"))
        for number, piece in enumerate(pieces):
            if number:
                parts.append(None)
            if piece.strip():
                # Line ends around a place belong to the mark-up; blanks inside a sentence do not.
                parts.append(piece.strip() if number == len(pieces) - 1 else piece.strip("\n"))
        return parts

    parts = []
    for item in group.objects(content, "a turn's content"):
        kind = item.get("type")
        if kind == "text":
            group.filled(item.get("text"), "a text part")
            parts.append(item["text"].strip("\n"))
        elif kind in ("image", "video"):
            reference = item.get(kind)
            parts.append(group.media(group.named(reference), options) if reference else None)
        else:
            raise group.bad(f"a part of type {kind!r}; known: text, image, video")
    return parts


def _members(group: Group, entry: Entry) -> list[str]:
    """The media in the order the JSON names them, else in the order of their numbers."""
    for key in ("image", "images", "video", "videos"):
        if entry.get(key) is not None:
            listed = entry[key] if isinstance(entry[key], list) else [entry[key]]
            return [group.named(reference) for reference in listed]
    return group.all(MEDIA)


def _turn(role: str, parts: list[Any], options: Any) -> Iterator[Segment]:
    """Media at the edge of a question stand before its "Q:", as in every other source of questions."""
    while parts and not isinstance(parts[0], str):
        yield parts.pop(0)
    if role == "user" and (not parts or not isinstance(parts[-1], str)):
        parts.append("")
    loss = options.text_loss if role == "assistant" else options.question_loss
    opening, closing = _MARKS[role]
    for number, part in enumerate(parts):
        if isinstance(part, str):
            before = opening if number == 0 else ""
            behind = closing if number == len(parts) - 1 else ""
            part = Text((before + part if part else before.rstrip()) + behind, loss)
        yield part


def interleaved(group: Group, entry: Entry, options: Any, epoch: int) -> list[Segment]:
    """A web page: texts and pictures in order; it ends before the picture over `max_images`."""
    segments: list[Segment] = []
    images = 0
    for kind, value in _mmc4(group, entry) if "text_list" in entry else _obelics(group, entry):
        if kind == "text":
            segments.append(
                Text(("\n" if segments else "") + group.filled(value, "a text"), options.text_loss)
            )
            continue
        # Cut before the picture that is too many: what follows may speak about it.
        images += 1
        if images > (options.max_images or images):
            break
        segments.append(group.media(group.named(value), options))
    if not any(isinstance(segment, Text) for segment in segments):
        raise group.bad("no text in the document", "empty_text")
    return segments


def _obelics(group: Group, entry: Entry) -> Iterator[tuple[str, Any]]:
    texts, images = entry.get("texts"), entry.get("images")
    if not isinstance(texts, list) or not isinstance(images, list) or len(texts) != len(images):
        raise group.bad('"texts" and "images" must be lists of one length (null where the other has one)')
    for text, image in zip(texts, images):
        if image is not None:
            yield "image", image
        if text is not None and str(text).strip():
            yield "text", text


def _mmc4(group: Group, entry: Entry) -> Iterator[tuple[str, Any]]:
    texts, infos = entry["text_list"], group.objects(entry.get("image_info", []), '"image_info"')
    if not isinstance(texts, list):
        raise group.bad('"text_list" must be a list')
    # MMC4 says beside which text a picture belongs; it stands before it.
    before: dict[int, list[object]] = {}
    for info in infos:
        place = info.get("matched_text_index", 0)
        if not isinstance(place, int) or not 0 <= place <= len(texts):
            raise group.bad(f"matched_text_index {place!r} among {len(texts)} texts")
        before.setdefault(place, []).append(info.get("image_name"))
    for number, text in enumerate([*texts, ""]):
        for name in before.get(number, []):
            yield "image", name
        if str(text).strip():
            yield "text", text
