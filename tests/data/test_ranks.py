"""tiktoken's vocabularies: the ids of the library itself, in many scripts; what is no such file is
refused."""

import base64
import json
from itertools import pairwise

import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.ranks import PATTERN, read_ranks
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer

TEXTS = [
    "HelloWorld, ABc I'm HERE's 12345 x86_64 and  two  spaces\n\n\tend ",
    "中文字符和English混排,2026年。漢字かな交じり文,カタカナ",
    "Привет, Мир! Ünïcödé ἀρχή שלום مرحبا नमस्ते สวัสดี 안녕하세요",
    "🙂👩‍👩‍👧 e\u0301 \u00a0 \u200b ½ ² ① a\r\nb\r\n",
    "def f(x):\n    return x**2  # don't\n",
    "",
    "   ",
]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A vocabulary as tiktoken trains it: bytes, then the most frequent pair of neighbours, again and
    again."""
    manual = build_source(SourceConfig(name="pydoc", kind="pydoc"), seed=0, val_fraction=0.1)
    words = [word.encode() for text in manual.texts(3) for word in text.split(" ")][:4000]
    words += [word.encode() for text in TEXTS for word in text.split(" ")] * 20
    found = {bytes([b]): b for b in range(256)}
    parts = [[word[i : i + 1] for i in range(len(word))] for word in words]
    for _ in range(400):
        pairs: dict[tuple[bytes, bytes], int] = {}
        for part in parts:
            for pair in pairwise(part):
                pairs[pair] = pairs.get(pair, 0) + 1
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.setdefault(left + right, len(found))
        for part in parts:
            i = 0
            while i < len(part) - 1:
                if (part[i], part[i + 1]) == (left, right):
                    part[i : i + 2] = [left + right]
                i += 1
    return found


@pytest.fixture
def folder(ranks, tmp_path):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    start = len(ranks)
    named = {start: "[BOS]", start + 1: "[EOS]", start + 18: "<|media_begin|>", start + 255: "[PAD]"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": name, "special": True} for i, name in named.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_ids_are_those_of_tiktoken(ranks, folder):
    tiktoken = pytest.importorskip("tiktoken")
    library = tiktoken.Encoding("t", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.load(folder)
    for text in TEXTS:
        assert list(ours.encode(text)) == library.encode(text, disallowed_special=()), text
        assert ours.decode(ours.encode(text)) == text


def test_special_tokens_have_the_ids_of_the_release(ranks, folder, tmp_path):
    ours, start = Tokenizer.load(folder), len(ranks)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (start, start + 1, start + 255)
    assert ours.media_begin_id == start + 18
    assert ours.id_of(f"<|reserved_token_{start + 2}|>") == start + 2
    # Tokens that a release lacks come behind its reserved ones, and all of it survives being saved.
    assert ours.media_pad_id >= start + 256
    again = Tokenizer.load(ours.save(tmp_path / "saved"))
    assert again.hash == ours.hash and "auto_map" not in again.config
    assert all(again.encode(text) == ours.encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw + b"!!! 7\n", "line 65"),
        (lambda raw: raw.replace(b" 300\n", b" 9000\n"), "ranks that are not 0, 1, 2"),
        (lambda raw: raw[:100], "ranks that are not"),
    ],
)
def test_a_damaged_file_is_refused(folder, change, said):
    path = folder / "tiktoken.model"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=said):
        Tokenizer.load(folder)
    with pytest.raises(DataError):
        read_ranks(path)


def test_another_family_is_refused(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("TikTokenTokenizer", "QWenTokenizer"))
    with pytest.raises(DataError, match="QWenTokenizer"):
        Tokenizer.load(folder)
