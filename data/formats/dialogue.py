"""Questions, conversations and interleaved documents as segments (see data/formats/build.py for the
shapes)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from earlyfusion.data.chat.rows import turns_of
from earlyfusion.data.formats.group import MEDIA, Entry, Group
from earlyfusion.data.sample import Segment, Text, answer_text, question_text

_MARKS = {"user": ("\nQ: ", "\nA:"), "assistant": (" ", ""), "system": ("\n", "")}
"""What stands before and behind the words of a role."""


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
    turns = [(role, _stripped(parts)) for role, parts, _ in turns_of(entry, group.where)]
    roles = [role for role, _ in turns]
    if not _MARKS.keys() >= set(roles):
        raise group.bad(f"turns of {sorted(set(roles))}; known: {sorted(_MARKS)}")
    if "assistant" not in roles:
        raise group.bad("no turn of the assistant: nothing to learn", "empty_text")
    if [] in [parts for _, parts in turns]:
        raise group.bad("an empty turn", "empty_text")

    # Every medium has one place; where nobody said which, they stand before the first word.
    members = _members(group, entry)
    media = [value for kind, value in chain.from_iterable(parts for _, parts in turns) if kind != "text"]
    places, named = media.count(None), any(media)
    if not media:
        first = roles.index("user") if "user" in roles else 0
        turns[first][1][:0] = [("image", None)] * len(members)
    elif places > len(members) or (places < len(members) and not named):
        reason = "missing_member" if places > len(members) else "bad_json"
        raise group.bad(f"{places} places for media, and {len(members)} media members", reason)

    order = iter(members)
    segments: list[Segment] = []
    for role, parts in turns:
        placed: list[str | Segment] = []
        for kind, value in parts:
            if kind != "text":
                value = group.media(group.named(value) if value else next(order), options)
            placed.append(value)
        segments += _turn(role, placed, options)
    return segments


def _stripped(parts: list[Any]) -> list[Any]:
    """Without line ends around a place, which belong to the mark-up, and blanks around a turn; the blanks of
    a sentence stay."""
    kept = []
    for number, (kind, value) in enumerate(parts, 1):
        if kind == "text":
            value = value.strip("\n" if number < len(parts) else None)
        if kind != "text" or value.strip():
            kept.append((kind, value))
    return kept


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
