"""Every format as a user would store it, and everything that can be wrong with one."""

import io
import json
import random

import pytest
from PIL import Image as PILImage

from earlyfusion.data.errors import REASONS, BadSample
from earlyfusion.data.formats import Group, build, describe
from earlyfusion.data.sample import Image, Regions, Text, VideoFile, answer_text, question_text
from earlyfusion.data.sources.shards import ShardsOptions

from .shard_files import dump, picture

JPG, PNG = picture(1), picture(2, (64, 32), "PNG")
GIF = picture(3, form="GIF")


def group(members):
    sizes = {name: len(data) for name, data in members.items()}
    return Group("k", "a.tar k", sizes, members.__getitem__)


def made(members, epoch=0, **options):
    return build(group(members), ShardsOptions(**options), epoch)


def shape(segments):
    """Short form: the text, or the kind of medium with the bytes."""
    names = {Image: "image", VideoFile: "video"}
    return [
        s.text if isinstance(s, Text) else (names[type(s)], s.image if isinstance(s, Image) else s.video)
        for s in segments
        if not isinstance(s, Regions)
    ]


def beside(_media="jpg", **entry):
    """A picture and a JSON."""
    return {_media: JPG if _media == "jpg" else PNG, "json": dump(entry)}


def alone(**entry):
    return {"json": dump(entry)}


def llava(*words, **fields):
    """Turns of a human and a model in turn."""
    turns = [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(words)]
    return {**fields, "conversations": turns}


def messages(*contents, roles=("user", "assistant")):
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents)]}


def boxed(*boxes, key="boxes", **fields):
    return beside(**{key: boxes, "labels": ["a"] * len(boxes)}, **fields)


TWO = {"0.jpg": JPG, "1.png": PNG}
PARTS = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "Then"}]
PARTS += [{"type": "image", "image": "a.jpg"}]
PAGE = {"texts": [None, "one", None, "two"], "images": ["0.jpg", None, "x/1.png", None]}
MMC4 = {"text_list": ["one", "two"], "image_info": [{"image_name": "b9.jpg", "matched_text_index": 1}]}
CASES = {
    "caption": ({"jpg": JPG, "txt": b" a field \n"}, [("image", JPG), "\na field"]),
    "caption_json": (beside("png", caption="sky", url="x"), [("image", PNG), "\nsky"]),
    "caption_bom": ({"webp": PNG, "txt": "\ufeffcafé".encode()}, [("image", PNG), "\ncafé"]),
    "qa": (
        beside(questions=[{"question": "How many?", "answer": 3}]),
        [("image", JPG), question_text("How many?"), answer_text("3")],
    ),
    "qa_one": (
        beside(question="Who?", answers=[{"answer": "a cat"}]),
        [("image", JPG), question_text("Who?"), answer_text("a cat")],
    ),
    "llava": (
        beside(**llava("<image>\nWhat?", "A dog.", "Colour?", "Brown.", image="coco/000.jpg")),
        [("image", JPG), "\nQ: What?\nA:", " A dog.", "\nQ: Colour?\nA:", " Brown."],
    ),
    "two_pictures": (
        {**TWO, **alone(**llava("Compare <image> and <image>.", "Same."))},
        ["\nQ: Compare ", ("image", JPG), " and ", ("image", PNG), ".\nA:", " Same."],
    ),
    "no_place": (beside(**messages("Hm?", "A")), [("image", JPG), "\nQ: Hm?\nA:", " A"]),
    "messages": (
        {
            "b.png": PNG,
            "a.jpg": JPG,
            **alone(
                **messages(
                    "Be brief.",
                    PARTS,
                    [{"type": "text", "text": "Yes"}],
                    roles=("system", "user", "assistant"),
                )
            ),
        },
        ["\nBe brief.", ("image", PNG), "\nQ: Then", ("image", JPG), "\nA:", " Yes"],
    ),
    "text_chat": (alone(**messages("1+1", "2")), ["\nQ: 1+1\nA:", " 2"]),
    "video_chat": (
        {"mp4": b"clip", **alone(**llava("<video>\nSo?", "It falls.", video="x.mp4"))},
        [("video", b"clip"), "\nQ: So?\nA:", " It falls."],
    ),
    "obelics": ({**TWO, **alone(**PAGE)}, [("image", JPG), "\none", ("image", PNG), "\ntwo"]),
    "mmc4": ({"b9.jpg": JPG, **alone(**MMC4)}, ["one", ("image", JPG), "\ntwo"]),
    "video": ({"webm": b"v", "txt": b"falls"}, [("video", b"v"), "\nfalls"]),
    "gif": ({"gif": GIF, **alone(caption="turns")}, [("video", GIF), "\nturns"]),
    "html": ({"png": PNG, "html": b"<p>hi</p>\n"}, [("image", PNG), "\n<p>hi</p>"]),
    "ocr": (beside(ocr="line 1\nline 2"), [("image", JPG), "\nline 1\nline 2"]),
    "ocr_lines": (beside(ocr=[{"text": "a"}, {"text": "b"}]), [("image", JPG), "\na\nb"]),
    "text": ({"txt": b"only words"}, ["only words"]),
    "text_json": (alone(text="only words"), ["only words"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_told_by_its_members(name):
    members, expected = CASES[name]
    assert shape(made(members)) == expected


def test_only_answers_have_the_loss_of_text_and_media_come_undecoded():
    segments = made(CASES["llava"][0], text_loss=0.5, question_loss=0.25)
    assert [s.loss for s in segments[1:]] == [0.25, 0.5, 0.25, 0.5]
    broken = made({"jpg": b"not a picture", "txt": b"x"})
    assert broken[0] == Image(b"not a picture")


def test_a_caption_may_answer_a_question():
    members = {"png": PNG, "txt": b"a red cup"}
    asked = made(members, ask="what is it?", question_loss=0.25)
    assert [(part.text, part.loss) for part in asked[1:]] == [
        ("\nQ: what is it?\nA:", 0.25),
        (" a red cup", 1.0),
    ]
    assert [part.text for part in made(members)[1:]] == ["\na red cup"]


def test_every_epoch_another_question_comes_last():
    """Behind the last answer alone stands the end of the document."""
    turns = [{"question": f"q{i}?", "answer": f"a{i}"} for i in range(3)]
    members = {"png": PNG, "json": json.dumps({"questions": turns}).encode()}
    said = [[part.text for part in made(members, epoch) if isinstance(part, Text)] for epoch in range(4)]
    assert said[0] == said[3] and [one[-1] for one in said[:3]] == [" a2", " a0", " a1"]
    assert all(sorted(one) == sorted(said[0]) for one in said)
    assert all(one.index(f" a{i}") == one.index(f"\nQ: q{i}?\nA:") + 1 for one in said for i in range(3))


def test_a_list_of_captions_gives_one_each_epoch():
    members = {"jpg": JPG, "json": dump({"caption": ["a", "b", "c"]})}
    assert [made(members, epoch)[1].text for epoch in range(4)] == ["\na", "\nb", "\nc", "\na"]


def test_an_interleaved_document_ends_before_a_picture_too_many():
    assert shape(made(CASES["obelics"][0], max_images=1)) == [("image", JPG), "\none"]


def test_video_options_reach_the_segment():
    clip = made(CASES["video"][0], max_frames=7, fps=1.0, video_backend="pyav")[0]
    assert (clip.suffix, clip.max_frames, clip.fps, clip.backend) == (".webm", 7, 1.0, "pyav")


# ---- boxes


def regions(entry, size=(200, 100), **options):
    made_of = made({"jpg": picture(0, size), "json": dump(entry)}, **options)
    return next(segment for segment in made_of if isinstance(segment, Regions))


CUP = [20, 10, 100, 60]
PLACES = {
    "pixels": ({"boxes": [CUP], "labels": ["cup"]}, CUP),
    "shares": ({"boxes": [[0.1, 0.1, 0.5, 0.6]], "labels": ["cup"]}, CUP),
    "corner and size": ({"boxes": [[20, 10, 80, 50]], "labels": ["cup"], "box_format": "xywh"}, CUP),
    "objects": ({"objects": [{"bbox": CUP, "category": "cup"}]}, CUP),
    "recognised text": ({"ocr": [{"text": "cup", "box": CUP}]}, CUP),
    "point": ({"regions": [{"label": "cup", "point": [50, 20]}], "caption": "see"}, [50, 20]),
    "share of a point": ({"points": [[0.5, 0.5]], "labels": ["cup"]}, [100, 50]),
    "one pixel": ({"boxes": [[0, 0, 1, 1]], "labels": ["cup"], "coordinates": "absolute"}, [0, 0, 1, 1]),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_come_out_in_pixels_whatever_they_came_in(name):
    entry, expected = PLACES[name]
    found = regions(entry, boxes="absolute")
    (region,) = found.regions
    assert found.form == "absolute" and region.label == "cup"
    assert list(region.box or region.point) == pytest.approx(expected)


def test_sizes_are_those_after_exif_orientation():
    turned = io.BytesIO()
    exif = PILImage.Exif()
    exif[0x0112] = 6
    PILImage.new("RGB", (200, 100)).save(turned, "JPEG", exif=exif)
    members = {"jpg": turned.getvalue(), "json": dump({"boxes": [[0.5, 0.5, 1, 1]], "labels": ["a"]})}
    assert made(members)[2].regions[0].box == (50, 100, 100, 200)


# ---- what is wrong names shard, key and reason

WRONG = {
    "empty_file": {
        "picture": {"jpg": b"", "txt": b"x"},
        "text": {"jpg": JPG, "txt": b""},
        "video": {"mp4": b"", "txt": b"x"},
    },
    "missing_member": {
        "no caption": {"jpg": JPG},
        "no picture": alone(texts=[None], images=["0.jpg"]),
        "picture not there": {**TWO, **alone(texts=[None], images=["7.jpg"])},
        "place without picture": alone(**llava("<image> a", "b")),
    },
    "encoding": {
        "latin-1": {"jpg": JPG, "txt": "café".encode("latin-1")},
        "utf-16": {"jpg": JPG, "txt": "café".encode("utf-16")},
        "utf-16 without mark": {"txt": "plain".encode("utf-16-le")},
        "json in latin-1": {"jpg": JPG, "json": '{"caption": "é"}'.encode("latin-1")},
    },
    "empty_text": {
        "blank caption": {"jpg": JPG, "txt": b" \n\t"},
        "blank field": beside(caption=""),
        "empty answer": beside(question="q", answer=" "),
        "no turns": alone(messages=[]),
        "no answer": alone(**messages("x")),
        "only pictures": {**TWO, **alone(texts=[None], images=["0.jpg"])},
        "empty ocr": beside(ocr=[]),
    },
    "bad_json": {
        "null caption": beside(caption=None),
        "torn json": {"jpg": JPG, "json": b'{"caption": "x'},
        "deep json": {"jpg": JPG, "json": b"[" * 100_000},
        "list json": {"jpg": JPG, "json": b"[1]"},
        "no question": beside(questions=[{"answer": "x"}]),
        "odd role": alone(**messages("x", roles=["tool"])),
        "pictures without place": {**TWO, **alone(**llava("<image> a", "b"))},
        "unequal lists": {**TWO, **alone(texts=["a"], images=[])},
        "matched beyond": {
            **TWO,
            **alone(text_list=["a"], image_info=[{"image_name": "0.jpg", "matched_text_index": 9}]),
        },
        "three numbers": boxed([5, 5, 5]),
        "not a number": {"jpg": JPG, "json": b'{"boxes": [[NaN, 0, 5, 5]], "labels": ["a"]}'},
        "labels missing": beside(boxes=[[0, 0, 5, 5]]),
    },
    "box_outside": {
        "box outside": boxed([0, 0, 400, 10]),
        "share outside": boxed([0, 0, 1.2, 1], coordinates="normalized"),
        "box without area": boxed([5, 5, 5, 9]),
        "point outside": boxed([-30, 5], key="points"),
    },
    "corrupt_image": {"boxes on no picture": {**boxed([0, 0, 5, 5]), "jpg": b"junk"}},
}


@pytest.mark.parametrize(("reason", "name"), [(reason, name) for reason in WRONG for name in WRONG[reason]])
def test_what_is_wrong_names_shard_key_and_reason(reason, name):
    with pytest.raises(BadSample, match=r"^a\.tar k: ") as caught:
        made(WRONG[reason][name])
    assert caught.value.reason == reason and reason in REASONS
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["caption", "qa", "conversation", "interleaved", "grounding", "ocr", "video", "code"]
)
def test_a_named_format_that_does_not_fit_is_a_bad_sample(kind):
    with pytest.raises(BadSample):
        made({"bin": b"x"}, format=kind)
    with pytest.raises(BadSample):
        made({"json": b'{"x": 1}'}, format=kind)


# ---- no JSON makes anything but a BadSample

JUNK = [
    None,
    0,
    -1,
    1.5,
    True,
    "",
    " ",
    "<image>",
    "0.jpg",
    "é",
    [],
    {},
    [[]],
    [None],
    [1, 2],
    {"a": 1},
    10**30,
    "x" * 50,
]


def spoil(value, rng):
    """A copy in which about every fourth part is something else."""
    if rng.random() < 0.25:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        return {key: spoil(item, rng) for key, item in value.items() if rng.random() > 0.1}
    if isinstance(value, list):
        return [spoil(item, rng) for item in value for _ in range(rng.choice((1, 1, 1, 0, 2)))]
    return value


BOXES = {
    "jpg": JPG,
    "json": dump(
        {
            "boxes": [[1, 2, 3, 4]],
            "points": [[0.1, 0.2]],
            "labels": ["a"],
            "regions": [{"label": "b", "box": [1, 2, 3, 4]}, {"text": "c", "point": [1, 2]}],
            "ocr": [{"text": "d", "bbox": [0, 0, 5, 5]}],
            "box_format": "xywh",
            "coordinates": "absolute",
            "caption": ["x", "y"],
        }
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name", [name for name, (members, _) in CASES.items() if "json" in members] + ["boxes"]
)
def test_no_json_does_more_than_make_a_bad_sample(name, seed):
    members = BOXES if name == "boxes" else CASES[name][0]
    entry = json.loads(members["json"])
    kinds = [
        "auto",
        describe(group(members), ShardsOptions())[0],
        "grounding" if name == "boxes" else "auto",
        "ocr",
    ]
    rng = random.Random(f"{name}/{seed}")
    good = 0
    for trial in range(300):
        spoiled = {**members, "json": dump(spoil(entry, rng))}
        try:
            made(spoiled, trial, format=kinds[trial % len(kinds)])
            good += 1
        except BadSample as error:
            assert error.reason in REASONS
    assert good < 300
