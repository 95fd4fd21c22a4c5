"""Questions about rendered clips: which way, what, how many, how far, how long.

    direction, object, objects, time   exact words (time as "2.5 s" or any number within 0.05 s)
    distance                            pixels between the first and the last frame, within 10 % (at least 1
                                        pixel)

Most need more than one frame. The blind view has grey frames with the same timestamps (the time question can
be answered from those: it says whether timestamps are read); the words tell every frame's boxes.
"""

from __future__ import annotations

import re

from earlyfusion.data.synth.clips import Clip
from earlyfusion.data.tasks.problem import MAX_SIDE, MIN_SIDE, Kind, Task, task
from earlyfusion.data.tasks.scoring.text import first_line, parse_count

DISTANCE_TOLERANCE = 0.1
TIME_TOLERANCE = 0.05  # seconds


@task("video_qa")
class VideoQa(Task):
    """See the file's head; distances also give their absolute error in pixels."""

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

    def judge(self, problem, text):
        """By category."""
        answer, category = first_line(text), problem.category
        if category == "objects":
            # "two" is 2.
            count = parse_count(answer)
            return count, float(count == int(problem.answer)), {}
        if category not in ("distance", "time"):
            return super().judge(problem, text)

        # Numbers are compared with their tolerance; of the time, the unit may be left out.
        expected, found = float(problem.answer.split()[0]), re.search(r"-?\d+(?:\.\d+)?", answer)
        value = float(found[0]) if found else None
        # No number said is as wrong as having said 0.
        error = expected if value is None else abs(value - expected)
        limit, metrics = TIME_TOLERANCE + 1e-9, {}
        if category == "distance":
            limit, metrics = max(1.0, DISTANCE_TOLERANCE * expected), {"pixel_error": error}
        return value, float(value is not None and error <= limit), metrics
