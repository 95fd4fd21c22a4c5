"""The run report: complete and self-contained from a full run, still readable from a broken or empty one."""

import json
import math
from pathlib import Path

import pytest
from page_cases import checked
from PIL import Image

from earlyfusion.eval.samples import save_result
from earlyfusion.pipeline.report.charts import MAX_POINTS, lines, thin
from earlyfusion.pipeline.report.page import read_run, series, write_report

METRICS = """{"event": "train", "loss/text": 2.5, "loss/image": 1.6, "loss/source/easy_vqa": 1.0, "lr": 0.002,
    "patches_per_s": 5.0, "data/share/<i>": 0.75, "data/epoch/<i>": 1.5, "data/skipped/torn": 3,
    "data/vision_share": 0.5}"""
TABLES = (
    """{"expert_load": {"1": [0.25, 0.25, 0.3, 0.2], "2": [0.1, 0.4, 0.5]}, "max_logit": {"3": [5.0, 7.0]}}"""
)
GUARD = """{"step": 199, "event": "guard", "kind": "spike", "action": "skip", "message": "loss 9 > <5>"}"""
VQA = """{"blind_accuracy": 0.62, "majority_accuracy": 0.61, "questions": 1000, "questions_total": 9673,
    "by_kind": {"yes/no": {"questions": 600, "accuracy": 0.9, "blind_accuracy": 0.7}}}"""
MAPS = """{"sublayers": ["0 attn", "0 mlp"], "sources": ["embed", "b1"], "image": [[1.0, null], [0.5, 0.5]],
    "text": [[1.0, null], [0.5, 0.5]]}"""


def full_run(folder: Path) -> Path:
    """A run folder with every part the report knows."""
    records = []
    for step in range(400):
        record = json.loads(METRICS) | {
            "step": step,
            "loss": 6 * math.exp(-step / 90) + 1,
            "seconds": step * 0.7,
        }
        record |= {"tokens": step * 4096, "grad_norm": 1 + math.cos(step), "tokens_per_s": 9000.0 + step}
        records.append(json.dumps(record | json.loads(TABLES if step % 50 == 0 else "{}")))
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join([*records, GUARD, "{broken", "7"]))

    for step, answer in ((100, "teal"), (399, "red")):
        save_result(folder, "easy_vqa", step, json.loads(VQA) | {"accuracy": 0.7 + step / 4000})
        bits = {"bits_per_byte": 2.5 - step / 400, "gzip_bits_per_byte": 2.3, "bytes": 9}
        save_result(folder, "bpb", step, bits)
        save_result(folder, "attnres", step, json.loads(MAPS))
        sample = {
            "image": "samples/a.png",
            "prompt": "Q: what <colour>?",
            "answer": answer,
            "reference": "red",
        }
        (folder / "samples" / f"{step}.json").write_text(json.dumps({"step": step, "samples": [sample]}))
    Image.new("RGB", (64, 64), (200, 30, 30)).save(folder / "samples" / "a.png")
    (folder / "recipe.toml").write_text('[run]\nname = "nano <1>"\n')
    (folder / "versions.json").write_text('{"torch": "2.13.0"}')
    (folder / "facts.json").write_text('{"name": "nano", "parameters": "1.5 M"}')
    return folder


def test_a_full_run_shows_its_numbers_loads_nothing_and_is_escaped(tmp_path):
    page = checked(write_report(full_run(tmp_path)))
    numbers = "80.0 %|62.0 %|+18.0|1.502|gzip 2.300|75.0 %|1.50|0.50</td>|1.20</td>|2.13.0|1.5 M|torn"
    for text in numbers.split("|"):
        assert text in page
    assert page.count("<svg ") == 12 and "step 100: teal" in page and "2 unreadable line(s)" in page
    for text in ("what &lt;colour&gt;?", "nano &lt;1&gt;", "loss 9 &gt; &lt;5&gt;", "<td>&lt;i&gt;</td>"):
        assert text in page


def test_an_empty_run_gives_a_page_and_a_missing_folder_an_error(tmp_path):
    assert "<section>" not in checked(write_report(tmp_path))
    with pytest.raises(FileNotFoundError, match="output folder of a run"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "eval", "samples", "recipe.toml", "versions.json", "facts.json"]
)
def test_each_part_may_be_missing(tmp_path, name):
    folder = full_run(tmp_path / "run")
    (folder / name).rename(tmp_path / "elsewhere")
    assert "could not be drawn" not in checked(write_report(folder))


def test_a_file_of_another_hand_costs_its_own_part_alone(tmp_path):
    save_result(full_run(tmp_path), "easy_vqa", 500, {"accuracy": "<script>", "by_kind": [3]})
    page = checked(write_report(tmp_path))
    assert page.count("could not be drawn") == 1 and "step 100: teal" in page


def test_pictures_outside_the_run_folder_are_not_read(tmp_path):
    folder = full_run(tmp_path / "run")
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    samples = [{"image": "../secret.png", "prompt": "p", "answer": "a", "reference": "a"}]
    (folder / "samples" / "500.json").write_text(json.dumps({"step": 500, "samples": samples}))
    assert "<img" not in write_report(folder).read_text()


def test_results_are_sorted_by_step_and_curves_hold_finite_numbers_only(tmp_path):
    for step in (30, 4, 100):
        save_result(tmp_path, "bpb", step, {"bits_per_byte": float("nan") if step == 4 else 1.5})
    save_result(tmp_path, "other", 1, {})
    (tmp_path / "eval" / "torn.json").write_text('{"name": "bpb", "st')
    values = ("2.0", "null", "NaN", "true", "1e300", '"x"')
    records = [f'{{"step": {step}, "event": "train", "loss": {value}}}' for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    run = read_run(tmp_path)
    results = [(result["step"], result["bits_per_byte"]) for result in run["results"]["bpb"]]
    assert results == [(4, None), (30, 1.5), (100, 1.5)]
    assert series(run["train"], "loss") == ([0], [2.0])


def test_thinning_keeps_the_mean():
    points = [(x, math.sin(x) + x) for x in range(5003)]
    xs, ys = thin(points)
    assert len(xs) == len(ys) <= MAX_POINTS
    assert [list(part) for part in thin(points[:7])] == [list(part) for part in zip(*points[:7])]
    size = math.ceil(5003 / MAX_POINTS)
    full = 5003 // size
    assert sum(ys[:full]) / full == pytest.approx(sum(y for _, y in points[: full * size]) / (full * size))


def test_drawings_carry_their_labels_and_survive_nan():
    curves = {"$a_b": ([1, 2, 3], [1.0, math.nan, 2.0]), "b": ([], [])}
    svg = lines('"><script>', curves, ylabel="y\0", levels={"limit": 3})
    assert "<svg " in svg and "limit 3" in svg and "<script" not in svg and "$a_b" in svg
    assert not lines("nothing to draw", {"a": ([], [])}, ylabel="y")
