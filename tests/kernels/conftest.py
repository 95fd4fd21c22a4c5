"""Lets the kernel tests share case builders such as kda_cases.py (pytest's importlib mode adds no directory
itself)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
