"""Damaged inputs of every kind, made from seeds, and what a loader makes of each: one JSON line a case.

`python hostile_cases.py FOLDER JOBS.json`, JOBS a list of [kind, seed]. A process of its own, so that
test_hostile.py can limit its memory and end it. A case is

    loaded      the loader took it; for data, [items, used, skipped] as it counts them
    refused     one error of those that the command line shows as one line with exit code 2
    traceback   any other exception          hang   more than SECONDS          wrong   it gave what was never
                written
"""

import contextlib
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import traceback
import warnings
from functools import cached_property
from pathlib import Path

import torch
from damage import ENTRIES, damage, odd, odd_rows, put, spoil
from shard_files import captions, picture, write_tar
from tiny import tiny_fusion, tiny_vision
from tiny_run import make_tokenizer, tiny_recipe
from tiny_state import restored, trained

from earlyfusion.data.config import DataConfig
from earlyfusion.data.loading.lane import Geometry, Spec, Stream, Watch
from earlyfusion.data.loading.loader import append_skipped, read_skipped, skip_file
from earlyfusion.data.prepare.cmd import prepare as prepare_verb
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline.build import meta_model
from earlyfusion.pipeline.checkpoint import Checkpointer, RunFacts
from earlyfusion.pipeline.cli import command_of, exit_code_of, invoke, one_line
from earlyfusion.pipeline.config.compose import load_config, to_toml
from earlyfusion.pipeline.report.compare import compare
from earlyfusion.pipeline.report.page import write_report
from earlyfusion.pipeline.report.sheet import inspect
from earlyfusion.pipeline.runtime import Runtime

SECONDS = 10
MEMORY = 1 << 30
"""Bytes of address space that a case may add to those of an idle process."""


class Hang(BaseException):
    """A case took too long; not an Exception, so that no loader can take it for one of its own."""


def run_prepare(*words):
    """`earlyfusion prepare` with these words; its errors pass."""
    return invoke(command_of(prepare_verb, "prepare"), [str(word) for word in words], "prepare")


class World:
    """What is right, made once; every case damages a copy of a part."""

    def __init__(self, root):
        os.environ["EF_CACHE"] = str(root / "cache")
        self.root = root
        self.words = make_tokenizer(root, 300)
        self.tokenizer = Tokenizer.load(self.words)
        self.tar = write_tar(root / "whole.tar", captions(3)).read_bytes()
        self.prepared = root / "prepared"
        self.prepare(write_tar(root / "source.tar", captions(4)), self.prepared)

        torch.manual_seed(0)
        fusion = tiny_fusion(vocab_size=self.tokenizer.vocab_size, tie_word_embeddings=True)
        fusion = fusion.model_copy(update={"media_token_id": self.tokenizer.media_pad_id})
        self.model = save_model(NativeFusion(fusion), self.tokenizer, root / "model")
        self.run = root / "run"
        for step in (1, 2):
            self.keeper(self.run).save(step, **self.state(step))

    @staticmethod
    def keeper(folder):
        return Checkpointer(folder, Runtime(), RunFacts({"stages": []}, "words", 300), keep=5)

    @staticmethod
    def state(step):
        model, optimizer = trained(step)
        return dict(model=model, optimizer=optimizer, trainer={"n": step}, lanes={0: [step, 7]})

    @cached_property
    def clips(self):
        from clip_files import numbered, write_clip

        return [write_clip(numbered(6, 48, 32), codec) for codec in ("mpeg4-open", "gif", "h264-mkv")]

    def prepare(self, source, out):
        """[items, stored, left out] by index.json."""
        run_prepare(source, "--out", out, "--workers", 1, "--tokenizer", self.words, "--vision", "tiny")
        made = json.loads((out / "index.json").read_text())
        return [made["items"], made["samples"], sum(made["skipped"].values())]

    def read(self, kind, path):
        """[items, used, left out] of one epoch as training counts them; the log of those left out must
        agree."""
        config = SourceConfig(name="mine", kind=kind, path=str(path), max_epochs=1)
        data = DataConfig(sources=[config], on_bad_sample="skip", val_fraction=0.0, prefetch="none")
        source = build_source(config, val_fraction=0.0)
        spec = Spec(data, self.tokenizer, tiny_vision(), Geometry(512, 512, 4096), {"mine": 1.0})
        stream = Stream(source, spec, 0, Watch())
        while stream.next_piece() is not None:
            pass

        entries = [{"stage": 0, "step": 0, "lane": 0, **entry} for entry in stream.skipped]
        append_skipped(skip_file(path.parent), entries)
        assert len(read_skipped(path.parent)) == len(entries)
        # Drawing a page takes twenty times what reading takes.
        if self.seed % 4 == 0:
            inspect(str(path), out=path.parent / "sheet.html", samples=3)
        return [len(source), stream.documents, len(entries)]


KINDS = {}
"""Kind -> (what a loader makes of one case, cases)."""


def kind(count):
    def enter(case):
        KINDS[case.__name__] = (case, count)
        return case

    return enter


# ---- Data: archives, rows, folders, media.


@kind(60)
def tar_bytes(world, rng, folder):
    return world.read("webdataset", put(folder / "a.tar", damage(rng, world.tar)))


NAMES = ["a.\udcff.txt", "\udcff\udcfe.txt", "x" * 300 + ".jpg", "\0.txt", "a\u2028b.txt", "dir/"]
NAMES += ".. a /etc/x.txt a.json c:\\x.txt a/./b.txt .txt a. é.txt $\\x$.txt <script>.txt a.txt.".split()
CONTENTS = [b"words", b"", b"caf\xe9", picture(1), b'{"caption": "\\ud83d"}']
HEADERS = "size path GNU.sparse.major mtime linkpath".split()


@kind(50)
def tar_names(world, rng, folder):
    form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    with tarfile.open(folder / "a.tar", "w", format=form) as tar:
        for _ in range(rng.randint(1, 8)):
            info, content = tarfile.TarInfo(rng.choice(NAMES)), rng.choice(CONTENTS)
            info.size, info.linkname = len(content), "/etc/passwd"
            info.type = rng.choice("00021SV").encode()
            if rng.random() < 0.4:
                odd_value = rng.choice(("²", "9" * 30, "-1", "../x", "1 2", ""))
                info.pax_headers = {rng.choice(HEADERS): odd_value}
            tar.addfile(info, io.BytesIO(content))
    return world.read("webdataset", folder / "a.tar")


@kind(40)
def packed(world, rng, folder):
    import zstandard

    lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(40))
    inside, name, form = rng.choice(((world.tar, "a.tar", "webdataset"), (lines, "a.jsonl", "text_files")))
    pack, end = rng.choice(((gzip.compress, ".gz"), (zstandard.compress, ".zst")))
    return world.read(form, put(folder / f"{name}{end}", damage(rng, pack(inside))))


@kind(1)
def bomb(world, rng, folder):
    """300 MB of one line in 300 kB."""
    with gzip.open(folder / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"a" * 1_000_000)
    return world.read("text_files", folder / "a.jsonl.gz")


@kind(50)
def index_rows(world, rng, folder):
    root = shutil.copytree(world.prepared, folder / "p")
    path = root / "shard-000000.index.jsonl"
    lines = path.read_bytes().split(b"\n")
    at = rng.randrange(len(lines) - 1)
    lines[at] = odd(rng, json.loads(lines[at]))
    put(path, *lines)
    if rng.random() < 0.5:
        (root / "index.json").unlink()
    return world.read("webdataset", root)


@kind(50)
def index_json(world, rng, folder):
    root = shutil.copytree(world.prepared, folder / "p")
    tree = json.loads((root / "index.json").read_bytes())
    if rng.random() < 0.4:
        tree["shards"][0]["samples"] = rng.choice((0, 3, 5, 10**12, -1, 1.5, True, "4"))
    put(root / "index.json", json.dumps(tree).encode() if rng.random() < 0.2 else odd(rng, tree))
    # The folder may be refused (DataError), and then nothing was changed.
    with contextlib.suppress(ValueError):
        run_prepare("--out", root, "--verify")
    return world.read("webdataset", root)


@kind(60)
def text_lines(world, rng, folder):
    lines = odd_rows(rng, {"text": "a line"}, 6)
    return world.read("text_files", put(folder / "a.jsonl", *lines, damage(rng, lines[0])))


ROW = r"""{
    "messages": [
        {"role": "user", "content": "<image>how many?"},
        {"role": "assistant", "content": "3", "reasoning_content": "one two three", "weight": 1.0,
         "tool_calls": [{"function": {"name": "python", "arguments": "{\"code\": \"1\"}"}}]},
        {"role": "tool", "name": "python", "index": 1, "content": "1"},
        {"role": "assistant",
         "content": [{"type": "text", "text": "so"}, {"type": "image", "image": "a.png"}]}
    ],
    "images": ["a.png"],
    "tools": [{"name": "python"}]
}"""


@kind(60)
def chat_rows(world, rng, folder):
    put(folder / "a.png", picture(1, form="PNG"))
    (folder / "link.png").symlink_to("/etc/passwd")
    rows = [ROW.replace("\n", "").encode()]
    for row in odd_rows(rng, json.loads(ROW), 5):
        rows.append(row.replace(b"a.png", rng.choice((b"a.png", b"link.png", b"../a.png"))))
    return world.read("chat_files", put(folder / "a.jsonl", *rows))


@kind(60)
def folder_files(world, rng, folder):
    root = folder / "f"
    entry = {"caption": "words", "questions": [{"question": "how many?", "answer": "3"}]}
    for i in range(3):
        put(root / f"{i}.png", picture(i, form="PNG"))
        put(root / f"{i}.json", odd(rng, entry))
    put(root / "rows.jsonl", *odd_rows(rng, {"text": "words", "image": "0.png"}, 3))
    put(root / "notes.txt", damage(rng, "wörds".encode()))
    put(root / os.fsdecode(b"\xff.txt"))
    (root / "link.md").symlink_to("/etc/passwd")
    (root / "circle").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    return world.read("folder", root)


@kind(60)
def records(world, rng, folder):
    members = []
    for i in range(6):
        members += [(f"{i}.png", picture(i, form="PNG")), (f"{i}.json", odd(rng, rng.choice(ENTRIES)))]
    return world.read("webdataset", write_tar(folder / "a.tar", members))


@kind(60)
def pictures(world, rng, folder):
    for i in range(4):
        form = rng.choice("PNG JPEG GIF WEBP BMP TIFF".split())
        put(folder / "f" / f"{i}.png", damage(rng, picture(i, form=form)))
        put(folder / "f" / f"{i}.txt", b"words")
    return world.read("folder", folder / "f")


@kind(30)
def clips(world, rng, folder):
    data = damage(rng, rng.choice(world.clips))
    members = [("0.mp4", data), ("0.txt", b"words"), ("1.gif", data), ("1.txt", b"words")]
    return world.read("webdataset", write_tar(folder / "a.tar", members))


COLUMNS = [["a", "b", None] * 20, [1, 2, 3], [["a"], []], [{"x": 1}], [1.5], [b"caf\xe9", b"\xff"], [None]]


@kind(40)
def tables(world, rng, folder):
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "a.parquet"
    parquet.write_table(pa.table({"text": rng.choice(COLUMNS)}), path, row_group_size=7)
    if rng.random() < 0.7:
        spoil(rng, path)
    if rng.random() < 0.5:
        return world.prepare(path, folder / "out")
    return world.read("text_files", path)


@kind(30)
def datasets_on_disk(world, rng, folder):
    import datasets

    if not (whole := world.root / "dataset").exists():
        rows = {"text": ["one", "two"], "image": [{"bytes": picture(1), "path": None}] * 2}
        datasets.Dataset.from_dict(rows).save_to_disk(str(whole))
    path = rng.choice(sorted(shutil.copytree(whole, folder / "d").iterdir()))
    data = path.read_bytes()
    as_json = path.suffix == ".json" and rng.random() < 0.8
    put(path, odd(rng, json.loads(data)) if as_json else damage(rng, data))
    return world.prepare(folder / "d", folder / "out")


@kind(50)
def rows_to_prepare(world, rng, folder):
    put(folder / "a.png", picture(1, form="PNG"))
    rows = [odd(rng, {**rng.choice(ENTRIES), "image": "a.png"}) for _ in range(6)]
    return world.prepare(put(folder / "a.jsonl", *rows, b'{"text": "words"}'), folder / "out")


@kind(30)
def half_prepared(world, rng, folder):
    out = shutil.copytree(world.prepared, folder / "out")
    (out / "index.json").unlink()
    spoil(rng, out / rng.choice((".prepare.json", "shard-000000.index.jsonl", "shard-000000.tar")))
    return world.prepare(world.root / "source.tar", out)


# ---- Models, recipes, checkpoints, reports.


@kind(70)
def model_config(world, rng, folder):
    path = shutil.copytree(world.model, folder / "m") / "config.json"
    tree = json.loads(path.read_bytes())
    text = odd(rng, tree)
    if rng.random() < 0.5:
        section = tree[rng.choice(("text_config", "vision_config"))]
        section[rng.choice([key for key in section if key != "model_type"])] = 10 ** rng.randint(6, 18)
        text = json.dumps(tree).encode()
    put(path, text)
    load_model(folder / "m")


@kind(50)
def weights(world, rng, folder):
    path = shutil.copytree(world.model, folder / "m") / "model.safetensors"
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        where = {"weight_map": {"decoder.norm.weight": "model.safetensors"}}
        put(folder / "m" / "model.safetensors.index.json", odd(rng, where))
    elif rng.random() < 0.2:
        put(path, data[:-1] + rng.randbytes(1))  # any are numbers
    else:
        put(path, damage(rng, data[:head]) + data[head:])
    load_model(folder / "m")


@kind(60)
def tokenizers(world, rng, folder):
    root = shutil.copytree(world.words, folder / "t")
    path = root / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    tree, way = json.loads(path.read_bytes()), rng.random()
    text = odd(rng, tree) if way < 0.8 else damage(rng, path.read_bytes())
    if "model" in tree and way < 0.5:
        if way < 0.2:  # forty doublings of every a
            double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
            tree["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
        else:
            tree["added_tokens"][0]["id"] = rng.choice((-1, 2**32 - 1, 2**40, 1.5, None))
            vocabulary = tree["model"]["vocab"]
            vocabulary[rng.choice(list(vocabulary))] = rng.choice((-1, 2**32 - 1, 2**31, 7))
        text = json.dumps(tree).encode()
    put(path, text)

    words = Tokenizer.load(root)
    words.decode(words.encode("aaaa the cat\n"))
    assert len(words.ends_line) == words.vocab_size and words.hash and words.special_ids


VALUES = '-1 [] {} "" true 1e999 nan "/dev/zero" "\\uD800" 1979-05-27 1000000 1000000000'.split()
VALUES += ["9" * 400, "9" * 5000, "[" * 5000, '"pipe:touch x"']


@kind(60)
def recipes(world, rng, folder):
    path, text = folder / "r.toml", to_toml(tiny_recipe(world.words)).encode()
    if rng.random() < 0.4:
        text = damage(rng, text)
    else:
        lines = text.split(b"\n")
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([i for i, line in enumerate(lines) if b" = " in line])
            lines[at] = lines[at].split(b" = ")[0] + b" = " + rng.choice(VALUES).encode()
        first = rng.choice((b"", b"", b"", b'extends = "r.toml"', b"extends = 5"))
        text = b"\n".join([first, *lines])
    meta_model(load_config([put(path, text)]))


@kind(60)
def checkpoints(world, rng, folder):
    """Whatever is damaged in the newest, what is loaded is what was saved: by it, or by the one before."""
    shutil.copytree(world.run, folder / "run")
    spoil(rng, rng.choice(sorted((folder / "run" / "checkpoints" / "step-000002").iterdir())))
    loaded = world.keeper(folder / "run").start(resume=True)
    true = world.state(loaded.step)
    assert loaded.trainer == true["trainer"] and loaded.lanes == true["lanes"]
    weight, momentum = restored(loaded)
    assert weight.tolist() == [float(loaded.step)] * 4 and torch.equal(momentum, 10 * weight)


RECORD = """{"step": 1, "event": "train", "loss": 2.0, "loss/source/NAME": 2.0, "data/share/NAME": 0.5,
    "lr": 0.001, "expert_load": {"1": [0.5, 0.5]}, "max_logit": {"3": [5.0, 7.0]}, "message": "NAME"}"""
RUN_FILES = {
    "eval/vqa.json": """{"name": "easy_vqa", "step": 1, "accuracy": 0.5, "blind_accuracy": 0.4,
        "questions": 4, "majority_accuracy": 0.3,
        "by_kind": {"NAME": {"questions": "<script>alert(1)</script>"}}}""",
    "samples/1.json": """{"step": 1, "samples": [{"image": "IMAGE", "prompt": "NAME", "answer": "NAME"}]}""",
    "facts.json": '{"name": "NAME"}',
}


@kind(9)
def run_folders(world, rng, folder):
    name = rng.choice((r"a", r"$\\x$ b$", r"<script>", r"\ud83d", r"\u0000"))
    image = rng.choice((r"a\u0000.png", r"\ud83d", "x" * 5000))
    named = lambda text: json.loads(text.replace("NAME", name).replace("IMAGE", image))
    lines = [json.dumps({**named(RECORD), "step": i}).encode() for i in range(4)]
    put(folder / "metrics.jsonl", *lines, *odd_rows(rng, named(RECORD), 4))
    for place, text in RUN_FILES.items():
        tree = named(text)
        put(folder / place, odd(rng, tree) if rng.random() < 0.5 else json.dumps(tree).encode())
    assert "<script" not in write_report(folder).read_text(encoding="utf-8")


CATEGORIES = ("math", "$\\x$ b$", "<script>alert(1)</script>", "[/bold]")


@kind(12)
def comparisons(world, rng, folder):
    summary = {"task": "mmlu", "data_hash": "<script>/*", "metrics": {"chance": 0.1}}
    for arm in ("base", "treated"):
        lines = []
        for i in range(12):
            row = {"id": str(i), "repeat": 0, "prompt_hash": f"p{i}", "score": float(i % 2), "tokens": 7}
            row["category"] = CATEGORIES[i % 4]
            lines.append(odd(rng, row) if i == 0 and rng.random() < 0.25 else json.dumps(row).encode())
        put(folder / arm / "mmlu" / "records.jsonl", *lines)
        text = json.dumps(summary).encode() if rng.random() < 0.8 else odd(rng, summary)
        put(folder / arm / "mmlu" / "summary.json", text)
    compare(base=str(folder / "base"), treated=str(folder / "treated"), out=folder)
    assert "<script" not in (folder / "compare.html").read_text(encoding="utf-8")


# ---- The process.


def measured(world, name, seed):
    """One case: its outcome, counts, message."""
    folder = world.root / f"{name}-{seed}"
    folder.mkdir()
    found = dict(kind=name, seed=seed, outcome="loaded", message="", counts=None)
    try:
        world.seed = seed
        signal.alarm(SECONDS)
        with contextlib.redirect_stdout(io.StringIO()):
            found["counts"] = KINDS[name][0](world, random.Random(f"{name} {seed}"), folder)
    except BaseException as error:
        names = {Hang: "hang", AssertionError: "wrong"}
        found |= {"outcome": names.get(type(error), "traceback"), "message": traceback.format_exc()}
        if exit_code_of(error) == 2:
            found |= {"outcome": "refused", "message": one_line(error)}
    finally:
        signal.alarm(0)
    shutil.rmtree(folder)
    return found


def main():
    world = World(Path(sys.argv[1]))
    jobs = json.loads(Path(sys.argv[2]).read_text())

    def ring(*_):
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    warnings.simplefilter("ignore")
    # Whatever is imported late is imported before memory is limited.
    for name in dict.fromkeys(name for name, _ in jobs if name != "bomb"):
        measured(world, name, -4)
    idle = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (idle + MEMORY, idle + MEMORY))
    for name, seed in jobs:
        print(json.dumps(measured(world, name, seed)), flush=True)


if __name__ == "__main__":
    main()
