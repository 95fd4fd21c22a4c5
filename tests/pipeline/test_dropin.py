"""What `earlyfusion export` writes, in the tools of others: transformers, Trainer, lm-eval, accelerate. The
code that travels along computes what our model computes; transformers' own classes do too, where they can."""

import json
import os
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from earlyfusion.data.loading.encode import assemble, encode
from earlyfusion.data.sample import Image as Picture
from earlyfusion.data.sample import Sample, Text, Video
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.benchmarks.lm_eval import lm_eval_model
from earlyfusion.eval.models.engine import load_own
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.hub.folder import load_model, public_tensors, save_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from tests.model.reference import pure_torch, to_reference
from tests.model.tiny import build, close, gradients, tiny_text, tiny_vision

# fp32, other orders of sums through four layers (tests/model/test_hf_parity.py)
TOLERANCE = 1e-4
IMAGE = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
VIDEO = IMAGE.replace("image", "video")
BOUNDED = {"gate_lower_bound": -5.0, "full_rank_output_gate": True}
V1 = dict(
    norm="layer", norm_eps=1e-5, bias=True, projector="v1", pos_emb_interpolation="bicubic", pos_emb_time=4
)
SHAPES = {
    # name: (text model, tower)
    "blocks": (dict(attn_res="block", attn_res_block_size=1, tie_word_embeddings=True), {}),
    "all as in K3": (
        dict(
            attn_res="block",
            attn_res_block_size=3,
            mla_output_gate=True,
            q_lora_rank=9,
            linear_attn_config=BOUNDED,
            hidden_act="situ",
            routed_expert_hidden_size=12,
        ),
        {},
    ),
    "full residuals, dense": (dict(attn_res="full", num_experts=0), V1),
    "one expert, middle MLA": (
        dict(num_experts_per_token=1, linear_attn_config={"full_attn_layers": [2]}, moe_layer_freq=2),
        V1,
    ),
}
FOREIGN = {
    "plain": dict(attn_res="none"),
    "tied, two dense": dict(attn_res="none", tie_word_embeddings=True, first_k_dense_replace=2),
    "one expert": dict(attn_res="none", num_experts_per_token=1, q_lora_rank=9),
}


def made(folder, words, text: dict, vision: dict, seed: int = 0):
    """A model of random weights with a tokenizer, as a model directory."""
    ids = {"bos_token_id": words.bos_id, "eos_token_id": words.eos_id, "pad_token_id": words.pad_id}
    config = FusionConfig(
        text=tiny_text(vocab_size=words.vocab_size, **ids, **text),
        vision=tiny_vision(**vision),
        media_token_id=words.media_pad_id,
    )
    model = build(config, seed).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("norm.weight", "norm0.weight", "norm1.weight", "bias")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    save_model(model, words, folder)
    return model


def exported(folder, to, *words) -> int:
    return cli.main(["export", str(folder), "--to", str(to), *words])


@pytest.fixture(scope="module")
def words(tokenizer):
    return Tokenizer.load(tokenizer)


@pytest.fixture(scope="module")
def pairs(words, tmp_path_factory):
    """shape -> (our model, its folder, the export's folder, transformers' model, processor)."""
    found = {}
    for seed, (shape, (text, vision)) in enumerate(SHAPES.items()):
        base = tmp_path_factory.mktemp("export")
        model = made(base / "ours", words, text, vision, seed)
        assert exported(base / "ours", base / "theirs") == EXIT_OK
        theirs = AutoModelForImageTextToText.from_pretrained(base / "theirs", trust_remote_code=True).eval()
        reader = AutoProcessor.from_pretrained(base / "theirs", trust_remote_code=True)
        found[shape] = model, base / "ours", base / "theirs", theirs, reader
    return found


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    torch.manual_seed(seed)
    noise = torch.randint(0, 256, (height, width, len(mode)), dtype=torch.uint8).numpy()
    return Image.fromarray(noise.squeeze(), mode)


def packed(model, document):
    """The fields of a document that the model reads."""
    return assemble(
        [document],
        tokens=len(document),
        pad_id=model.config.text.pad_token_id,
        sources=["t"],
        patch_size=model.config.vision.patch_size,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_code_that_travels_along_reads_and_computes_the_same(pairs, words, shape):
    """Ids, patches, logits and every gradient, with pictures and a clip in one document."""
    ours, _, _, theirs, reader = pairs[shape]
    frames = [picture(20, 14, seed) for seed in range(6)]
    segments = [
        Text("Look: "),
        Picture(picture(33, 18, 1)),
        Text(" and "),
        Picture(picture(12, 40, 2)),
        Text(" then"),
        Video(frames, [index / 2.0 for index in range(6)]),
        Text(" so what? " * 6),
    ]
    document = encode(Sample(segments, "t", "t"), words, ours.config.vision, eos=False)
    text = f"Look: {IMAGE} and {IMAGE} then{VIDEO}" + " so what? " * 6
    given = reader(text=text, images=[segments[1].image, segments[3].image], videos=frames, fps=2.0)
    assert given["input_ids"][0].tolist() == document.ids.tolist()
    assert [tuple(grid) for grid in given["image_grid_thw"].tolist()] == document.grids
    expected = document.patches.float() / 255.0 * 2.0 - 1.0
    torch.testing.assert_close(given["pixel_values"], expected, atol=1e-6, rtol=0)

    batch = packed(ours, document)
    logits = ours.logits(ours.hidden(batch))
    found = theirs(**given).logits[0]
    torch.testing.assert_close(found, logits, atol=TOLERANCE, rtol=TOLERANCE)

    # A training loss of both, and gradients by their public names.
    labels = given["input_ids"].clone()
    loss = theirs(**given, labels=labels).loss
    torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:]).backward()
    loss.backward()
    own = {name: p.grad for name, p in ours.named_parameters()}
    public = {t.name: t.view(own[t.ours]) for t in public_tensors(own.items())}
    got = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in theirs.named_parameters()
    }
    close({name: got[name] for name in public}, public, atol=TOLERANCE, rtol=TOLERANCE)
    gradients(ours), gradients(theirs)


@pytest.mark.parametrize("mode", ["L", "RGBA", "turned", "16 bit"])
def test_pictures_of_other_kinds_are_prepared_alike(pairs, words, mode, tmp_path):
    ours, _, _, _, reader = pairs["blocks"]
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        picture(30, 17, 3).save(tmp_path / "a.png", exif=exif)
        image = Image.open(tmp_path / "a.png")
    elif mode == "16 bit":
        image = Image.fromarray(torch.randint(0, 65536, (17, 30)).numpy().astype("uint16"))
    else:
        image = picture(30, 17, 3, mode)
    document = encode(Sample([Picture(image)], "t", "t"), words, ours.config.vision)
    given = reader(text=IMAGE, images=image)
    expected = document.patches.float() / 255.0 * 2.0 - 1.0
    torch.testing.assert_close(given["pixel_values"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_generate_goes_on_as_the_whole_text_would(pairs, shape):
    """Greedy, with its cache, in a batch padded on the left: each row as by itself and without a cache."""
    _, _, _, theirs, reader = pairs[shape]
    texts = [f"{IMAGE} one picture", "none, and a longer text of some more words", f"x{IMAGE}"]
    images = [picture(17, 22, 4), picture(40, 9, 5)]
    given = reader(text=texts, images=images, padding=True, padding_side="left")
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    together = theirs.generate(**given, **options)[:, given["input_ids"].shape[1] :]
    images = iter(images)
    for row, text in zip(together, texts):
        alone = reader(text=text, images=[next(images)] if IMAGE in text else None)
        start = alone["input_ids"].shape[1]
        cached = theirs.generate(**alone, **options)[0, start:]
        plain = theirs.generate(**alone, **options, use_cache=False)[0, start:]
        assert row.tolist() == cached.tolist() == plain.tolist()
    beams = theirs.generate(**given, **options, num_beams=3)
    slow = theirs.generate(**given, **options, num_beams=3, use_cache=False)
    assert beams.tolist() == slow.tolist()


def test_padding_leaves_no_trace(pairs):
    """Right and left, logits of the real tokens are those without it."""
    _, _, _, theirs, reader = pairs["all as in K3"]
    texts = ["a text of several words, long enough for two chunks of the delta rule", "short"]
    alone = [theirs(**reader(text=text)).logits[0] for text in texts]
    for side in ("left", "right"):
        given = reader(text=texts, padding=True, padding_side=side)
        rows = theirs(**given).logits
        for row, mask, expected in zip(rows, given["attention_mask"], alone):
            torch.testing.assert_close(row[mask.bool()], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_marks_and_pictures_must_be_as_many(pairs):
    _, _, _, theirs, reader = pairs["blocks"]
    with pytest.raises(ValueError, match="1 images and 0 videos for 2 and 0 places"):
        reader(text=IMAGE * 2, images=picture(9, 9, 0))
    given = reader(text=IMAGE, images=picture(9, 9, 0))
    with pytest.raises(ValueError, match="the text has 0 places"):
        pictures = {name: given[name] for name in ("pixel_values", "image_grid_thw")}
        theirs(input_ids=given["input_ids"][:, :2], **pictures)


def test_a_chat_template_is_a_prompt(pairs, words):
    _, _, _, _, reader = pairs["blocks"]
    image = picture(20, 20, 7)
    talk = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "hm?"}]}]
    text = reader.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    ids = reader(text=text, images=image)["input_ids"][0].tolist()
    assert ids[0] == words.bos_id and ids.count(words.bos_id) == 1
    assert ids.count(words.media_pad_id) == 9 and text.endswith('<|open|>message role="assistant"<|sep|>')


def test_what_transformers_saves_comes_back(pairs, tmp_path):
    """export -> transformers -> save_pretrained -> import, bit for bit; and our loader reads the export."""
    for shape, (_, ours, theirs_at, theirs, reader) in pairs.items():
        again, back = tmp_path / "again" / shape, tmp_path / "back" / shape
        theirs.save_pretrained(again)
        reader.save_pretrained(again)
        assert cli.main(["import", str(again), "--to", str(back)]) == EXIT_OK
        assert load_model(back).config == load_model(theirs_at).config == load_model(ours).config
        first, last = (load_file(at / "model.safetensors") for at in (ours, back))
        assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
        # What was saved can be loaded once more.
        third = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
        assert all(torch.equal(a, b) for a, b in zip(third.parameters(), theirs.parameters()))


def test_the_export_needs_neither_our_package_nor_triton(pairs, tmp_path):
    _, _, theirs, _, _ = pairs["all as in K3"]
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("earlyfusion", "triton", "fla"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from transformers import AutoModelForCausalLM, AutoProcessor
model = AutoModelForCausalLM.from_pretrained({str(theirs)!r}, trust_remote_code=True)
reader = AutoProcessor.from_pretrained({str(theirs)!r}, trust_remote_code=True)
print("ids", model.generate(**reader(text="one two"), max_new_tokens=3, do_sample=False).shape)
"""
    environment = dict(os.environ, HF_MODULES_CACHE=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0 and "ids torch.Size([1, " in done.stdout, done.stderr


def test_trainer_lowers_its_loss(pairs, tmp_path):
    _, _, at, _, reader = pairs["blocks"]
    model = AutoModelForImageTextToText.from_pretrained(at, trust_remote_code=True)
    rows = [dict(reader(text=f"{IMAGE} it is a flag", images=picture(16, 16, 8)))] * 4

    def together(batch):
        """One row a batch: pictures of several have one tensor."""
        (row,) = batch
        return {**row, "labels": row["input_ids"]}

    options = TrainingArguments(
        str(tmp_path),
        max_steps=60,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=rows, data_collator=together)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2


def test_lm_eval_scores_the_export_as_we_do(pairs, tmp_path):
    """loglikelihood and generation of `--model hf` against our own model in the same harness."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    _, ours, at, _, _ = pairs["blocks"]
    options = dict(trust_remote_code=True, dtype="float32", device="cpu", batch_size=2)
    hf = get_model("hf")(pretrained=str(at), **options)
    own = lm_eval_model(load_own(ours))
    pairs_of = [("The sky", " is"), ("One two", " three four"), ("", "word")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs_of)]
    got, expected = hf.loglikelihood(asked, disable_tqdm=True), own.loglikelihood(asked)
    torch.testing.assert_close(
        torch.tensor([a for a, _ in got]), torch.tensor([a for a, _ in expected]), atol=1e-3, rtol=1e-4
    )
    options = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, options), i) for i, (text, _) in enumerate(pairs_of[:2])]
    assert hf.generate_until(asked, disable_tqdm=True) == own.generate_until(asked)


def test_accelerate_runs_it_from_disk(pairs, tmp_path):
    """Big-model loading: an empty model, its weights left in files, the same logits."""
    _, _, at, theirs, reader = pairs["full residuals, dense"]
    given = reader(text=f"{IMAGE} and some words", images=picture(16, 24, 9))
    with init_empty_weights():
        empty = AutoModelForImageTextToText.from_config(theirs.config, trust_remote_code=True)
    whole = ("vision_tower", "language_model.model.layers.1", "language_model.model.layers.3")
    names = {".".join(name.split(".")[:4]) for name, _ in empty.named_parameters() if name.startswith("lang")}
    names = {name.removesuffix(".weight") for name in names} | {"vision_tower", "mm_projector"}
    places = {name: "disk" if name in whole else "cpu" for name in names}
    model = load_checkpoint_and_dispatch(
        empty, str(at), device_map=places, offload_folder=str(tmp_path), dtype=torch.float32
    ).eval()
    assert next(model.vision_tower.parameters()).device.type == "meta"
    with torch.no_grad():
        assert torch.equal(model(**given).logits, theirs(**given).logits)


@pytest.fixture(scope="module")
def plain(words, tmp_path_factory):
    """text shape -> (our model, its folder, the folder for KimiLinear)."""
    found = {}
    for seed, (shape, text) in enumerate(FOREIGN.items()):
        base = tmp_path_factory.mktemp("plain")
        model = made(base / "ours", words, text, V1, seed)
        assert exported(base / "ours", base / "theirs", "--format", "kimi_linear") == EXIT_OK
        found[shape] = model, base / "ours", base / "theirs"
    return found


@pytest.mark.parametrize("shape", FOREIGN)
def test_transformers_own_class_reads_the_text_model(plain, words, shape, tmp_path):
    """Logits, all gradients, decoding with its cache; nothing missing, nothing left; and back again."""
    ours, folder, at = plain[shape]
    theirs, found = AutoModelForCausalLM.from_pretrained(
        at, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    text = "All of it, word by word, once. " * 4
    document = encode(Sample([Text(text)], "t", "t"), words, ours.config.vision)
    ids = AutoTokenizer.from_pretrained(at)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == document.ids[:-1].tolist()
    logits = ours.logits(ours.hidden(packed(ours, document)))[:-1]
    with pure_torch():
        given = theirs(input_ids=ids, labels=ids, use_cache=False)
        given.loss.backward()
        with torch.no_grad():
            first = theirs(input_ids=ids[:, :-2], use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"
            second = theirs(input_ids=ids[:, -2:-1], **{name: first[name]}, use_cache=True)
    torch.testing.assert_close(given.logits[0], logits, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(second.logits[0, 0], logits[-2], atol=TOLERANCE, rtol=TOLERANCE)
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    own = {n: p.grad for n, p in ours.decoder.named_parameters()}
    got = {n: p.grad for n, p in theirs.named_parameters()}
    wanted = to_reference(own)
    if ours.config.text.tie_word_embeddings:
        # There the head is a matrix of its own.
        got["model.embed_tokens.weight"] = got["model.embed_tokens.weight"] + got.pop("lm_head.weight")
    close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    gradients(ours)

    # Back from the export, and from what transformers saves of it.
    theirs.save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(at).save_pretrained(tmp_path / "again")
    first = load_file(folder / "model.safetensors")
    for number, source in enumerate((at, tmp_path / "again")):
        back = tmp_path / f"back-{number}"
        assert cli.main(["import", str(source), "--tower", str(folder), "--to", str(back)]) == EXIT_OK
        last = load_file(back / "model.safetensors")
        assert all(torch.equal(first[name], last[name]) for name in first)


def test_transformers_own_kimi_k25_reads_the_whole(words, tmp_path):
    vision = V1 | {"num_attention_heads": 2, "head_dim": 8, "hidden_size": 16}
    ours = made(tmp_path / "ours", words, FOREIGN["plain"], vision, 5)
    assert exported(tmp_path / "ours", tmp_path / "theirs", "--format", "kimi_k25") == EXIT_OK
    theirs, found = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "theirs", attn_implementation="eager", output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    segments = [Text("See "), Picture(picture(22, 17, 3)), Text(" there.")]
    document = encode(Sample(segments, "t", "t"), words, ours.config.vision)
    with pure_torch(), torch.no_grad():
        logits = theirs.eval()(
            input_ids=document.ids[None],
            pixel_values=document.patches.float() / 255.0 * 2.0 - 1.0,
            image_grid_thw=torch.tensor(document.grids),
            use_cache=False,
        ).logits[0]
        expected = ours.logits(ours.hidden(packed(ours, document)))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


REFUSED = {
    "mla_output_gate": dict(mla_output_gate=True),
    "attn_res": dict(attn_res="block"),
    "moe_layer_freq": dict(moe_layer_freq=2),
    "num_experts = 0": dict(num_experts=0),
    "kv_norm_eps": dict(kv_norm_eps=1e-5),
    "hidden_act": dict(hidden_act="situ"),
    "routed_expert_hidden_size": dict(routed_expert_hidden_size=12),
    "gate_lower_bound": dict(linear_attn_config=dict(gate_lower_bound=-5.0)),
    "full_rank_output_gate": dict(linear_attn_config=dict(full_rank_output_gate=True)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_their_classes_would_leave_out_is_refused(words, said, tmp_path, capsys):
    made(tmp_path / "ours", words, dict(attn_res="none") | REFUSED[said], V1)
    assert exported(tmp_path / "ours", tmp_path / "theirs", "--format", "kimi_linear") == EXIT_USER
    message = capsys.readouterr().err
    assert said in message and "use --format earlyfusion" in message and message.count("\n") == 1
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "change", [{"norm": "rms"}, {"projector": "v2"}, {"pos_emb_interpolation": "bilinear"}]
)
def test_a_tower_that_kimi_k25_would_compute_otherwise_is_refused(words, change, tmp_path, capsys):
    made(tmp_path / "ours", words, dict(attn_res="none"), V1 | change)
    assert exported(tmp_path / "ours", tmp_path / "theirs", "--format", "kimi_k25") == EXIT_USER
    assert next(iter(change)) in capsys.readouterr().err and not (tmp_path / "theirs").exists()


def test_many_files_hold_what_one_does(pairs, tmp_path, monkeypatch):
    _, ours, at, _, _ = pairs["all as in K3"]
    monkeypatch.setattr("earlyfusion.pipeline.export_cmd.MEGABYTE", 1 << 12)
    assert exported(ours, tmp_path / "out", "--shard-mb", "4", "--licence", "mit") == EXIT_OK
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    whole = load_file(at / "model.safetensors")
    parts = {name: load_file(tmp_path / "out" / file)[name] for name, file in index.items()}
    assert len(set(index.values())) > 3 and parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit" and card.data.library_name == "transformers"
    assert "trust_remote_code=True" in card.text and "Nothing was measured" in card.text
