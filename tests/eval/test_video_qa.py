"""Video questions: judged with their tolerances, hold in the frames, and reach the model as frames with
times."""

import numpy as np
import pytest
from fusion_cases import tiny_config, tiny_tokenizer

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample, Video
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS
from earlyfusion.eval.benchmarks.questions import make_items
from earlyfusion.eval.benchmarks.video_qa import judge_clip
from earlyfusion.eval.registry import build_task


def by_category(category, seed=0):
    return [item for item in make_items("video_qa", 60, seed) if item.category == category]


@pytest.mark.parametrize("seed", [0, 1])
def test_motion_holds_in_the_frames(seed):
    """Direction and distance from the pixels of the first and the last frame alone."""
    for item in [*by_category("direction", seed), *by_category("distance", seed)]:
        clip, frames = item.graph, [np.asarray(frame) for frame in item.media().frames]
        if clip.standing and clip.standing[0] == clip.colour:
            continue
        corners = []
        for frame in (frames[0], frames[-1]):
            ys, xs = np.nonzero((frame == COLOURS[clip.colour]).all(-1))
            corners.append((xs.min(), ys.min()))
        dx, dy = corners[1][0] - corners[0][0], corners[1][1] - corners[0][1]
        way = ("right" if dx > 0 else "left") if dx else ("down" if dy > 0 else "up")
        assert item.answer == (way if item.category == "direction" else str(abs(dx or dy)))
        assert (
            (frames[0][0, 0] == BACKGROUNDS[clip.background]).all() or corners[0] == (0, 0) or clip.standing
        )


def test_one_frame_does_not_tell_the_direction():
    """Over many clips every direction is equally common, and the first frame alone leaves at least two
    open."""
    ways = [item.answer for item in make_items("video_qa", 600, 3) if item.category == "direction"]
    counts = [ways.count(way) for way in ("left", "right", "up", "down")]
    assert sum(counts) == 120 and max(counts) < 50  # 30 each expected, sd 4.7


def test_answers_within_their_tolerance():
    distance = next(item for item in by_category("distance") if int(item.answer) > 20)
    gold = int(distance.answer)
    for said, right in ((gold, 1), (round(gold * 1.09), 1), (round(gold * 1.2), 0), (-gold, 0)):
        assert judge_clip(distance, f" {said} pixels")[1] == right, said
    assert judge_clip(distance, "far")[0] is None
    time = by_category("time")[0]
    seconds = float(time.answer.split()[0])
    for said, right in (
        (f"{seconds} s", 1),
        (f"at {seconds:.2f} seconds", 1),
        (f"{seconds + 0.2:.1f}", 0),
        ("", 0),
    ):
        assert judge_clip(time, said)[1] == right, said
    objects = by_category("objects")[0]
    assert judge_clip(objects, {"1": "one", "2": "two"}[objects.answer])[1] == 1
    direction = by_category("direction")[0]
    assert (
        judge_clip(direction, f" {direction.answer}.\nQ: what")[1] == 1
        and judge_clip(direction, "sideways")[1] == 0
    )


def test_clips_reach_the_model_as_frames_with_their_times():
    tokenizer = tiny_tokenizer()
    vision = tiny_config(tokenizer).vision
    task = build_task("video_qa")
    assert task.needs == frozenset({"video"})
    for question in task.questions(4, None, 0):
        seen, blind, _ = (request.prompt for request in task.requests(question, 0))
        assert isinstance(seen[0], Video) and len(seen[0].frames) == len(seen[0].timestamps) >= 5
        one, other = (
            encode(Sample(prompt, "eval", "0"), tokenizer, vision, eos=False) for prompt in (seen, blind)
        )
        assert sum(grid[0] for grid in one.grids) == len(seen[0].frames) and one.grids == other.grids
        assert one.ids.tolist() == other.ids.tolist() and not (one.patches == other.patches).all()
