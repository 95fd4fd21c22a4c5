"""Tasks of reading: words on a sign, values of a chart, cells of a board, what happens in a clip. Held out:
words; values of a chart with its kind; first rows of boards; what moves.

Most questions about a clip need more than one frame. Its blind view has grey frames with the same timestamps
(the time question can be answered from those: it says whether timestamps are read); the words tell every
frame's boxes.
"""

from __future__ import annotations

import re
from functools import partial

from earlyfusion.data.synth.charts import Chart
from earlyfusion.data.synth.clips import Clip
from earlyfusion.data.synth.graph import Question
from earlyfusion.data.synth.grid import Board
from earlyfusion.data.synth.words import ASK_TEXT, Sign
from earlyfusion.data.tasks.problem import MAX_SIDE, MIN_SIDE, Kind, Task, about, task
from earlyfusion.data.tasks.scenes import MEDIUM
from earlyfusion.data.tasks.scoring import rewards, text

KINDS = {
    "value": Kind(r"^what is the value"),
    "extreme": Kind(r"^which value"),
    "sum": Kind(r"^what is the sum"),
}
"""What both the task and the exam ask about a chart."""
ALL = (*KINDS, "difference")


def _text_of(several: bool, sign: Sign, rng: object) -> Question | None:
    return (ASK_TEXT, sign.text) if (" " in sign.text) == several else None


@task("ocr")
class Ocr(Task):
    """What a sign says. Reward: 1 - edit distance / longer length, case counts. Knobs: most_words, sides.

    Training shows no word of the test side; a number stands alone and is held out like a word.
    """

    levels = (
        {"most_words": 1, "min_side": 32, "max_side": 64},
        {"most_words": 2, "min_side": 40, "max_side": 80},
        {"most_words": 3, "min_side": 48, "max_side": 128},
    )
    # One word and several are reported apart: a long text is another skill.
    kinds = {"word": Kind(ask=partial(_text_of, False)), "words": Kind(ask=partial(_text_of, True))}
    make = Sign.make
    answer_tokens = 32

    def draw(self, rng, heldout, knobs):
        """See Task."""
        sign = Sign.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        words = sign.text.split()
        # Drawn anew rather than cut: a cut text would not fill its picture.
        if len(words) > knobs["most_words"]:
            return None
        return about(sign, ASK_TEXT, sign.text, sign.text, f"word/{words[0]}", f"{len(words)} words")

    def score(self, problem, answer):
        """See text.similarity; quotation marks around the answer are not part of it."""
        # Near misses earn their share, or there would be nothing to learn from at first.
        return text.similarity(answer.strip().strip("\"'"), problem.answer)

    def judge(self, problem, said):
        """Containment (OCRBench); error rates and ANLS are over the first line."""
        answer, gold = text.first_line(said), problem.answer
        metrics = {
            # Containment pays for long answers; these beside it do not.
            "exact": float(text.exact_match(answer, gold)),
            "cer": text.error_rate(answer, gold),
            "wer": text.error_rate(answer.split(), gold.split()),
            "anls": text.anls(answer, gold),
        }
        return answer or None, float(text.contains(said, gold)), metrics


@task("chart_value")
class ChartValue(Task):
    """One value, the label of an extreme, the sum or a difference of a bar or line chart.

    Reward: 1 - relative error for numbers, exact for labels. Knobs: chart (bar, line), most (values), kinds,
    sides.
    """

    levels = (
        {"chart": ("bar",), "most": 3, "kinds": ("value",), "min_side": 48, "max_side": 64},
        {"chart": ("bar", "line"), "most": 5, "kinds": ("value", "extreme"), **MEDIUM},
        {"chart": ("bar", "line"), "most": 5, "kinds": ALL, "min_side": 48, "max_side": 128},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        chart = Chart.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        kind = rng.choice(knobs["kinds"])
        if chart.kind not in knobs["chart"] or len(chart.values) > knobs["most"]:
            return None

        if kind == "difference":
            i, j = rng.sample(range(len(chart.values)), 2)
            if chart.values[i] < chart.values[j]:
                i, j = j, i
            question = f"how much larger is {chart.labels[i]} than {chart.labels[j]}?"
            target = str(chart.values[i] - chart.values[j])
        else:
            # The wording of the exam, which is that of pretraining.
            asked = KINDS[kind].choose(chart, rng, self.listed)
            if asked is None:
                return None
            question, target = asked

        # An extreme is a letter, all else a number.
        answer = target if kind == "extreme" else int(target)
        return about(chart, question, answer, target, f"chart/{chart.kind}/{chart.values}", kind)

    def score(self, problem, answer):
        """See rewards.value and rewards.words."""
        scorer = rewards.words if isinstance(problem.answer, str) else rewards.value
        return scorer(answer, problem.answer, problem.question)


@task("chart")
class ChartExam(Task):
    """Values, extremes, sums and comparisons in bar and line charts."""

    kinds = {**KINDS, "comparison": Kind(r"^is ", balanced=True)}
    make = Chart.make
    answer_tokens = 8

    def judge(self, problem, said):
        """ChartQA's relaxed correctness of the first line."""
        # "7." is 7 to a reader and no number to the published script.
        answer = text.first_line(said).rstrip(".")
        metrics = {"exact": float(text.exact_match(answer, problem.answer))}
        return answer or None, float(text.relaxed_match(answer, problem.answer)), metrics


@task("board")
class BoardExam(Task):
    """Cells, rows and counts on boards of coloured squares: exact words."""

    kinds = {
        "cell": Kind(r"^what color"),
        "row": Kind(r"^what is row"),
        "count": Kind(r"^how many cells"),
    }
    make = Board.make


DISTANCE_TOLERANCE = 0.1
TIME_TOLERANCE = 0.05  # seconds


@task("video_qa")
class VideoQa(Task):
    """direction, object, objects, time: exact words (time as "2.5 s" or any number within 0.05 s). distance:
    pixels between the first and the last frame, within 10 % (at least 1 pixel), with its absolute error."""

    kinds = {
        "direction": Kind(r"^which way"),
        "object": Kind(r"^what moves"),
        "objects": Kind(r"^how many objects"),
        "distance": Kind(r"^how far"),
        "time": Kind(r"^when does"),
    }
    video = True

    def graph(self, rng):
        """See Task."""
        # Five to eight frames at three rates: time must be read, it cannot be counted.
        frames, fps = rng.randint(5, 8), rng.choice((1.0, 2.0, 4.0))
        return Clip.make(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True, frames=frames, fps=fps)

    def judge(self, problem, said):
        """By category."""
        answer, category = text.first_line(said), problem.category
        if category == "objects":
            # "two" is 2.
            count = text.parse_count(answer)
            return count, float(count == int(problem.answer)), {}
        if category not in ("distance", "time"):
            return super().judge(problem, said)

        # Numbers are compared with their tolerance; of the time, the unit may be left out.
        expected, found = float(problem.answer.split()[0]), re.search(r"-?\d+(?:\.\d+)?", answer)
        value = float(found[0]) if found else None
        # No number said is as wrong as having said 0.
        error = expected if value is None else abs(value - expected)
        limit, metrics = TIME_TOLERANCE + 1e-9, {}
        if category == "distance":
            limit, metrics = max(1.0, DISTANCE_TOLERANCE * expected), {"pixel_error": error}
        return value, float(value is not None and error <= limit), metrics
