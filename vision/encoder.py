"""MoonViT: a vision transformer over packed images of native resolution.

One module serves the three generations (Kimi-VL, Kimi K2.5, Kimi K3); the flags of VisionConfig choose.
Parameter names are those of the released checkpoints, below their `vision_tower.` prefix.

Legend: P patches of all items in the pack, M tokens after the merge, C hidden size, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.products import linear
from earlyfusion.kernels.segments import Segments
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.grid import GridTensors, VisionGrid, same_geometry
from earlyfusion.vision.towers import tower


class Linear(nn.Linear):
    """nn.Linear by the project's own product (kernels/products.py)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in its weight's dtype: fp32 weights keep fp32 statistics under bf16 autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(kind: str, width: int, eps: float) -> RMSNorm | nn.LayerNorm:
    """RMSNorm ("rms", weight) or LayerNorm ("layer", weight and bias) with an explicit eps."""
    return RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps)


def init_linear(layer: nn.Linear, std: float) -> None:
    """Weight N(0, std^2), bias zero."""
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def zero_anchor(module: nn.Module) -> torch.Tensor:
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


class PatchProjection(nn.Module):
    """Linear map of a flattened patch, stored in the shape of the equivalent strided convolution [C, 3, p,
    p]."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.std = cfg.initializer_range
        self.weight = nn.Parameter(
            torch.empty(cfg.hidden_size, cfg.in_channels, cfg.patch_size, cfg.patch_size)
        )
        self.bias = nn.Parameter(torch.empty(cfg.hidden_size)) if cfg.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches [P, 3, p, p], uint8 (normalised here: (x / 255 - 0.5) / 0.5) or float (already so) -> [P,
        C]."""
        x = patches.flatten(1)
        # Bytes until here: a quarter of the memory and of the copy to the device.
        if x.dtype == torch.uint8:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            x = x.to(wide).mul_(2.0 / 255.0).sub_(1.0)
        return linear(x.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PositionTable(nn.Module):
    """Learned absolute positions [table height, table width, C], resampled to the size of each image."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.std = cfg.initializer_range
        self.weight = nn.Parameter(torch.empty(cfg.pos_emb_height, cfg.pos_emb_width, cfg.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, at: GridTensors) -> torch.Tensor:
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
        if at.time_row_P is not None and at.time_TC is not None:
            x = x + at.time_TC[at.time_row_P]
        return x


class PatchEmbed(nn.Module):
    """Patch projection plus positions."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(cfg)
        self.pos_emb = PositionTable(cfg)

    def forward(self, patches: torch.Tensor, at: GridTensors) -> torch.Tensor:
        x = self.proj(patches)
        # Under autocast the projection is bfloat16 while parameters
        # are float32: the residual stream stays float32.
        return (x + self.pos_emb(at)).to(self.proj.weight.dtype)


class EncoderMLP(nn.Module):
    """fc1(GELU_tanh(fc0(x)))."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.std = cfg.initializer_range
        self.fc0 = Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.bias)
        self.fc1 = Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.fc0, self.std)
        init_linear(self.fc1, self.std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class EncoderBlock(nn.Module):
    """Pre-norm block: x += wo(attention(RoPE(wqkv(norm0(x))))), x += mlp(norm1(x)).

    Rows of wqkv are q | k | v, each heads * head_dim. Attention is bidirectional inside a segment.
    """

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = cfg.num_attention_heads, cfg.head_dim
        self.std = cfg.initializer_range
        self.norm0 = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)
        self.norm1 = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)
        self.wqkv = Linear(cfg.hidden_size, 3 * cfg.qkv_width, bias=cfg.bias)
        self.wo = Linear(cfg.qkv_width, cfg.hidden_size, bias=cfg.bias)
        self.mlp = EncoderMLP(cfg)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.wqkv, self.std)
        init_linear(self.wo, self.std)

    def attend(self, x_PC: torch.Tensor, turns_PK: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Attention branch on normed input [P, C] -> [P, C]."""
        # One product for q, k and v: they read the same input.
        qkv_P3HD = self.wqkv(x_PC).view(-1, 3, self.num_heads, self.head_dim)
        if segments.total == 0:  # nothing to attend; the gradient path to the weights must still exist
            return self.wo(qkv_P3HD[:, 2].flatten(1))
        q_PHD, k_PHD, v_PHD = resolve("qkv_rope", x_PC.device)(qkv_P3HD, turns_PK)
        attention = resolve("attention", x_PC.device)
        o_PHD, _ = attention(q_PHD, k_PHD, v_PHD, segments, causal=False, scale=self.head_dim**-0.5)
        return self.wo(o_PHD.flatten(1))

    def forward(self, x_PC: torch.Tensor, turns_PK: torch.Tensor, segments: Segments) -> torch.Tensor:
        x_PC = x_PC + self.attend(self.norm0(x_PC), turns_PK, segments)
        return x_PC + self.mlp(self.norm1(x_PC))


class Encoder(nn.Module):
    """The stack of blocks and the final norm."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.merge_size = cfg.merge_size
        self.blocks = nn.ModuleList([EncoderBlock(cfg) for _ in range(cfg.num_hidden_layers)])
        self.final_layernorm = make_norm(cfg.norm, cfg.hidden_size, cfg.norm_eps)

    def forward(self, x_PC: torch.Tensor, turns_PK: torch.Tensor, segments: Segments) -> torch.Tensor:
        """[P, C] in merge order -> [P / merge size, merge size, C]."""
        for block in self.blocks:
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

    def reset_parameters(self) -> None:
        """N(0, initializer_range^2) for matrices and the position table, ones for norms, zeros for biases."""
        # After `to_empty` nothing holds a value: every part draws its own again.
        for module in [*self.patch_embed.modules(), *reversed(list(self.encoder.modules()))]:
            # children before parents, which have the last word
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def zero_anchor(self) -> torch.Tensor:
        """Scalar 0 through which every parameter receives a gradient of zeros."""
        return zero_anchor(self)

    def forward(self, patches: torch.Tensor, grid: VisionGrid) -> torch.Tensor:
        """Patches [P, 3, p, p] (uint8, or float already normalised to -1..1) of the items in `grid`, in their
        order.

        Returns [M, merge size, C] in item order, tokens row by row. A pack without patches passes through all
        blocks and returns [0, merge size, C]: sharded training needs every rank in every block.
        Raises ValueError when patches and grid, or grid and configuration, do not belong together.
        """
        # Order is undone by nobody: tokens come out in merge order, which is their order in the text.
        self._check(patches, grid)
        at = grid.on(patches.device)
        x_PC = self.patch_embed(patches.index_select(0, at.order_P), at)
        tokens = self.encoder(x_PC, at.turns_PK, grid.segments)
        return tokens if at.frame_rows_FM is None else self._mean_over_frames(tokens, at)

    def _mean_over_frames(self, tokens: torch.Tensor, at: GridTensors) -> torch.Tensor:
        """One weighted gather per frame of the longest clip: deterministic, and clips may differ in
        length."""
        rows, weights = at.frame_rows_FM, at.frame_weight_FM
        assert rows is not None and weights is not None
        flat = tokens.flatten(1)
        total = flat.index_select(0, rows[0]) * weights[0, :, None]
        for frame in range(1, rows.shape[0]):
            total = total + flat.index_select(0, rows[frame]) * weights[frame, :, None]
        return total.to(tokens.dtype).unflatten(1, tokens.shape[1:])

    def _check(self, patches: torch.Tensor, grid: VisionGrid) -> None:
        cfg = self.cfg
        # A wrong pack would run and give features of the wrong pictures.
        expected = (grid.num_patches, cfg.in_channels, cfg.patch_size, cfg.patch_size)
        if tuple(patches.shape) != expected:
            raise ValueError(
                f"patches {list(patches.shape)} do not fit grids {grid.grids}: expected {list(expected)}"
            )
        if not same_geometry(grid.cfg, cfg):
            raise ValueError(
                f"the VisionGrid was built for {grid.cfg}, the tower is {cfg}; "
                "build it with VisionGrid.from_grids(grids, tower.cfg)"
            )
