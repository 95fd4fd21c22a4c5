"""Positions: table resampling against interpolate, 2-D RoPE against real rotations, the time table."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.grid import VisionGrid, resample_taps, rope_turns, time_table

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


@pytest.mark.parametrize("head_dim", [8, 32, 72])
def test_rope_equals_real_rotations_with_x_before_y(head_dim):
    torch.manual_seed(head_dim)
    rows, cols = torch.tensor([0, 3, 511, 7]), torch.tensor([5, 0, 300, 7])
    qkv = torch.randn(4, 3, 3, head_dim, dtype=torch.float64)
    turns = rope_turns(rows, cols, VisionConfig(head_dim=head_dim))
    q, k, v = resolve("qkv_rope", "cpu")(qkv, turns.to(torch.complex128))
    assert torch.equal(v, qkv[:, 2])
    for i in range(head_dim // 4):
        f = 10000.0 ** (-4 * i / head_dim)
        for pair, coordinate in ((2 * i, cols), (2 * i + 1, rows)):
            angle = (coordinate.double() * f)[:, None, None]
            a, b = qkv[:, :2, :, 2 * pair], qkv[:, :2, :, 2 * pair + 1]
            got = torch.stack([q, k], dim=1)[..., 2 * pair : 2 * pair + 2]
            expected = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
            # the turns are rounded to float32 once
            torch.testing.assert_close(got, torch.stack(expected, -1), rtol=0, atol=1e-6)


def test_time_table_is_sines_then_cosines_after_a_zero_row():
    table = time_table(4, 6)
    assert table.shape == (5, 6) and not table[0].any()
    assert table[1].tolist() == [0, 0, 0, 1, 1, 1]
    f = 3 * 10000.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(table[4].numpy(), np.concatenate([np.sin(f), np.cos(f)]), atol=1e-6)


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
