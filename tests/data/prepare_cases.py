"""What the tests of `earlyfusion prepare` share."""

import hashlib
import itertools
import json
import os
import shutil
import signal

from earlyfusion.data.prepare import write as prepare_write
from earlyfusion.data.prepare.cmd import prepare as verb
from earlyfusion.data.prepare.parts import Part
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.pipeline.cli import command_of, invoke


def main(words):
    """The verb, called with the words of a command line."""
    return invoke(command_of(verb, "prepare"), words, "prepare")


def words_of(tmp_path, source, out="out", *options, workers=1):
    """The words of a preparation of `source` by the test's own tokenizer."""
    fixed = ["--tokenizer", tmp_path / "tokenizer", "--vision", "tiny", "--workers", workers]
    return [str(word) for word in (source, "--out", tmp_path / out, *fixed, *options)]


def prepare(tmp_path, source, out="out", *options, workers=1):
    main(words_of(tmp_path, source, out, *options, workers=workers))
    return json.loads((tmp_path / out / "index.json").read_text())


def samples(folder):
    source = build_source(SourceConfig(name="p", kind="webdataset", path=str(folder)), val_fraction=0.0)
    return [source.get(i, 0) for i in range(len(source))]


def skipped(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


def digest(folder):
    """Names and contents of everything a preparation leaves."""
    files = sorted(path for path in folder.iterdir() if path.name != ".lock")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed(argv, where, count):
    """Run in a child that kills itself at call number `count` of one function; returns its wait status."""
    child = os.fork()
    if child == 0:
        owner, name = {
            "add": (prepare_write.ShardSet, "add"),
            "part": (Part, "add"),
            "delete": (shutil, "rmtree"),
            "index": (prepare_write, "write_index"),
            "rename": (os, "replace"),
        }[where]
        real, calls = getattr(owner, name), itertools.count(1)

        def dying(*args, **kw):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kw)

        setattr(owner, name, dying)
        try:
            main(argv)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]
