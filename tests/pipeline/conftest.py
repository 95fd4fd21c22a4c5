"""Lets the pipeline tests share modules such as tiny_mla.py (pytest's importlib mode adds no directory itself)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
