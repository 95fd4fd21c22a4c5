"""The compiled decoder beside the modules (its logits: test_engine_logits.py): when it stands aside, that new
weights reach it, and which bits it promises."""

import pytest
import torch
from engine_cases import (
    SHAPES,
    TOKENIZER,
    by_sample,
    drain,
    drawn,
    engine_of,
    equal_bits,
    equal_tokens,
    model,
    requests,
    serve,
)
from test_engine_logits import MORE_SHAPES

from earlyfusion.kernels.cpu import program as build
from earlyfusion.model.engine import cpu
from earlyfusion.model.engine.engine import Engine

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
EVERY = {**SHAPES, **MORE_SHAPES}


@pytest.mark.parametrize("shape", ["block_attnres", "k3_options", "kda_last", "odd_widths", "many_experts"])
def test_neither_threads_nor_neighbours_nor_cuts_change_a_bit(shape):
    """Other slots, chunks of a prompt, more rows than go through together, reading again after a pause."""
    net = model(0, **EVERY[shape])
    given = requests([5, 40, 90, 33, 150, 300], drawn(12))
    base = serve(net, given, prefill_chunk=512, max_slots=6)
    for threads, slots, chunk in ((1, 1, 512), (2, 4, 7), (3, 6, 50), (5, 2, 4)):
        torch.set_num_threads(threads)
        try:
            equal_bits(base, serve(net, given, prefill_chunk=chunk, max_slots=slots))
        finally:
            torch.set_num_threads(1)
    engine = engine_of(net, max_slots=6)
    handles = [engine.submit(request) for request in given]
    for index, request in enumerate(given):
        engine.step()
        handles[index] = engine.resume(engine.pause(request.id))
    drain(engine)
    equal_bits(base, by_sample(handle.completions[0] for handle in handles))


def test_it_stands_aside(monkeypatch, request):
    """For other dtypes, without memory for a copy, where plain kernels are asked for, and without a compiler,
    where the engine answers the same."""
    net, given = model(), requests([1, 8, 31, 70], drawn(12))
    base = serve(net, given)
    compiled = lambda net: Engine(net, TOKENIZER).runner.compiled is not None
    assert compiled(net) and not compiled(model().double()) and not compiled(model().bfloat16())
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "free_memory", lambda: 1000)
        assert not compiled(net)
    with monkeypatch.context() as patch:
        patch.setenv("EF_KERNELS", "naive")
        assert not compiled(net)
    request.addfinalizer(build._library.cache_clear)
    monkeypatch.setenv("CXX", "no-such-compiler")
    build._library.cache_clear()
    assert not compiled(net)
    equal_tokens(base, serve(net, given))
