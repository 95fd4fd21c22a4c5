"""Tasks of reading: words on a sign, values of a chart. Held out: words; values of a chart with its kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from earlyfusion.data.synth.charts import chart_questions, draw_chart, make_chart
from earlyfusion.data.synth.graphs import twin
from earlyfusion.data.synth.words import draw_sign, make_sign
from earlyfusion.data.tasks.problem import BaseTask, Drawn, Problem
from earlyfusion.data.tasks.scoring import rewards as scoring

ASK_TEXT = "what does the text say?"


class Ocr(BaseTask):
    """What a sign says. Reward: 1 - edit distance / longer length. Knobs: most_words, sides.

    Training shows no word of the test side; a number stands alone and is held out like a word.
    """

    name = "ocr"
    levels = (
        {"most_words": 1, "min_side": 32, "max_side": 64},
        {"most_words": 2, "min_side": 40, "max_side": 80},
        {"most_words": 3, "min_side": 48, "max_side": 128},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        sign = make_sign(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        said = sign.text.split()
        if len(said) > knobs["most_words"]:
            return None
        meta = {"width": sign.width, "height": sign.height, "graph": sign}
        key = f"word/{said[0]}"
        return Drawn(
            ASK_TEXT, draw_sign(sign), twin(sign), sign.text, sign.text, key, f"{len(said)} words", meta
        )

    def score(self, problem: Problem, said: str) -> float:
        """See scoring.reading; quotation marks around the answer are not part of it."""
        return scoring.reading(said.strip().strip("\"'"), problem.answer)


class ChartValue(BaseTask):
    """One value, the label of an extreme, the sum or a difference of a bar or line chart.

    Reward: 1 - relative error for numbers, exact for labels. Knobs: chart (bar, line), most (values), kinds,
    sides.
    """

    name = "chart_value"
    levels = (
        {"chart": ("bar",), "most": 3, "kinds": ("value",), "min_side": 48, "max_side": 64},
        {"chart": ("bar", "line"), "most": 5, "kinds": ("value", "extreme"), "min_side": 48, "max_side": 96},
        {
            "chart": ("bar", "line"),
            "most": 5,
            "kinds": ("value", "extreme", "sum", "difference"),
            "min_side": 48,
            "max_side": 128,
        },
    )
    _patterns = {"value": r"^what is the value", "extreme": r"^which value", "sum": r"^what is the sum"}

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        chart = make_chart(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
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
            fitting = [
                asked
                for asked in chart_questions(chart, rng, 99)
                if re.search(self._patterns[kind], asked[0])
            ]
            if not fitting:
                return None
            question, target = rng.choice(fitting)
        answer = target if kind == "extreme" else int(target)
        meta = {"width": chart.width, "height": chart.height, "graph": chart}
        key = f"chart/{chart.kind}/{chart.values}"
        return Drawn(question, draw_chart(chart), twin(chart), answer, target, key, kind, meta)

    def score(self, problem: Problem, said: str) -> float:
        """See scoring.value and scoring.words."""
        if isinstance(problem.answer, str):
            return scoring.words(said, problem.answer)
        return scoring.value(said, problem.answer, problem.question)
