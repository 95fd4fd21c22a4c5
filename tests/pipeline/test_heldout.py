"""What every source holds out is measured and shown: against a loop by hand, through a resume, with its blind
control."""

import copy
import json
import math
from dataclasses import replace

import pytest
import tiny_run
import torch
from PIL import Image as PILImage
from tiny_run import write_recipe

from earlyfusion.data.loading.encode import assemble, cuts, encode
from earlyfusion.data.sample import Image
from earlyfusion.eval.heldout import GREY, Loss, heldout_getters
from earlyfusion.pipeline.build import absolute_paths
from earlyfusion.pipeline.config.compose import dump, load_config, refused_on_resume
from earlyfusion.pipeline.track import read_metrics

RTOL = 1e-5  # one packed row against documents one by one, fp32


@pytest.fixture(scope="module")
def photos(folder):
    """Twenty pictures of a colour and a size of their own, with captions; one cannot be read."""
    made = folder / "photos"
    made.mkdir()
    for number in range(20):
        name, colour = [("red", (200, 0, 0)), ("blue", (0, 0, 200))][number % 2]
        PILImage.new("RGB", (24 + 4 * number, 40), colour).save(made / f"{number:02d}.png")
        (made / f"{number:02d}.txt").write_text(f"a {name} stamp")
    (made / "broken.png").write_bytes(b"not a picture")
    (made / "broken.txt").write_text("a caption")
    return made


@pytest.fixture(scope="module")
def recipe(folder, tokenizer, photos):
    """The tiny recipe with a folder of photos among its sources."""
    made = tiny_run.tiny_recipe(tokenizer, eval__heldout=6, eval__samples=1)
    made["data"] |= {"on_bad_sample": "skip", "max_bad_share": 1.0, "val_fraction": 0.4}
    made["data"]["sources"].append({"name": "photos", "kind": "folder", "path": str(photos), "weight": 0.3})
    made["stages"][1]["weights"]["photos"] = 0.2
    return write_recipe(folder / "photos.toml", made)


def by_hand(run, name: str, count: int, *, blind: bool) -> tuple[float, int]:
    """Nats and number of the learned tokens: a softmax of all logits, document by document."""
    model, nats, tokens = run.fusion.eval(), 0.0, 0
    for get in heldout_getters(run.evaluator.source(name), count):
        try:
            document = encode(get(), run.tokenizer, model.config.vision)
        except ValueError:
            continue
        if blind and document.patches is not None:
            document.patches = torch.full_like(document.patches, GREY)
        for start, stop in cuts(document, 160, 4 * 384, run.tokenizer.ends_line):
            piece = document.piece(start, stop)
            batch = assemble([piece], tokens=len(piece), pad_id=0, sources=[name], patch_size=8)
            with torch.no_grad():
                log_probs = model.logits(model.hidden(batch)).double().log_softmax(-1)
            learned = piece.loss_weights[1:] > 0
            nats -= float(log_probs[:-1].gather(1, piece.ids[1:, None])[learned].sum())
            tokens += int(learned.sum())
    return nats, tokens


def test_the_held_out_loss_of_every_source_is_that_of_a_loop_by_hand(training, tmp_path):
    run = training(("eval.heldout", 2))
    run.fusion.train()
    headline = run.evaluator.heldout(0, final=True)
    assert run.fusion.training
    saved = json.loads((tmp_path / "run" / "eval" / "heldout_0000000.json").read_text())["sources"]
    assert list(saved) == ["vqa", "manual", "scenes", "photos"]
    for name, numbers in saved.items():
        count = numbers["samples"] + sum(numbers.get("left_out", {}).values())
        assert count == 8 or name == "manual", "of long documents fewer"
        nats, tokens = by_hand(run, name, count, blind=False)
        assert numbers["tokens"] == tokens > 0
        assert numbers["loss"] == pytest.approx(nats / tokens, rel=RTOL) == headline[f"heldout/source/{name}"]
    for name in ("vqa", "photos"):
        nats, tokens = by_hand(run, name, 8, blind=True)
        assert headline[f"heldout/blind/{name}"] == pytest.approx(nats / tokens, rel=RTOL)
    source = run.evaluator.source("manual")
    read = [get() for get in list(heldout_getters(source))[: saved["manual"]["samples"]]]
    size = sum(len(sample.text.encode()) for sample in read)
    bits = saved["manual"]["loss"] * saved["manual"]["tokens"] / math.log(2)
    assert headline["heldout/bits_per_byte/manual"] == pytest.approx(bits / size)


def test_the_blind_row_sees_sizes_and_nothing_else(training):
    """Other pixels of the same size change the loss and leave the blind one, bit for bit; grey pixels make
    them one."""
    run = training()
    evaluator = run.evaluator
    samples = [get() for get in heldout_getters(evaluator.source("vqa"), 4)]

    def painted(colour):
        paint = lambda segment: Image(PILImage.new("RGB", segment.open().size, colour))
        return [
            replace(s, segments=[paint(part) if isinstance(part, Image) else part for part in s.segments])
            for s in samples
        ]

    losses = {}
    for name, shown in (
        ("true", samples),
        ("red", painted((255, 0, 0))),
        ("grey", painted((GREY, GREY, GREY))),
    ):
        whole = Loss()
        for loss in evaluator.measure([lambda sample=sample: sample for sample in shown]):
            whole.add(loss)
        losses[name] = whole
    assert losses["true"].seen_nats != losses["red"].seen_nats
    assert losses["true"].blind_nats == losses["red"].blind_nats == losses["grey"].blind_nats
    assert losses["grey"].seen_nats == losses["grey"].blind_nats


@pytest.fixture(scope="module")
def finished(folder, recipe):
    with pytest.MonkeyPatch.context() as patch:
        assert (
            tiny_run.run_here(recipe, folder / "own", *WORDS, "--steps 4", report=True, monkeypatch=patch)
            == 0
        )
    return folder / "own"


WORDS = ("--eval.every 2",)


def evaluations(out) -> list[dict]:
    records = read_metrics(out / "metrics.jsonl", "eval")
    return [
        {key: value for key, value in record.items() if key not in ("time", "message")} for record in records
    ]


def test_own_pictures_and_their_loss_stand_in_metrics_report_and_card(finished):
    at_two, at_end = evaluations(finished)
    assert (at_two["step"], at_end["step"]) == (2, 4)
    assert at_end["heldout/source/photos"] != at_two["heldout/source/photos"]
    assert {"heldout/blind/photos", "heldout/image", "heldout/image_blind", "heldout/text"} <= at_end.keys()
    report = (finished / "report.html").read_text()
    assert "Held-out loss by source" in report and "a red stamp" in report + report.replace("blue", "red")
    latest = json.loads((finished / "samples" / "step_0000004.json").read_text())["samples"]
    assert [sample["source"] for sample in latest] == ["vqa", "scenes", "photos", "manual"], (
        "one of each, texts last"
    )
    shown = latest[2]
    assert shown["image"] and shown["reference"].endswith("stamp") and "stamp" not in shown["prompt"]
    assert latest[3]["image"] is None and latest[3]["prompt"] and latest[3]["reference"]
    card = (finished / "model" / "README.md").read_text()
    assert f"| heldout/source/photos | {at_end['heldout/source/photos']:.4g}" in card


def test_a_resumed_run_measures_the_same(run, recipe, finished, tmp_path):
    assert run(recipe, tmp_path, *WORDS, "--steps 3") == 0
    assert run(recipe, tmp_path, *WORDS, "--steps 4 --resume") == 0
    ours = [record for record in evaluations(tmp_path) if record["step"] != 3]
    assert ours == evaluations(finished)


def test_the_saved_recipe_names_its_inputs_from_the_root(recipe, photos, monkeypatch):
    monkeypatch.chdir(photos.parent)
    given = dump(
        load_config(
            [str(recipe)], [("data.sources.photos.path", "photos"), ("eval.data", {"mmmu": "own.jsonl"})]
        )
    )
    given["data"]["sources"].append(
        {"name": "far", "path": "https://host/a.tar", "options": {"shards": ["a.tar", "pipe:cat b"]}}
    )
    saved = absolute_paths(copy.deepcopy(given))
    assert saved["data"]["sources"][3]["path"] == str(photos)
    assert saved["data"]["sources"][4] == {
        "name": "far",
        "path": "https://host/a.tar",
        "options": {"shards": [str(photos.parent / "a.tar"), "pipe:cat b"]},
    }
    assert saved["eval"]["data"] == {"mmmu": str(photos.parent / "own.jsonl")}
    own = {**given, "data": {**given["data"], "sources": given["data"]["sources"][:4]}}
    assert refused_on_resume(own, absolute_paths(copy.deepcopy(own))) == [], (
        "the same files, so a resume may go on"
    )
