"""Lets the tests of this room share the builders of the model's and the pipeline's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pipeline"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
import rl_cases
from long2short_cases import here, toy  # noqa: F401

from earlyfusion.eval import rewards


@pytest.fixture(autouse=True)
def every_run_is_closed():
    """Those that a test left open, the last first."""
    yield
    while rl_cases.OPEN:
        rl_cases.OPEN.pop().close()


@pytest.fixture
def rewards_called_here(monkeypatch):
    """Rewards of the tests are called in this process; the report is left out (slow)."""
    made = rewards.make_reward
    monkeypatch.setattr("earlyfusion.rl.rollouts.experience.make_reward", lambda *a: (made(*a)[0], "inline"))
    monkeypatch.setattr("earlyfusion.rl.train.write_rl_report", lambda out: out / "report.html")
