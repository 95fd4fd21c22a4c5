"""Lets the evaluation tests use the model tests' builders (fusion_cases.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
