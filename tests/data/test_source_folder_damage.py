"""What is wrong with a file of a folder is counted by its reason."""

import pytest

from earlyfusion.data.errors import BadSample, DataError
from earlyfusion.data.sources.base import SourceConfig, build_source

from .shard_files import picture


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"caf\xe9", "encoding"),
        ("a.txt", b"", "empty_file"),
        ("a.txt", b" \n ", "empty_text"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "encoding"),
        ("a.jsonl", b"{text}\n", "bad_json"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "bad_json"),
        ("a.jsonl", b'{"body": 1}\n', "bad_json"),
        ("a.jsonl", b'{"text": "t", "image": "../secret.png"}\n', "missing_member"),
        ("p.json", b'{"title": "x"}', "empty_text"),
        ("p.json", b'{"questions": [1]}', "bad_json"),
        ("p.json", b'{"questions": 5}', "bad_json"),
        ("p.json", b'{"questions": null}', "bad_json"),
        ("a.jsonl", b'{"text": "t", "image": "a\\u0000.png"}\n', "missing_member"),
        ("a.jsonl", b'{"text": "t", "image": "\\ud83d.png"}\n', "missing_member"),
        ("a.jsonl", b'{"text": "t", "image": "' + b"a" * 5000 + b'.png"}\n', "missing_member"),
        ("p.txt", b"\n", "empty_text"),
    ],
)
def test_damage_has_a_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    if name.startswith("p."):
        (tmp_path / "p.jpg").write_bytes(picture(0))
    files = build_source(SourceConfig(name="f", kind="folder", path=str(tmp_path)), val_fraction=0.0)
    with pytest.raises(BadSample) as caught:
        files.get(0, 0)
    assert caught.value.reason == reason and name.split(".")[0] in str(caught.value)


def test_missing_and_empty_folders_are_one_clear_line(tmp_path):
    def opened(path, val_fraction=0.0):
        config = SourceConfig(name="mine", kind="folder", path=str(path))
        return build_source(config, val_fraction=val_fraction)

    with pytest.raises(DataError, match=r"source 'mine': folder .*nowhere does not exist"):
        opened(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds nothing to read; expected pictures"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("one file")
    with pytest.raises(DataError, match=r"no training sample; add data or lower data\.val_fraction"):
        opened(tmp_path, 0.9999999)


def test_a_folder_may_be_named_from_here_and_be_a_link_itself(tmp_path, monkeypatch):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder" / "deep" / "p.jpg").write_bytes(picture(0))
    (tmp_path / "folder" / "deep" / "p.txt").write_text("words")
    (tmp_path / "folder" / "a.jsonl").write_text('{"text": "t", "image": "deep/p.jpg"}\n')
    monkeypatch.chdir(tmp_path)
    for path in ("folder", "link", "./folder/../link", str(tmp_path / "link")):
        files = build_source(SourceConfig(name="f", kind="folder", path=path), val_fraction=0.0)
        assert [files.get(index, 0).segments[0].open().size for index in range(2)] == [(40, 24)] * 2


def test_a_link_out_of_the_folder_is_not_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    root = tmp_path / "folder"
    root.mkdir()
    (root / "a.txt").symlink_to(secret)
    (root / "b.jsonl").write_text('{"text": "t", "image": "c.png"}\n')
    (root / "c.png").symlink_to(secret)
    files = build_source(SourceConfig(name="f", kind="folder", path=str(root)), val_fraction=0.0)
    assert len(files) == 2 and files.left_out.total() == 1
    for index in range(2):
        with pytest.raises(BadSample, match="lies outside") as caught:
            files.get(index, 0)
        assert "the secret" not in str(caught.value)
