"""Positions of patches: resampled learned table, 2-D RoPE, sine/cosine of time.

Everything that depends only on sizes is computed here on the host; the tower applies it with one
weighted gather and one complex product.

Legend: P patches, H heads, D head dim, C hidden size, h x w patches of a frame, taps neighbours of the
resampling.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

# Free parameter of the cubic convolution kernel; this is the value of `torch.nn.functional.interpolate`.
CUBIC_A = -0.75


@lru_cache(maxsize=4096)  # by axis: a cache of whole sizes would grow to gigabytes on native-resolution data
def _axis_taps(out: int, table: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours [out, taps] and weights [out, taps] (float64) that resample `table` points to `out` points.

    Half-pixel centres: point i reads the table at x = (i + 0.5) * table / out - 0.5, without antialiasing.
    """
    x = (np.arange(out, dtype=np.float64) + 0.5) * (table / out) - 0.5
    left = np.floor(x)
    u = x - left
    if mode == "bilinear":
        weights = np.stack([1.0 - u, u], axis=1)
        first = 0
    else:  # bicubic
        a = CUBIC_A

        def near(d: np.ndarray) -> np.ndarray:  # distance 0..1
            return ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0

        def far(d: np.ndarray) -> np.ndarray:  # distance 1..2
            return ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a

        weights = np.stack([far(u + 1.0), near(u), near(1.0 - u), far(2.0 - u)], axis=1)
        first = -1
    # Clipping repeats the border, as interpolate does without antialiasing.
    index = left.astype(np.int64)[:, None] + np.arange(first, first + weights.shape[1])
    return np.clip(index, 0, table - 1), weights


def resample_taps(h: int, w: int, table_h: int, table_w: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Resampling of a [table_h, table_w] table to [h, w] as a weighted gather.

    Returns (index int64 [h*w, taps] into the flattened table, weight float32 [h*w, taps]), rows in row-major
    order; taps is 4 (bilinear) or 16 (bicubic). Equals `F.interpolate(..., align_corners=False,
    antialias=False)`, and is the identity when the sizes agree.
    """
    # Separable: two short lists make the taps of every patch.
    row_index, row_weight = _axis_taps(h, table_h, mode)
    col_index, col_weight = _axis_taps(w, table_w, mode)
    index = row_index[:, None, :, None] * table_w + col_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * col_weight[None, :, None, :]
    return index.reshape(h * w, -1), weight.reshape(h * w, -1).astype(np.float32)


def axial_angles(sides: int, head_dim: int, theta: float) -> torch.Tensor:
    """Angles [sides, head_dim / 4] in float64: coordinate n turns pair i of its axis by n * theta^(-4 i /
    head_dim)."""
    frequency = theta ** (-4.0 * torch.arange(head_dim // 4, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(sides, dtype=torch.float64), frequency)


@lru_cache(maxsize=64)
def _axial_turns(sides: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    angles = axial_angles(sides, head_dim, theta)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rope_turns(
    row_P: torch.Tensor, col_P: torch.Tensor, *, sides: int, head_dim: int, theta: float
) -> torch.Tensor:
    """Unit complex numbers [P, head_dim / 2] of the 2-D RoPE, complex64, on the device of the coordinates.

    Pair 2i carries the column (x) and pair 2i+1 the row (y), both with frequency i: x and y alternate.
    """
    # Looked up, not computed: coordinates are integers up to the longest side.
    turns = _axial_turns(sides, head_dim, theta, row_P.device)
    return torch.stack((turns[col_P], turns[row_P]), dim=-1).flatten(1)


@lru_cache(maxsize=64)
def time_table(frames: int, width: int) -> torch.Tensor:
    """Fixed table [frames + 1, width], float32: row 0 is zero (single images), row f + 1 belongs to frame f
    of a clip.

    Frame f: [sin(f * w_i) | cos(f * w_i)] in halves, w_i = 10000^(-i / (width / 2)). The constant is not
    rope_theta.
    """
    frequency = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.outer(torch.arange(frames, dtype=torch.float64), frequency)
    rows = torch.cat((angles.sin(), angles.cos()), dim=1)
    return torch.cat((rows.new_zeros(1, width), rows)).float()
