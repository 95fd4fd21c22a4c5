"""The natively multimodal model: image patches and text tokens in one decoder from the first training step.

    patches -> VisionTower -> Projector -> written over the embeddings of <|media_pad|> -> Decoder ->
    next-token loss

The vision tower runs in every training step, with zero patches if the batch has none: under sharded training
every rank must take part in every collective, and every parameter gets a gradient (of zeros).

Shapes: T tokens of a packed row, D hidden, P patches, M image tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import earlyfusion.vision.timm_tower  # noqa: F401  (registers itself)
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.products import linear
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.decoder import Decoder, Recompute
from earlyfusion.vision.balance import Route
from earlyfusion.vision.encoder import Projector, VisionGrid, VisionTower, build_tower, zero_anchor
from earlyfusion.vision.patches import Grid


class Prompt(Protocol):
    """What the model reads of a packed row to compute hidden states (data/loading/encode.py has more fields).

    ids int64 [T]; patches uint8 [P, 3, p, p] of all images in order, grids their (t, h, w); media_positions
    int64 [M], the positions in ids that the image features fill, in feature order.
    """

    ids: Tensor
    segments: Segments
    patches: Tensor
    grids: list[Grid]
    media_positions: Tensor


class Packed(Prompt, Protocol):
    """A training row: labels int64 [T], the id to predict at each position (-100: none), and loss_weights
    fp32 [T]."""

    labels: Tensor
    loss_weights: Tensor


@dataclass
class FusionOutput:
    """loss_sum = sum_t w_t nll_t (scalar, differentiable); weight_sum = sum_t w_t over
    labelled positions (scalar); nll_T detached fp32 (0 where there is no label or no weight). The mean loss
    is loss_sum / weight_sum, with both summed over micro-batches and ranks first."""

    loss_sum: Tensor
    weight_sum: Tensor
    nll_T: Tensor


class NativeFusion(nn.Module):
    """Tower, projector and decoder as one trainable module."""

    def __init__(self, config: FusionConfig) -> None:
        super().__init__()
        self.config = config
        # patches -> features of the decoder's width -> hidden states
        self.vision_tower = build_tower(config.vision)
        self.mm_projector = Projector(config.vision, config.text.hidden_size)
        self.decoder = Decoder(config.text)
        # Set by sharded training, where every rank must run the tower for every row.
        self.always_sees = False

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode_images(
        self, patches: Tensor, grids: Sequence[Grid] | VisionGrid, route: Route | None = None
    ) -> Tensor:
        """Patches [P, 3, p, p] of images with these (t, h, w) grids -> features [M, D], row by row within an
        image.

        With a route this rank encodes the pictures that the route brings here, and gets the features of its
        own from those that encoded them (vision/balance.py); every rank must then call it, with the routes of
        one plan.
        """
        if route is not None:
            held: Any = route.held
            patches, grids = route.send_patches(patches), held
        grid = grids if isinstance(grids, VisionGrid) else VisionGrid.from_grids(grids, self.config.vision)
        features = self.mm_projector(self.vision_tower(patches, grid))
        return features if route is None else route.bring_home(features)

    def embed(
        self,
        batch: Prompt,
        route: Route | Tensor | None = None,
        feature_of_M: Tensor | None = None,
    ) -> Tensor:
        """Decoder input [T, D]: token embeddings with image features in their places.

        route: see `encode_images`, or the features [M, D] themselves. feature_of_M: for documents that share
        pictures, as the answers to one prompt do. int64 [M], the feature that belongs at each media position;
        `patches` and `grids` then hold every picture once, and a row without pictures leaves the tower alone.
        None: feature i belongs at position i.

        Raises ValueError if the number of features is not the number of media positions.
        """
        # Text first; a row that shares pictures and has none needs nothing more.
        x_TD = self.decoder.embed_tokens(batch.ids)
        if feature_of_M is not None and not len(batch.grids) and not self.always_sees:
            return x_TD

        # The tower runs also for a row without pictures, with no patches (see the file's head).
        if isinstance(route, Tensor):
            features_MD = route
        else:
            features_MD = self.encode_images(batch.patches, batch.grids, route)
        if feature_of_M is not None:
            features_MD = features_MD.index_select(0, feature_of_M)

        # Features take the places of the placeholders.
        positions_M = batch.media_positions
        if features_MD.shape[0] != positions_M.shape[0]:
            raise ValueError(
                f"the images give {features_MD.shape[0]} features but the text holds {positions_M.shape[0]}"
                f" <|media_pad|> positions (grids {list(batch.grids)[:4]}); encode text and images with the"
                " same vision configuration (patch_size, merge_kernel_size)"
            )
        return x_TD.index_copy(0, positions_M, features_MD.to(x_TD.dtype))

    def hidden(self, batch: Prompt, route: Route | Tensor | None = None) -> Tensor:
        """Hidden states [T, D] after the final norm. route: see `embed`."""
        # Filler tokens must not move what training counts: expert load, QK-Clip's maximum.
        counted_T = batch.ids != self.config.text.pad_token_id if self.training else None
        return self.decoder(self.embed(batch, route), batch.segments, counted_T=counted_T)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Next-token logits [T, V] of hidden states; for decoding, where T is small."""
        return linear(hidden_TD, self.decoder.head_weight().to(hidden_TD.dtype))

    def recompute(self, at: Recompute) -> None:
        """Whether training keeps no activations inside the decoder's layers ("layer") or AttnRes blocks
        ("block"), nor inside the blocks of the project's own tower, and computes them again in the backward
        pass."""
        self.decoder.recompute = at
        if isinstance(self.vision_tower, VisionTower):
            self.vision_tower.encoder.recompute = at != "no"

    def within(self, compute: Callable[..., Any], *given: Any) -> Any:
        """compute(*given), which reads weights of the model directly: sharded training holds those of its
        root only while one of its forward methods runs, and this is one."""
        return compute(*given)

    def vision_anchor(self) -> Tensor:
        """A scalar 0 through which every parameter of the vision side receives a gradient of zeros."""
        return zero_anchor(self.vision_tower) + zero_anchor(self.mm_projector)

    def token_log_probs(self, batch: Packed, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each label, log softmax(logits / temperature)[label], and its distribution's
        entropy.

        Both [T] in nats, fp32, 0 where the label is -100; the first is differentiable, the second detached.
        Never holds [T, V]. Raises ValueError for a temperature that is not positive.
        """
        hidden_TD = self.hidden(batch)
        judge = resolve("token_log_probs", hidden_TD)
        return judge(hidden_TD, self.decoder.head_weight(), batch.labels, temperature=temperature)

    def forward(self, batch: Packed, route: Route | Tensor | None = None) -> FusionOutput:
        """Weighted next-token loss of a packed batch, summed (not averaged) over positions. route: see
        `embed`."""
        return self.loss(self.hidden(batch, route), batch)

    def loss(self, hidden_TD: Tensor, batch: Packed) -> FusionOutput:
        """The loss of hidden states [T, D]; see `forward`."""
        # Logits never stand in memory for all tokens: head and loss are one operation.
        loss_sum, nll_T = resolve("linear_cross_entropy", hidden_TD)(
            hidden_TD, self.decoder.head_weight(), batch.labels, batch.loss_weights
        )
        if self.training and self.vision_tower is not None:
            # Without images no feature reaches the loss, and the vision side would get no gradient at all.
            loss_sum = loss_sum + self.vision_anchor()
        weight_sum = torch.where(batch.labels >= 0, batch.loss_weights, 0.0).sum()
        return FusionOutput(loss_sum, weight_sum, nll_T)
