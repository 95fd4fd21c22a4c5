"""The gallery of a run's report: for each kind of prompt the best, worst and most divided rollouts, and the
held-out problems whose greedy answer changed between the first and the last measurement.

Everything a model or a data set wrote is escaped; control characters are made visible.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image as PILImage

from earlyfusion.pipeline.report.run import is_chartable
from earlyfusion.rl.report.measured import Pair, Record, by_label, pairs_by_label

Picture = Callable[[Mapping[str, Any]], str | None]
"""A record's picture as a data URI, or None."""
LINES = 12
"""Different answers shown of one group."""
FOLDED = 160
"""Longer answers, such as programs, show their last line and open on a click."""
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}

STYLE = """
.cards2{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:14px;align-items:start}
.cards2 .picture img{height:170px;image-rendering:pixelated}
.cards2 table{width:100%;margin-top:4px}.cards2 td,.cards2 th{padding:2px 0 2px 10px;white-space:nowrap;text-align:right}
.cards2 td:first-child,.cards2 th:first-child{width:100%;padding-left:0;text-align:left;white-space:normal}
.cards2 td:not(:first-child){overflow-wrap:normal}.card b{font-size:18px;white-space:nowrap}
.said,.asked{white-space:pre-wrap;max-height:9em;overflow:auto;overflow-wrap:anywhere}
.cards2 .whole td{white-space:normal;text-align:left}.cards2 summary{color:var(--muted);font-size:12px;cursor:pointer}
.cards2 pre{white-space:pre-wrap;overflow-wrap:anywhere;max-height:32em}
.asked{color:var(--muted);margin-bottom:4px}.tag{display:block;text-align:right;color:var(--muted);font-size:12px}
.wide{overflow-x:auto}.wide td,.wide th{white-space:nowrap;padding-right:12px}.muted-cell{color:var(--muted)}
.split{display:flex;height:22px;border-radius:6px;overflow:hidden;margin:10px 0 6px}
.split div{color:#fff;font-size:12px;line-height:22px;text-align:center;overflow:hidden;white-space:nowrap}
details.kind{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:14px 22px;margin-top:12px}
details.kind summary span{color:var(--muted);font-weight:400;font-size:13px;margin-left:8px}
h2.free{margin:34px 0 0}
"""


def show(text: Any) -> str:
    """Text of others, for HTML."""
    return html.escape(str(text).translate(_VISIBLE).strip())


def data_uri(picture: PILImage.Image) -> str:
    """A picture with its bytes inside."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def gallery_part(
    rollouts: Sequence[Record],
    measured: Mapping[int, Sequence[Record]],
    *,
    logged: Picture,
    redrawn: Picture,
    each: int = 3,
) -> str:
    """The gallery, one folding part for each kind of prompt. logged, redrawn: pictures of rollouts and of
    measured problems. each: cards of one sort."""
    groups = by_label(rollouts)
    pairs = pairs_by_label(measured[min(measured)], measured[max(measured)]) if len(measured) > 1 else {}
    labels = list(dict.fromkeys([*groups, *pairs]))
    if not labels:
        return ""
    parts = []
    for index, label in enumerate(labels):
        body = _rollout_sorts(groups.get(label, []), logged, each)
        body += _again(groups.get(label, []), logged, each) + _changed_sorts(
            pairs.get(label, []), redrawn, each
        )
        told = _summary(groups.get(label, []), pairs.get(label, []))
        opened = " open" if index < 3 else ""
        parts.append(
            "<details"
            f' class="kind"{opened}><summary>{show(label)}<span>{told}</span></summary>{body}</details>'
        )
    note = (
        "Best, worst and most divided: groups of the second half of the log, by mean score and by spread of"
        " the rewards. Changed: the same held-out problem, answered greedily at the first and at the last"
        " measurement."
    )
    return f'<h2 class="free">Rollouts to look at</h2><p class="note">{note}</p>{"".join(parts)}'


def _summary(groups: Sequence[Record], pairs: Sequence[Pair]) -> str:
    told = [f"{len(groups):,} group{'s' if len(groups) > 1 else ''} logged"] if groups else []
    if pairs:
        won = sum(bool(after.get("solved")) and not before.get("solved") for before, after in pairs)
        lost = sum(bool(before.get("solved")) and not after.get("solved") for before, after in pairs)
        told.append(f"{len(pairs):,} measured: {won} wrong → right, {lost} right → wrong")
    return " · ".join(told)


def later_half(groups: Sequence[Record]) -> list[Record]:
    """The groups of the second half of the logged updates: what the trained policy does, not the one at the
    start."""
    updates = sorted({group["update"] for group in groups})
    since = updates[len(updates) // 2] if updates else 0
    return [group for group in groups if group["update"] >= since]


def mean_score(group: Record) -> float:
    """Mean score of a group's answers, 0 when none has one."""
    scores = [answer["score"] for answer in _answers(group) if is_chartable(answer.get("score"))]
    return sum(scores) / len(scores) if scores else 0.0


def spread(group: Record) -> float:
    """Variance of a group's rewards: how much it has to teach."""
    rewards = [answer["reward"] for answer in _answers(group) if is_chartable(answer.get("reward"))]
    centre = sum(rewards) / len(rewards) if rewards else 0.0
    return sum((reward - centre) ** 2 for reward in rewards) / max(1, len(rewards))


def _answers(group: Record) -> list[dict[str, Any]]:
    answers = group.get("answers")
    return [answer for answer in answers if isinstance(answer, dict)] if isinstance(answers, list) else []


def sorts(groups: Sequence[Record], each: int) -> dict[str, list[Record]]:
    """best, worst and divided groups, no group in two of them; newer ones first among equals."""
    late = sorted(later_half(groups), key=lambda group: -group["update"])
    share = min(each, -(-len(late) // 3))
    chosen: dict[str, list[Record]] = {}
    taken: set[int] = set()
    for name, key in (
        ("worst", mean_score),
        ("best", lambda g: -mean_score(g)),
        ("divided", lambda g: -spread(g)),
    ):
        left = [
            group for group in late if id(group) not in taken and (name != "divided" or spread(group) > 0)
        ]
        chosen[name] = sorted(left, key=key)[:share]
        taken |= {id(group) for group in chosen[name]}
    return chosen


def _rollout_sorts(groups: Sequence[Record], picture: Picture, each: int) -> str:
    chosen = sorts(groups, each)
    titles = {"best": "Best", "worst": "Worst", "divided": "Most divided"}
    return "".join(
        _cards(title, [_group_card(g, picture) for g in chosen[name]]) for name, title in titles.items()
    )


def _cards(title: str, cards: Sequence[str]) -> str:
    return f'<h3>{title}</h3><div class="cards2">{"".join(cards)}</div>' if cards else ""


def _again(groups: Sequence[Record], picture: Picture, each: int) -> str:
    """The same training problem logged more than once (a pool): the largest changes of its mean score."""
    seen: dict[str, list[Record]] = {}
    for group in groups:
        seen.setdefault(str(group.get("key")), []).append(group)
    twice = [
        (members[0], members[-1]) for members in seen.values() if members[0]["update"] < members[-1]["update"]
    ]
    twice = [pair for pair in twice if mean_score(pair[0]) != mean_score(pair[1])]
    twice.sort(key=lambda pair: -abs(mean_score(pair[1]) - mean_score(pair[0])))
    cards = [_group_card(before, picture) + _group_card(after, picture) for before, after in twice[:each]]
    return _cards("Most changed in training: the same problem, earlier and later", cards)


def _picture(uri: str | None) -> str:
    return f'<img src="{html.escape(uri)}" alt="">' if uri else ""


def _group_card(group: Record, picture: Picture) -> str:
    """One group: picture, prompt, target, and its answers, equal ones together, best advantage first."""
    rows: dict[tuple[Any, ...], int] = {}
    for answer in _answers(group):
        line = tuple(answer.get(key) for key in ("text", "score", "reward", "advantage", "finish", "status"))
        rows[line] = rows.get(line, 0) + 1
    ordered = sorted(rows.items(), key=lambda item: -(item[0][3] if is_chartable(item[0][3]) else 0.0))
    lines = "".join(_answer_row(line, count) for line, count in ordered[:LINES])
    more = f'<div class="q">{len(ordered) - LINES} more</div>' if len(ordered) > LINES else ""
    head = "<tr><th>answer</th><th>n</th><th>score</th><th>reward</th><th>adv.</th></tr>"
    return (
        f'<div class="picture"><span class="tag">update {group["update"]:,} · mean'
        f" {mean_score(group):.2f}</span>"
        f"{_picture(picture(group))}"
        f'<div class="asked">{show(group.get("prompt", ""))}</div>'
        f"<div>expected: {show(group.get('target', ''))}</div><table>{head}{lines}</table>{more}</div>"
    )


def _answer_row(line: tuple[Any, ...], count: int) -> str:
    text, score, reward, advantage, finish, status = line
    tone = (
        "good"
        if is_chartable(advantage) and advantage > 0
        else "bad"
        if is_chartable(advantage) and advantage < 0
        else ""
    )
    notes = [str(note) for note, usual in ((finish, "stop"), (status, "ok")) if note not in (usual, None)]
    aside = f' <span class="q">({show(", ".join(notes))})</span>' if notes else ""
    numbers = "".join(
        f"<td>{value:{form}}</td>" if is_chartable(value) else "<td>–</td>"
        for value, form in ((score, ".2f"), (reward, ".2f"), (advantage, "+.2f"))
    )
    brief, whole = _folded(str(text or ""), 5)
    return (
        f'<tr><td class="{tone}"><div'
        f' class="said">{brief}{aside}</div></td><td>{count}</td>{numbers}</tr>{whole}'
    )


def _folded(text: str, columns: int) -> tuple[str, str]:
    """What stands in the cell of an answer, and a row below it that opens to the whole of a long one."""
    if len(text) <= FOLDED:
        return show(text) or "(nothing)", ""
    last = text.rstrip().rsplit("\n", 1)[-1]
    brief = show(last) if len(last) <= FOLDED else f"…{show(last[-FOLDED:])}"
    summary = f"the whole answer, {len(text):,} characters"
    row = (
        '<tr class="whole"><td'
        f' colspan="{columns}"><details><summary>{summary}</summary><pre>{show(text)}</pre></details></td></tr>'
    )
    return brief or "(nothing)", row


def flips(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """right: solved only after; wrong: solved only before; still: solved neither time. Largest changes first,
    and among equals those whose right answer gained (right), lost (wrong) or has (still) the least
    probability."""
    solved = [
        (bool(before.get("solved")), bool(after.get("solved")), before, after) for before, after in pairs
    ]
    right = [(before, after) for was, now, before, after in solved if now and not was]
    wrong = [(before, after) for was, now, before, after in solved if was and not now]
    still = [(before, after) for was, now, before, after in solved if not was and not now]
    moved = lambda pair: (pair[1]["score"] - pair[0]["score"], _chance(pair[1]) - _chance(pair[0]))
    return {
        "right": sorted(right, key=moved, reverse=True),
        "wrong": sorted(wrong, key=moved),
        "still": sorted(still, key=lambda pair: (pair[1]["score"], _chance(pair[1]))),
    }


def _chance(record: Record) -> float:
    value = record.get("p_target")
    return float(value) if is_chartable(value) else 0.0  # type: ignore[arg-type]


def _changed_sorts(pairs: Sequence[Pair], picture: Picture, each: int) -> str:
    if not pairs:
        return ""
    chosen = flips(pairs)
    titles = {
        "right": "Changed: wrong → right",
        "wrong": "Changed: right → wrong",
        "still": "Wrong before and after",
    }
    body = "".join(
        _cards(
            f"{title} ({len(chosen[name])} of {len(pairs)})",
            [_pair_card(p, picture) for p in chosen[name][:each]],
        )
        for name, title in titles.items()
    )
    return body or '<p class="note">Every held-out problem of this kind was solved both times.</p>'


def _pair_card(pair: Pair, picture: Picture) -> str:
    rows = ""
    for when, record in (("before", pair[0]), ("after", pair[1])):
        brief, whole = _folded(str(record.get("answer", "")), 3)
        rows += (
            f'<tr><td class="{"good" if record.get("solved") else "bad"}"><div class="said">{when}:'
            f" {brief}</div></td>"
            f"<td>{record['score']:.2f}</td><td>{_chance(record):.3f}</td></tr>{whole}"
        )
    after = pair[1]
    return (
        f'<div class="picture">{_picture(picture(after))}<div'
        f' class="asked">{show(after.get("prompt", ""))}</div>'
        f"<div>expected: {show(after.get('target', ''))}</div>"
        f"<table><tr><th>greedy answer</th><th>score</th><th>p(target)</th></tr>{rows}</table></div>"
    )
