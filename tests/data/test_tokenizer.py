import json
import pickle
import random

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import answer_text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.sources.embedded import load_split
from earlyfusion.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from earlyfusion.data.vocabulary import embedded_corpus

# Planes of Unicode that behave differently: ASCII, controls,
# combining marks, CJK, emoji with joiners, private use.
RANGES = [
    (32, 126),
    (0, 31),
    (0x80, 0x24F),
    (0x300, 0x36F),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1FAFF),
    (0xE000, 0xF8FF),
]
RANGES += [(0x200B, 0x200F), (0x10000, 0x10FFFF)]


def random_text(rng):
    return "".join(chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randint(0, 60)))


@pytest.mark.parametrize("seed", [0, 1])
def test_any_unicode_text_comes_back_byte_for_byte(tokenizer, seed):
    rng = random.Random(seed)
    for _ in range(400):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("seed", [0, 1])
def test_special_strings_in_text_never_become_special_ids(tokenizer, seed):
    rng = random.Random(seed)
    special = set(tokenizer.special_ids.values())
    assert len(special) == len(SPECIAL_TOKENS)
    for _ in range(200):
        text = "".join(rng.choice([*SPECIAL_TOKENS, " ", "a", "\n", "<|", "|>"]) for _ in range(8))
        ids = tokenizer.encode(text)
        assert not special & set(ids)
        assert tokenizer.decode(ids) == text


def test_the_words_of_pictures_and_the_answers_of_easy_vqa_are_single_tokens(tokenizer):
    answers = {answer for entry in load_split("train") for _, answer in entry.questions}
    assert len(answers) == 13
    for text in ["image", "video", *(answer_text(answer) for answer in answers)]:
        assert len(tokenizer.encode(text)) == 1, text


def test_transformers_reads_the_saved_directory(tokenizer, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.save(tmp_path / "tok"))
    text = "Q: what color is the circle?\nA: teal 42"
    assert tuple(theirs.encode(text, add_special_tokens=False)) == tokenizer.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )


def test_load_gives_back_what_save_wrote(tokenizer, tmp_path):
    loaded = Tokenizer.load(tokenizer.save(tmp_path / "tok"))
    assert (loaded.hash, loaded.special_ids, loaded.added) == (tokenizer.hash, tokenizer.special_ids, ())
    assert Tokenizer.load(tmp_path / "tok" / "tokenizer.json").hash == tokenizer.hash
    assert pickle.loads(pickle.dumps(tokenizer)).encode("a red star") == tokenizer.encode("a red star")


def test_a_foreign_tokenizer_keeps_its_own_specials_and_gets_the_missing_ones(tmp_path):
    backend = Backend(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == 1
    assert (
        "[BOS]" in tokenizer.added and "<|media_pad|>" in tokenizer.added and "[EOS]" not in tokenizer.added
    )
    assert tokenizer.encode("hello world") == (2, 3)
    assert tokenizer.eos_id not in tokenizer.encode("hello </s>")
    assert tokenizer.vocab_size == 4 + len(tokenizer.added)


def test_a_directory_without_tokenizer_json_is_one_clear_line(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json in it; give a file that"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="no such file or directory"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizers file"):
        Tokenizer.load(tmp_path)


def test_held_out_topics_are_not_in_the_tokenizer_corpus():
    corpus = set(embedded_corpus())
    source = build_source(SourceConfig(name="pydoc", kind="pydoc"))
    held = [sample.text for sample in source.heldout_samples()]
    assert held and not corpus & set(held)
    assert source.get(0, 0).text in corpus


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
FRONT = {"type": "Prepend", "prepend": "a" * 1_000}
LONGER = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1_000}
HUGE = {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": HUGE}, "expected fewer than"),
        ({"normalizer": {"type": "Sequence", "normalizers": 40 * [DOUBLE]}}, "times as long; not used"),
        ({"normalizer": {"type": "Sequence", "normalizers": [FRONT, LONGER]}}, "times as long; not used"),
        ({"added_tokens": [{"id": -1}]}, "not a tokenizers file"),
    ],
)
def test_a_tokenizer_made_to_do_harm_is_one_line(tmp_path, tokenizer, change, told):
    path = tokenizer.save(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=rf"^tokenizer .*tokenizer\.json: [^\n]*{told}[^\n]*$"):
        Tokenizer.load(tmp_path)
