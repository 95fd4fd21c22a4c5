"""Sample pictures and the AttnRes probe: what is shown is what was asked, answered and measured."""

import json

import pytest
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from PIL import Image as PilImage

from earlyfusion.data.loading.encode import assemble, encode
from earlyfusion.data.sample import Image, Sample, Text, Video
from earlyfusion.eval.samples import answer_samples, attnres_weights, save_samples
from earlyfusion.model.engine.engine import generate

RED = PilImage.new("RGB", (24, 16), (220, 20, 20))


def samples() -> list[Sample]:
    frames = [PilImage.new("RGB", (16, 16), (0, shade, 0)) for shade in (0, 90, 180)]
    return [
        Sample([Image(RED), Text("\nQ: what color?\nA:", 0.0), Text(" red")], "vqa", "0"),
        Sample([Video(frames, [0.0, 0.5, 1.0]), Text(" brighter")], "clips", "1"),
        Sample([Text("the quick"), Text(" brown")], "text", "2"),
    ]


@pytest.fixture(scope="module")
def setup():
    tokenizer = tiny_tokenizer()
    return tokenizer, tiny_model(tiny_config(tokenizer))


def test_the_reference_never_reaches_the_model(setup):
    tokenizer, model = setup
    records = answer_samples(model, tokenizer, samples(), max_new_tokens=6)
    for sample, record in zip(samples(), records, strict=True):
        prompt = Sample(sample.segments[:-1], sample.source, sample.key)
        reference = sample.segments[-1].text
        assert record["reference"] == reference.strip() and reference not in prompt.text
        open_document = encode(prompt, tokenizer, model.config.vision, eos=False)
        assert record["answer"] == generate(model, tokenizer, [open_document], max_new_tokens=6)[0].strip()
    assert records[0]["prompt"] == "Q: what color?\nA:"
    assert [getattr(record["picture"], "size", None) for record in records] == [(24, 16), (16, 16), None]


def test_saved_samples_can_be_read_back_and_seen(setup, tmp_path):
    tokenizer, model = setup
    records = answer_samples(model, tokenizer, samples(), max_new_tokens=4)
    for step in (5, 10):
        path = save_samples(tmp_path, step, records)
    saved = json.loads(path.read_text())
    assert saved["step"] == 10 and [s["answer"] for s in saved["samples"]] == [r["answer"] for r in records]
    assert saved["samples"][2]["image"] is None
    with PilImage.open(tmp_path / saved["samples"][0]["image"]) as picture:
        assert picture.convert("RGB").getpixel((3, 3)) == (220, 20, 20)
    assert len(list((tmp_path / "samples").glob("picture_*.png"))) == 2  # pictures once, not at every step


@pytest.mark.parametrize("attn_res, size, blocks", [("block", 2, 2), ("block", 3, 2), ("full", 1, 8)])
def test_attnres_rows_sum_to_one_over_the_sources_they_read(setup, attn_res, size, blocks):
    tokenizer = setup[0]
    model = tiny_model(tiny_config(tokenizer, attn_res=attn_res, attn_res_block_size=size))
    found = attnres_weights(model, packed(model, tokenizer, samples(), 160))
    assert found["sources"] == ["embedding", *(f"block {n}" for n in range(1, blocks + 1)), "own block"]
    assert len(found["sublayers"]) == 2 * 4 + 1 and found["sublayers"][-1] == "output"
    per_block = 1 if attn_res == "full" else 2 * size
    for kind in ("image", "text"):
        for number, row in enumerate(found[kind]):
            finished = blocks + 1 if number == 8 else 1 + number // per_block
            own = number < 8 and number % per_block != 0
            assert [w is not None for w in row] == [i < finished for i in range(blocks + 1)] + [own]
            assert sum(weight or 0 for weight in row) == pytest.approx(1, abs=1e-5)
    assert found["image"] != found["text"]


def packed(model, tokenizer, given, tokens):
    documents = [encode(sample, tokenizer, model.config.vision) for sample in given]
    names = [document.source for document in documents]
    return assemble(documents, tokens=tokens, pad_id=tokenizer.pad_id, sources=names, patch_size=8)


def test_filler_and_kinds_that_a_batch_lacks_are_left_out(setup):
    tokenizer, model = setup
    length = len(encode(samples()[2], tokenizer, model.config.vision))
    short, long = (attnres_weights(model, packed(model, tokenizer, samples()[2:], n)) for n in (length, 90))
    assert short["text"][5] == pytest.approx(long["text"][5], abs=1e-5) and "image" not in short


def test_a_model_without_attention_residuals_has_no_weights(setup):
    assert attnres_weights(tiny_model(tiny_config(setup[0], attn_res="none")), None) is None
