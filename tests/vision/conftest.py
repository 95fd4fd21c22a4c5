"""Random items for the vision tests."""

import pytest
import torch

from earlyfusion.vision.encoder import VisionGrid


@pytest.fixture
def make_pack():
    """(grids, cfg, seed) -> (normalised float patches [P, 3, p, p], VisionGrid)."""

    def build(grids, cfg, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        grid = VisionGrid.from_grids(grids, cfg)
        shape = (grid.num_patches, cfg.in_channels, cfg.patch_size, cfg.patch_size)
        return torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1, grid

    return build
