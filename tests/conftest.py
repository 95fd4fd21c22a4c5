"""One torch thread per test process: two-thread jobs collapse when both cores are busy."""

import faulthandler
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # page_cases.py is for the tests of every room

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run through the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
torch.set_num_threads(1)


LONG = (
    "test_hostile.py test_readme.py test_serve_attacks.py test_emulated_gpu.py test_triton_model.py".split()
)


HANGS = 900
"""Seconds of a test after which it is taken for one that will never end: its process says where it stands and
goes, and the suite goes on without it."""


def pytest_configure(config):
    # While a test runs its own place is taken by what pytest captures.
    config.terminal = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(HANGS, exit=True, file=item.config.terminal)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb(config):
    # Who looks for a mistake has time.
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(config, items):
    # The longest first: at the end one core would wait for the other.
    items.sort(key=lambda item: item.path.name not in LONG)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; none is visible")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
