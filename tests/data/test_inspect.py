"""`earlyfusion data inspect`: the tree says what is there, and the sheet shows it as the model gets it."""

import base64
import contextlib
import io
import json
import re

import numpy as np
import pytest
from page_cases import checked
from PIL import Image as PILImage

from earlyfusion.data.cards import make_card
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Region, Regions, Sample, Text, Video
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.pipeline.report import sheet
from earlyfusion.pipeline.report.page import write_page
from earlyfusion.vision.config import VisionConfig

from .prepare_cases import main as prepare
from .shard_files import captions, picture, write_tar


@pytest.fixture(autouse=True)
def wide(own_cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def inspect(tmp_path, capsys):
    def run(path, **options):
        sheet.inspect(str(path), **options)
        return capsys.readouterr().out

    return run


def prepared(tmp_path, *words):
    """The manifest of what `prepare` makes of in.tar."""
    own = ["--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]
    prepare([str(tmp_path / "in.tar"), *own, *words])
    return json.loads((tmp_path / "out" / "index.json").read_text())


def test_prepared_shards_are_counted_exactly_without_reading_them(tmp_path, inspect, capsys):
    write_tar(tmp_path / "in.tar", [*captions(20), ("99.txt", b" ")])
    made = prepared(tmp_path, "--shard-samples", "8")
    capsys.readouterr()
    shown = inspect(tmp_path / "out", samples=1)
    for text in (
        "20 samples",
        "3 shards",
        "20 samples of 21 items",
        "20 caption",
        f"{made['tokens']:,} tokens",
        f"{made['patches']:,} patches (moonvit_v2)",
        "left out: 1 empty_text",
    ):
        assert text in shown, (text, shown)


def test_a_recipe_counts_prepared_shards_by_its_own_patches(tmp_path, inspect, capsys, tokenizer):
    """One rule is not another's: 8-pixel patches give more of them than the 14-pixel ones that prepare
    counted by."""
    write_tar(tmp_path / "in.tar", captions(6))
    made = prepared(tmp_path)
    recipe = tmp_path / "mix8.toml"
    recipe.write_text(
        f'data.val_fraction = 0.0\ntokenizer.path = "{tmp_path}/tokenizer"\n'
        '[vision]\npreset = "moonvit_v2"\npatch_size = 8\n'
        f'[[data.sources]]\nname = "own"\nkind = "webdataset"\npath = "{tmp_path}/out"\n'
    )
    capsys.readouterr()
    shown = inspect(recipe, samples=6)
    assert f"{made['patches']:,} patches (moonvit_v2)" in shown and "1 shard\n" in shown
    config = VisionConfig.preset("moonvit_v2", patch_size=8)
    given = SourceConfig(name="own", kind="webdataset", path=str(tmp_path / "out"))
    source = build_source(given, val_fraction=0.0)
    patches = [encode(source.get(i, 0), tokenizer, config).num_patches for i in range(6)]
    assert f"{sum(patches) / 6:,.0f} patches a sample (patches of 8)" in shown


def test_other_shards_are_estimated_and_damage_is_shown(tmp_path, inspect):
    data = write_tar(
        tmp_path / "a.tar", [*captions(6), ("7.jpg", picture(7)), ("../x.txt", b"out")]
    ).read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: len(data.rstrip(b"\0")) - 10])
    shown = inspect(tmp_path / "a.tar", samples=50)
    for text in ("1 cut short: a.tar", "6 caption", "(from 6 samples)"):
        assert text in shown, (text, shown)
    assert "1 truncated_tar" in shown
    write_tar(tmp_path / "b.tar", [*captions(3), ("../x.txt", b"out"), ("9.jpg", b"")])
    shown = inspect(tmp_path / "b.tar", samples=50)
    assert "members left out: 1 outside" in shown and "1 empty_file" in shown


def test_a_recipe_is_shown_source_by_source(inspect, tmp_path):
    shown = inspect("nano", samples=2, out=tmp_path / "nano.html")
    for text in (
        "easy_vqa  easy_vqa  weight 0.76 (76.0%)",
        "4,000 samples, 1,000 held out",
        "pydoc",
        "scenes",
    ):
        assert text in shown
    assert checked(tmp_path / "nano.html").count('<div class="picture">') == 10


# ---- the sheet


@pytest.fixture
def page(tmp_path, tokenizer, vision):
    def written(*samples):
        cards = [make_card(sample, tokenizer, vision) for sample in samples]
        data = {"title": "t", "cards_of": {"<s>": cards}}
        return checked(write_page(tmp_path / "sheet.html", "sheet.html", data))

    return written


def pictures(html):
    found = re.findall(r"data:image/jpeg;base64,([^\"]+)", html)
    return [PILImage.open(io.BytesIO(base64.b64decode(text))) for text in found]


def test_the_sheet_stands_alone_and_runs_nothing_of_the_data(page):
    evil = '<script>alert(1)</script><img src=x onerror="alert(2)">'
    sample = Sample([Image(picture(0)), Regions([Region(evil, box=(1, 1, 9, 9))]), Text(evil)], evil, evil)
    html = page(sample, Sample([Image(b"junk")], evil, evil))
    assert len(pictures(html)) == 1 and "&lt;script&gt;" in html and "<h2>&lt;s&gt;" in html


@pytest.mark.parametrize("limit", [None, 64])
def test_boxes_lie_where_they_belong(page, tokenizer, vision, limit):
    """A red rectangle in the picture, a box around it: the pixels under the drawn box must be red, also when
    shrunk."""
    pixels = np.zeros((150, 230, 3), np.uint8)
    pixels[40:110, 60:180] = (255, 0, 0)
    config = vision.model_copy(update={"in_patch_limit": limit}) if limit else vision
    sample = Sample([Image(pixels), Regions([Region("red", box=(60, 40, 180, 110))])], "s", "k")
    part = make_card(sample, tokenizer, config)["parts"][0]
    (mark,), seen = part["marks"], part["picture"]
    left, top, width, height = (mark[key] / 100 for key in ("left", "top", "width", "height"))
    shown = np.asarray(seen.convert("RGB")).astype(int)
    red = (shown[..., 0] > 128) & (shown[..., 1] < 100)
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    # Two pixels: the resize blurs the edge.
    assert abs(columns[0] - left * seen.width) < 2 and abs(columns[-1] + 1 - (left + width) * seen.width) < 2
    assert abs(rows[0] - top * seen.height) < 2 and abs(rows[-1] + 1 - (top + height) * seen.height) < 2
    places = re.search(r'class="box" style="left:([\d.]+)%;top:([\d.]+)%', page(sample))
    assert limit or [float(x) for x in places.groups()] == pytest.approx(
        [mark["left"], mark["top"]], abs=0.01
    )


def test_a_card_has_the_counts_of_encoding(page, tokenizer, vision):
    frames = [PILImage.new("RGB", (40, 30), (i * 40, 0, 0)) for i in range(6)]
    sample = Sample([Video(frames, [i * 0.5 for i in range(6)]), Text("It moves.")], "s", "k")
    card, document = make_card(sample, tokenizer, vision), encode(sample, tokenizer, vision)
    counts = (len(document), document.num_patches, len(document.media_positions))
    assert (card["tokens"], card["patches"], card["vision_tokens"]) == counts
    html = page(sample)
    assert f"{len(document)} tokens" in html and "6 frames" in html and len(pictures(html)) == 6
    assert "00:00:00.000" in html and "00:00:02.000" in html


@pytest.mark.parametrize("path", ["pipe:touch {mark}", "{{p,q}}ipe:touch {mark}"])
def test_a_recipe_is_code_and_no_command_of_it_runs_unasked(tmp_path, inspect, path):
    mark = tmp_path / "ran"
    source = path.format(mark=mark)
    recipe = tmp_path / "strange.toml"
    recipe.write_text(f'[[data.sources]]\nname = "s"\nkind = "webdataset"\npath = {json.dumps(source)}\n')
    with pytest.raises(DataError, match=r"names commands.*pipe:touch.*a recipe is code.*--run-commands"):
        inspect(recipe)
    recipe.write_text(
        '[[data.sources]]\nname = "s"\nkind = "webdataset"\n'
        f"options = {{ shards = [{json.dumps(source)}] }}\n"
    )
    with pytest.raises(DataError, match="--run-commands"):
        inspect(recipe)
    assert not mark.exists()
    with contextlib.suppress(DataError):
        inspect(recipe, run_commands=True)
    assert mark.exists() == source.startswith("pipe:"), "of braces, the first that is no shard ends it"


def test_files_that_are_no_sample_are_counted(tmp_path, inspect):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.png", "b.png", "c.zip", "noend"):
        (folder / name).write_bytes(picture(1, form="PNG"))
    (folder / "a.txt").write_text("a caption")
    shown = inspect(folder)
    for text in ("1 picture without .txt or .json beside it", "1 file of kind .zip", "1 file of kind none"):
        assert text in shown, shown
    write_tar(tmp_path / "a.tar", [*captions(1), ("noend", b"x")])
    assert "members left out: 1 no_extension" in inspect(tmp_path / "a.tar")
