"""AdamW for everything."""

from __future__ import annotations

import torch
from torch import nn

from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.registry import optimizer, param_groups

# Decays of the two moments, those of GPT-3 (arXiv 2005.14165, appendix B) and most that came after it.
BETAS = (0.9, 0.95)


@optimizer("adamw", matrices="adamw")
def adamw(options: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW for everything, with QK-Clip after every step where the recipe asks for it."""
    made = torch.optim.AdamW(param_groups(options, model), betas=BETAS, eps=options.eps)
    if options.qk_clip is not None:
        # After the step, as in MuonClip: the weights that are clipped are the new ones.
        clip = QKClip(model, options.qk_clip)
        made.register_step_post_hook(lambda *_: clip.apply())
        made.qk_clip = clip  # type: ignore[attr-defined]  # the same attribute as MuonClip's
    return made
