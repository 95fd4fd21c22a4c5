"""Bits per byte: every token paid for once, no context across documents, beside what gzip does."""

import math
import shutil
import subprocess

import pytest
import torch
from eval_cases import own_model

from earlyfusion.eval.benchmarks.bpb import BitsPerByte, gzip_bits_per_byte
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions
from earlyfusion.kernels.segments import Segments

RELATIVE = 1e-5  # fp32 logits, packed against one by one
DOCUMENTS = ["the quick brown fox\njumps over the lazy dog", "x", "Ünïcödé ⟨β⟩ 日本語", "red " * 60]
SIZE = sum(len(document.encode()) for document in DOCUMENTS)


def measured(model):
    named = [(str(number), text) for number, text in enumerate(DOCUMENTS)]
    return run_task(model, BitsPerByte(TaskOptions(), named))["metrics"]


@pytest.mark.parametrize("window", [3, 16, 4096])
def test_bits_equal_a_sum_over_single_windows(window):
    model = own_model(2, batch_tokens=window)
    nats, decoder = 0.0, model.model.decoder
    for document in DOCUMENTS:
        ids = model.tokenizer.encode(document)
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            inputs = torch.tensor([model.tokenizer.bos_id, *piece[:-1]])
            with torch.no_grad():
                h = decoder(decoder.embed_tokens(inputs), Segments((len(inputs),)))
                logp = model.model.logits(h).log_softmax(-1)
            nats -= float(logp[torch.arange(len(piece)), torch.tensor(piece)].sum())
    found = measured(model)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / SIZE, rel=RELATIVE)
    assert found["score"] == -found["bits_per_byte"]
    assert (found["bytes"], found["documents"]) == (SIZE, 4)


@pytest.mark.skipif(shutil.which("gzip") is None, reason="no gzip program here")
def test_the_compressor_agrees_with_the_gzip_program(tmp_path):
    documents = ["spam and eggs " * 500, "def f(x):\n    return x\n" * 300]
    (tmp_path / "text").write_bytes(b"".join(d.encode() + b"\0" for d in documents))
    program = subprocess.run(["gzip", "-9nc", str(tmp_path / "text")], capture_output=True, check=True).stdout
    total = sum(len(d) for d in documents)
    # zlib and GNU gzip are two implementations of one method
    assert gzip_bits_per_byte(documents) == pytest.approx(8 * len(program) / total, rel=0.05)


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(EvalError, match="holds no text"):
        BitsPerByte(TaskOptions(data=tmp_path / "empty.txt")).documents()
