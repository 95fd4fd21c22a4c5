"""What the tower must know about a pack of images, computed once on the host from their sizes.

Patches arrive row by row; inside the tower they stand in merge order: the patches of one token are
neighbours. Attention does not see order, so reordering the uint8 input once (no gradient) makes the merge at
the end a plain view.

Legend: P patches, M tokens after merging, U rows of resampled positions (one for each patch of each different
size).
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
from earlyfusion.vision.position import resample_taps, rope_turns, time_table


@dataclass(frozen=True)
class Geometry:
    """The part of a VisionConfig that positions depend on."""

    merge: tuple[int, int]
    table: tuple[int, int, int]  # height, width, frames
    interpolation: str
    sides: int
    head_dim: int
    hidden_size: int
    rope_theta: float

    @classmethod
    def of(cls, cfg: VisionConfig) -> Geometry:
        return cls(
            merge=cfg.merge_kernel_size,
            table=(cfg.pos_emb_height, cfg.pos_emb_width, cfg.pos_emb_time),
            interpolation=cfg.pos_emb_interpolation,
            sides=cfg.max_patches_per_side,
            head_dim=cfg.head_dim,
            hidden_size=cfg.hidden_size,
            rope_theta=cfg.rope_theta,
        )


@dataclass(frozen=True)
class GridTensors:
    """Device side of a VisionGrid. Optional fields are None when the pack does not need them."""

    order_P: torch.Tensor  # int64: row of the incoming patch that stands at this place
    turns_PK: torch.Tensor  # complex64: 2-D RoPE
    position_index_UW: torch.Tensor  # int64: taps into the flattened position table
    position_weight_UW: torch.Tensor  # float32
    position_row_P: torch.Tensor | None  # int64: which of the U rows a patch adds; None when that is 0..P-1
    time_row_P: torch.Tensor | None  # int64: row of the time table
    time_TC: torch.Tensor | None  # float32: the time table
    frame_rows_FM: torch.Tensor | None  # int64: f-th frame of token m, as a row of the unpooled tokens
    frame_weight_FM: torch.Tensor | None  # float32: 1 / t, or 0 past the last frame


@lru_cache(maxsize=512)
def merge_order(h: int, w: int, merge: tuple[int, int]) -> np.ndarray:
    """Row-major index of each patch of an h x w frame, in merge order; inside a token (dy, dx) row by row."""
    rows, cols = merge
    index = np.arange(h * w, dtype=np.int64).reshape(h // rows, rows, w // cols, cols)
    return index.transpose(0, 2, 1, 3).reshape(-1)


def _check(grid: Grid, geometry: Geometry) -> None:
    t, h, w = grid
    rows, cols = geometry.merge
    if min(grid) < 1 or h % rows or w % cols:
        raise ValueError(
            f"grid {grid}: h and w must be positive multiples of the merge kernel {geometry.merge}"
        )
    if max(h, w) > geometry.sides:
        raise ValueError(
            f"grid {grid}: at most {geometry.sides} patches a side; resize with patches.navit_size"
        )
    if t > geometry.table[2]:
        raise ValueError(
            f"grid {grid}: at most {geometry.table[2]} frames share an item (pos_emb_time); "
            "cut longer clips with patches.prepare_frames"
        )


@dataclass(frozen=True, eq=False)
class VisionGrid:
    """Metadata of a pack of items (images, or clips of up to pos_emb_time frames), in the order of their
    patches.

    `segments` bounds attention: all frames of one item together, no item sees another.
    """

    grids: tuple[Grid, ...]
    geometry: Geometry
    segments: Segments
    tokens: tuple[int, ...]  # per item

    @classmethod
    def from_grids(cls, grids: Sequence[Grid], cfg: VisionConfig) -> VisionGrid:
        """Metadata for items of (t, h, w) patches; an empty list is a pack without images.

        Raises ValueError for sizes that are not whole tokens, too long a side, or too many frames.
        """
        geometry = Geometry.of(cfg)
        items = tuple((int(t), int(h), int(w)) for t, h, w in grids)
        for grid in items:
            _check(grid, geometry)
        segments = Segments.from_lengths([num_patches(grid) for grid in items])
        return cls(items, geometry, segments, tuple(num_tokens(grid, geometry.merge) for grid in items))

    @property
    def num_patches(self) -> int:
        """P, the rows of the patch tensor."""
        return self.segments.total

    @property
    def num_tokens(self) -> int:
        """M, the features that come out."""
        return sum(self.tokens)

    def on(self, device: torch.device | str) -> GridTensors:
        """Index tensors on `device`, built at the first call and kept. Call it ahead of the forward to hide
        the copy."""
        return self.segments.cached(("vision.grid", str(device)), lambda: self._build(torch.device(device)))

    def _build(self, device: torch.device) -> GridTensors:
        g = self.geometry
        order, rows, cols, position_row, times = [], [], [], [], []
        index, weight, first_row = [], [], {}
        offset = known = 0
        for t, h, w in self.grids:
            merged = merge_order(h, w, g.merge)
            if (h, w) not in first_row:
                taps = resample_taps(h, w, *g.table[:2], g.interpolation)
                index.append(taps[0][merged])
                weight.append(taps[1][merged])
                first_row[h, w] = known
                known += h * w
            order.append((offset + np.arange(t)[:, None] * (h * w) + merged).reshape(-1))
            rows.append(np.tile(merged // w, t))
            cols.append(np.tile(merged % w, t))
            position_row.append(np.tile(first_row[h, w] + np.arange(h * w), t))
            times.append(np.repeat(np.arange(t) + (t > 1), h * w))
            offset += t * h * w

        def put(
            parts: list[np.ndarray], empty: tuple[int, ...] = (0,), dtype: type = np.int64
        ) -> torch.Tensor:
            joined = np.concatenate(parts) if parts else np.zeros(empty, dtype)
            return torch.from_numpy(joined).to(device, non_blocking=True)

        moving = any(t > 1 for t, _, _ in self.grids)
        frame_rows, frame_weight = self._frames() if moving else (None, None)
        return GridTensors(
            order_P=put(order),
            turns_PK=rope_turns(put(rows), put(cols), sides=g.sides, head_dim=g.head_dim, theta=g.rope_theta),
            position_index_UW=put(index, (0, 1)),
            position_weight_UW=put(weight, (0, 1), np.float32),
            position_row_P=None if known == offset else put(position_row),
            time_row_P=put(times) if moving else None,
            time_TC=time_table(g.table[2], g.hidden_size).to(device) if moving else None,
            frame_rows_FM=None if frame_rows is None else frame_rows.to(device, non_blocking=True),
            frame_weight_FM=None if frame_weight is None else frame_weight.to(device, non_blocking=True),
        )

    def _frames(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token the rows of its frames and their weights; clips of different length share the
        pack."""
        longest = max(t for t, _, _ in self.grids)
        rows, weights = [], []
        offset = 0
        for (t, _, _), tokens in zip(self.grids, self.tokens):
            frame = np.arange(longest)[:, None]
            # Past its last frame an item rereads its first one, with weight zero.
            rows.append(offset + np.where(frame < t, frame, 0) * tokens + np.arange(tokens))
            weights.append(np.broadcast_to(np.where(frame < t, 1.0 / t, 0.0), (longest, tokens)))
            offset += t * tokens
        joined = np.concatenate(weights, axis=1).astype(np.float32)
        return torch.from_numpy(np.concatenate(rows, axis=1)), torch.from_numpy(joined)
