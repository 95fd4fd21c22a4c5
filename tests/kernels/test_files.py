"""Files are written whole or not at all, and an unknown name is answered with the nearest."""

import json
import math
import os

import numpy as np
import pytest

from earlyfusion.kernels import files
from earlyfusion.kernels.errors import did_you_mean, nearest
from earlyfusion.kernels.files import read_jsonl, replacing, write_atomic, write_json


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "deep" / "file", "old")
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(path.parent) == ["file"]


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(files.os, "fsync", lambda handle: calls.append("fsync"))
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    write_atomic(tmp_path / "a", b"1")
    write_atomic(tmp_path / "a", b"2", sync=False)
    assert calls == ["fsync", "replace", "replace"] and (tmp_path / "a").read_bytes() == b"2"


def test_text_is_utf8_with_its_line_ends_and_half_a_character_escaped(tmp_path):
    assert write_atomic(tmp_path / "a", "ö\r\n\ud800").read_bytes() == b"\xc3\xb6\r\n\\ud800"
    assert json.loads(write_json(tmp_path / "b", {"ö": [1]}).read_text("utf-8")) == {"ö": [1]}


def test_json_is_strict_whatever_is_written(tmp_path):
    path = write_json(
        tmp_path / "a", {1: math.nan, "b": (np.float32(0.5), -math.inf, None, True), "c": tmp_path}
    )
    expected = {"1": None, "b": [0.5, None, None, True], "c": str(tmp_path)}
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == expected


def test_torn_lines_and_what_is_no_object_are_left_out(tmp_path):
    deep = "[" * 100_000
    (tmp_path / "a").write_bytes(b'{"x": "a\xe2\x80\xa8b"}\n\n[1]\n' + deep.encode() + b'\n{"y": 1}\n{"z"')
    assert read_jsonl(tmp_path / "a") == [{"x": "a\u2028b"}, {"y": 1}]
    assert read_jsonl(tmp_path / "none") == []


def test_the_nearest_name_is_said_and_all_where_they_are_few_or_none_is_near():
    many = [f"name{i}" for i in range(20)]
    assert nearest("pretrian", ["pretrain", "plan"]) == "pretrain" and nearest("xyz", ["pretrain"]) is None
    assert did_you_mean("pln", ["plan", "sft"]) == "did you mean 'plan'? (known: plan, sft)"
    assert did_you_mean("name21", many) == "did you mean 'name2'?"
    assert did_you_mean("xyz", ["plan", "sft"]) == "known: plan, sft"
    assert did_you_mean("x", []) == "nothing is known here"
