"""Lets the model tests share builders such as fusion_cases.py (pytest's importlib mode adds no directory
itself)."""

import sys
from pathlib import Path

import pytest

from earlyfusion.kernels.cpu import program as build

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["compiled", "modules"])
def way(request, monkeypatch):
    """The engine's C++, and what is taken where there is no compiler."""
    if request.param == "modules":
        monkeypatch.setattr(build, "wanted", lambda: False)
    elif build.compiler() is None:
        pytest.skip("needs a C++ compiler")
