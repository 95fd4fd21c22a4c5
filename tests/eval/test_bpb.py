"""Bits per byte: every token paid for once, no context across pieces, compressors measured as gzip and xz
do."""

import gzip
import math
import shutil
import subprocess

import pytest
import torch
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.eval.benchmarks.bpb import bits_per_byte, compressed_bits_per_byte, text_pieces
from earlyfusion.kernels.segments import Segments

RELATIVE = 1e-5  # fp32 logits, packed against one by one
DOCUMENTS = ["the quick brown fox\njumps over the lazy dog", "x", "Ünïcödé ⟨β⟩ 日本語", "red " * 60]


@pytest.fixture(scope="module")
def setup():
    tokenizer = tiny_tokenizer()
    return tokenizer, tiny_model(tiny_config(tokenizer), seed=2)


def test_pieces_pay_for_every_token_once_and_restart_from_bos():
    pieces = text_pieces(list(range(10, 21)), bos=1, eos=2, max_length=4)
    assert [t for _, targets in pieces for t in targets] == [*range(10, 21), 2]
    assert pieces[0] == ([1, 10, 11, 12], [10, 11, 12, 13]) and pieces[1][0] == [1, 14, 15, 16]
    assert all(len(inputs) == len(targets) <= 4 for inputs, targets in pieces)
    assert text_pieces([], bos=1, eos=2, max_length=4) == [([1], [2])]
    with pytest.raises(ValueError, match="max_length=0"):
        text_pieces([1], 0, 0, 0)


@pytest.mark.parametrize("max_length", [3, 16, 4096])
def test_bits_equal_a_sum_over_single_documents(setup, max_length):
    tokenizer, model = setup
    nats = 0.0
    for document in DOCUMENTS:
        ids = [*tokenizer.encode(document), tokenizer.eos_id]
        for start in range(0, len(ids), max_length):
            piece = ids[start : start + max_length]
            inputs = torch.tensor([tokenizer.bos_id, *piece[:-1]])
            with torch.no_grad():
                h = model.decoder(model.decoder.embed_tokens(inputs), Segments((len(inputs),)))
                logp = model.logits(h).log_softmax(-1)
            nats -= float(logp[torch.arange(len(piece)), torch.tensor(piece)].sum())
    size = sum(len(d.encode()) for d in DOCUMENTS)
    for tokens_per_batch in (1, 100, 8192):
        result = bits_per_byte(
            model, tokenizer, DOCUMENTS, max_length=max_length, tokens_per_batch=tokens_per_batch
        )
        assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=RELATIVE)
    assert result.bytes == size and result.documents == 4
    assert result.tokens == sum(len(tokenizer.encode(d)) + 1 for d in DOCUMENTS)


def test_a_model_that_knows_nothing_pays_log2_of_the_vocabulary_per_token(setup):
    tokenizer, _ = setup
    model = tiny_model(tiny_config(tokenizer))
    with torch.no_grad():
        model.decoder.lm_head.weight.zero_()
    result = bits_per_byte(model, tokenizer, DOCUMENTS)
    assert result.bits_per_byte == pytest.approx(
        result.tokens * math.log2(tokenizer.vocab_size) / result.bytes, rel=RELATIVE
    )


@pytest.mark.skipif(shutil.which("gzip") is None, reason="no gzip program here")
def test_compressors_agree_with_the_gzip_program(tmp_path):
    documents = ["spam and eggs " * 500, "def f(x):\n    return x\n" * 300]
    stream = b"".join(d.encode() + b"\0" for d in documents)
    found = compressed_bits_per_byte(documents)
    (tmp_path / "text").write_bytes(stream)
    program = subprocess.run(["gzip", "-9nc", str(tmp_path / "text")], capture_output=True, check=True).stdout
    total = sum(len(d) for d in documents)
    # zlib and GNU gzip are two implementations of one method
    assert found["gzip_bits_per_byte"] == pytest.approx(8 * len(program) / total, rel=0.05)
    alone = sum(len(gzip.compress(d.encode(), 9, mtime=0)) for d in documents)
    assert found["gzip_per_document_bits_per_byte"] == 8 * alone / total
    assert 0 < found["xz_bits_per_byte"] < 1


def test_empty_text_and_lossy_tokenizers_are_refused(setup):
    tokenizer, model = setup
    with pytest.raises(ValueError, match="hold no text"):
        bits_per_byte(model, tokenizer, ["", ""])

    class Lossy:
        def encode(self, text):
            return tokenizer.encode(text.lower())

        def decode(self, ids):
            return tokenizer.decode(ids)

    with pytest.raises(ValueError, match=r"document 1 .*lossless"):
        bits_per_byte(model, Lossy(), ["fox", "Fox"])
