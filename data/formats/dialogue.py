"""Questions, conversations and interleaved documents as segments (see data/formats/build.py for the
shapes)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from earlyfusion.data.formats.group import PICTURES, VIDEOS, Group
from earlyfusion.data.sample import Segment, Text, answer_text, question_text

MEDIA = (*PICTURES, *VIDEOS)
_PLACE = re.compile(r"<image>|<video>")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
Part = tuple[str, Any]
"""("text", str), ("place", None: the next medium in order) or ("media", reference)."""


def questions(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    """The media, then every question with its answer; a list of answers gives one each epoch."""
    if entry is None:
        raise group.bad("questions need a .json member", "missing_member")
    turns = entry.get("questions", [entry])
    if not isinstance(turns, list) or not turns:
        raise group.bad('"questions" must be a list with at least one question', "bad_json")
    segments: list[Segment] = [group.media(member, options) for member in group.all(MEDIA)]
    for turn in turns:
        if not isinstance(turn, dict):
            raise group.bad(f"a question is {type(turn).__name__}, expected an object", "bad_json")
        answer = turn.get("answer", turn.get("answers"))
        if isinstance(answer, list) and answer:
            answer = answer[epoch % len(answer)]
        if isinstance(answer, dict):  # VQAv2 writes {"answer": ..., "answer_id": ...}
            answer = answer.get("answer")
        answer = str(answer) if isinstance(answer, int | float) else answer
        asked = group.filled(turn.get("question"), '"question"').strip()
        segments.append(Text(question_text(asked), options.question_loss))
        segments.append(Text(answer_text(group.filled(answer, '"answer"').strip()), options.text_loss))
    return segments


def conversation(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    """Turns in order, answers with `text_loss`, the rest with `question_loss`; media stand where the turns
    place them."""
    turns = list(_turns(group, entry or {}))
    members = _members(group, entry or {})
    places = sum(kind == "place" for _, parts in turns for kind, _ in parts)
    named = any(kind == "media" for _, parts in turns for kind, _ in parts)
    if places == 0 and not named and members:  # nobody said where: before the first word
        first = next((i for i, (role, _) in enumerate(turns) if role == "user"), 0)
        turns[first][1][:0] = [("place", None)] * len(members)
    elif places > len(members):
        raise group.bad(f"{places} media places and {len(members)} media members", "missing_member")
    elif not named and places < len(members):
        raise group.bad(f"{len(members)} media members and only {places} places for them", "bad_json")
    order = iter(members)
    segments: list[Segment] = []
    for role, parts in turns:
        filled = [("media", next(order)) if kind == "place" else (kind, value) for kind, value in parts]
        segments += _turn(group, role, filled, options)
    return segments


def _turns(group: Group, entry: dict[str, Any]) -> Iterator[tuple[str, list[Part]]]:
    turns = entry.get("conversations", entry.get("messages"))
    if not isinstance(turns, list) or not turns:
        raise group.bad('expected a list "conversations" or "messages" with at least one turn', "bad_json")
    answered = False
    for turn in turns:
        if not isinstance(turn, dict):
            raise group.bad(f"a turn is {type(turn).__name__}, expected an object", "bad_json")
        role = _ROLES.get(str(turn.get("from", turn.get("role"))).lower())
        if role is None:
            raise group.bad(
                f"a turn of {turn.get('from', turn.get('role'))!r}; known: {sorted(_ROLES)}", "bad_json"
            )
        answered |= role == "assistant"
        parts = list(_parts(group, turn.get("value", turn.get("content"))))
        if not parts:
            raise group.bad(f"an empty turn of {role}", "empty_text")
        yield role, parts
    if not answered:
        raise group.bad("no turn of the assistant: nothing to learn", "empty_text")


def _parts(group: Group, content: object) -> Iterator[Part]:
    if isinstance(content, str):
        group.filled(content, "a turn")
        position = 0
        for match in _PLACE.finditer(content):
            if content[position : match.start()].strip():
                yield "text", content[position : match.start()].strip("\n")
            yield "place", None
            position = match.end()
        if content[position:].strip():
            yield "text", content[position:].strip()
        return
    if not isinstance(content, list):
        raise group.bad(f"a turn's content is {type(content).__name__}, expected string or list", "bad_json")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            yield "text", group.filled(part.get("text"), "a text part").strip("\n")
        elif kind in ("image", "video"):
            reference = part.get(kind)
            yield ("media", group.named(reference)) if isinstance(reference, str) else ("place", None)
        else:
            raise group.bad(f"a part of type {kind!r}; known: text, image, video", "bad_json")


def _members(group: Group, entry: dict[str, Any]) -> list[str]:
    """The media in the order the JSON names them, else in the order of their numbers."""
    for key in ("image", "images", "video", "videos"):
        if key in entry and entry[key] is not None:
            listed = entry[key] if isinstance(entry[key], list) else [entry[key]]
            return [group.named(reference) for reference in listed]
    return group.all(MEDIA)


def _turn(group: Group, role: str, parts: list[Part], options: Any) -> Iterator[Segment]:
    """Media at the edge of a question stand before its "Q:", as in every other source of questions."""
    while parts and parts[0][0] == "media":
        yield group.media(parts.pop(0)[1], options)
    loss = options.text_loss if role == "assistant" else options.question_loss
    opening, closing = {"user": ("\nQ: ", "\nA:"), "assistant": (" ", ""), "system": ("\n", "")}[role]
    texts = len(parts)
    for number, (kind, value) in enumerate(parts):
        if kind == "media":
            yield group.media(value, options)
            continue
        before = opening if number == 0 else ""
        yield Text(before + value + (closing if number == texts - 1 else ""), loss)
    if role == "user" and (not parts or parts[-1][0] == "media"):
        yield Text((opening.rstrip() if not parts else "") + closing, loss)


def interleaved(group: Group, entry: dict[str, Any] | None, options: Any, epoch: int) -> list[Segment]:
    """A web page: texts and pictures in order; it ends before the picture over `max_images`."""
    parts = _mmc4(group, entry or {}) if "text_list" in (entry or {}) else _obelics(group, entry or {})
    segments: list[Segment] = []
    images = 0
    for kind, value in parts:
        if kind == "media":
            images += 1
            if options.max_images is not None and images > options.max_images:
                break
            segments.append(group.media(value, options))
        else:
            segments.append(Text(("\n" if segments else "") + value, options.text_loss))
    if not any(isinstance(segment, Text) for segment in segments):
        raise group.bad("no text in the document", "empty_text")
    return segments


def _obelics(group: Group, entry: dict[str, Any]) -> Iterator[Part]:
    texts, images = entry.get("texts"), entry.get("images")
    if not isinstance(texts, list) or not isinstance(images, list) or len(texts) != len(images):
        raise group.bad(
            '"texts" and "images" must be lists of one length (null where the other has one)', "bad_json"
        )
    for text, image in zip(texts, images):
        if image is not None:
            yield "media", group.named(image)
        if text is not None and not (isinstance(text, str) and not text.strip()):
            yield "text", group.filled(text, '"texts"').strip()


def _mmc4(group: Group, entry: dict[str, Any]) -> Iterator[Part]:
    texts, infos = entry.get("text_list"), entry.get("image_info", [])
    if not isinstance(texts, list) or not isinstance(infos, list):
        raise group.bad('"text_list" and "image_info" must be lists', "bad_json")
    before: dict[int, list[str]] = {}
    for info in infos:
        place = info.get("matched_text_index", 0) if isinstance(info, dict) else None
        if not isinstance(place, int) or not 0 <= place <= len(texts):
            raise group.bad(f"matched_text_index {place!r} among {len(texts)} texts", "bad_json")
        before.setdefault(place, []).append(group.named(info.get("image_name")))
    for number, text in enumerate([*texts, ""]):
        for member in before.get(number, []):
            yield "media", member
        if number < len(texts) and str(text).strip():
            yield "text", group.filled(text, '"text_list"').strip()
