"""Rollouts on disk: one object a line, every picture once, and a resumed log equal to one that was never
interrupted."""

import json
import math

import pytest
from PIL import Image

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.rl.rollouts.log import RolloutLog, read_rollouts

ANSWER = {"text": "no\n", "tokens": 2, "score": 0.0, "reward": 0.0, "advantage": -0.5, "logprob": -0.7}


def group(update: int, seed: int = 0, **changes) -> dict:
    """A record as `group_records` makes them, with the picture itself."""
    problem = make_task("counting").sample(seed, "train", 0)
    given = {"update": update, "key": problem.key, "answers": [ANSWER], "image": problem.picture}
    return given | changes


def folder(out) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def test_a_record_tells_the_whole_group_and_its_picture(tmp_path):
    made = group(10, 3)
    RolloutLog(tmp_path, start_update=0).write([made], sandbox="no network wall")
    (record,) = read_rollouts(tmp_path / "rollouts.jsonl")
    assert record == made | {"image": record["image"], "sandbox": "no network wall"}
    with Image.open(tmp_path / record["image"]) as picture:
        assert picture.mode == made["image"].mode and picture.tobytes() == made["image"].tobytes()


def test_equal_pictures_are_one_file_and_words_have_none(tmp_path):
    log = RolloutLog(tmp_path, start_update=0)
    log.write([group(1, 0), group(1, 1), group(1, 2, image=None)])
    log.write([group(2, 0)])
    images = [record["image"] for record in read_rollouts(tmp_path)]
    assert images[0] == images[3] != images[1] and images[2] is None
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


@pytest.mark.parametrize("killed_after", [3, 5])
def test_a_resumed_folder_equals_one_that_was_never_interrupted(tmp_path, killed_after):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    log = RolloutLog(whole, start_update=0)
    for update in range(1, 7):
        log.write([group(update, update), group(update, 0, image=None)])
    log = RolloutLog(broken, start_update=0)
    for update in range(1, killed_after + 1):
        log.write([group(update, update), group(update, 0, image=None)])
    with open(broken / "rollouts.jsonl", "a") as file:
        file.write('{"update": 6, "task": "cou')
    (broken / "rollouts" / f".{'0' * 24}.png.77.tmp").write_bytes(b"half")
    log = RolloutLog(broken, start_update=2)  # the checkpoint was older than the log
    assert [record["update"] for record in read_rollouts(broken)] == [1, 1, 2, 2]
    for update in range(3, 7):
        log.write([group(update, update), group(update, 0, image=None)])
    assert folder(broken) == folder(whole)


def test_a_fresh_run_begins_anew_and_leaves_other_files_alone(tmp_path):
    RolloutLog(tmp_path, start_update=0).write([group(1)])
    (tmp_path / "rollouts" / "mine.png").write_bytes(b"not ours")
    RolloutLog(tmp_path, start_update=0)
    assert read_rollouts(tmp_path) == [] and list(folder(tmp_path)) == ["rollouts/mine.png"]


def test_odd_text_stays_one_line_of_strict_json(tmp_path):
    text = 'line\nnext\u2028after\x85"quoted"\x00 \ud83d half'
    odd = {"score": math.nan, "reward": math.inf, "logprob": -math.inf, "sizes": (8, 16)}
    RolloutLog(tmp_path, start_update=0).write([group(1, answers=[{"text": text} | odd])])
    RolloutLog(tmp_path, start_update=1).write([group(2)])  # and is kept through a resume

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    record = json.loads(lines[0], parse_constant=refuse)
    nulls = {"score": None, "reward": None, "logprob": None, "sizes": [8, 16]}
    assert len(lines) == 2 and record["answers"] == [{"text": text} | nulls]
