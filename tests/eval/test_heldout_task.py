"""Own samples through `earlyfusion eval`: the loss training would count, the blind row, answers, and no
picture dropped."""

import json

import pytest
import torch
from eval_cases import Scripted, own_model
from PIL import Image as PILImage

from earlyfusion.data.loading.encode import assemble, encode
from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions
from earlyfusion.pipeline.cli import main as cli
from earlyfusion.pipeline.report.evaluation import show

COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def model():
    return own_model(3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Six pictures with captions and two texts."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(6):
        PILImage.new("RGB", (16, 16), COLOURS[number % 3]).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {COLOURS[number % 3]} shape")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(f"the quick brown fox jumps {name}")
    return folder


@pytest.fixture(scope="module")
def shards(photos, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards")
    model.tokenizer.save(out / "tokenizer")
    words = [photos, "--out", out / "made", "--tokenizer", out / "tokenizer", "--vision", "tiny"]
    assert cli(["prepare", *map(str, words), "--workers", "1", "--dedup", "none"]) == 0
    return out / "made"


def by_hand(model, samples) -> tuple[float, int]:
    """Nats and number of learned tokens, document by document."""
    nats, tokens = 0.0, 0
    for sample in samples:
        document = encode(sample, model.tokenizer, model.model.config.vision)
        batch = assemble([document], tokens=len(document), pad_id=0, sources=["s"], patch_size=8)
        with torch.no_grad():
            log_probs = model.model.logits(model.model.hidden(batch)).double().log_softmax(-1)
        learned = document.loss_weights[1:] > 0
        nats -= float(log_probs[:-1].gather(1, document.ids[1:, None])[learned].sum())
        tokens += int(learned.sum())
    return nats, tokens


def captioned(grey=False) -> list[Sample]:
    samples = []
    for colour in (*COLOURS, *COLOURS):
        picture = PILImage.new("RGB", (16, 16), (128, 128, 128) if grey else colour)
        samples.append(Sample([Image(picture), Text(f"\na {colour} shape")], "s", "0"))
    return samples


def texts(*given) -> list[Sample]:
    return [Sample([Text(text)], "s", "0") for text in given]


def heldout(data, **extra):
    return build_task("heldout", TaskOptions(data=data, extra=extra))


def test_shards_and_their_folder_give_the_loss_of_a_loop_by_hand(model, photos, shards, tmp_path):
    seen, grey = by_hand(model, captioned()), by_hand(model, captioned(grey=True))
    plain = by_hand(model, texts(*(f"the quick brown fox jumps {name}" for name in ("one", "two"))))
    expected = {
        "loss": (seen[0] + plain[0]) / (seen[1] + plain[1]),
        "seen_loss": seen[0] / seen[1],
        "blind_loss": grey[0] / seen[1],
        "text_loss": plain[0] / plain[1],
    }
    for data in (shards, photos):
        metrics = run_task(model, heldout(data), out=tmp_path / data.name)["metrics"]
        assert metrics["n"] == 8 and metrics["tokens"] == seen[1] + plain[1]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert metrics["score"] == -metrics["loss"] and "bits_per_byte" not in metrics
        assert metrics["seeing"] == pytest.approx(expected["blind_loss"] - expected["seen_loss"], rel=1e-3)


def test_answers_stand_in_records_and_a_second_run_asks_nothing(model, shards, tmp_path, capsys, monkeypatch):
    summary = run_task(model, heldout(shards, shown=3), limit=5, out=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "heldout" / "records.jsonl").read_text().splitlines()]
    shown = [record for record in records if "output" in record]
    assert len(records) == 5 and len(shown) == 3 and all(record["target"] for record in shown)
    show([summary])
    assert f"{summary['metrics']['loss']:.4g}" in capsys.readouterr().out
    monkeypatch.setattr(model, "losses", None)
    assert run_task(model, heldout(shards, shown=3), limit=5, out=tmp_path)["metrics"] == summary["metrics"]


def test_bad_samples_are_counted_and_wrong_options_named(model, photos, tmp_path):
    (tmp_path / "0.png").write_bytes(b"no picture")
    (tmp_path / "0.txt").write_text("a caption")
    (tmp_path / "1.txt").write_text("the quick brown fox")
    metrics = run_task(model, heldout(tmp_path))["metrics"]
    assert metrics["n"] == 1 and metrics["left out: corrupt_image"] == 1
    with pytest.raises(EvalError, match="did you mean 'shown'"):
        heldout(photos, shwon=3)
    with pytest.raises(EvalError, match="needs a model with loss"):
        run_task(Scripted(), heldout(photos))


def test_bits_per_byte_reads_shards_of_text_and_refuses_pictures(model, photos, shards, tmp_path):
    task = lambda data: build_task("bits_per_byte", TaskOptions(data=data)).documents()
    for data in (shards, photos):
        with pytest.raises(EvalError, match=r"picture.*text alone; --tasks heldout"):
            task(data)
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the quick brown fox {number}")
    assert cli(["prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "made"), "--workers", "1"]) == 0
    assert [text for _, text in task(tmp_path / "made")] == [f"the quick brown fox {n}" for n in range(3)]


def test_a_score_of_nothing_is_explained(tmp_path):
    PILImage.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    asked = {"question": "<image 1> Which?", "options": "['red', 'blue']", "answer": "A"}
    rows = [{**asked, "id": f"own_{n}", "image_1": "red.png"} for n in range(4)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task("mmmu", TaskOptions(data=tmp_path / "own.jsonl"))
    told = lambda said: "\n".join(run_task(Scripted(lambda request: said), task).get("explained", ()))
    parts = ("read out of 100%", "'mumble' where 'A'", "--chat")
    assert all(part in told("mumble") for part in parts)
    assert "right form and wrong" in told("B") and told("A") == ""
    task.private = True
    assert "mumble" not in told("mumble")
