"""Lets the tests of this room share the builders of the model's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest

from earlyfusion.rl import rewards


@pytest.fixture
def rewards_called_here(monkeypatch):
    """Rewards of the tests are called in this process; the report is left out (slow)."""
    made = rewards.make_reward
    monkeypatch.setattr("earlyfusion.rl.rollouts.experience.make_reward", lambda *a: (made(*a)[0], "inline"))
    monkeypatch.setattr("earlyfusion.rl.parts.write_rl_report", lambda out: out / "report.html")
