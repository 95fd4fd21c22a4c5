"""Positions: table resampling against interpolate, impossible grids. (RoPE and time: test_tower.py.)"""

import pytest
import torch
import torch.nn.functional as F

from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.grid import VisionGrid, resample_taps

RESAMPLE_TOL = 1e-6  # float32 weights of unit-size table entries
CPU = torch.device("cpu")
SIZES = [(2, 2), (4, 10), (16, 16), (18, 6), (64, 64), (66, 128), (2, 130)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_weighted_gather_equals_interpolate(size, mode, seed):
    torch.manual_seed(seed)
    table = torch.rand(64, 64, 5, dtype=torch.float64) * 2 - 1
    index, weight = resample_taps(*size, 64, 64, mode)
    got = (table.flatten(0, 1)[torch.from_numpy(index)] * torch.from_numpy(weight)[..., None]).sum(1)
    expected = F.interpolate(
        table.permute(2, 0, 1)[None], size, mode=mode, align_corners=False, antialias=False
    )
    assert (got - expected[0].flatten(1).T).abs().max() <= RESAMPLE_TOL


@pytest.mark.parametrize(
    "grid, message",
    [
        ((1, 3, 4), "multiples"),
        ((1, 0, 4), "multiples"),
        ((5, 2, 2), "frames"),
        ((1, 2, 514), "patches a side"),
    ],
)
def test_impossible_grids_are_refused(grid, message):
    with pytest.raises(ValueError, match=message):
        VisionGrid.from_grids([grid], VisionConfig.preset("tiny"))
