"""From a PIL image to uint8 patches at native resolution (no squashing to a square).

The resize rule is the "navit" rule of Kimi K2.5 and K3: shrink only, keep the aspect ratio, then pad right
and bottom with zeros (black) to whole tokens, before normalisation. Patches stay uint8; the tower normalises
them, so a batch is a quarter of its float32 size in host memory and on the way to the device.

Legend: t frames, h rows and w columns of patches, p patch side in pixels, P = t*h*w patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from earlyfusion.vision.config import VisionConfig

Grid = tuple[int, int, int]


class Resize(NamedTuple):
    """Outcome of the resize rule, in pixels: resize to (new_w, new_h), then add pad_w columns and pad_h
    rows."""

    new_w: int
    new_h: int
    pad_w: int
    pad_h: int

    @property
    def width(self) -> int:
        """Width after padding."""
        return self.new_w + self.pad_w

    @property
    def height(self) -> int:
        """Height after padding."""
        return self.new_h + self.pad_h


def navit_size(width: int, height: int, cfg: VisionConfig, *, patch_limit: int | None = None) -> Resize:
    """Size of a width x height pixel image after the navit rule.

    s = min(1, sqrt(L / (max(1, w // p) * max(1, h // p))), S*p / w, S*p / h) with L = `patch_limit`
    (default `cfg.in_patch_limit`) and S = `cfg.max_patches_per_side`; new side = clamp(int(side * s), 1,
    S*p). L is a target, not a bound: the rule counts whole patches of the original, and padding comes on top.
    Reserve a margin when packing. Raises ValueError for an empty image.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image of {width}x{height} pixels: both sides must be at least 1")
    # Whole patches of the original count, as in the released code, so that sizes agree to the pixel.
    p = cfg.patch_size
    limit = cfg.in_patch_limit if patch_limit is None else patch_limit
    longest = cfg.max_patches_per_side * p
    patches = max(1, width // p) * max(1, height // p)
    s = min(1.0, sqrt(limit / patches), longest / width, longest / height)
    new_w = min(max(1, int(width * s)), longest)
    new_h = min(max(1, int(height * s)), longest)
    # Negative modulo: what is missing to the next whole token.
    merge_h, merge_w = cfg.merge_kernel_size
    return Resize(new_w, new_h, -new_w % (p * merge_w), -new_h % (p * merge_h))


def grid_of(size: Resize, cfg: VisionConfig, frames: int = 1) -> Grid:
    """(t, h, w) in patches of `frames` frames of a resized image."""
    return frames, size.height // cfg.patch_size, size.width // cfg.patch_size


def num_patches(grid: Grid) -> int:
    """Patches of one item: t*h*w."""
    t, h, w = grid
    return t * h * w


def num_tokens(grid: Grid, merge: tuple[int, int] = (2, 2)) -> int:
    """Tokens one item takes in the text: (h / merge rows) * (w / merge columns); frames of an item share
    them."""
    _, h, w = grid
    return (h // merge[0]) * (w // merge[1])


@lru_cache(maxsize=512)
def merge_order(h: int, w: int, merge: tuple[int, int]) -> np.ndarray:
    """Row-major index of each patch of an h x w frame, in merge order; inside a token (dy, dx) row by row."""
    rows, cols = merge
    # Attention does not see order, so the merge may be paid once, on the uint8 input.
    index = np.arange(h * w, dtype=np.int64).reshape(h // rows, rows, w // cols, cols)
    return index.transpose(0, 2, 1, 3).reshape(-1)


class Share(NamedTuple):
    """What rank `rank` of `ranks` encodes of one picture that all of them share: an even stretch of its
    tokens, with the patches of all frames."""

    grid: Grid
    rank: int
    ranks: int

    def tokens(self, merge: tuple[int, int]) -> range:
        """Which of the picture's tokens."""
        total = num_tokens(self.grid, merge)
        return range(total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks)

    def patches(self, merge: tuple[int, int]) -> int:
        """How many."""
        return len(self.tokens(merge)) * self.grid[0] * merge[0] * merge[1]


def by_token(grid: Grid, merge: tuple[int, int]) -> np.ndarray:
    """Index [P] of a picture's patches, token by token and frame by frame within: stretches of tokens are
    stretches of it."""
    t, h, w = grid
    frame = merge_order(h, w, merge).reshape(-1, 1, merge[0] * merge[1])
    return (frame + np.arange(t)[None, :, None] * h * w).reshape(-1)


@dataclass(frozen=True)
class VisionCost:
    """Forward FLOPs of the tower: `per_patch` * n + `per_pair` * n^2 for each picture (a multiply-add is
    two)."""

    per_patch: float
    per_pair: float

    @classmethod
    def from_config(cls, config: VisionConfig) -> Self:
        """a = 2 (patch embedding + L (4 C Q + 2 C F)), b = 4 Q L, with C hidden, Q qkv width, F mlp, L
        layers."""
        # From the configuration alone: the host plans before any tensor exists.
        width, qkv, layers = config.hidden_size, config.qkv_width, config.num_hidden_layers
        block = 4 * width * qkv + 2 * width * config.intermediate_size
        embed = width * config.in_channels * config.patch_size**2
        return cls(2.0 * (embed + layers * block), 4.0 * qkv * layers)

    def of(self, grids: Sequence[Grid]) -> float:
        """FLOPs of pictures of these (t, h, w) grids, in patches."""
        # Attention looks at all patches of one item and never across items: the square is per item.
        counts = [num_patches(grid) for grid in grids]
        return self.per_patch * sum(counts) + self.per_pair * sum(count * count for count in counts)


def patchify(frames: np.ndarray, patch_size: int) -> Tensor:
    """Cut uint8 frames [t, H, W, 3] of whole patches into patches [P, 3, p, p]: frame by frame, row by row,
    left to right."""
    t, height, width, channels = frames.shape
    p = patch_size
    # One transpose: pixels of a patch become neighbours, channels first as the weights have them.
    cut = frames.reshape(t, height // p, p, width // p, p, channels).transpose(0, 1, 3, 5, 2, 4)
    return torch.from_numpy(np.ascontiguousarray(cut)).view(-1, channels, p, p)


def unpatchify(patches: Tensor, grid: Grid) -> np.ndarray:
    """Inverse of `patchify`: patches [P, 3, p, p] of one item back to frames [t, h*p, w*p, 3]."""
    t, h, w = grid
    _, channels, p, _ = patches.shape
    whole = patches.view(t, h, w, channels, p, p).permute(0, 1, 4, 2, 5, 3)
    return whole.reshape(t, h * p, w * p, channels).numpy()


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8 (5 and more swap the sides); 1 when there is none, or when the EXIF block is
    damaged."""
    try:
        found = image.getexif().get(0x0112, 1)
    except Exception:  # metadata of unknown origin: Pillow raises struct.error, SyntaxError, KeyError, ...
        return 1
    return found if found in _UPRIGHT else 1


def to_rgb(image: Image.Image, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """Any PIL image as upright 8-bit RGB.

    First frame of an animation; EXIF orientation applied; transparency (alpha channel or transparent colour)
    put on `background`; 16-bit greyscale scaled to 8 bits (PIL alone would clip it to white). Mode "I" is
    read as 16-bit samples, which is what PNG and TIFF files in that mode hold; mode "F" is clipped to 0..255.
    """
    if getattr(image, "is_animated", False):
        image.seek(0)
    image.load()  # TIFF turns itself upright while loading
    # Before anything else: sizes and colours are those of the picture as it is looked at.
    turn = orientation(image)
    if turn != 1:
        image = image.transpose(_UPRIGHT[turn])
        # What travels along still says "turn me": only the transparent colour is kept.
        image.info = {key: value for key, value in image.info.items() if key == "transparency"}
    if image.mode == "La":  # premultiplied alpha: PIL converts it to LA and to nothing else
        image = image.convert("LA")
    # The common case leaves without a copy.
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(canvas, image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image, rows: int = 256) -> Image.Image:
    """16-bit samples as 8-bit ones, some rows at a time: in float64 a whole picture would take 24 bytes a
    pixel."""
    width, height = image.size
    small = np.empty((height, width), np.uint8)
    for top in range(0, height, rows):
        # 257 = 65535 / 255: both ends of the range are kept.
        samples = np.asarray(image.crop((0, top, width, min(top + rows, height)))).astype(np.float64)
        small[top : top + rows] = (np.clip(samples, 0, 65535) / 257.0).round()
    return Image.fromarray(small)


def fit(
    frames: Image.Image | np.ndarray,
    size: Resize,
    *,
    exact: bool = True,
    extent: tuple[float, float] | None = None,
) -> np.ndarray:
    """RGB picture, or uint8 frames [t, H, W, 3] -> uint8 [t, height, width, 3]: resized, then zero-padded.

    `exact` is Pillow's antialiased bicubic. Otherwise torch's uint8 kernel does it: the same filter in 16-bit
    integer weights, vectorised, several times as fast and within two levels of Pillow
    (tests/vision/test_patches.py). `extent` (not for `exact`): the picture's true width and height in these
    pixels, where a decoder has rounded them up.
    """
    pixels = np.asarray(frames)
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    height, width = pixels.shape[1:3]
    if (width, height) == (size.new_w, size.new_h):
        resized = pixels
    elif exact:
        new, kind = (size.new_w, size.new_h), Image.Resampling.BICUBIC
        resized = np.stack([np.asarray(Image.fromarray(frame).resize(new, kind)) for frame in pixels])
    else:
        # A copy when the memory is read-only (PIL's is): torch takes writable arrays only.
        planes = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2)
        wanted: dict[str, Any] = {"size": (size.new_h, size.new_w)}
        if extent is not None and extent != (width, height):
            wanted = {"scale_factor": (size.new_h / extent[1], size.new_w / extent[0])}
        smaller = interpolate(planes, **wanted, mode="bicubic", antialias=True)
        resized = smaller[:, :, : size.new_h, : size.new_w].permute(0, 2, 3, 1).numpy()
    if not size.pad_w and not size.pad_h:
        return resized
    # Zeros after resizing: an edge must not bleed into the padding.
    canvas = np.zeros((len(resized), size.height, size.width, 3), dtype=np.uint8)
    canvas[:, : size.new_h, : size.new_w] = resized
    return canvas


def prepare_image(image: Image.Image, cfg: VisionConfig) -> tuple[Tensor, Grid]:
    """One image -> (uint8 patches [h*w, 3, p, p], (1, h, w))."""
    rgb = to_rgb(image, cfg.alpha_background)
    size = navit_size(*rgb.size, cfg)
    return patchify(fit(rgb, size), cfg.patch_size), grid_of(size, cfg)


def prepare_clip(frames: np.ndarray, cfg: VisionConfig, *, exact: bool) -> tuple[Tensor, Grid]:
    """One group of frames uint8 [t, H, W, 3] -> (uint8 patches [t*h*w, 3, p, p], (t, h, w))."""
    # Every frame of a clip has the same size, so one rule serves the group.
    size = navit_size(frames.shape[2], frames.shape[1], cfg, patch_limit=cfg.in_patch_limit_each_frame)
    return patchify(fit(frames, size, exact=exact), cfg.patch_size), grid_of(size, cfg, len(frames))


def prepare_frames(
    frames: Sequence[Image.Image], cfg: VisionConfig, *, exact: bool = True
) -> list[tuple[Tensor, Grid]]:
    """Video frames -> items of up to `cfg.pos_emb_time` frames: a list of (uint8 patches [t*h*w, 3, p, p],
    (t, h, w)).

    The last item holds what is left. All frames must have one size (they come from one video); raises
    ValueError otherwise. The patch limit is `cfg.in_patch_limit_each_frame`, for every frame alike.
    """
    images = [to_rgb(frame, cfg.alpha_background) for frame in frames]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise ValueError(f"frames of one video must share a size, got {sorted(sizes)}; resize them first")
    # Whole groups: frames of one item attend to each other and share its tokens.
    groups = [images[start : start + cfg.pos_emb_time] for start in range(0, len(images), cfg.pos_emb_time)]
    return [prepare_clip(np.array(group), cfg, exact=exact) for group in groups]
