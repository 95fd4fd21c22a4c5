"""Pages: both languages say the same, no side of the split sees the other, and a clip shows all of a page."""

import json
from itertools import pairwise
from random import Random

import pytest
from PIL import Image

from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Image as MediaImage
from earlyfusion.data.sample import Text, Video
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.synth.pages import (
    COLUMNS,
    FONTS,
    FORMS,
    INNER,
    PALETTES,
    TONES,
    WIDTH,
    Page,
    Section,
    damaged,
    draw,
    from_html,
    parse_dsl,
    side,
    to_dsl,
    to_html,
)
from earlyfusion.data.tasks.pages import (
    FPS,
    GRID,
    HEIGHT,
    HOLD_S,
    MOVE_S,
    OVERLAP,
    REVISE,
    ROWS,
    document_of,
    frames,
    on_ground,
    places_of,
    row_of,
    scroll,
)
from earlyfusion.data.tasks.problem import TaskError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.video import sample_indices
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.vision.patches import navit_size

SIDES = ("train", "template", "combination")


@pytest.mark.parametrize("of", SIDES)
def test_both_languages_give_a_page_back(of):
    for seed in range(60):
        page = draw(Random(seed), of)
        assert parse_dsl(to_dsl(page)) == (page, [])
        assert from_html(to_html(page)) == (page, [])


ODD = ["a | b", "back\\slash", "two\nlines", "\\n", '<b>& "x"</b>', "", "  spaces  ", "漢字 é", "\\p|\\"]


@pytest.mark.parametrize("kind", FORMS)
def test_any_text_survives_both_ways(kind):
    """Whatever the texts hold: separators, escapes, markup, nothing."""
    form, rng = FORMS[kind], Random(kind)
    step = len(form.repeated)
    for variant in form.variants:
        rounds = 2 * (COLUMNS[variant] if kind == "table" else 1)
        count = len(form.lead) + len(form.tail) + rounds * step
        section = Section(kind, variant, rng.choice(TONES), tuple(rng.choice(ODD) for _ in range(count)))
        page = Page("sand", "mono", "snug", (section,))
        assert parse_dsl(to_dsl(page)) == (page, [])
        assert from_html(to_html(page)) == (page, [])


def test_training_pages_hold_no_template_and_no_combination_that_is_held_out():
    drawn = {of: {draw(Random(seed), of).kinds for seed in range(400)} for of in SIDES}
    assert not drawn["train"] & (drawn["template"] | drawn["combination"])
    held = {two for kinds in drawn["combination"] for two in pairwise(kinds) if side(two) == "combination"}
    assert held and all(held & {*pairwise(kinds)} for kinds in drawn["combination"])
    for kinds in drawn["train"] | drawn["template"]:
        assert not held & {*pairwise(kinds)}
    # Every kind is seen in training: what is held out is how they stand together.
    assert {kind for kinds in drawn["train"] for kind in kinds} == {*INNER}


@pytest.mark.parametrize(
    "text, kinds, repairs",
    [
        ("hreo left accent| A| B| C", ["hero"], 4),
        ("page sand serif roomy\nhero left accent| A", ["hero"], 1),
        ("page sand serif roomy\ncards two soft| a| b| c| d| e", ["cards"], 1),
        ("page sand serif roomy\nwhat is this\nnav end soft| A| B", ["nav"], 1),
        ("page sand serif roomy\n" + "text left soft| A| B\n" * 99, ["text"] * 24, 0),
    ],
)
def test_what_can_be_read_is_repaired_and_told(text, kinds, repairs):
    page, told = parse_dsl(text)
    assert [section.kind for section in page.sections] == kinds
    assert len(told) == repairs
    assert parse_dsl(to_dsl(page)) == (page, [])


@pytest.mark.parametrize("text", ["", "no page at all", "|||", "page sand serif roomy", "\x00"])
def test_what_is_no_page_is_refused_with_an_example(text):
    with pytest.raises(BadSample, match="expected lines like"):
        parse_dsl(text)


def test_any_text_is_read_or_refused_and_never_fails_otherwise():
    rng, words = (
        Random(1),
        [*FORMS, *PALETTES, *FONTS, "|", "\n", "\\", "\\p", "page", "<b", "é", " ", "<table"],
    )
    for _ in range(500):
        text = "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(rng.randint(0, 30)))
        try:
            document, _ = document_of(text)
            assert "<" in document
        except BadSample as error:
            assert error.reason == "bad_page"


def striped(height):
    """A page whose rows all look different."""
    picture = Image.new("RGB", (240, height))
    for y in range(height):
        picture.paste((y % 256, y // 256, 77), (0, y, 240, y + 1))
    return picture


@pytest.mark.parametrize("height", [90, 180, 181, 400, 1000])
def test_a_clip_shows_every_row_of_a_page(height):
    page = striped(height)
    rows = set()
    for frame in frames(page, None, 8):
        assert frame.size == (240, HEIGHT)
        rows |= {frame.getpixel((0, y))[:2] for y in range(HEIGHT)}
    assert rows == {(y % 256, y // 256) for y in range(height)}


@pytest.mark.parametrize("height", [90, 300, 440, 590, 740])
def test_frames_taken_out_of_a_recorded_clip_show_one_place_in_each_item(height):
    """Four frames are one item of the tower; they are spread from the first frame to the last."""
    made = frames(striped(height), None, 8)
    taken = [made[index] for index in sample_indices(len(made), 8, FPS)]
    items = [{frame.tobytes() for frame in taken[i : i + 4]} for i in range(0, len(taken), 4)]
    assert len(items) == len(places_of(height)) and all(len(item) == 1 for item in items)
    # As a model was trained on them.
    assert [frame.tobytes() for frame in taken] == [
        frame.tobytes() for frame in frames(striped(height), None, FPS)
    ]


def test_what_is_opened_is_shown_at_its_place_and_nothing_else_twice():
    page, opened = striped(400), striped(400)
    opened.paste((255, 0, 0), (0, 50, 240, 60))
    stops = [*scroll(page, opened)]
    assert [(picture is opened, here) for picture, here, _ in stops] == [
        (False, 0),
        (True, 0),
        (False, HEIGHT - OVERLAP),
        (False, 400 - HEIGHT),
    ]
    # A place is held for as long as four frames at the rate of a model's clips: one item of the tower.
    assert (HOLD_S + MOVE_S) * FPS == 4


def folder_of(tmp_path, count=12):
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(count):
        of = SIDES[number % 3]
        name = f"pictures/{number}.png"
        striped(200 + number).save(tmp_path / name)
        page = draw(Random(number), of)
        row = row_of(page, of, file=name, **({"opened": name} if number % 2 else {}))
        if number % 4 == 0:
            row |= {"draft": to_dsl(damaged(page, Random(number))), "drafted": name}
        rows.append(json.dumps(row) + "\n")
    (tmp_path / "pages.jsonl").write_text("".join(rows))
    return tmp_path


def test_a_text_is_cut_out_on_the_grid_with_what_is_around_it(tmp_path):
    folder = folder_of(tmp_path)
    rows = [json.loads(line) for line in (folder / ROWS).open()]
    texts = [("Bright garden", 14, 25, 79, 11), ("Go", 200, 60, 40, 24)]
    for row in rows:
        row["texts"] = texts
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task("pages", path=str(folder))
    boxes, clips = {text: box for text, *box in texts}, []
    for seed in range(40):
        problem = task.sample(seed, "train", 4)
        shown, whole = problem.media(), problem.picture
        said = problem.target.split("| ")
        seen = shown.frames if isinstance(shown, Video) else [shown.open().convert("RGB")]
        if isinstance(shown, Video):
            # From top to bottom, each for as long as one item of the tower.
            clips.append(len(said))
            assert said == [text for text, *_ in texts if text in said]
            assert len(seen) == 4 * len(said)
            assert all(len({one.tobytes() for one in seen[i : i + 4]}) == 1 for i in range(0, len(seen), 4))
        for text, cut in zip(said, seen[::4]):
            left, top, width, height = boxes[text]
            # Somewhere on the grid: the text whole, at most a step more on either side, then the ground.
            assert any(
                on_ground(whole.crop((x, y, right, bottom)), cut.size).tobytes() == cut.tobytes()
                for y in range(max(0, top // GRID * GRID - GRID), top + 1, GRID)
                for x in range(max(0, left // GRID * GRID - GRID), left + 1, GRID)
                for right in range(-(-(left + width) // GRID) * GRID, min(241, x + cut.size[0] + 1), GRID)
                for bottom in range(-(-(top + height) // GRID) * GRID, y + cut.size[1] + 1, GRID)
            )
        assert task.reward(problem, problem.target) == 1 > task.reward(problem, "Bright Go") > 0
    assert {*clips} == {1, 2} and 10 < len(clips) < 30
    # Held-out pages are asked for as pages, and a folder without texts has none to read.
    assert task.sample(0, "test", 4).target.startswith("page ")
    (folder / ROWS).write_text("".join(json.dumps({**row, "texts": []}) + "\n" for row in rows))
    with pytest.raises(TaskError, match="no train page for level 4"):
        make_task("pages", path=str(folder)).sample(0, "train", 4)


@pytest.mark.parametrize("target", ["dsl", "html"])
def test_the_task_asks_for_held_out_pages_and_pays_for_what_is_right(tmp_path, target):
    task = make_task("pages", path=str(folder_of(tmp_path)), target=target)
    asked = task.test_problems(4, 0, 1)
    assert {problem.category for problem in asked} == {"template", "combination"}
    for problem in asked:
        assert isinstance(problem.media(), Video)
        assert task.reward(problem, problem.target) == 1
        other = next(one for one in asked if one.target != problem.target)
        assert 0 < task.reward(problem, other.target) < 1
        assert task.reward(problem, "nothing to see here") == 0
    # One picture holds nothing that has to be opened first, whichever way it is asked for.
    either = task.test_problems(8, 0, 2)
    kinds = {json.loads(line)["page"]: "opened" in line for line in (tmp_path / "pages.jsonl").open()}
    if target == "dsl":
        assert {isinstance(problem.media(), Video) for problem in either} == {True, False}
        assert all(isinstance(problem.media(), Video) for problem in either if kinds[problem.target])
    stills = [task.sample(seed, "train", 0) for seed in range(20)]
    whole = {json.loads(line)["page"] for line in (tmp_path / "pages.jsonl").open() if "opened" not in line}
    if target == "dsl":
        assert {problem.target for problem in stills} <= whole
    assert task.sample(3, "train", 2).target == task.sample(3, "train", 2).target


def test_a_folder_without_pages_says_how_to_make_one(tmp_path):
    with pytest.raises(TaskError, match="earlyfusion website pages --out"):
        make_task("pages", path=str(tmp_path))
    with pytest.raises(TaskError, match="expected dsl or html"):
        make_task("pages", path=str(tmp_path), target="pdf")


def test_a_draft_has_mistakes_and_is_a_page():
    for seed in range(300):
        page = draw(Random(seed))
        draft = damaged(page, Random(seed))
        assert draft != page and parse_dsl(to_dsl(draft)) == (draft, [])


def test_a_conversation_shows_the_draft_and_pays_for_the_page_alone(tmp_path):
    source = build_source(
        SourceConfig(
            name="talks",
            kind="page_talks",
            options={"path": str(folder_of(tmp_path)), "difficulty": 2, "revised": 0.5, "shown": 0.5},
        )
    )
    seen = set()
    for number in range(60):
        sample = source.made(number, "k", heldout=False)
        words = [part for part in sample.segments if isinstance(part, Text)]
        pages = [(part.text, part.loss) for part in words if part.text.startswith("page ")]
        revised = REVISE in "".join(part.text for part in words)
        pictures = [part for part in sample.segments if isinstance(part, MediaImage | Video)]
        seen.add((revised, len(pictures)))
        # The page that is paid for comes last; the draft before it is another one and costs nothing.
        assert [loss for _, loss in pages] == [0, 1][1 - revised :]
        assert len({text for text, _ in pages}) == 1 + revised
    # Of drafts, some are shown as they look and some are not.
    assert seen == {(False, 1), (True, 1), (True, 2)}


@pytest.mark.parametrize("recipe", ["website-pretrain", "website-sft"])
def test_what_a_model_is_shown_is_never_shrunk(recipe):
    """Letters of six pixels cannot be read from a frame that was made smaller."""
    vision = load_config([recipe]).vision
    for height, limit in ((HEIGHT, vision.in_patch_limit_each_frame), (600, vision.in_patch_limit)):
        size = navit_size(WIDTH, height, vision, patch_limit=limit)
        assert (size.new_w, size.new_h) == (WIDTH, height)
