"""`earlyfusion prepare`: every kind of input."""

import json

import pytest
from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import UserError

from .clip_files import numbered, write_clip
from .prepare_cases import prepare, samples, skipped
from .shard_files import captions, picture, write_tar

pytestmark = pytest.mark.usefixtures("own_cache")


def test_json_lines_with_paths(tmp_path):
    root = tmp_path / "set"
    (root / "img").mkdir(parents=True)
    for i in range(3):
        (root / "img" / f"{i}.jpg").write_bytes(picture(i))
    (tmp_path / "secret.jpg").write_bytes(picture(9))
    rows = """{"image": "img/0.jpg", "caption": "zero"}
{"image": ["img/1.jpg", "img/2.jpg"], "conversations": TURNS}
{"texts": ["a", null, "b"], "images": [null, "img/1.jpg", null]}
{"image": "img/77.jpg", "caption": "gone"}
{"image": "../secret.jpg", "caption": "escape"}
{"image": "ROOT/secret.jpg", "caption": "escape"}
not json
"""
    turns = '[{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "left"}]'
    rows = rows.replace("TURNS", turns).replace("ROOT", str(tmp_path))
    (root / "data.jsonl").write_text(rows)
    made = prepare(tmp_path, root / "data.jsonl")
    assert made["formats"] == {"caption": 1, "conversation": 1, "interleaved": 1} and made["media"] == 4
    texts = [sample.text for sample in samples(tmp_path / "out")]
    assert texts == ["\nzero", "\nQ:  or ?\nA: left", "a\nb"]
    assert made["skipped"] == {"missing_member": 1, "unreadable": 2, "bad_json": 1}
    assert [entry["from"] for entry in skipped(tmp_path / "out")][-1] == "data.jsonl:7"
    # The pictures belong to the lines, they are no items of their own.
    as_folder = prepare(tmp_path, root, "folder")
    assert as_folder["formats"] == made["formats"] and as_folder["items"] == 7


def test_parquet_with_pictures_inside(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"image": {"bytes": picture(i), "path": f"{i}.jpg"}, "caption": f"row {i}"} for i in range(30)]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:20]), tmp_path / "a.parquet", row_group_size=8)
    parquet.write_table(pyarrow.Table.from_pylist(rows[20:]), tmp_path / "b.parquet")
    prepare(tmp_path, f"{tmp_path}/*.parquet", "out", workers=2)
    found = samples(tmp_path / "out")
    assert [s.text for s in found] == [f"\nrow {i}" for i in range(30)]
    assert found[27].segments[0].image == picture(27)


def test_a_dataset_that_names_files_elsewhere_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["words"]}).save_to_disk(str(tmp_path / "d"))
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../../../../etc/passwd"
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="lies outside"):
        prepare(tmp_path, tmp_path / "d")


def test_datasets_on_disk_keep_their_bytes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {
        "image": [{"bytes": picture(i, form="PNG"), "path": None} for i in range(12)],
        "text": [f"row {i}" for i in range(12)],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    table.select(range(1, 12)).save_to_disk(str(tmp_path / "one"))
    prepare(tmp_path, tmp_path / "one")
    found = samples(tmp_path / "out")
    assert [s.text for s in found] == [f"\nrow {i}" for i in range(1, 12)]
    assert found[0].segments[0].image == picture(1, form="PNG")
    datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="splits test, train; name one with --split"):
        prepare(tmp_path, tmp_path / "two", "two-out")
    assert prepare(tmp_path, tmp_path / "two", "two-out", "--split", "test")["samples"] == 3


def test_shards_are_resharded_and_torn_ones_counted(tmp_path):
    whole = write_tar(tmp_path / "a.tar", captions(20)).read_bytes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(whole)
    (tmp_path / "in" / "b.tar").write_bytes(
        write_tar(tmp_path / "b.tar", captions(10, 15)).read_bytes()[:9000]
    )
    made = prepare(tmp_path, tmp_path / "in", "out", "--shard-samples", 7)
    texts = [s.text for s in samples(tmp_path / "out")]
    assert texts[:20] == [f"\ncaption {i}" for i in range(20)] and len(texts) == len(set(texts))
    assert made["skipped"]["truncated_tar"] == 1 and made["skipped"]["duplicate"] >= 1


def test_a_folder_of_videos(tmp_path):
    root = tmp_path / "clips"
    root.mkdir()
    for name, codec in (("a.mp4", "h264"), ("b.webm", "vp9"), ("c.gif", "gif")):
        (root / name).write_bytes(write_clip(numbered(6), codec))
        (root / name).with_suffix(".txt").write_text(f"a clip, {name}")
    (root / "d.mp4").write_bytes((root / "a.mp4").read_bytes()[:700])
    (root / "d.txt").write_text("torn")
    made = prepare(tmp_path, root)
    assert made["formats"] == {"video": 3} and made["patches"] > 0
    assert [e["reason"] for e in skipped(tmp_path / "out")] == ["corrupt_video"]


def test_pictures_above_the_limit_are_left_out_and_the_limit_can_be_set(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for name, side in (("large", 24), ("small", 12)):
        PILImage.new("RGB", (side, side)).save(root / f"{name}.png")
        (root / f"{name}.txt").write_text(name)
    assert prepare(tmp_path, root)["samples"] == 2
    assert prepare(tmp_path, root, "limited", "--max-pixels", 300)["skipped"] == {"pixel_limit": 1}
    (left_out,) = skipped(tmp_path / "limited")
    assert left_out["from"] == "large" and "(prepare: --max-pixels)" in left_out["message"]
    with pytest.raises(UserError, match="--max-pixels"):
        prepare(tmp_path, root, "none", "--max-pixels", 0)


@pytest.fixture
def three(tmp_path):
    """Three pictures in a folder."""
    (tmp_path / "set" / "img").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "set" / "img" / f"{number}.jpg").write_bytes(picture(number))
    return tmp_path / "set"


def test_a_list_of_rows_in_one_json_file_is_read_as_json_lines_are(tmp_path, three):
    """LLaVA's usual form; also in a folder, where the pictures are then what the rows name."""
    turns = lambda n: [
        {"from": "human", "value": '<image>\nWhat \\"]}{[ is it?'},
        {"from": "gpt", "value": f"{n} \u00e4"},
    ]
    rows = [{"id": str(n), "image": f"img/{n}.jpg", "conversations": turns(n)} for n in range(3)]
    (three / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(tmp_path, three / "rows.jsonl", "lines")
    (three / "rows.jsonl").unlink()
    (three / "llava.json").write_text(
        json.dumps(
            [*rows, {"image": "img/9.jpg", "caption": "gone"}, {"no": "text"}], indent=1, ensure_ascii=False
        ),
        encoding="utf-8-sig",
    )
    expected = [(sample.text, sample.segments[0]) for sample in samples(tmp_path / "lines")]
    for source, out in ((three / "llava.json", "list"), (three, "folder")):
        made = prepare(tmp_path, source, out)
        assert made["formats"] == {"conversation": 3} and made["items"] == 5
        assert [(sample.text, sample.segments[0]) for sample in samples(tmp_path / out)] == expected
        assert [entry["from"] for entry in skipped(tmp_path / out)] == ["llava.json:4", "llava.json:5"]


@pytest.mark.parametrize(("name", "mark"), [("captions.csv", ","), ("captions.tsv", "\t")])
def test_a_table_of_captions_is_read_alone_and_as_a_folders_metadata(tmp_path, three, name, mark):
    lines = [mark.join(("file", "caption", "note")), mark.join(("img/0.jpg", '"a red, round one"', ""))]
    lines += [mark.join((f"img/{n}.jpg", f'"two\nlines {n}"', "")) for n in (1, 2)]
    (three / name).write_text("\n".join(lines) + "\n")
    (three / "measures.csv").write_text("width,height\n1,2\n")  # no rows of samples: left alone
    for source, out in ((three / name, "table"), (three, "folder")):
        made = prepare(tmp_path, source, out)
        assert made["formats"] == {"caption": 3} and made["items"] == 3
        found = samples(tmp_path / out)
        assert [s.text for s in found] == ["\na red, round one", "\ntwo\nlines 1", "\ntwo\nlines 2"]
        assert [s.segments[0].image for s in found] == [picture(n) for n in range(3)]


def test_questions_and_answers_of_other_names_are_asked_when_named(tmp_path, three, capsys):
    row = {"img_file": "img/0.jpg", "prompt": "What is it?", "response": "a ball"}
    (three / "own.jsonl").write_text(json.dumps(row))
    named = ("--image-field", "img_file", "--question-field", "prompt", "--answer-field", "response")
    assert prepare(tmp_path, three / "own.jsonl", "out", *named)["formats"] == {"qa": 1}
    assert samples(tmp_path / "out")[0].text == "\nQ: What is it?\nA: a ball"
    with pytest.raises(
        DataError,
        match=r"none of 1 items .*own.jsonl:1: .*'img_file' names 'img/0\.jpg'.*--image-field img_file",
    ):
        prepare(tmp_path, three / "own.jsonl", "plain")
    capsys.readouterr()
    half = ("--image-field", "img_file", "--text-field", "response")
    assert prepare(tmp_path, three / "own.jsonl", "half", *half)["formats"] == {"caption": 1}
    assert (
        "1 item: caption without the field 'prompt': ask it with --question-field" in capsys.readouterr().err
    )


def test_a_caption_beside_a_source_text_is_not_lost(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for name, words in (("frog", "a frog"), ("bare", "")):
        (root / f"{name}.png").write_bytes(picture(len(name + words), form="PNG"))
        (root / f"{name}.svg").write_text(f"<svg id='{name}'/>")
        if words:
            (root / f"{name}.txt").write_text(words)
    made = prepare(tmp_path, root)
    assert made["formats"] == {"caption": 1, "code": 1}
    assert [s.text for s in samples(tmp_path / "out")] == ["\n<svg id='bare'/>", "\na frog"]
    assert prepare(tmp_path, root, "coded", "--format", "code")["formats"] == {"code": 2}
    again = prepare(tmp_path, tmp_path / "coded", "again")
    assert again["formats"] == {"code": 2}, "the format of a preparation is kept"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{}", "not a list of rows"),
        ("a.json", "[1, 2]", "without an object"),
        ("a.json", '[{"text": "cut', "not closed"),
        ("a.json", "", "not a list of rows"),
        ("a.csv", "image,caption\n", "no rows"),
        ("a.csv", b"image,caption\n\xff,x\n", "expected UTF-8"),
    ],
)
def test_tables_that_are_none_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, tmp_path / name)
