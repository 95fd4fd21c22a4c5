import json
import re
from collections import Counter
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from pydantic import ValidationError

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import Image, Text, answer_text, question_text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.sources.embedded import load_split

from .shard_files import picture


def source(kind, name=None, path=None, seed=0, val_fraction=0.1, **options):
    config = SourceConfig(name=name or kind, kind=kind, path=path and str(path), options=options)
    return build_source(config, seed=seed, val_fraction=val_fraction)


def test_easy_vqa_has_the_official_counts_and_split():
    train, test = load_split("train"), load_split("test")
    assert (len(train), len(test)) == (4000, 1000)
    assert sum(len(entry.questions) for entry in train) == 38_575
    assert sum(len(entry.questions) for entry in test) == 9_673
    assert {answer for entry in train + test for _, answer in entry.questions} == set(
        (Path(find_spec("easy_vqa").origin).parent / "data" / "answers.txt").read_text().split()
    )


def test_easy_vqa_asks_anew_every_epoch_and_only_true_questions():
    vqa, official = source("easy_vqa", questions_per_image=5), load_split("train")[7].questions
    true = {question_text(question) + answer_text(answer) for question, answer in official}
    seen = set()
    for epoch in range(4):
        texts = [segment for segment in vqa.get(7, epoch).segments if isinstance(segment, Text)]
        asked, answered = texts[::2], texts[1::2]
        assert len(asked) == 5 and {q.text + a.text for q, a in zip(asked, answered)} <= true
        assert {q.loss for q in asked} == {0} and {a.loss for a in answered} == {1}
        seen.add(tuple(q.text for q in asked))
    assert len(seen) == 4


def test_weighted_questions_of_easy_vqa_come_as_often_and_as_early_as_their_weights_say():
    weights = {"^what": 6.0, "color": 0.5, r"\bnot?\b.*yes$": 2.0}
    vqa, official = source("easy_vqa", questions_per_image=2, question_weights=weights), load_split("train")
    asked = [[" ".join(one) for one in entry.questions] for entry in official]
    number = next(i for i, one in enumerate(asked) if len(one) == len(set(one)) == 8)
    worth = {}
    for one in asked[number]:
        found = [weight for pattern, weight in weights.items() if re.search(pattern, one)]
        worth[one.rpartition(" ")[0]] = np.prod(found)
    assert len(set(worth.values())) >= 3
    drawn = Counter()
    for epoch in range(4000):
        first, _, second, _ = (part.text for part in vqa.get(number, epoch).segments[1:])
        drawn[first, second] += 1
    whole = sum(worth.values())
    for (one, w), (other, v) in permutations(worth.items(), 2):
        # Drawn in turn without putting back: w of all, then v of the rest.
        chance = w / whole * v / (whole - w)
        found = drawn[question_text(one), question_text(other)] / 4000
        # Five standard deviations of a count of 4,000.
        assert abs(found - chance) < 5 * (chance * (1 - chance) / 4000) ** 0.5
    with pytest.raises(ValidationError, match="is no regular expression: unterminated"):
        source("easy_vqa", question_weights={"[": 2})


def paragraphs(sample):
    return {" ".join(part.split()) for part in sample.text.split("\n\n") if len(part) > 120}


@pytest.mark.parametrize("kind", ["pydoc", "stdlib_code"])
def test_held_out_text_is_disjoint_from_training(kind):
    texts = source(kind, val_fraction=0.2)
    sides = [[texts.get(i, 0) for i in range(len(texts))], list(texts.heldout_samples())]
    for part in (lambda s: {s.text}, lambda s: {s.key.split("#")[0]}, paragraphs):
        train, held = (set().union(*map(part, side)) for side in sides)
        # The manual repeats whole sections in other topics; code repeats its licence.
        assert train and held and (not train & held or (part is paragraphs and kind == "stdlib_code"))


def test_library_code_does_not_contain_the_held_out_topics():
    code = source("stdlib_code", total_bytes=40_000_000, val_fraction=0.0)
    files = {code.get(i, 0).key.split("#")[0] for i in range(len(code))}
    assert not any("pydoc_data" in name or "test" in name.split("/")[:-1] for name in files)
    assert "json/decoder.py" in files


def test_a_fingerprint_changes_with_options_and_seed_but_not_with_the_weight():
    base = source("synth_words").fingerprint()
    assert source("synth_words", seed=1).fingerprint() != base
    assert source("synth_words", max_side=64).fingerprint() != base
    weighed = SourceConfig(name="synth_words", kind="synth_words", weight=0.3)
    assert build_source(weighed).fingerprint() == base


# ---- folder


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(6):
        PILImage.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(tmp_path / f"p{i}.png")
        (tmp_path / f"p{i}.txt").write_text(f"picture {i}\n", encoding="utf-8")
    (tmp_path / "deep").mkdir()
    PILImage.new("RGB", (40, 24), (9, 9, 9)).save(tmp_path / "deep" / "q.jpg")
    entry = {"caption": "a dark field", "questions": [{"question": "is it dark?", "answer": "yes"}]}
    (tmp_path / "deep" / "q.json").write_text(json.dumps(entry))
    (tmp_path / "notes.md").write_text("# notes\ntwo lines\n")
    (tmp_path / "lines.jsonl").write_text('{"text": "first"}\n\n{"text": "second", "image": "p0.png"}\n')
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "alone.png").write_bytes(b"a picture without caption is left alone")
    return tmp_path


def test_a_folder_gives_captioned_pictures_and_texts(folder):
    files = source("folder", path=folder, val_fraction=0.0)
    samples = {sample.key: sample for sample in (files.get(i, 0) for i in range(len(files)))}
    pictures = {f"p{i}.png" for i in range(6)}
    assert set(samples) == pictures | {"deep/q.jpg", "notes.md", "lines.jsonl:1", "lines.jsonl:3"}
    assert samples["p3.png"].text == "\npicture 3" and samples["p3.png"].segments[0].open().size == (30, 23)
    assert samples["deep/q.jpg"].text == "\na dark field\nQ: is it dark?\nA: yes"
    assert [type(s) for s in samples["lines.jsonl:3"].segments] == [Image, Text]
    assert samples["lines.jsonl:1"].text == "first" and samples["notes.md"].text == "# notes\ntwo lines\n"


def test_folder_files_are_held_out_by_name(folder):
    files = source("folder", path=folder, val_fraction=0.4)
    train = {files.get(i, 0).key for i in range(len(files))}
    held = {sample.key for sample in files.heldout_samples()}
    assert train and held and not train & held and len(train | held) == 10
    assert all(held_out(f"folder/{key}", 0.4) for key in held)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"caf\xe9", "encoding"),
        ("a.txt", b"", "empty_file"),
        ("a.txt", b" \n ", "empty_text"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "encoding"),
        ("a.jsonl", b"{text}\n", "bad_json"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "bad_json"),
        ("a.jsonl", b'{"body": 1}\n', "bad_json"),
        ("a.jsonl", b'{"text": "t", "image": "../secret.png"}\n', "missing_member"),
        ("p.json", b'{"title": "x"}', "empty_text"),
        ("p.json", b'{"questions": [1]}', "bad_json"),
        ("p.json", b'{"questions": 5}', "bad_json"),
        ("p.json", b'{"questions": null}', "bad_json"),
        ("a.jsonl", b'{"text": "t", "image": "a\\u0000.png"}\n', "missing_member"),
        ("a.jsonl", b'{"text": "t", "image": "\\ud83d.png"}\n', "missing_member"),
        ("a.jsonl", b'{"text": "t", "image": "' + b"a" * 5000 + b'.png"}\n', "missing_member"),
        ("p.txt", b"\n", "empty_text"),
    ],
)
def test_damage_has_a_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    if name.startswith("p."):
        (tmp_path / "p.jpg").write_bytes(picture(0))
    files = source("folder", path=tmp_path, val_fraction=0.0)
    with pytest.raises(BadSample) as caught:
        files.get(0, 0)
    assert caught.value.reason == reason and name.split(".")[0] in str(caught.value)


def test_missing_and_empty_folders_are_one_clear_line(tmp_path):
    with pytest.raises(DataError, match=r"source 'mine': folder .*nowhere does not exist"):
        source("folder", "mine", tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds nothing to read; expected pictures"):
        source("folder", path=tmp_path)
    (tmp_path / "a.txt").write_text("one file")
    with pytest.raises(DataError, match=r"no training sample; add data or lower data\.val_fraction"):
        source("folder", path=tmp_path, val_fraction=0.9999999)


def test_a_folder_may_be_named_from_here_and_be_a_link_itself(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder" / "p.jpg").write_bytes(picture(0))
    (tmp_path / "folder" / "p.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    for path in ("folder", "link", "./folder/../link", str(tmp_path / "link")):
        files = source("folder", path=path, val_fraction=0.0)
        assert files.get(0, 0).segments[0].open().size == (40, 24)


def test_a_link_out_of_the_folder_is_not_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    root = tmp_path / "folder"
    root.mkdir()
    (root / "a.txt").symlink_to(secret)
    (root / "b.jsonl").write_text('{"text": "t", "image": "c.png"}\n')
    (root / "c.png").symlink_to(secret)
    files = source("folder", path=root, val_fraction=0.0)
    assert len(files) == 2 and files.left_out.total() == 1
    for index in range(2):
        with pytest.raises(BadSample, match="lies outside") as caught:
            files.get(index, 0)
        assert "the secret" not in str(caught.value)
