"""Layouts that people have: each is found by looking, and what is not read is told."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.prepare.read import InputOptions, open_input
from earlyfusion.data.prepare.write import Worker


def draw(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def looked(root):
    """(input, outcomes) of a folder."""
    worker = Worker(
        str(root), InputOptions(), format="auto", tokenizer=None, vision="tiny", max_pixels=1_000_000
    )
    return worker.input, [worker.outcome(number) for number in range(worker.input.count)]


def coco(root, captions, extra=()):
    for i in range(4):
        draw(root / "train2017" / f"{i:012}.jpg", i)
        draw(root / "val2017" / f"{i:012}.jpg", 10 + i)  # the same names: the split decides
    images = [{"id": 7 + i, "file_name": f"{i:012}.jpg", "width": 30, "height": 20} for i in range(4)]
    found = {"info": {}, "licenses": [], "images": images, "annotations": [*captions, *extra]}
    (root / "annotations").mkdir()
    (root / "annotations" / "captions_train2017.json").write_text(json.dumps(found))


def test_captions_of_coco_go_to_the_picture_of_their_split(tmp_path):
    captions = [{"image_id": 7 + i % 3, "id": i, "caption": f"caption {i}"} for i in range(6)]
    coco(tmp_path, captions, extra=[{"image_id": 7, "id": 9, "bbox": [0, 0, 1, 1]}])
    found, outcomes = looked(tmp_path)
    assert "COCO captions of captions_train2017.json" in found.layout and found.count == 3
    assert any("1 annotations without a caption are not read; 1 pictures have none" in n for n in found.notes)
    for i, one in enumerate(outcomes):
        assert one.reason == "" and one.format == "caption"
        assert one.members["jpg"] == (tmp_path / "train2017" / f"{i:012}.jpg").read_bytes()
        assert json.loads(one.members["json"])["caption"] == [f"caption {i}", f"caption {i + 3}"]


def test_a_picture_that_coco_names_and_nobody_has_is_left_out_by_name(tmp_path):
    coco(tmp_path, [{"image_id": 7, "id": 0, "caption": "here"}, {"image_id": 8, "id": 1, "caption": "gone"}])
    for split in ("train2017", "val2017"):
        (tmp_path / split / f"{1:012}.jpg").unlink()
    _, (kept, gone) = looked(tmp_path)
    assert not kept.reason and gone.reason == "missing_member" and f"{1:012}.jpg" in gone.message


def test_coco_names_no_files_outside_its_folder(tmp_path):
    root = tmp_path / "inside"
    coco(root, [{"image_id": 7, "id": 0, "caption": "here"}])
    draw(tmp_path / "secret.jpg")
    path = root / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace(f"{0:012}.jpg", "../secret.jpg"))
    opened = open_input(str(root), InputOptions())
    with pytest.raises(BadSample):
        opened.members(0)


def test_folders_of_classes_are_the_words_of_pictures_without_any(tmp_path):
    root = tmp_path / "classes"
    for i, name in enumerate(("tabby_cat", "dog", "tabby_cat")):
        draw(root / "train" / name / f"{i}.png", i)
    found, outcomes = looked(root)
    assert found.layout == "pictures in 2 folders, whose names are their words"
    words = {one.origin: one.members["txt"].decode() for one in outcomes}
    assert words == {"train/dog/1": "dog", "train/tabby_cat/0": "tabby cat", "train/tabby_cat/2": "tabby cat"}
    # Splits are no classes.
    for split in ("train", "val"):
        draw(tmp_path / "splits" / split / "0.png")
    assert all(one.reason for one in looked(tmp_path / "splits")[1])
    # One caption changes what the others are: pictures without words, left out with a reason.
    (root / "train" / "dog" / "1.txt").write_text("a dog on a hill")
    _, outcomes = looked(root)
    assert [bool(one.reason) for one in outcomes] == [False, True, True]


def test_conversations_of_llava_and_sharegpt(tmp_path):
    draw(tmp_path / "images" / "a.jpg")
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "noise"}]
    (tmp_path / "llava.json").write_text(
        json.dumps([{"id": "1", "image": "images/a.jpg", "conversations": turns}])
    )
    talk = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello you"}]
    (tmp_path / "sharegpt.jsonl").write_text(json.dumps({"conversations": talk}) + "\n")
    found, outcomes = looked(tmp_path)
    assert "rows of llava.json" in found.layout and "rows of sharegpt.jsonl" in found.layout
    assert sorted((one.format, one.media, one.reason) for one in outcomes) == [
        ("conversation", 0, ""),
        ("conversation", 1, ""),
    ]


def test_tables_and_what_nobody_reads(tmp_path):
    draw(tmp_path / "a.png")
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file_name", "caption"], ["a.png", "noise, coloured"]])
    (tmp_path / "sizes.csv").write_text("weight,height\n1,2\n")
    (tmp_path / "notes.docx").write_bytes(b"PK")
    found, (one,) = looked(tmp_path)
    assert one.format == "caption" and one.members["txt"] == b"noise, coloured"
    notes = "\n".join(found.notes)
    assert "sizes.csv is not read: it has no column of" in notes
    assert "files of unknown kinds are not read: .docx 1" in notes
    assert "1 pictures or videos without words are read where a row names them" in notes


def test_what_is_no_layout_is_one_line_that_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"COCO captions.*tar shards") as caught:
        open_input(str(tmp_path), InputOptions())
    assert "\n" not in str(caught.value)
    (tmp_path / "captions.json").write_text('{"images": [], "annotations": 3}')
    with pytest.raises(DataError, match="expected lists of images and annotations"):
        open_input(str(tmp_path), InputOptions())
