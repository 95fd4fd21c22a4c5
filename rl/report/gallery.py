"""The gallery of a run's report: for each kind of prompt the best, worst and most divided rollouts, and the
held-out
problems whose greedy answer changed between the first and the last measurement. All of it as plain dicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.page import number
from earlyfusion.rl.report.measured import Pair, Record, by_label, mean, pairs_by_label

Picture = Callable[[Record], str | None]
"""A record's picture as a data URI, or None."""
SHOWN = 12
"""Different answers shown of one group."""
FOLDED = 160
"""Longer answers, such as programs, show their last line and open on a click."""


def gallery(
    rollouts: Sequence[Record], measured: Mapping[int, Sequence[Record]], picture: Picture, each: int
) -> list[dict[str, Any]]:
    """The kinds of prompts, each with its groups of cards by title. each: cards of one sort."""
    groups, pairs = by_label(rollouts), pairs_by_label(measured)
    kinds = []
    for label in dict.fromkeys([*groups, *pairs]):
        # A kind may be logged and not measured, or measured and not trained on.
        own, both = groups.get(label, []), pairs.get(label, [])
        cards = {title: [group_card(g, picture) for g in some] for title, some in sorts(own, each).items()}
        # Both times beside each other, in the order of the pairs.
        again = [group_card(group, picture) for pair in asked_again(own)[:each] for group in pair]
        cards["Most changed in training: the same problem, earlier and later"] = again

        found = flips(both)
        for title, some in found.items():
            cards[f"{title} ({len(some)} of {len(both)})"] = [
                pair_card(pair, picture) for pair in some[:each]
            ]
        about = {"logged": len(own), "measured": len(both), **{key: len(some) for key, some in found.items()}}
        kinds.append({"label": label, "about": about, "cards": cards})
    return kinds


def numbers_of(group: Record, key: str) -> list[float]:
    """A number of every answer of a logged group that has it."""
    return [answer[key] for answer in answers_of(group) if is_finite(answer.get(key))]


def answers_of(group: Record) -> list[Record]:
    """The answers of a logged group that are records."""
    answers = group.get("answers")
    return [answer for answer in answers if isinstance(answer, dict)] if isinstance(answers, list) else []


def mean_score(group: Record) -> float:
    """Mean score of a group's answers, 0 when none has one."""
    return mean(numbers_of(group, "score") or [0.0])


def spread(group: Record) -> float:
    """Variance of a group's rewards, 0 when none has one: how much it has to teach."""
    rewards = numbers_of(group, "reward") or [0.0]
    return mean((reward - mean(rewards)) ** 2 for reward in rewards)


def later_half(groups: Sequence[Record]) -> list[Record]:
    """The groups of the second half of the logged updates: what the trained policy does, not the one at the
    start."""
    updates = sorted({group["update"] for group in groups})
    return [group for group in groups if group["update"] >= updates[len(updates) // 2]]


def sorts(groups: Sequence[Record], each: int) -> dict[str, list[Record]]:
    """The best, worst and most divided groups, no group in two of them; newer ones first among equals."""
    left = sorted(later_half(groups), key=itemgetter("update"), reverse=True)
    # A third each: with few groups no sort takes all.
    share = min(each, -(-len(left) // 3))
    worst = sorted(left, key=mean_score)[:share]
    left = [group for group in left if group not in worst]
    best = sorted(left, key=mean_score, reverse=True)[:share]
    # Equal rewards teach nothing.
    left = [group for group in left if group not in best and spread(group) > 0]
    divided = sorted(left, key=spread, reverse=True)[:share]
    return {"Best": best, "Worst": worst, "Most divided": divided}


def asked_again(groups: Sequence[Record]) -> list[Pair]:
    """(earlier, later) of the same training problem logged more than once, the largest changes of its score
    first."""
    first: dict[str, Record] = {}
    last: dict[str, Record] = {}
    for group in groups:
        # A pool asks its problems again; procedural ones rarely repeat.
        first.setdefault(str(group.get("key")), group)
        last[str(group.get("key"))] = group
    pairs = [(first[key], last[key]) for key in last if first[key]["update"] < last[key]["update"]]
    moved = [pair for pair in pairs if mean_score(pair[0]) != mean_score(pair[1])]
    return sorted(moved, key=lambda pair: -abs(mean_score(pair[1]) - mean_score(pair[0])))


def flips(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Problems solved only after, only before, neither time. Largest changes first, and among equals those
    whose right answer gained, lost or has the least probability."""

    def moved(pair: Pair) -> tuple[float, float]:
        before, after = pair
        return after["score"] - before["score"], chance(after) - chance(before)

    # By (solved before, solved after).
    sides: dict[tuple[bool, bool], list[Pair]] = {}
    for before, after in pairs:
        sides.setdefault((bool(before.get("solved")), bool(after.get("solved"))), []).append((before, after))
    still = sides.get((False, False), [])
    return {
        "Changed: wrong → right": sorted(sides.get((False, True), []), key=moved, reverse=True),
        "Changed: right → wrong": sorted(sides.get((True, False), []), key=moved),
        "Wrong before and after": sorted(still, key=lambda pair: (pair[1]["score"], chance(pair[1]))),
    }


def chance(record: Record) -> float:
    """Probability of the right answer, 0 where it was not measured."""
    return record["p_target"] if is_finite(record.get("p_target")) else 0.0


def answer(text: Any, numbers: Sequence[str], tone: str, notes: str = "") -> dict[str, Any]:
    """One line of a card; a long text is shown by its last line, and whole on a click."""
    whole = str(text or "").strip()
    # The answer of a program stands in its last line.
    brief = whole.rsplit("\n", 1)[-1] if len(whole) > FOLDED else whole
    brief = brief if len(brief) <= FOLDED else f"…{brief[-FOLDED:]}"
    return {
        "brief": brief,
        "whole": whole if brief != whole else "",
        "numbers": numbers,
        "tone": tone,
        "notes": notes,
    }


def group_card(group: Record, picture: Picture) -> dict[str, Any]:
    """One group: picture, prompt, target, and its answers, equal ones together, best advantage first."""
    keys = ("text", "score", "reward", "advantage", "finish", "status")
    counts = Counter(tuple(map(one.get, keys)) for one in answers_of(group))
    ordered = sorted(counts, key=lambda row: row[3] if is_finite(row[3]) else 0.0, reverse=True)

    lines = []
    for row in ordered[:SHOWN]:
        text, score, reward, advantage, finish, status = row
        tone = ""
        if is_finite(advantage) and advantage:
            tone = "good" if advantage > 0 else "bad"
        # What is usual is not worth a word.
        notes = ", ".join(str(note) for note in (finish, status) if note not in ("stop", "ok", None))
        numbers = [str(counts[row]), number(score, ".2f"), number(reward, ".2f"), number(advantage, "+.2f")]
        lines.append(answer(text, numbers, tone, notes))
    return {
        "tag": f"update {group['update']:,} · mean {mean_score(group):.2f}",
        "picture": picture(group),
        "prompt": group.get("prompt"),
        "target": group.get("target"),
        "heads": ("n", "score", "reward", "adv."),
        "answers": lines,
        "more": max(0, len(ordered) - SHOWN),
    }


def pair_card(pair: Pair, picture: Picture) -> dict[str, Any]:
    """One held-out problem with its greedy answers before and after."""
    lines = []
    for when, record in zip(("before", "after"), pair):
        numbers = [when, number(record["score"], ".2f"), number(chance(record))]
        lines.append(answer(record.get("answer"), numbers, "good" if record.get("solved") else "bad"))
    after = pair[1]
    shown = {"picture": picture(after), "prompt": after.get("prompt"), "target": after.get("target")}
    return shown | {"heads": ("", "score", "p(target)"), "answers": lines}
