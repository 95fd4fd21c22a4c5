"""Evaluation during and after training, and what a finished run leaves: results, samples, model directory, report."""

from __future__ import annotations
