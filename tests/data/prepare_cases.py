"""What the tests of `earlyfusion prepare` share."""

import hashlib
import json

from earlyfusion.data.prepare.cmd import main
from earlyfusion.data.sources.base import SourceConfig, build_source


def prepare(tmp_path, source, out="out", *options, workers=1):
    argv = [
        str(source),
        "--out",
        str(tmp_path / out),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--vision",
        "tiny",
    ]
    assert main([*argv, "--workers", str(workers), *map(str, options)]) == 0
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
