"""`earlyfusion plan RECIPE` and `--dry-run`: what a recipe will build and do, without data and without weights.

Prints the resolved recipe, parameters and FLOPs by room, how the optimizer routes every weight, and the stages with
their tokens and learning rates. The model is built on the meta device, so the 48B recipe prints as fast as nano.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from earlyfusion.model.config import FusionConfig
from earlyfusion.model.flops import FlopCounter, count_parameters
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.arguments import parse_arguments
from earlyfusion.pipeline.compose import load_config, recipe_hash, render
from earlyfusion.pipeline.config import RunConfig
from earlyfusion.pipeline.errors import EXIT_OK
from earlyfusion.pipeline.optim.groups import build_param_groups
from earlyfusion.pipeline.optim.plan import TableRow, routing_rows
from earlyfusion.pipeline.schedule import StageTable
