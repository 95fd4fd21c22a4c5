"""What the tower must know about a pack of images, computed once on the host from their sizes.

Patches arrive row by row; inside the tower they stand in merge order: the patches of one token are
neighbours. Attention does not see order, so reordering the uint8 input once (no gradient) makes the merge at
the end a plain view.

Everything about positions depends on sizes alone, too: the resampling of the learned table, the 2-D RoPE and
the sine/cosine of time are computed here, and the tower applies them with one weighted gather and one complex
product.

Legend: P patches, M tokens after merging, D head dim, C hidden size, h x w patches of a frame, taps
neighbours of the resampling, U rows of resampled positions (one for each patch of each different size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, num_patches, num_tokens

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


@lru_cache(maxsize=64)
def _axial_turns(sides: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers [sides, head_dim / 4], angles in float64: coordinate n turns pair i of its axis by
    n * theta^(-4 i / head_dim)."""
    frequency = theta ** (-4.0 * torch.arange(head_dim // 4, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(sides, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rope_turns(row_P: torch.Tensor, col_P: torch.Tensor, cfg: VisionConfig) -> torch.Tensor:
    """Unit complex numbers [P, head_dim / 2] of the 2-D RoPE, complex64, on the device of the coordinates.

    Pair 2i carries the column (x) and pair 2i+1 the row (y), both with frequency i: x and y alternate.
    """
    # Looked up, not computed: coordinates are integers up to the longest side.
    turns = _axial_turns(cfg.max_patches_per_side, cfg.head_dim, cfg.rope_theta, row_P.device)
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


@dataclass
class GridTensors:
    """Device side of a VisionGrid. Optional fields are None when the pack does not need them."""

    order_P: torch.Tensor  # int64: row of the incoming patch that stands at this place
    turns_PK: torch.Tensor  # complex64: 2-D RoPE
    position_index_UW: torch.Tensor  # int64: taps into the flattened position table
    position_weight_UW: torch.Tensor  # float32
    position_row_P: torch.Tensor | None = None
    """int64: which of the U rows a patch adds; None when that is 0..P-1"""
    time: tuple[torch.Tensor, torch.Tensor] | None = None
    """int64 row_P of the time table, and the table float32 [t, C]"""
    frames: tuple[torch.Tensor, torch.Tensor] | None = None
    """[F, M] each: int64 f-th frame of token m as a row of the unpooled tokens; float32 1 / t, or 0 past the
    last frame"""


@lru_cache(maxsize=512)
def merge_order(h: int, w: int, merge: tuple[int, int]) -> np.ndarray:
    """Row-major index of each patch of an h x w frame, in merge order; inside a token (dy, dx) row by row."""
    rows, cols = merge
    # Attention does not see order, so the merge may be paid once, on the uint8 input.
    index = np.arange(h * w, dtype=np.int64).reshape(h // rows, rows, w // cols, cols)
    return index.transpose(0, 2, 1, 3).reshape(-1)


@dataclass(frozen=True, eq=False)
class VisionGrid:
    """Metadata of a pack of items (images, or clips of up to pos_emb_time frames), in the order of their
    patches.

    `segments` bounds attention: all frames of one item together, no item sees another.
    """

    grids: tuple[Grid, ...]
    cfg: VisionConfig
    segments: Segments
    tokens: tuple[int, ...]  # per item

    @classmethod
    def from_grids(cls, grids: Sequence[Grid], cfg: VisionConfig) -> VisionGrid:
        """Metadata for items of (t, h, w) patches; an empty list is a pack without images.

        Raises ValueError for sizes that are not whole tokens, too long a side, or too many frames.
        """
        rows, cols = cfg.merge_kernel_size
        # Sizes come from data: the message must name the picture's and not an index.
        for t, h, w in grids:
            complaint = ""
            if min(t, h, w) < 1 or h % rows or w % cols:
                complaint = f"h and w must be positive multiples of the merge kernel {(rows, cols)}"
            elif max(h, w) > cfg.max_patches_per_side:
                complaint = f"at most {cfg.max_patches_per_side} patches a side; resize with navit_size"
            elif t > cfg.pos_emb_time:
                complaint = f"at most {cfg.pos_emb_time} frames share an item; cut clips with prepare_frames"
            if complaint:
                raise ValueError(f"grid {(t, h, w)}: {complaint}")
        segments = Segments.from_lengths([num_patches(grid) for grid in grids])
        tokens = tuple(num_tokens(grid, cfg.merge_kernel_size) for grid in grids)
        return cls(tuple(grids), cfg, segments, tokens)

    @property
    def num_patches(self) -> int:
        """P, the rows of the patch tensor."""
        return self.segments.total

    def on(self, device: torch.device) -> GridTensors:
        """Index tensors on `device`, built at the first call and kept."""
        # Kept with the segments: forward, recomputation and backward ask for the same tensors.
        return self.segments.cached(("vision.grid", str(device)), lambda: self._build(device))

    def _build(self, device: torch.device) -> GridTensors:
        cfg, longest = self.cfg, max((t for t, _, _ in self.grids), default=1)
        # The empty beginnings give a pack without images the right shapes and dtypes.
        parts, frames = [np.zeros((5, 0), np.int64)], [np.zeros((longest, 0), np.int64)]
        weights = [np.zeros((longest, 0), np.float32)]
        indices, tap_weights, first_row = [], [], {}
        known = first_patch = first_token = 0
        for (t, h, w), tokens in zip(self.grids, self.tokens):
            merged, size = merge_order(h, w, cfg.merge_kernel_size), h * w
            if (h, w) not in first_row:  # a size is resampled once, whatever images share it
                index, weight = resample_taps(
                    h, w, cfg.pos_emb_height, cfg.pos_emb_width, cfg.pos_emb_interpolation
                )
                indices.append(index[merged])
                tap_weights.append(weight[merged])
                first_row[h, w] = known
                known += size

            # Of every patch: where it comes from, row and column, its resampled position, its time.
            frame, place = np.repeat(np.arange(t), size), np.tile(merged, t)
            position = first_row[h, w] + np.tile(np.arange(size), t)
            order = first_patch + frame * size + place
            parts.append(np.stack([order, place // w, place % w, position, frame + (t > 1)]))

            # Of every token: its frames. Past its last one an item rereads its first, with weight zero.
            turn = np.arange(longest)[:, None]
            frames.append(first_token + np.where(turn < t, turn, 0) * tokens + np.arange(tokens))
            share = np.where(turn < t, 1.0 / t, 0.0).astype(np.float32)
            weights.append(np.broadcast_to(share, (longest, tokens)))
            first_patch, first_token = first_patch + t * size, first_token + t * tokens

        # Not waited for: the copy runs beside the host's next work.
        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        order_P, row_P, col_P, position_P, time_P = map(put, np.concatenate(parts, axis=1))
        at = GridTensors(
            order_P,
            rope_turns(row_P, col_P, cfg),
            put(np.concatenate(indices or [np.zeros((0, 1), np.int64)])),
            put(np.concatenate(tap_weights or [np.zeros((0, 1), np.float32)])),
        )
        # Without a repeated size the gather would be the identity.
        if known != first_patch:
            at.position_row_P = position_P
        # Packs of single images skip time and the mean over frames altogether.
        if longest > 1:
            at.time = time_P, time_table(cfg.pos_emb_time, cfg.hidden_size).to(device)
            at.frames = put(np.concatenate(frames, axis=1)), put(np.concatenate(weights, axis=1))
        return at
