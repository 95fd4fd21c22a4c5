"""Tasks of reading: words on a sign, values of a chart, cells of a board. Held out: words; values of a chart
with its kind; first rows of boards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from earlyfusion.data.synth.charts import Chart
from earlyfusion.data.synth.graph import Graph
from earlyfusion.data.synth.grid import Board
from earlyfusion.data.synth.words import ASK_TEXT, Sign
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.problem import MAX_SIDE, MIN_SIDE, Drawn, Judged, Problem, Task, task
from earlyfusion.data.tasks.scenes import MEDIUM
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.text import (
    anls,
    character_error_rate,
    contains,
    exact_match,
    first_line,
    relaxed_match,
    word_error_rate,
)

EXAM = {"min_side": MIN_SIDE, "max_side": MAX_SIDE}


def _one_word(sign: Sign) -> bool:
    return len(sign.text.split()) == 1


def _several_words(sign: Sign) -> bool:
    return len(sign.text.split()) > 1


@task("ocr")
class Ocr(Task):
    """What a sign says. Reward: 1 - edit distance / longer length. Knobs: most_words, sides.

    Training shows no word of the test side; a number stands alone and is held out like a word.
    """

    levels = (
        {"most_words": 1, "min_side": 32, "max_side": 64},
        {"most_words": 2, "min_side": 40, "max_side": 80},
        {"most_words": 3, "min_side": 48, "max_side": 128},
    )
    kinds = {"word": Kind(fits=_one_word), "words": Kind(fits=_several_words)}
    listed = 1
    answer_tokens = 32

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        sign = Sign.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        words = sign.text.split()
        if len(words) > knobs["most_words"]:
            return None
        key, category = f"word/{words[0]}", f"{len(words)} words"
        meta = {"width": sign.width, "height": sign.height, "graph": sign}
        return Drawn(ASK_TEXT, sign.draw(), sign.words(), sign.text, sign.text, key, category, meta)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.reading; quotation marks around the answer are not part of it."""
        return rewards.reading(answer.strip().strip("\"'"), problem.answer)

    def graph(self, rng: Random) -> Graph:
        """See Task."""
        return Sign.make(rng, heldout=True, **EXAM)

    def judge(self, problem: Problem, text: str) -> Judged:
        """Containment (OCRBench); error rates and ANLS are over the first line."""
        answer, gold = first_line(text), problem.answer
        metrics = {
            "exact": float(exact_match(answer, gold)),
            "cer": character_error_rate(answer, gold),
            "wer": word_error_rate(answer, gold),
            "anls": anls(answer, [gold]),
        }
        return answer or None, float(contains(text, gold)), metrics


@task("chart_value")
class ChartValue(Task):
    """One value, the label of an extreme, the sum or a difference of a bar or line chart.

    Reward: 1 - relative error for numbers, exact for labels. Knobs: chart (bar, line), most (values), kinds,
    sides.
    """

    levels = (
        {"chart": ("bar",), "most": 3, "kinds": ("value",), "min_side": 48, "max_side": 64},
        {"chart": ("bar", "line"), "most": 5, "kinds": ("value", "extreme"), **MEDIUM},
        {
            "chart": ("bar", "line"),
            "most": 5,
            "kinds": ("value", "extreme", "sum", "difference"),
            "min_side": 48,
            "max_side": 128,
        },
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        chart = Chart.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        kind = rng.choice(tuple(knobs["kinds"]))
        if chart.kind not in knobs["chart"] or len(chart.values) > knobs["most"]:
            return None

        if kind == "difference":
            i, j = rng.sample(range(len(chart.values)), 2)
            if chart.values[i] < chart.values[j]:
                i, j = j, i
            question = f"how much larger is {chart.labels[i]} than {chart.labels[j]}?"
            target = str(chart.values[i] - chart.values[j])
        else:
            pattern = ChartExam.kinds[kind].pattern
            asked = [pair for pair in chart.questions(rng, self.listed) if re.search(pattern, pair[0])]
            if not asked:
                return None
            question, target = rng.choice(asked)

        answer = target if kind == "extreme" else int(target)
        meta = {"width": chart.width, "height": chart.height, "graph": chart}
        key = f"chart/{chart.kind}/{chart.values}"
        return Drawn(question, chart.draw(), chart.words(), answer, target, key, kind, meta)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.value and rewards.words."""
        if isinstance(problem.answer, str):
            return rewards.words(answer, problem.answer)
        return rewards.value(answer, problem.answer, problem.question)


@task("chart")
class ChartExam(Task):
    """Values, extremes, sums and comparisons in bar and line charts."""

    kinds = {
        "value": Kind(r"^what is the value"),
        "extreme": Kind(r"^which value"),
        "sum": Kind(r"^what is the sum"),
        "comparison": Kind(r"^is ", balanced=True),
    }
    answer_tokens = 8

    def graph(self, rng: Random) -> Graph:
        """See Task."""
        return Chart.make(rng, heldout=True, **EXAM)

    def judge(self, problem: Problem, text: str) -> Judged:
        """ChartQA's relaxed correctness of the first line."""
        answer = first_line(text).rstrip(".")
        metrics = {"exact": float(exact_match(answer, problem.answer))}
        return answer or None, float(relaxed_match(answer, problem.answer)), metrics


@task("board")
class BoardExam(Task):
    """Cells, rows and counts on boards of coloured squares: exact words."""

    kinds = {
        "cell": Kind(r"^what color"),
        "row": Kind(r"^what is row"),
        "count": Kind(r"^how many cells"),
    }

    def graph(self, rng: Random) -> Graph:
        """See Task."""
        return Board.make(rng, heldout=True, **EXAM)
