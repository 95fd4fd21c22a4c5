"""timm's transformers as towers, against timm's own forward; timm is asked for only where one is built."""

import json
import subprocess
import sys

import pytest
import torch

from earlyfusion.kernels.errors import UserError
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.encoder import TowerError, VisionGrid, build_tower, merge_order
from earlyfusion.vision.patches import patchify

NAMES = ("vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "naflexvit_base_patch16_siglip")


def shim() -> None:
    """torchvision of another build has no compiled operations; timm needs none of them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            return
    KEPT.append(library)


KEPT: list[torch.library.Library] = []


@pytest.fixture(scope="module")
def timm():
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        shim()
    except ImportError:
        pass
    return pytest.importorskip("timm")


def config(name: str) -> VisionConfig:
    from earlyfusion.vision.timm_tower import timm_config

    return timm_config(name)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_timms_own(timm, name):
    """Three sizes in one pack, a clip among them: each frame as timm computes it by itself."""
    cfg = config(name)
    torch.manual_seed(0)
    tower = build_tower(cfg).eval()
    p, grids = cfg.patch_size, [(1, 4, 6), (2, 2, 4), (1, 4, 6)]
    videos = [torch.randint(0, 256, (t, h * p, w * p, 3), dtype=torch.uint8) for t, h, w in grids]
    patches = torch.cat([patchify(video.numpy(), p) for video in videos])
    with torch.no_grad():
        found = tower(patches, VisionGrid.from_grids(grids, cfg))
        at = 0
        mean, std = (torch.tensor(tower.model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        for video, (_, h, w) in zip(videos, grids):
            pictures = (video.permute(0, 3, 1, 2) / 255.0 - mean) / std
            expected = tower.model.forward_features(pictures)
            expected = expected["patches"] if isinstance(expected, dict) else expected
            expected = expected[:, -h * w :].mean(0)[torch.from_numpy(merge_order(h, w, (2, 2)))]
            tokens = h * w // 4
            torch.testing.assert_close(found[at : at + tokens].flatten(0, 1), expected, atol=1e-5, rtol=1e-5)
            at += tokens
    assert at == len(found) and tower(patches[:0], VisionGrid.from_grids([], cfg)).shape[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("swin_tiny_patch4_window7_224", "vision.timm 'swin_tiny_patch4_window7_224'"),
        ("convnext_tiny", "vision.timm 'convnext_tiny'"),
        ("eva02_tiny_patch14_224", "keeps a table outside its checkpoints"),
        ("vit_tinny", "no model of timm"),
    ],
)
def test_what_cannot_be_a_tower_is_said(timm, name, said):
    with pytest.raises(TowerError, match=said):
        build_tower(VisionConfig.preset("moonvit", tower="timm", timm=name))


def test_a_timm_checkpoint_is_imported(timm, tmp_path):
    """timm's own files (config.json with `architecture`, model.safetensors), bit for bit; no head."""
    from safetensors.torch import save_file

    from earlyfusion.model.hub.foreign import Foreign

    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    save_file(model.state_dict(), str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    source = Foreign(tmp_path)
    tower = build_tower(source.vision)
    for name, tensor in tower.state_dict().items():
        found = source.find(f"vision_tower.{name}")
        assert torch.equal(source.tensor(found), model.state_dict()[name.removeprefix("model.")]), name
        assert found.names and tensor.shape == source.tensor(found).shape
    assert source.left(["vision_tower."]) == []


def test_without_timm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'earlyfusion\[towers\]'"):
        build_tower(VisionConfig.preset("moonvit", tower="timm", timm="vit_tiny_patch16_224"))


def test_nothing_else_imports_timm():
    program = "import sys, earlyfusion.model.fusion; assert 'timm' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
