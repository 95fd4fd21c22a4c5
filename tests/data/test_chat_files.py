"""Chat files through the source, the loader and the packer: what is learned, where pictures go, which rows
are bad."""

import base64
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import num_tokens

VISION = VisionConfig.preset("tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["which color is it? red message role user assistant python"] * 4, 300)


def png(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    PILImage.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write(folder: Path, *rows, name: str = "chats.jsonl") -> SourceConfig:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    raw = "".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape")
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return SourceConfig(name="chats", kind="chat_files", path=str(folder / name))


def loader(config, tokenizer, length=96, tokens=128, **settings):
    data = DataConfig(sources=[config], val_fraction=0.0, prefetch="none", **settings)
    return Loader(data, tokenizer, VISION, length=length, tokens=tokens, max_patches=4096)


def first(config: SourceConfig):
    return build_source(config, val_fraction=0.0).get(0, 0)


ASKED = {"role": "user", "content": "what?"}
RED = {"role": "assistant", "content": "red"}

# A conversation with everything, and by hand what of it is learned, document by document.
WHOLE = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>which?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "count",
            "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "1+1"}'}}],
        },
        {"role": "tool", "name": "python", "content": "2"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image"}]},
        {"role": "assistant", "content": "old answer", "weight": 0},
        {"role": "user", "content": "now?"},
        {"role": "assistant", "content": "red"},
    ],
    "images": ["a.png", "b.png"],
}
END = "<|close|>message<|sep|><|end_of_msg|>"
LEARNED = (
    "<|open|>think<|sep|>count<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|><|open|>argument key="code"'
    ' type="string"<|sep|>'
    f"1+1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{END}two{END}red{END}[EOS]"
)


@pytest.fixture
def whole(tmp_path) -> SourceConfig:
    (tmp_path / "a.png").write_bytes(png(60, 40))
    (tmp_path / "b.png").write_bytes(png(28, 84))
    return write(tmp_path, WHOLE)


def test_exactly_the_answers_of_a_hand_written_conversation_are_labels(whole, tokenizer):
    """Through loader and packer: the labels in order spell what the assistant says, and nothing else."""
    with loader(whole, tokenizer, length=1024, tokens=1024) as one:
        (batch,) = one.next_step()
    assert tokenizer.decode(batch.labels[batch.labels >= 0].tolist()).startswith(LEARNED)
    assert set(batch.loss_weights.tolist()) == {0.0, 1.0}
    assert torch.equal(batch.loss_weights > 0, batch.labels >= 0)
    place = (batch.labels >= 0).nonzero()[0].item()
    assert batch.labels[place] == batch.ids[place + 1], "a label is the next token of its document"


def test_pictures_stand_where_the_row_places_them(whole, tokenizer):
    document = encode(first(whole), tokenizer, VISION)
    assert len(document.spans) == 2 and document.patches is not None
    before = [tokenizer.decode(document.ids[max(0, a - 3) : a].tolist()) for a, _ in document.spans]
    assert before[0].endswith('"<|sep|>') and before[1].endswith("and ")
    sizes = [num_tokens(grid, VISION.merge_kernel_size) for grid in document.grids]
    assert sum(sizes) == len(document.media_positions)


@pytest.mark.parametrize("form", ["path", "data uri", "named part", "image_url", "nobody says where", "dict"])
def test_every_way_to_name_a_picture_gives_the_same_document(tmp_path, tokenizer, form):
    raw = png(48, 32)
    (tmp_path / "a.png").write_bytes(raw)
    uri = "data:image/png;base64," + base64.b64encode(raw).decode()
    words = {"type": "text", "text": "what?"}
    content, images = {
        "path": ("<image>what?", ["a.png"]),
        "data uri": ("<image>what?", [uri]),
        "named part": ([{"type": "image", "image": "a.png"}, words], None),
        "image_url": ([{"type": "image_url", "image_url": {"url": uri}}, words], None),
        "nobody says where": ("what?", "a.png"),
        "dict": ("<image>what?", [{"bytes": None, "path": "a.png"}]),
    }[form]
    row = {**pictured(content=content), "images": images}
    plain = write(tmp_path, pictured("a.png", content="<image>what?"), name="plain.jsonl")
    ours, theirs = (encode(first(c), tokenizer, VISION) for c in (write(tmp_path, row), plain))
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.patches, theirs.patches)


def test_a_video_is_read_where_the_row_places_it(tmp_path, tokenizer):
    pytest.importorskip("av")
    frames = [PILImage.new("RGB", (64, 48), (40 * i, 0, 0)) for i in range(6)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=500)
    row = {"messages": [{"role": "user", "content": "see <video>what?"}, RED], "videos": ["a.gif"]}
    document = encode(first(write(tmp_path, row)), tokenizer, VISION)
    text = tokenizer.decode(document.ids[: document.spans[0][0]].tolist())
    assert text.endswith("see 00:00:00.000") and len(document.spans) >= 2


def test_other_names_of_roles_gzip_and_tools_are_read(tmp_path, tokenizer):
    rows = [{"conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "red"}]}]
    config = write(tmp_path, *rows, name="c.jsonl.gz")
    assert "<|sep|>what?" in tokenizer.decode(encode(first(config), tokenizer, VISION).ids.tolist())
    tools = [{"type": "function", "function": {"name": "python"}}]
    text = first(write(tmp_path, {"messages": [ASKED, RED], "tools": tools})).text
    assert text.startswith('message role="system"# Tools\n' + json.dumps(tools[0]))


def pictured(*images, content="<image>"):
    return {"messages": [{"role": "user", "content": content}, RED], "images": list(images)}


def calling(**message):
    return {"messages": [ASKED, {"role": "assistant", **message}]}


BAD = {
    "not json": ("{", "bad_json"),
    "no messages": ({"text": "x"}, "bad_json"),
    "unknown role": ({"messages": [{"role": "asistant", "content": "x"}]}, "bad_json"),
    "too few pictures": (pictured("a.png", content="<image> <image>"), "missing_member"),
    "too many pictures": (pictured("a.png", "a.png"), "missing_member"),
    "no such picture": (pictured("b.png"), "missing_member"),
    "url": (pictured("https://x/y.png"), "missing_member"),
    "broken uri": (pictured("data:image/png;base64,?"), "bad_json"),
    "no answer": ({"messages": [ASKED]}, "empty_text"),
    "weightless": (calling(content="red", weight=0), "empty_text"),
    "negative weight": (calling(content="red", weight=-1), "bad_json"),
    "empty user": (pictured(content=""), "empty_text"),
    "content is a number": (pictured(content=3), "bad_json"),
    "unknown part": (pictured(content=[{"type": "audio"}]), "bad_json"),
    "turn is a string": ({"messages": ["hello"]}, "bad_json"),
    "broken call": (calling(tool_calls=[{"name": "f", "arguments": "{"}]), "bad_json"),
    "calls of a user": ({"messages": [ASKED | {"tool_calls": [{"name": "f"}]}, RED]}, "bad_json"),
    "tools": ({"messages": [ASKED, RED], "tools": "python"}, "bad_json"),
    "latin-1": ('{"messages": "\udce9"}', "encoding"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_and_costs_itself_alone(tmp_path, case):
    row, reason = BAD[case]
    (tmp_path / "a.png").write_bytes(png(48, 32))
    source = build_source(write(tmp_path, {"messages": [ASKED, RED]}, row), val_fraction=0.0)
    assert "red" in source.get(0, 0).text
    with pytest.raises(BadSample, match=r"chats\.jsonl:2") as caught:
        source.get(1, 0)
    assert caught.value.reason == reason


def test_a_conversation_cut_inside_an_image_is_refused_or_left_out_and_counted(tmp_path, tokenizer):
    (tmp_path / "a.png").write_bytes(png(280, 280))
    long = {"messages": [{"role": "user", "content": "<image>what?"}, RED], "images": ["a.png"]}
    config = write(tmp_path, long, *[{"messages": [ASKED, RED]}] * 30)
    with (
        loader(config, tokenizer, overlong="skip") as one,
        pytest.raises(BadSample, match=r"chats.jsonl:1: \d+ tokens are more than length = 96"),
    ):
        for _ in range(30):
            one.next_step()
    with loader(config, tokenizer, overlong="skip", on_bad_sample="skip") as one:
        batches = [one.next_step()[0] for _ in range(30)]
        passes = int(one.stats()["epochs"]["chats"])
        assert passes >= 1 and one.stats()["skipped"]["over_budget"] in (passes, passes + 1)
    assert not any(batch.num_patches for batch in batches)


def test_held_out_rows_are_never_trained_on_and_paths_are_checked(tmp_path):
    write(tmp_path, *[{"messages": [ASKED, RED]}] * 40)
    config = SourceConfig(name="c", kind="chat_files", path=str(tmp_path))
    source = build_source(config, val_fraction=0.2)
    train = {source.get(i, 0).key for i in range(len(source))}
    held = {sample.key for sample in source.heldout_samples()}
    assert len(train) + len(held) == 40 and not train & held and held
    with pytest.raises(DataError, match="no text file at"):
        build_source(config.model_copy(update={"path": str(tmp_path / "none.jsonl")}))
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(DataError, match="no chat file at"):
        build_source(config.model_copy(update={"path": str(tmp_path / "x.txt")}))
