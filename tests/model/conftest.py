"""Lets the model tests share builders such as fusion_cases.py (pytest's importlib mode adds no directory
itself)."""

import sys
from pathlib import Path

import pytest

from earlyfusion.kernels.cpu import build

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """The engine's C++, and what is taken where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setenv("EF_KERNELS", "torch")
    elif build.compiler() is None:
        pytest.skip("needs a C++ compiler")
