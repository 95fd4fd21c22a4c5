"""Damaged inputs of every kind, made from seeds, and what a loader makes of each: one JSON line a case.

`python hostile_cases.py FOLDER JOBS.json`, JOBS a list of [kind, seed]. A process of its own, so that
test_hostile.py can limit its memory and end it. A case is

    loaded      the loader took it; for data, [items, used, skipped] as it counts them
    refused     one error of those that the command line shows as one line with exit code 2
    traceback   any other exception          hang   more than SECONDS          wrong   it gave what was never
                written
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tarfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shard_files import captions, picture, write_tar
from tiny import tiny_fusion, tiny_vision
from tiny_run import make_tokenizer, tiny_recipe

from earlyfusion.data.config import DataConfig
from earlyfusion.data.loading.stats import append_skipped, read_skipped, skip_file
from earlyfusion.data.loading.stream import Geometry, Spec, Stream
from earlyfusion.data.prepare.cmd import prepare as prepare_verb
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline.checkpoint import Checkpointer, RunFacts
from earlyfusion.pipeline.cli import command_of, exit_code_of, invoke, one_line
from earlyfusion.pipeline.config.compose import load_config, to_toml
from earlyfusion.pipeline.plan import meta_model
from earlyfusion.pipeline.report.compare import compare
from earlyfusion.pipeline.report.run import write_report
from earlyfusion.pipeline.report.sheet import inspect
from earlyfusion.pipeline.runtime import Runtime

SECONDS = 10
MEMORY = 1 << 30
"""Bytes of address space that a case may add to those of an idle process."""
DEEP = "@deep@"
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**12,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 5000,
    "\ud83d",
    "\0",
    "\u2028\x85",
    "²",
    "../../../../etc/passwd",
    "/etc/passwd",
    "$\\x$",
    "<script>alert(1)</script>",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a"],
    DEEP,
]
"""What no writer of a file meant to say."""


class Hang(BaseException):
    """A case took too long; not an Exception, so that no loader can take it for one of its own."""


def damage(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, taken out, put in, zeroed or doubled; numbers made huge. A third have one bit
    flipped."""
    made = bytearray(data)
    if made and rng.random() < 0.33:
        made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        return bytes(made)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(made) + 1), rng.randint(1, max(1, len(made) // 8))
        way = rng.randrange(7)
        if way == 0:
            for _ in range(min(len(made), rng.randint(1, 16))):
                made[rng.randrange(len(made))] = rng.randrange(256)
        elif way == 1:
            del made[at:]
        elif way == 2:
            del made[at : at + length]
        elif way == 3:
            made[at:at] = rng.randbytes(length % 300)
        elif way == 4:
            made[at : at + length] = bytes(len(made[at : at + length]))
        elif way == 5:
            made[at:at] = made[at : at + length]
        else:
            made = bytearray(re.sub(rb"\d+", rng.choice((b"-7", b"9" * 30, b"1e999")), bytes(made), count=1))
    return bytes(made)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    found = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += [(tree, key), *places(value)]
    return found


def odd(rng: random.Random, tree: Any) -> bytes:
    """The tree as JSON with one to three values replaced or taken out; now and then its bytes are damaged,
    too."""
    tree = copy.deepcopy(tree)
    if rng.random() < 0.1:
        tree = rng.choice(ODD)
    for _ in range(rng.randint(1, 3)):
        if not (found := places(tree)):
            break
        container, key = rng.choice(found)
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    text = json.dumps(tree).replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000).encode()
    return damage(rng, text) if rng.random() < 0.15 else text


def run_prepare(words):
    """`earlyfusion prepare` with these words; its errors pass."""
    return invoke(command_of(prepare_verb, "prepare"), words, "prepare")


class World:
    """What is right, made once; every case damages a copy of a part."""

    def __init__(self, root: Path) -> None:
        os.environ["EF_CACHE"] = str(root / "cache")
        self.root = root
        self.words = make_tokenizer(root, 300)
        self.tokenizer = Tokenizer.load(self.words)
        self.vision = tiny_vision()
        self.tar = write_tar(root / "whole.tar", captions(3)).read_bytes()
        self.prepared = root / "prepared"
        write_tar(root / "source.tar", captions(4))
        self.prepare(root / "source.tar", self.prepared)
        torch.manual_seed(0)
        text = {"vocab_size": self.tokenizer.vocab_size, "tie_word_embeddings": True}
        fusion = tiny_fusion(**text).model_copy(update={"media_token_id": self.tokenizer.media_pad_id})
        self.model = save_model(NativeFusion(fusion), self.tokenizer, root / "model")
        self.checkpoints = root / "run"
        for step in (1, 2):
            self.keeper(self.checkpoints).save(step, **self.state(step))

    @staticmethod
    def keeper(folder: Path) -> Checkpointer:
        return Checkpointer(folder, Runtime(), RunFacts({"stages": []}, "words", 300), keep=5)

    @staticmethod
    def state(step: int) -> dict[str, Any]:
        weights = {"w": torch.arange(64.0) * step}
        return {
            "model": weights,
            "optimizer": {"m": weights["w"] / 2},
            "trainer": {"n": step},
            "lanes": {0: [step, 7]},
        }

    def prepare(self, source: Path, out: Path) -> list[int] | None:
        """[items, stored, left out] by index.json."""
        run_prepare(
            [
                str(source),
                "--out",
                str(out),
                "--workers",
                "1",
                "--tokenizer",
                str(self.words),
                "--vision",
                "tiny",
            ]
        )
        made = json.loads((out / "index.json").read_text())
        return [made["items"], made["samples"], sum(made["skipped"].values())]

    def read(self, kind: str, path: Path, **options: Any) -> list[int]:
        """[items, used, left out] of one epoch as training counts them; the log of those left out must
        agree."""
        config = SourceConfig(name="mine", kind=kind, path=str(path), max_epochs=1, options=options)
        data = DataConfig(sources=[config], on_bad_sample="skip", val_fraction=0.0, prefetch="none")
        source = build_source(config, val_fraction=0.0)
        stream = Stream(source, Spec(data, self.tokenizer, self.vision, Geometry(512, 512, 4096)), 0)
        while stream.next_piece() is not None:
            pass
        log = skip_file(path.parent)
        entries = [{"stage": 0, "step": 0, "lane": 0, **entry} for entry in stream.noted]
        append_skipped(log, entries)
        assert len(read_skipped(path.parent)) == sum(stream.skipped.values()) == len(stream.noted)
        out = str(path.parent / "sheet.html")
        inspect(str(path), out=Path(out), samples=3, tokenizer=str(self.words))
        return [len(source), stream.given[0], sum(stream.skipped.values())]


Case = Callable[[World, random.Random, Path], Any]
KINDS: dict[str, tuple[Case, int]] = {}
"""Kind -> (what a loader makes of one case, cases)."""


def kind(count: int) -> Callable[[Case], Case]:
    def enter(case: Case) -> Case:
        KINDS[case.__name__] = (case, count)
        return case

    return enter


@kind(60)
def tar_bytes(world: World, rng: random.Random, folder: Path) -> Any:
    (folder / "a.tar").write_bytes(damage(rng, world.tar))
    return world.read("webdataset", folder / "a.tar")


@kind(50)
def tar_names(world: World, rng: random.Random, folder: Path) -> Any:
    names = [
        "a.\udcff.txt",
        "\udcff\udcfe.txt",
        "..",
        "a",
        "a\u2028b.txt",
        "x" * 300 + ".jpg",
        "/etc/x.txt",
        "a.json",
        "\0.txt",
        "c:\\x.txt",
        "a/./b.txt",
        ".txt",
        "a.",
        "é.txt",
        "$\\x$.txt",
        "<script>.txt",
        "a.txt.",
        "dir/",
    ]
    with tarfile.open(
        folder / "a.tar", "w", format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    ) as tar:
        for _ in range(rng.randint(1, 8)):
            info = tarfile.TarInfo(rng.choice(names))
            content = rng.choice((b"words", b"", b"caf\xe9", picture(1), b'{"caption": "\\ud83d"}'))
            info.size, info.type = len(content), rng.choice((b"0", b"0", b"0", b"2", b"1", b"S", b"V"))
            info.linkname = "/etc/passwd"
            if rng.random() < 0.4:
                headers = ("size", "path", "GNU.sparse.major", "mtime", "linkpath")
                info.pax_headers = {rng.choice(headers): rng.choice(("²", "9" * 30, "-1", "../x", "1 2", ""))}
            tar.addfile(info, io.BytesIO(content))
    return world.read("webdataset", folder / "a.tar")


@kind(40)
def packed(world: World, rng: random.Random, folder: Path) -> Any:
    import zstandard

    lines = b"".join(json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(40))
    inside, name = rng.choice(((world.tar, "a.tar"), (lines, "a.jsonl")))
    way, end = rng.choice(((gzip.compress, ".gz"), (zstandard.compress, ".zst")))
    path = folder / f"{name}{end}"
    path.write_bytes(damage(rng, way(inside)))
    return world.read("webdataset" if name == "a.tar" else "text_files", path)


@kind(1)
def bomb(world: World, rng: random.Random, folder: Path) -> Any:
    """300 MB of one line in 300 kB."""
    with gzip.open(folder / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"a" * 1_000_000)
    return world.read("text_files", folder / "a.jsonl.gz")


@kind(50)
def index_rows(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.prepared, folder / "p")
    path = folder / "p" / "shard-000000.index.jsonl"
    lines = path.read_bytes().split(b"\n")
    at = rng.randrange(len(lines) - 1)
    lines[at] = odd(rng, json.loads(lines[at])).replace(b"\n", b" ")
    path.write_bytes(b"\n".join(lines))
    if rng.random() < 0.5:
        (folder / "p" / "index.json").unlink()
    return world.read("webdataset", folder / "p")


@kind(50)
def index_json(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.prepared, folder / "p")
    path = folder / "p" / "index.json"
    tree = json.loads(path.read_bytes())
    if rng.random() < 0.4:
        tree["shards"][0]["samples"] = rng.choice((0, 3, 5, 10**12, -1, 1.5, True, "4"))
    path.write_bytes(json.dumps(tree).encode() if rng.random() < 0.2 else odd(rng, tree))
    with contextlib.suppress(
        ValueError
    ):  # DataError: the folder may be refused, and then nothing was changed
        run_prepare(["--out", str(folder / "p"), "--verify"])
    return world.read("webdataset", folder / "p")


@kind(60)
def text_lines(world: World, rng: random.Random, folder: Path) -> Any:
    lines = [odd(rng, {"text": f"line {i}"}).replace(b"\n", b" ") for i in range(6)]
    (folder / "a.jsonl").write_bytes(b"\n".join([*lines, damage(rng, lines[0])]))
    return world.read("text_files", folder / "a.jsonl")


ROW = {
    "messages": [
        {"role": "user", "content": "<image>how many?"},
        {
            "role": "assistant",
            "content": "3",
            "reasoning_content": "one two three",
            "weight": 1.0,
            "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "1"}'}}],
        },
        {"role": "tool", "name": "python", "index": 1, "content": "1"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "so"}, {"type": "image", "image": "a.png"}],
        },
    ],
    "images": ["a.png"],
    "tools": [{"name": "python"}],
}


@kind(60)
def chat_rows(world: World, rng: random.Random, folder: Path) -> Any:
    (folder / "a.png").write_bytes(picture(1, form="PNG"))
    (folder / "link.png").symlink_to("/etc/passwd")
    rows = [
        odd(rng, ROW).replace(b"a.png", rng.choice((b"a.png", b"link.png", b"../a.png"))) for _ in range(5)
    ]
    (folder / "a.jsonl").write_bytes(
        b"\n".join([json.dumps(ROW).encode(), *(row.replace(b"\n", b" ") for row in rows)])
    )
    return world.read("chat_files", folder / "a.jsonl")


@kind(60)
def folder_files(world: World, rng: random.Random, folder: Path) -> Any:
    root = folder / "f"
    root.mkdir()
    entry = {"caption": "words", "questions": [{"question": "how many?", "answer": "3"}]}
    for i in range(3):
        (root / f"{i}.png").write_bytes(picture(i, form="PNG"))
        (root / f"{i}.json").write_bytes(odd(rng, entry))
    rows = [odd(rng, {"text": "words", "image": "0.png"}).replace(b"\n", b" ") for _ in range(3)]
    (root / "rows.jsonl").write_bytes(b"\n".join(rows))
    (root / "notes.txt").write_bytes(damage(rng, "wörds".encode()))
    (root / "link.md").symlink_to("/etc/passwd")
    (root / "circle").symlink_to(root)
    (root / os.fsdecode(b"\xff.txt")).write_bytes(b"")
    os.mkfifo(root / "pipe.txt")
    return world.read("folder", root)


ENTRIES: list[dict[str, Any]] = [
    {
        "caption": "a cup",
        "boxes": [[1, 2, 10, 12]],
        "labels": ["cup"],
        "coordinates": "absolute",
        "box_format": "xyxy",
    },
    {"regions": [{"label": "cup", "box": [1, 2, 10, 12]}, {"label": "dot", "point": [3, 4]}]},
    {"ocr": [{"text": "words", "box": [1, 2, 10, 12]}]},
    {
        "conversations": [{"from": "human", "value": "<image>how?"}, {"from": "gpt", "value": "so"}],
        "image": "a.png",
    },
    {"texts": ["a", None, "b"], "images": [None, "a.png", None]},
    {"text_list": ["a", "b"], "image_info": [{"matched_text_index": 0, "image_name": "a.png"}]},
    {"questions": [{"question": "how many?", "answer": ["3", "three"]}]},
]


@kind(60)
def records(world: World, rng: random.Random, folder: Path) -> Any:
    members = []
    for i in range(6):
        members += [(f"{i}.png", picture(i, form="PNG")), (f"{i}.json", odd(rng, rng.choice(ENTRIES)))]
    write_tar(folder / "a.tar", members)
    return world.read("webdataset", folder / "a.tar")


@kind(60)
def pictures(world: World, rng: random.Random, folder: Path) -> Any:
    root = folder / "f"
    root.mkdir()
    for i in range(4):
        form = rng.choice(("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"))
        (root / f"{i}.png").write_bytes(damage(rng, picture(i, form=form)))
        (root / f"{i}.txt").write_text("words")
    return world.read("folder", root)


@kind(30)
def clips(world: World, rng: random.Random, folder: Path) -> Any:
    from clip_files import numbered, write_clip

    if not hasattr(world, "clip"):
        kinds = ("mpeg4-open", "gif", "h264-mkv")
        world.clip = {c: write_clip(numbered(6, 48, 32), c) for c in kinds}  # type: ignore[attr-defined]
    codec = rng.choice(list(world.clip))  # type: ignore[attr-defined]
    data = damage(rng, world.clip[codec])  # type: ignore[attr-defined]
    write_tar(folder / "a.tar", [("0.mp4", data), ("0.txt", b"words"), ("1.gif", data), ("1.txt", b"words")])
    return world.read("webdataset", folder / "a.tar")


@kind(40)
def tables(world: World, rng: random.Random, folder: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    column = rng.choice(
        (["a", "b", None] * 20, [1, 2, 3], [["a"], []], [{"x": 1}], [1.5], [b"caf\xe9", b"\xff"], [None])
    )
    parquet.write_table(pa.table({"text": column}), folder / "a.parquet", row_group_size=7)
    if rng.random() < 0.7:
        (folder / "a.parquet").write_bytes(damage(rng, (folder / "a.parquet").read_bytes()))
    if rng.random() < 0.5:
        return world.prepare(folder / "a.parquet", folder / "out")
    return world.read("text_files", folder / "a.parquet")


@kind(30)
def datasets_on_disk(world: World, rng: random.Random, folder: Path) -> Any:
    import datasets

    if not (whole := world.root / "dataset").exists():
        rows = {"text": ["one", "two"], "image": [{"bytes": picture(1), "path": None}] * 2}
        datasets.Dataset.from_dict(rows).save_to_disk(str(whole))
    shutil.copytree(whole, folder / "d")
    path = rng.choice(sorted((folder / "d").iterdir()))
    data = path.read_bytes()
    path.write_bytes(
        odd(rng, json.loads(data)) if path.suffix == ".json" and rng.random() < 0.8 else damage(rng, data)
    )
    return world.prepare(folder / "d", folder / "out")


@kind(50)
def rows_to_prepare(world: World, rng: random.Random, folder: Path) -> Any:
    (folder / "a.png").write_bytes(picture(1, form="PNG"))
    rows = [odd(rng, {**rng.choice(ENTRIES), "image": "a.png"}).replace(b"\n", b" ") for _ in range(6)]
    rows.append(b'{"text": "words"}')
    (folder / "a.jsonl").write_bytes(b"\n".join(rows))
    return world.prepare(folder / "a.jsonl", folder / "out")


@kind(30)
def half_prepared(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.prepared, folder / "out")
    (folder / "out" / "index.json").unlink()
    path = folder / "out" / rng.choice((".prepare.json", "shard-000000.index.jsonl", "shard-000000.tar"))
    path.write_bytes(damage(rng, path.read_bytes()))
    return world.prepare(world.root / "source.tar", folder / "out")


@kind(70)
def model_config(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.model, folder / "m")
    path = folder / "m" / "config.json"
    tree = json.loads(path.read_bytes())
    if rng.random() < 0.5:
        section = tree[rng.choice(("text_config", "vision_config"))]
        section[rng.choice([key for key in section if key != "model_type"])] = 10 ** rng.choice(
            (6, 9, 12, 18)
        )
        path.write_text(json.dumps(tree))
    else:
        path.write_bytes(odd(rng, tree))
    load_model(folder / "m")


@kind(50)
def weights(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.model, folder / "m")
    path = folder / "m" / "model.safetensors"
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        where = {"weight_map": {"decoder.norm.weight": "model.safetensors"}}
        (folder / "m" / "model.safetensors.index.json").write_bytes(odd(rng, where))
    else:
        numbers = data[:-1] + bytes([rng.randrange(256)])  # any are numbers
        path.write_bytes(numbers if rng.random() < 0.2 else damage(rng, data[:head]) + data[head:])
    load_model(folder / "m")


@kind(60)
def tokenizers(world: World, rng: random.Random, folder: Path) -> Any:
    shutil.copytree(world.words, folder / "t")
    path = folder / "t" / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    tree = json.loads(path.read_bytes())
    way = rng.random()
    if way < 0.2 and "model" in tree:
        double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        tree["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
        path.write_text(json.dumps(tree))
    elif way < 0.5 and "model" in tree:
        tree["added_tokens"][0]["id"] = rng.choice((-1, 2**32 - 1, 2**40, 1.5, None))
        tree["model"]["vocab"][rng.choice(list(tree["model"]["vocab"]))] = rng.choice(
            (-1, 2**32 - 1, 2**31, 7)
        )
        path.write_text(json.dumps(tree))
    else:
        path.write_bytes(odd(rng, tree) if way < 0.8 else damage(rng, path.read_bytes()))
    words = Tokenizer.load(folder / "t")
    words.decode(words.encode("aaaa the cat\n"))
    assert len(words.ends_line) == words.vocab_size and words.hash and words.special_ids


@kind(60)
def recipes(world: World, rng: random.Random, folder: Path) -> Any:
    tree = tiny_recipe(world.words)
    path = folder / "r.toml"
    text = to_toml(tree).encode()
    if rng.random() < 0.4:
        text = damage(rng, text)
    else:
        values = (
            "-1",
            "[]",
            "{}",
            '""',
            "true",
            "1e999",
            "nan",
            "9" * 400,
            "9" * 5000,
            "[" * 5000,
            '"/dev/zero"',
            '"\\uD800"',
            "1979-05-27",
            "1000000",
            "1000000000",
            '"pipe:touch x"',
        )
        lines = text.split(b"\n")
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([i for i, line in enumerate(lines) if b" = " in line])
            lines[at] = lines[at].split(b" = ")[0] + b" = " + rng.choice(values).encode()
        text = b"\n".join([rng.choice((b"", b"", b"", b'extends = "r.toml"', b"extends = 5")), *lines])
    path.write_bytes(text)
    meta_model(load_config([path]))


@kind(60)
def checkpoints(world: World, rng: random.Random, folder: Path) -> Any:
    """Whatever is damaged in the newest, what is loaded is what was saved: by it, or by the one before."""
    shutil.copytree(world.checkpoints, folder / "run")
    path = rng.choice(sorted((folder / "run" / "checkpoints" / "step-000002").iterdir()))
    data = path.read_bytes()
    if rng.random() < 0.5:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    else:
        path.write_bytes(damage(rng, data))
    loaded = world.keeper(folder / "run").start(resume=True)
    true = world.state(loaded.step)
    same = torch.equal(loaded.model["w"], true["model"]["w"]) and torch.equal(
        loaded.optimizer["m"], true["optimizer"]["m"]
    )
    assert same and loaded.trainer == true["trainer"] and loaded.lanes == true["lanes"]


@kind(9)
def run_folders(world: World, rng: random.Random, folder: Path) -> Any:
    name = rng.choice(("a", "$\\x$ b$", "<script>", "\ud83d", "\0"))
    record = {
        "step": 1,
        "event": "train",
        "loss": 2.0,
        f"loss/source/{name}": 2.0,
        f"data/share/{name}": 0.5,
        "lr": 1e-3,
        "expert_load": {"1": [0.5, 0.5]},
        "max_logit": {"3": [5.0, 7.0]},
        "message": name,
    }
    lines = [json.dumps({**record, "step": i}).encode() for i in range(4)]
    lines += [odd(rng, record).replace(b"\n", b" ") for _ in range(4)]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    vqa = {
        "name": "easy_vqa",
        "step": 1,
        "accuracy": 0.5,
        "blind_accuracy": 0.4,
        "majority_accuracy": 0.3,
        "questions": 4,
        "by_kind": {name: {"questions": "<script>alert(1)</script>", "accuracy": 0.9}},
    }
    samples = {
        "step": 1,
        "samples": [{"image": rng.choice(("a\0.png", "\ud83d", "x" * 5000)), "prompt": name, "answer": name}],
    }
    for place, tree in (("eval/vqa.json", vqa), ("samples/1.json", samples), ("facts.json", {"name": name})):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(odd(rng, tree) if rng.random() < 0.5 else json.dumps(tree).encode())
    assert "<script" not in write_report(folder).read_text(encoding="utf-8")


@kind(12)
def comparisons(world: World, rng: random.Random, folder: Path) -> Any:
    for arm in ("base", "treated"):
        place = folder / arm / "mmlu"
        place.mkdir(parents=True)
        names = ("math", "$\\x$ b$", "<script>alert(1)</script>", "[/bold]")
        rows = [
            {
                "id": str(i),
                "repeat": 0,
                "prompt_hash": f"p{i}",
                "score": float(i % 2),
                "category": names[i % 4],
                "tokens": 7,
            }
            for i in range(12)
        ]
        lines = [json.dumps(row).encode() for row in rows]
        if rng.random() < 0.25:
            lines[0] = odd(rng, rows[0]).replace(b"\n", b" ")
        (place / "records.jsonl").write_bytes(b"\n".join(lines))
        summary = {"task": "mmlu", "data_hash": "<script>/*", "metrics": {"chance": 0.1}}
        (place / "summary.json").write_bytes(
            json.dumps(summary).encode() if rng.random() < 0.8 else odd(rng, summary)
        )
    compare(str(folder / "base"), str(folder / "treated"), out=folder, draws=100, flips=100)
    assert "<script" not in (folder / "compare.html").read_text(encoding="utf-8")


def measured(world: World, name: str, seed: int) -> dict[str, Any]:
    """One case: its outcome, counts, message, seconds."""
    folder = world.root / f"{name}-{seed}"
    folder.mkdir()
    began = time.perf_counter()
    told: dict[str, Any] = {"kind": name, "seed": seed, "outcome": "loaded", "message": "", "counts": None}
    try:
        signal.alarm(SECONDS)
        with open(os.devnull, "w", encoding="utf-8") as quiet, contextlib.redirect_stdout(quiet):
            told["counts"] = KINDS[name][0](world, random.Random(f"{name} {seed}"), folder)
    except Hang:
        told |= {"outcome": "hang", "message": traceback.format_exc()}
    except AssertionError:
        told |= {"outcome": "wrong", "message": traceback.format_exc()}
    except BaseException as error:
        refused = exit_code_of(error) == 2
        told |= {"outcome": "refused" if refused else "traceback"}
        told["message"] = one_line(error) if refused else traceback.format_exc()
    finally:
        signal.alarm(0)
    shutil.rmtree(folder)
    return {**told, "seconds": time.perf_counter() - began}


def main() -> None:
    world = World(Path(sys.argv[1]))
    jobs = json.loads(Path(sys.argv[2]).read_text())

    def ring(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    warnings.simplefilter("ignore")
    for name in dict.fromkeys(name for name, _ in jobs if name != "bomb"):
        measured(world, name, -1)  # whatever is imported late is imported before memory is limited
    idle = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (idle + MEMORY, idle + MEMORY))
    for name, seed in jobs:
        print(json.dumps(measured(world, name, seed)), flush=True)


if __name__ == "__main__":
    main()
