"""The webdataset and text_files sources: access by number, split, resume, and damage inside a loader."""

import datetime
import gzip
import json
import time

import pytest

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sources.base import SourceConfig, build_source

from .shard_files import captions, write_tar


@pytest.fixture(autouse=True)
def own_cache(tmp_path, cache, tokenizer, monkeypatch):
    monkeypatch.setenv("EF_CACHE", str(tmp_path / "cache"))


def source(kind, path, val_fraction=0.0, **options):
    config = SourceConfig(name="mine", kind=kind, path=path and str(path), options=options)
    return build_source(config, val_fraction=val_fraction)


def texts_of(path, **options):
    files = source("text_files", path, **options)
    return [files.get(i, 0).text for i in range(len(files))]


# ---- webdataset


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path):
    prints = []
    for folder, count in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "s.tar", captions(count))
        prints.append(source("webdataset", tmp_path / folder).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_going_on_from_a_far_position_reads_nothing_before_it(tmp_path, monkeypatch):
    members = [
        (f"{i:06d}.{end}", data) for i in range(10_000) for end, data in (("jpg", b"J" * 50), ("txt", b"t"))
    ]
    path = write_tar(tmp_path / "a.tar", members)
    source("webdataset", path)  # the index is made once
    read = []
    from earlyfusion.data.shards.read import LocalFile

    real = LocalFile.__call__
    monkeypatch.setattr(LocalFile, "__call__", lambda self, o, s: read.append((o, s)) or real(self, o, s))
    start = time.perf_counter()
    again = source("webdataset", path)
    sample = again.get(9_999, 0)
    seconds = time.perf_counter() - start
    assert sample.key == "a.tar/009999" and len(read) == 2 and min(o for o, _ in read) > 9_990 * 1024
    assert seconds < 0.5  # measured 10 ms; the issue allows 2 s


# ---- text files


LINES = [json.dumps({"text": f"document {i} é", "n": i}, ensure_ascii=False) for i in range(50)]


def compressed(name, data):
    if name.endswith(".gz"):
        return gzip.compress(data)
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames, as appending to a file gives
        return zstandard.ZstdCompressor().compress(data[:half]) + zstandard.ZstdCompressor().compress(
            data[half:]
        )
    return data


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("ending", ["", "\n", "\n\n \n"])
def test_json_lines_are_documents(tmp_path, name, ending):
    raw = ("\n\n".join(LINES[:3]) + "\r\n" + "\n".join(LINES[3:]) + ending).encode()
    (tmp_path / name).write_bytes(compressed(name, raw))
    assert texts_of(tmp_path / name) == [f"document {i} é" for i in range(50)]


def test_rows_of_parquet_are_documents_over_row_groups(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(50)), "body": [f"document {i} é" for i in range(49)] + [None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    files = source("text_files", tmp_path, text_field="body")
    assert [files.get(i, 0).text for i in (48, 0, 13)] == ["document 48 é", "document 0 é", "document 13 é"]
    with pytest.raises(BadSample, match=r"a\.parquet:50: the text is empty") as caught:
        files.get(49, 0)
    assert caught.value.reason == "empty_text"
    with pytest.raises(DataError, match="no column 'text'; there are"):
        source("text_files", tmp_path)


def test_parquet_without_texts_or_with_damaged_pages_is_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for column in ([datetime.date(2026, 1, 1)], [1, 2], [["a"]], [{"x": 1}], [None]):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"a\.parquet: column 'text' holds .*, expected text"):
            source("text_files", tmp_path)
    texts = [f"document {i} " + "words " * 50 for i in range(40)]
    parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10, compression="gzip"
    )
    data = (tmp_path / "a.parquet").read_bytes()
    at = data.index(b"\x1f\x8b", len(data) // 3)
    (tmp_path / "a.parquet").write_bytes(data[:at] + bytes(20) + data[at + 20 :])
    with pytest.raises(DataError, match=r"a\.parquet: damaged after row \d+ "):
        source("text_files", tmp_path)


def test_plain_text_is_one_document_or_chunks_at_line_ends(tmp_path):
    text = "".join(f"line {i} é\n" for i in range(300)) + "no end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.md").write_text("# small\n")
    assert texts_of(tmp_path) == [text, "# small\n"]
    chunks = texts_of(tmp_path, chunk_bytes=500)
    assert "".join(chunks) == text + "# small\n" and len(chunks) > 5
    assert all(500 <= len(chunk.encode()) < 520 for chunk in chunks[:-2])


def test_text_files_by_glob_braces_and_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    for i in range(3):
        (tmp_path / f"t{i}.jsonl").write_text(LINES[i] + "\n", encoding="utf-8")
    expected = [f"document {i} é" for i in range(3)]
    assert (
        texts_of(tmp_path)
        == texts_of(f"{tmp_path}/t*.jsonl")
        == texts_of(f"{tmp_path}/t{{0..2}}.jsonl")
        == expected
    )
    fsspec.filesystem("memory").pipe("/t/a.jsonl", LINES[4].encode())
    assert texts_of("memory://t/a.jsonl") == ["document 4 é"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "encoding"),
        (b"{text}", "bad_json"),
        (b'{"body": 1}', "bad_json"),
        (b'{"text": " "}', "empty_text"),
        (b'["text"]', "bad_json"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    files = source("text_files", tmp_path)
    assert files.get(0, 0).text == "good"
    with pytest.raises(BadSample, match=r"a\.jsonl:2: ") as caught:
        files.get(1, 0)
    assert caught.value.reason == reason


def test_nothing_to_read_is_one_clear_line(tmp_path):
    with pytest.raises(DataError, match="source 'mine': no text file at"):
        source("text_files", tmp_path)
    with pytest.raises(DataError, match="source 'mine': no shard at"):
        source("webdataset", tmp_path)
