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

GEOMETRY = (
    "merge_kernel_size",
    "pos_emb_height",
    "pos_emb_width",
    "pos_emb_time",
    "pos_emb_interpolation",
    "max_patches_per_side",
    "head_dim",
    "hidden_size",
    "rope_theta",
)
"""The fields of a VisionConfig that positions depend on."""


def same_geometry(one: VisionConfig, other: VisionConfig) -> bool:
    """Whether a grid built for one configuration serves a tower of the other."""
    # Usually the very same object; the comparison is for towers built from an equal file.
    return one is other or all(getattr(one, name) == getattr(other, name) for name in GEOMETRY)


@dataclass
class GridTensors:
    """Device side of a VisionGrid. Optional fields are None when the pack does not need them."""

    order_P: torch.Tensor  # int64: row of the incoming patch that stands at this place
    turns_PK: torch.Tensor  # complex64: 2-D RoPE
    position_index_UW: torch.Tensor  # int64: taps into the flattened position table
    position_weight_UW: torch.Tensor  # float32
    position_row_P: torch.Tensor | None = (
        None  # int64: which of the U rows a patch adds; None when that is 0..P-1
    )
    time_row_P: torch.Tensor | None = None  # int64: row of the time table
    time_TC: torch.Tensor | None = None  # float32: the time table
    frame_rows_FM: torch.Tensor | None = None  # int64: f-th frame of token m, as a row of the unpooled tokens
    frame_weight_FM: torch.Tensor | None = None  # float32: 1 / t, or 0 past the last frame


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

    @property
    def num_tokens(self) -> int:
        """M, the features that come out."""
        return sum(self.tokens)

    def on(self, device: torch.device | str) -> GridTensors:
        """Index tensors on `device`, built at the first call and kept. Call it ahead of the forward to hide
        the copy."""
        # Kept with the segments: forward, recomputation and backward ask for the same tensors.
        return self.segments.cached(("vision.grid", str(device)), lambda: self._build(torch.device(device)))

    def _build(self, device: torch.device) -> GridTensors:
        cfg = self.cfg
        order, rows, cols, position_row, times = [], [], [], [], []
        index, weight, first_row = [], [], {}
        offset = known = 0
        for t, h, w in self.grids:
            merged = merge_order(h, w, cfg.merge_kernel_size)
            if (h, w) not in first_row:  # a size is resampled once, whatever images share it
                taps = resample_taps(h, w, cfg.pos_emb_height, cfg.pos_emb_width, cfg.pos_emb_interpolation)
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

        # Not waited for: the copy runs beside the host's next work.
        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        def joined(parts: list[np.ndarray]) -> torch.Tensor:
            return put(np.concatenate([np.zeros(0, np.int64), *parts]))

        at = GridTensors(
            order_P=joined(order),
            turns_PK=rope_turns(
                joined(rows),
                joined(cols),
                sides=cfg.max_patches_per_side,
                head_dim=cfg.head_dim,
                theta=cfg.rope_theta,
            ),
            position_index_UW=put(np.concatenate(index or [np.zeros((0, 1), np.int64)])),
            position_weight_UW=put(np.concatenate(weight or [np.zeros((0, 1), np.float32)])),
        )
        # Without a repeated size the gather would be the identity.
        if known != offset:
            at.position_row_P = joined(position_row)
        if any(t > 1 for t, _, _ in self.grids):
            # Packs of single images skip time and the mean over frames altogether.
            at.time_row_P, at.time_TC = (
                joined(times),
                time_table(cfg.pos_emb_time, cfg.hidden_size).to(device),
            )
            at.frame_rows_FM, at.frame_weight_FM = map(put, self._frames())
        return at

    def _frames(self) -> tuple[np.ndarray, np.ndarray]:
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
        return np.concatenate(rows, axis=1), np.concatenate(weights, axis=1).astype(np.float32)
