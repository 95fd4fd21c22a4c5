"""Optimizers; importing the package registers those of the project."""

from earlyfusion.pipeline.optim import muonclip as muonclip
