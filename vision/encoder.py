"""The vision side of the model: MoonViT, a vision transformer over packed images of native resolution, the
projector to the width of the decoder, and the registry of towers.

One module serves the three generations (Kimi-VL, Kimi K2.5, Kimi K3); the flags of VisionConfig choose.
Parameter names are those of the released checkpoints, below their `vision_tower.` and `mm_projector.`.

    @tower("moonvit")
    class VisionTower(nn.Module):
        def __init__(self, cfg: VisionConfig) -> None: ...
        def forward(self, patches, grid) -> Tensor: ...  # [M, merge size, C], tokens in the grid's order

A recipe names a tower by `vision.tower`; one that is not part of the project by its place,
"package.module:Class".

Patches arrive row by row; inside the tower they stand in merge order: the patches of one token are
neighbours. Attention does not see order, so reordering the uint8 input once (no gradient) makes the merge at
the end a plain view. Everything about positions depends on sizes alone: the resampling of the learned table,
the 2-D RoPE and the sine/cosine of time are computed once on the host (`VisionGrid`), and the tower applies
them with one weighted gather and one complex product.

Legend: P patches of all items in the pack, M tokens after the merge, G patches of a token, C hidden size, H
heads, D head dim, h x w patches of a frame, taps neighbours of the resampling, U rows of resampled positions
(one for each patch of each different size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.errors import UserError, did_you_mean
from earlyfusion.kernels.files import Record, function_at
from earlyfusion.kernels.products import linear
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, Share, merge_order, num_patches, num_tokens

TOWERS: Record = {}
"""Every registered tower by its name."""


class TowerError(UserError, ValueError):
    """A tower that is not known, or is not where its name says."""


def tower(name: str) -> Callable[[Any], Any]:
    """Register the decorated class as the tower `name`."""
    # By name and not by class: configurations are plain text.
    return lambda cls: TOWERS.setdefault(name, cls)


def import_tower(name: str) -> None:
    """Import and register "package.module:Class"; a registered name needs nothing.

    Recipes are code and may name such places; model directories are data and may not, so that reading one
    runs nothing. Raises UserError.
    """
    # Importing runs code: only a recipe, which its user wrote, may ask for it.
    if ":" in name and name not in TOWERS:
        TOWERS[name] = function_at(name, "vision.tower")


def build_tower(config: VisionConfig) -> nn.Module:
    """The tower that `config.tower` names. Raises TowerError with the nearest name."""
    # Configurations come from model directories too, so nothing is imported here.
    if config.tower in TOWERS:
        return TOWERS[config.tower](config)
    if ":" in config.tower:
        raise TowerError(
            f"vision.tower {config.tower!r} is code that a model directory may not bring along; call"
            " earlyfusion.vision.encoder.import_tower with its name first"
        )
    raise TowerError(f"vision.tower {config.tower!r}; {did_you_mean(config.tower, TOWERS)}")


# ---- what is known from the sizes of a pack

# Free parameter of the cubic convolution kernel; this is the value of `torch.nn.functional.interpolate`.
CUBIC_A = -0.75


@lru_cache(maxsize=4096)  # by axis: a cache of whole sizes would grow to gigabytes on native-resolution data
def _axis_taps(out: int, table: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours [out, taps] and weights [out, taps] (float64) that resample `table` points to `out` points.

    Half-pixel centres: point i reads the table at x = (i + 0.5) * table / out - 0.5. With antialiasing the
    triangle of bilinear is as wide as a point is of the table, and its part outside falls away.
    """
    x = (np.arange(out, dtype=np.float64) + 0.5) * (table / out) - 0.5
    left = np.floor(x)
    if mode == "bilinear_antialias":
        reach = max(table / out, 1.0)
        index = left.astype(np.int64)[:, None] + np.arange(-int(np.ceil(reach)), int(np.ceil(reach)) + 2)
        weights = np.maximum(1.0 - np.abs(index - x[:, None]) / reach, 0.0)
        weights *= (index >= 0) & (index < table)
        return np.clip(index, 0, table - 1), weights / weights.sum(axis=1, keepdims=True)

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
    order; taps is 4 (bilinear), 16 (bicubic) or, with antialiasing, as many as the sizes ask for. Equals
    `F.interpolate(..., align_corners=False)`, and is the identity when the sizes agree.
    """
    # Separable: two short lists make the taps of every patch.
    row_index, row_weight = _axis_taps(h, table_h, mode)
    col_index, col_weight = _axis_taps(w, table_w, mode)
    index = row_index[:, None, :, None] * table_w + col_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * col_weight[None, :, None, :]
    return index.reshape(h * w, -1), weight.reshape(h * w, -1).astype(np.float32)


@lru_cache(maxsize=32)  # 40 bytes a patch
def _places(t: int, h: int, w: int, merge_kernel: tuple[int, int]) -> np.ndarray:
    """[5, P] of every patch of an item: where it comes from, row and column, which of h * w positions, time
    (0: a single image)."""
    merged, size = merge_order(h, w, merge_kernel), h * w
    frame, place = np.repeat(np.arange(t), size), np.tile(merged, t)
    position = np.tile(np.arange(size), t)
    return np.stack([frame * size + place, place // w, place % w, position, frame + (t > 1)])


@lru_cache(maxsize=64)
def _axial_turns(sides: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Unit complex numbers [sides, head_dim / 4], angles in float64: coordinate n turns pair i of its axis by
    n * theta^(-4 i / head_dim)."""
    frequency = theta ** (-4.0 * torch.arange(head_dim // 4, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(sides, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rope_turns(row_P: Tensor, col_P: Tensor, cfg: VisionConfig) -> Tensor:
    """Unit complex numbers [P, head_dim / 2] of the 2-D RoPE, complex64, on the device of the coordinates.

    Pair 2i carries the column (x) and pair 2i+1 the row (y), both with frequency i: x and y alternate.
    Without RoPE (rope_theta None) nothing turns.
    """
    if cfg.rope_theta is None:
        return torch.ones(len(row_P), cfg.head_dim // 2, dtype=torch.complex64, device=row_P.device)
    # Looked up, not computed: coordinates are integers up to the longest side.
    turns = _axial_turns(cfg.max_patches_per_side, cfg.head_dim, cfg.rope_theta, row_P.device)
    return torch.stack((turns[col_P], turns[row_P]), dim=-1).flatten(1)


@lru_cache(maxsize=64)
def time_table(frames: int, width: int) -> Tensor:
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

    order_P: Tensor  # int64: row of the incoming patch that stands at this place
    turns_PK: Tensor  # complex64: 2-D RoPE
    position_index_UW: Tensor  # int64: taps into the flattened position table
    position_weight_UW: Tensor  # float32
    position_row_P: Tensor | None = None
    """int64: which of the U rows a patch adds; None when that is 0..P-1"""
    time: tuple[Tensor, Tensor] | None = None
    """int64 row_P of the time table, and the table float32 [t, C]"""
    frames: tuple[Tensor, Tensor] | None = None
    """[F, M] each: int64 f-th frame of token m as a row of the unpooled tokens; float32 1 / t, or 0 past the
    last frame"""


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
            size = h * w
            if (h, w) not in first_row:  # a size is resampled once, whatever images share it
                merged = merge_order(h, w, cfg.merge_kernel_size)
                index, weight = resample_taps(
                    h, w, cfg.pos_emb_height, cfg.pos_emb_width, cfg.pos_emb_interpolation
                )
                indices.append(index[merged])
                tap_weights.append(weight[merged])
                first_row[h, w] = known
                known += size

            places_P = _places(t, h, w, cfg.merge_kernel_size)
            parts.append(places_P + np.array([[first_patch], [0], [0], [first_row[h, w]], [0]]))
            # Of every token: its frames. Past its last one an item rereads its first, with weight zero.
            if longest > 1:
                turn = np.arange(longest)[:, None]
                frames.append(first_token + np.where(turn < t, turn, 0) * tokens + np.arange(tokens))
                share = np.where(turn < t, 1.0 / t, 0.0).astype(np.float32)
                weights.append(np.broadcast_to(share, (longest, tokens)))
            first_patch, first_token = first_patch + t * size, first_token + t * tokens
        # Sizes with fewer taps are filled up by taps of weight zero.
        taps = max((index.shape[1] for index in indices), default=1)
        for each in (indices, tap_weights):
            each[:] = [np.pad(one, ((0, 0), (0, taps - one.shape[1]))) for one in each]

        # Not waited for: the copy runs beside the host's next work.
        def put(array: np.ndarray) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class ShareGrid(VisionGrid):
    """Metadata of one rank's share of a picture, its patches in the order of `by_token`."""

    share: Share

    @classmethod
    def of(cls, share: Share, cfg: VisionConfig, segments: Segments) -> ShareGrid:
        """segments: tells the blocks that patches of other ranks are to be attended as well."""
        tokens = len(share.tokens(cfg.merge_kernel_size))
        return cls((share.grid,), cfg, segments, (tokens,), share)

    def _build(self, device: torch.device) -> GridTensors:
        whole = VisionGrid.from_grids(self.grids, self.cfg).on(device)
        (frames, h, w), size = self.share.grid, self.cfg.merge_size
        tokens = self.share.tokens(self.cfg.merge_kernel_size)
        # [tokens, frames, patches of a token]: where each patch of the share stands in the whole picture.
        within = torch.arange(tokens.start * size, tokens.stop * size, device=device).view(-1, 1, size)
        place_P = (within + torch.arange(frames, device=device)[:, None] * h * w).flatten()
        rows = slice(tokens.start * size, tokens.stop * size)
        at = GridTensors(
            torch.arange(self.num_patches, device=device),
            whole.turns_PK[place_P],
            whole.position_index_UW[rows],
            whole.position_weight_UW[rows],
        )
        if whole.time is not None:
            at.position_row_P = (within - rows.start).expand(-1, frames, -1).flatten()
            at.time = whole.time[0][place_P], whole.time[1]
            first_M = torch.arange(len(tokens), device=device) * frames
            rows_FM = first_M + torch.arange(frames, device=device)[:, None]
            at.frames = rows_FM, torch.full(rows_FM.shape, 1.0 / frames, device=device)
        return at


# ---- modules


class Linear(nn.Linear):
    """nn.Linear by the project's own product (kernels/products.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in its weight's dtype: fp32 weights keep fp32 statistics under bf16 autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(kind: str, width: int, eps: float) -> RMSNorm | nn.LayerNorm:
    """RMSNorm ("rms", weight) or LayerNorm ("layer", weight and bias) with an explicit eps."""
    return RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps)


def draw(module: nn.Module, std: float) -> None:
    """N(0, std^2) for the module's own weights and those of the linear layers right under it, zeros for
    biases."""
    # In the order of construction, so that a seed gives the same tower in every version.
    for each in [module, *module.children()]:
        if each is module or isinstance(each, nn.Linear):
            for name, parameter in each.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.zeros_(parameter)
                else:
                    nn.init.normal_(parameter, std=std)


class Drawn(nn.Module):
    """Base of the modules that `draw` initialises."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def reset_parameters(self) -> None:
        draw(self, self.std)


def zero_anchor(module: nn.Module) -> Tensor:
    """A scalar 0 that depends on every parameter of `module`: added to a loss, it gives each a gradient of
    zeros.

    Sums empty slices, so it costs nothing and stays 0 whatever the parameters hold. Of sharded parameters it
    takes the local shard.
    """
    # Summed over empty slices: no overflowed weight can turn the zero into NaN.
    total = torch.zeros(())
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        total = total.to(local.device) + local.narrow(0, 0, 0).sum()
    return total


class PatchProjection(Drawn):
    """Linear map of a flattened patch, stored in the shape of the equivalent strided convolution [C, 3, p,
    p]."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__(cfg.initializer_range)
        self.weight = nn.Parameter(
            torch.empty(cfg.hidden_size, cfg.in_channels, cfg.patch_size, cfg.patch_size)
        )
        self.bias = nn.Parameter(torch.empty(cfg.hidden_size)) if cfg.bias else None
        self.reset_parameters()

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [P, 3, p, p], uint8 (normalised here: (x / 255 - 0.5) / 0.5) or float (already so) -> [P,
        C]."""
        x = patches.flatten(1)
        # Bytes until here: a quarter of the memory and of the copy to the device.
        if x.dtype == torch.uint8:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            x = x.to(wide).mul_(2.0 / 255.0).sub_(1.0)
        return linear(x.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PositionTable(Drawn):
    """Learned absolute positions [table height, table width, C], resampled to the size of each image."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__(cfg.initializer_range)
        self.weight = nn.Parameter(torch.empty(cfg.pos_emb_height, cfg.pos_emb_width, cfg.hidden_size))
        self.reset_parameters()

    def forward(self, at: GridTensors) -> Tensor:
        """Positions [P, C] in float32 or wider; a clip (t > 1) also gets the sine/cosine row of each frame.

        Each size in the pack is resampled once; images that share it gather the result.
        """
        table = self.weight.flatten(0, 1)
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        # A weighted gather in place of interpolate: one call for images of all sizes.
        weight = at.position_weight_UW.to(table.dtype)
        x = F.embedding_bag(at.position_index_UW, table, per_sample_weights=weight, mode="sum")
        if at.position_row_P is not None:
            x = F.embedding(at.position_row_P, x)
        if at.time is not None:
            time_row_P, time_TC = at.time
            x = x + time_TC[time_row_P]
        return x


class PatchEmbed(nn.Module):
    """Patch projection plus positions."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(cfg)
        self.pos_emb = PositionTable(cfg)

    def forward(self, patches: Tensor, at: GridTensors) -> Tensor:
        x = self.proj(patches)
        # Under autocast the projection is bfloat16 while parameters
        # are float32: the residual stream stays float32.
        return (x + self.pos_emb(at)).to(self.proj.weight.dtype)


class EncoderMLP(Drawn):
    """fc1(GELU_tanh(fc0(x)))."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__(cfg.initializer_range)
        self.fc0 = Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.bias)
        self.fc1 = Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.bias)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class EncoderBlock(Drawn):
    """Pre-norm block: x += wo(attention(RoPE(wqkv(norm0(x))))), x += mlp(norm1(x)).

    Rows of wqkv are q | k | v, each heads * head_dim. Attention is bidirectional inside a segment.
    """

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__(cfg.initializer_range)
        self.num_heads, self.head_dim = cfg.num_attention_heads, cfg.head_dim
        self.norm0 = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)
        self.norm1 = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)
        self.wqkv = Linear(cfg.hidden_size, 3 * cfg.qkv_width, bias=cfg.bias)
        self.wo = Linear(cfg.qkv_width, cfg.hidden_size, bias=cfg.bias)
        self.mlp = EncoderMLP(cfg)
        self.reset_parameters()

    def attend(self, x_PC: Tensor, turns_PK: Tensor, segments: Segments) -> Tensor:
        """Attention branch on normed input [P, C] -> [P, C]."""
        # One product for q, k and v: they read the same input.
        qkv_P3HD = self.wqkv(x_PC).view(-1, 3, self.num_heads, self.head_dim)
        if segments.total == 0:  # nothing to attend; the gradient path to the weights must still exist
            return self.wo(qkv_P3HD[:, 2].flatten(1))
        q_PHD, k_PHD, v_PHD = resolve("qkv_rope", x_PC)(qkv_P3HD, turns_PK)
        attention = resolve("attention", x_PC)
        o_PHD, _ = attention(q_PHD, k_PHD, v_PHD, segments, causal=False, scale=self.head_dim**-0.5)
        return self.wo(o_PHD.flatten(1))

    def forward(self, x_PC: Tensor, turns_PK: Tensor, segments: Segments) -> Tensor:
        x_PC = x_PC + self.attend(self.norm0(x_PC), turns_PK, segments)
        return x_PC + self.mlp(self.norm1(x_PC))


class Encoder(nn.Module):
    """The stack of blocks and the final norm. recompute: training keeps no activations inside a block and
    computes them again in the backward pass."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.merge_size, self.recompute = cfg.merge_size, False
        self.blocks = nn.ModuleList([EncoderBlock(cfg) for _ in range(cfg.num_hidden_layers)])
        self.final_layernorm = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)

    def forward(self, x_PC: Tensor, turns_PK: Tensor, segments: Segments) -> Tensor:
        """[P, C] in merge order -> [P / merge size, merge size, C]."""
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_PC = checkpoint(block, x_PC, turns_PK, segments, use_reentrant=False)
            else:
                x_PC = block(x_PC, turns_PK, segments)
        # Grouped before the norm: an output that is a view would upset the hooks of sharded training.
        return self.final_layernorm(x_PC.view(-1, self.merge_size, x_PC.shape[-1]))


@tower("moonvit")
class VisionTower(nn.Module):
    """Packed patches -> features [M, merge size, C]: patches of a token side by side, averaged over its
    frames.

    Sources: Kimi-VL report section 2.1 (2-D), Kimi K2.5 report section 4.2 (frames of a clip attend jointly
    and are averaged), Kimi K3 report section 2.4 (V2). The paper of V2 describes attention within and between
    frames in turn; its released code attends jointly, and so does this.
    """

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = PatchEmbed(cfg)
        self.encoder = Encoder(cfg)

    def forward(self, patches: Tensor, grid: VisionGrid) -> Tensor:
        """Patches [P, 3, p, p] (uint8, or float already normalised to -1..1) of the items in `grid`, in their
        order.

        Returns [M, merge size, C] in item order, tokens row by row. A pack without patches passes through all
        blocks and returns [0, merge size, C]: sharded training needs every rank in every block.
        Raises ValueError when patches and grid, or grid and configuration, do not belong together.
        """
        # A wrong pack would run and give features of the wrong pictures.
        cfg = self.cfg
        expected = (grid.num_patches, cfg.in_channels, cfg.patch_size, cfg.patch_size)
        if tuple(patches.shape) != expected:
            raise ValueError(
                f"patches {list(patches.shape)} do not fit grids {grid.grids}: expected {list(expected)}"
            )
        if grid.cfg != cfg:
            raise ValueError(
                f"the VisionGrid was built for {grid.cfg}, the tower is {cfg}; "
                "build it with VisionGrid.from_grids(grids, tower.cfg)"
            )

        # Order is undone by nobody: tokens come out in merge order, which is their order in the text.
        at = grid.on(patches.device)
        x_PC = self.patch_embed(patches.index_select(0, at.order_P), at)
        tokens = self.encoder(x_PC, at.turns_PK, grid.segments)
        if at.frames is None:
            return tokens

        # One weighted gather per frame of the longest clip: deterministic, and clips may differ in length.
        rows, weights = at.frames
        flat = tokens.flatten(1)
        total = flat.index_select(0, rows[0]) * weights[0, :, None]
        for frame in range(1, rows.shape[0]):
            total = total + flat.index_select(0, rows[frame]) * weights[frame, :, None]
        return total.to(tokens.dtype).unflatten(1, tokens.shape[1:])


class Projector(Drawn):
    """Two linear layers with exact (erf) GELU over the G concatenated patches of a token.

    v1 (Kimi-VL, K2.5): LayerNorm of each patch `pre_norm`, then biased layers.
    v2 (Kimi K3): layers without bias, then RMSNorm `post_norm` of the result.
    Both norms take `projector_ln_eps`, never the tower's `norm_eps`, which in the V2 tower is a thousand
    times wider.
    """

    def __init__(self, cfg: VisionConfig, hidden_size: int) -> None:
        super().__init__(cfg.initializer_range)
        # The generations differ in where the norm stands and whether there are biases.
        first = cfg.projector == "v1"
        width = cfg.hidden_size * cfg.merge_size
        self.pre_norm = make_norm("layer", cfg.hidden_size, cfg.projector_ln_eps) if first else None
        self.proj = nn.Sequential(
            Linear(width, width, bias=first), nn.GELU(), Linear(width, hidden_size, bias=first)
        )
        self.post_norm = None if first else make_norm("rms", hidden_size, cfg.projector_ln_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self.proj, self.std)

    def forward(self, features_MGC: Tensor) -> Tensor:
        """[M, G, C] -> [M, D]; M may be 0."""
        # v1 norms each patch by itself, before the patches of a token are joined.
        x = features_MGC if self.pre_norm is None else self.pre_norm(features_MGC)
        x = self.proj(x.flatten(1))
        # v2 norms what the decoder reads, so that images arrive at the scale of text.
        return x if self.post_norm is None else self.post_norm(x)
