"""timm's vision transformers as towers: `vision.tower = "timm"` and, say,
`vision.timm = "vit_so400m_patch14_siglip_224"`.

Any model of timm that takes pictures of any size: VisionTransformer with its position table resampled to
the grid of each picture (`dynamic_img_size`), NaFlexVit as it is. Pictures of one size go through together,
others one size after the other; class and register tokens are dropped, the patches of a token put side by
side, and frames of a clip averaged, as MoonViT does. timm is imported when the first tower is built: it needs
a torchvision that fits this torch.

Refused: models with a size of their own (windows, convolutions), and those that keep tables outside their
checkpoints (RoPE of EVA and DINOv3), which a loaded model would lack.
"""

from typing import Any

import torch
from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import TowerError, VisionGrid, tower
from earlyfusion.vision.patches import merge_order


def timm_model(name: str | None) -> nn.Module:
    """timm's model of that name, without its head. Raises UserError without timm, TowerError for a model that
    cannot be a tower."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"vision.tower 'timm': timm cannot be imported ({error}); pip install 'earlyfusion[towers]' with"
            " the torchvision of this torch"
        ) from None
    if name is None or not timm.is_model(name):
        near = "see timm.list_models('*vit*')"
        raise TowerError(f"vision.timm {name!r}: no model of timm {timm.__version__}; {near}")
    given: dict[str, Any] = {"num_classes": 0, "global_pool": "", "pretrained": False}
    if not name.startswith("naflexvit"):
        given["dynamic_img_size"] = True
    try:
        model: nn.Module = timm.create_model(name, **given)
    except TypeError as error:
        raise TowerError(f"vision.timm {name!r}: takes no pictures of other sizes ({error})") from None
    if not hasattr(model, "blocks") or not hasattr(model, "num_prefix_tokens"):
        raise TowerError(f"vision.timm {name!r}: {type(model).__name__} is no transformer of patches")
    for module in model.modules():
        if module._non_persistent_buffers_set:
            raise TowerError(
                f"vision.timm {name!r}: {type(module).__name__} keeps a table outside its checkpoints, which"
                " a loaded model would lack; take one with a learned position table"
            )
    return model


def timm_config(name: str) -> VisionConfig:
    """The configuration of a tower of that model: its sizes, the limits of MoonViT."""
    with torch.device("meta"):
        model: Any = timm_model(name)
    block = model.blocks[0]
    heads = block.attn.num_heads
    embed = model.patch_embed if hasattr(model, "patch_embed") else model.embeds
    return VisionConfig.preset(
        "moonvit",
        tower="timm",
        timm=name,
        patch_size=embed.patch_size[0],
        hidden_size=model.num_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=heads,
        head_dim=model.num_features // heads,
        intermediate_size=block.mlp.fc1.out_features,
        pos_emb_time=4,
    )


@tower("timm")
class TimmTower(nn.Module):
    """See the head of the file. Raises TowerError where sizes of `cfg` are not the model's."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model: Any = timm_model(cfg.timm)
        if (found := self.model.num_features) != cfg.hidden_size:
            raise TowerError(f"vision.hidden_size {cfg.hidden_size}: {cfg.timm} has {found}")
        prepared: Any = self.model.pretrained_cfg
        self.mean, self.std = (tuple(prepared[key]) for key in ("mean", "std"))

    def forward(self, patches: Tensor, grid: VisionGrid) -> Tensor:
        """Patches [P, 3, p, p] (uint8, or float in -1..1) of the items in `grid` -> [M, merge size, C]."""
        dtype = next(self.model.parameters()).dtype
        x = patches.to(torch.promote_types(dtype, torch.float32))
        x = x / 255.0 if patches.dtype == torch.uint8 else x * 0.5 + 0.5
        mean, std = (x.new_tensor(each)[:, None, None] for each in (self.mean, self.std))
        x = ((x - mean) / std).to(dtype)

        # All frames of a size in one batch, whatever items they belong to.
        sizes: dict[tuple[int, int], list[int]] = {}
        for item, (_, h, w) in enumerate(grid.grids):
            sizes.setdefault((h, w), []).append(item)
        parts = x.split([t * h * w for t, h, w in grid.grids])
        found: list[Tensor] = [x.new_zeros(0)] * len(parts)
        for (h, w), items in sizes.items():
            rows = torch.cat([parts[item] for item in items])
            features = self._features(rows, h, w)
            frames = [grid.grids[item][0] for item in items]
            for item, part in zip(items, features.split(frames)):
                found[item] = part.mean(0)
        empty = x.new_zeros(0, self.cfg.merge_size, self.cfg.hidden_size)
        return torch.cat([empty, *found])

    def _features(self, rows: Tensor, h: int, w: int) -> Tensor:
        """Patches of frames of h x w, row by row -> [frames, tokens, merge size, C]."""
        p = self.cfg.patch_size
        cut = rows.view(-1, h, w, rows.shape[1], p, p)
        pictures = cut.permute(0, 3, 1, 4, 2, 5).reshape(len(cut), rows.shape[1], h * p, w * p)
        features = self.model.forward_features(pictures)
        # NaFlexVit returns its mask, too.
        features = features["patches"] if isinstance(features, dict) else features
        features = features[:, features.shape[1] - h * w :]
        order = torch.from_numpy(merge_order(h, w, self.cfg.merge_kernel_size)).to(features.device)
        return features[:, order].unflatten(1, (-1, self.cfg.merge_size))
