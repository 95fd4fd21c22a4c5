"""The run report: complete and self-contained from a full run, still readable from a broken or empty one."""

import json
import math
import re
from pathlib import Path

import pytest
from PIL import Image

from earlyfusion.eval.results import load_results, save_result
from earlyfusion.pipeline.report.charts import MAX_POINTS, heat_map, line_chart, smooth, thin
from earlyfusion.pipeline.report.run import read_run, write_report


def full_run(folder: Path) -> Path:
    """A run folder with every part the report knows."""
    lines = []
    for step in range(0, 400):
        record = {"step": step, "event": "train", "loss": 6 * math.exp(-step / 90) + 1 + 0.1 * math.sin(step)}
        record |= {
            "loss/text": record["loss"] + 0.5,
            "loss/image": record["loss"] - 0.4,
            "loss/source/easy_vqa": 1.0,
        }
        record |= {
            "loss/source/pydoc": 2.0,
            "lr": 2e-3 * (1 - step / 400),
            "grad_norm": 1 + math.cos(step),
            "tokens": step * 4096,
        }
        record |= {"tokens_per_s": 9000.0 + step, "patches_per_s": 500.0, "seconds": step * 0.7}
        if step % 50 == 0:
            record["expert_load"] = {"1": [0.25, 0.25, 0.3, 0.2], "2": [0.1, 0.4, 0.3, 0.2]}
            record["max_logit"] = {"3": [5.0 + step / 10, 7.0]}
        lines.append(json.dumps(record))
    lines.insert(
        200,
        json.dumps(
            {"step": 199, "event": "guard", "kind": "spike", "action": "skip", "message": "loss 9 > <5>"}
        ),
    )
    lines += ["{broken", "7"]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    for step in (100, 399):
        kinds = {
            "yes/no": {"questions": 600, "accuracy": 0.9, "blind_accuracy": 0.7, "majority_accuracy": 0.6}
        }
        payload = {
            "accuracy": 0.7 + step / 4000,
            "blind_accuracy": 0.62,
            "majority_accuracy": 0.61,
            "by_kind": kinds,
        }
        save_result(folder, "easy_vqa", step, payload | {"questions": 1000, "questions_total": 9673})
        save_result(
            folder,
            "bpb",
            step,
            {
                "bits_per_byte": 2.5 - step / 400,
                "gzip_bits_per_byte": 2.3,
                "xz_bits_per_byte": 2.1,
                "bytes": 9,
                "documents": 2,
            },
        )
    weights = [[1.0, None, None], [0.5, 0.5, None], [0.2, 0.3, 0.5]]
    payload = {
        "sublayers": ["0 attn", "0 mlp", "1 attn"],
        "sources": ["embed", "b1", "b2"],
        "image": weights,
        "text": weights,
    }
    save_result(folder, "attnres", 399, payload)
    (folder / "samples").mkdir()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(folder / "samples" / "a.png")
    for step, answer in ((100, "teal"), (399, "red")):
        sample = {
            "image": "samples/a.png",
            "prompt": "Q: what <colour>?",
            "answer": answer,
            "reference": "red",
        }
        (folder / "samples" / f"{step}.json").write_text(json.dumps({"step": step, "samples": [sample]}))
    (folder / "recipe.toml").write_text('[run]\nname = "nano <1>"\n')
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13.0"}))
    (folder / "facts.json").write_text(json.dumps({"name": "nano", "parameters": "1.5 M"}))
    return folder


def test_full_run_shows_every_part(tmp_path):
    page = write_report(full_run(tmp_path)).read_text()
    for heading in (
        "Does it see? easy-VQA",
        "What it says",
        "Loss",
        "Held-out text",
        "Inside the model",
        "Events",
        "To run it again",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert (
        "80.0 %" in page and "62.0 %" in page and "+18.0" in page
    )  # the accuracy, its blind control, the margin
    assert "1.502" in page and "gzip 2.300" in page
    assert page.count("<svg ") == 12
    assert "step 100: teal" in page  # the same picture's earlier answer
    assert "2 unreadable line(s)" in page


def test_page_loads_nothing_from_elsewhere(tmp_path):
    page = write_report(full_run(tmp_path)).read_text()
    loaded = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert loaded and all(source.startswith("data:image/") for source in loaded)
    assert "@import" not in page and "<script" not in page and "url(http" not in page


def test_run_text_is_escaped(tmp_path):
    page = write_report(full_run(tmp_path)).read_text()
    assert "what &lt;colour&gt;?" in page and "nano &lt;1&gt;" in page and "loss 9 &gt; &lt;5&gt;" in page
    assert "<colour>" not in page


def test_empty_run_gives_a_page_and_a_missing_folder_an_error(tmp_path):
    assert write_report(tmp_path).read_text().count("<section>") == 0
    with pytest.raises(FileNotFoundError, match="output folder of a run"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "eval", "samples", "recipe.toml", "versions.json", "facts.json"]
)
def test_each_part_may_be_missing(tmp_path, missing):
    folder = full_run(tmp_path)
    (folder / missing).rename(tmp_path / "elsewhere")
    assert "</html>" in write_report(folder).read_text()


def test_pictures_outside_the_run_folder_are_not_read(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    full_run(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    record = {
        "step": 500,
        "samples": [{"image": "../secret.png", "prompt": "p", "answer": "a", "reference": "a"}],
    }
    (folder / "samples" / "500.json").write_text(json.dumps(record))
    assert "<img" not in write_report(folder).read_text()


def test_results_round_trip_sorted_by_step_and_without_nan(tmp_path):
    for step in (30, 4, 100):
        save_result(tmp_path, "bpb", step, {"bits_per_byte": float("nan") if step == 4 else 1.5})
    save_result(tmp_path, "other", 1, {})
    (tmp_path / "eval" / "torn.json").write_text('{"name": "bpb", "st')
    results = load_results(tmp_path, "bpb")
    assert [r["step"] for r in results] == [4, 30, 100]
    assert results[0]["bits_per_byte"] is None and results[1]["bits_per_byte"] == 1.5
    assert not list((tmp_path / "eval").glob(".*"))


def test_read_run_keeps_finite_numbers_only(tmp_path):
    lines = [{"step": 1, "event": "train", "loss": 2.0}, {"step": 2, "event": "train", "loss": None}]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, lines)) + '\n{"step":3,"event":"train","loss":NaN}\n'
    )
    assert read_run(tmp_path).series("loss") == ([1], [2.0])


def test_thinning_keeps_the_mean_and_smoothing_a_constant():
    xs, ys = list(range(5003)), [math.sin(x) + x for x in range(5003)]
    thin_x, thin_y = thin(xs, ys)
    assert len(thin_x) == len(thin_y) <= MAX_POINTS
    assert thin(xs[:7], ys[:7]) == (xs[:7], ys[:7])
    whole = sum(ys[:5000]) / 5000  # runs of eleven: compare over full runs only
    size = math.ceil(5003 / MAX_POINTS)
    full = 5003 // size
    assert sum(thin_y[:full]) / full == pytest.approx(sum(ys[: full * size]) / (full * size))
    assert whole == pytest.approx(2499.5, abs=1e-2)
    assert smooth([3.0] * 40) == pytest.approx([3.0] * 40)
    assert smooth([1.0, 2.0], 0.5)[1] == pytest.approx((0.25 * 1 + 0.5 * 2) / 0.75)


def test_drawings_carry_their_labels_and_survive_nan():
    svg = line_chart(
        {"a": ([1, 2, 3], [1.0, math.nan, 2.0]), "b": ([], [])},
        ylabel="y",
        levels={"limit": 3},
        description="d",
    )
    assert svg.startswith("<svg ") and 'aria-label="d"' in svg and "limit 3" in svg
    svg = heat_map(
        {"t": [[0.25, None], [math.nan, 0.75]]},
        rows=["r", "s"],
        columns=["c", "d"],
        description="d",
        ylabel="",
        xlabel="",
    )
    assert ".25" in svg and ".75" in svg and "nan" not in svg.lower().replace("nano", "")
