"""Steps whose pictures lie unevenly on the ranks, and what a step's gradients are; for
test_picture_exchange.py."""

import random
from typing import Any

import torch
from tiny_run import tiny_text

from earlyfusion.data.loading.encode import Encoded, PackedBatch, assemble
from earlyfusion.model.config import FusionConfig
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.parallel.encoder import DecoupledEncoder
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.step import LossMeter, forward_backward
from earlyfusion.vision.balance import Exchange, Route, exchange
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import Grid, VisionCost, num_patches, num_tokens

PAD, MEDIA, TOKENS = 2, 5, 160

# case -> rank -> micro-batch -> document -> grids of its pictures (none: text only)
Step = list[list[list[list[Grid]]]]
SMALL: Grid = (1, 2, 2)
CASES: dict[int, dict[str, Step]] = {
    2: {
        "a rank without pictures": [[[[(1, 4, 4), SMALL], []], [[(1, 2, 6)], [SMALL]]], [[[], []], [[]]]],
        "text only": [[[[], []], [[]]], [[[]], [[], []]]],
        "one huge and many small": [
            [[[(1, 12, 14)], [SMALL] * 4, [SMALL] * 5]] * 2,
            [[[SMALL]], [[], [SMALL]]],
        ],
        "clips beside pictures": [
            [[[(4, 4, 4), (2, 6, 4)], [(1, 4, 2)]], [[(3, 2, 2), (4, 2, 4)]]],
            [[[]], [[(1, 2, 4)], []]],
        ],
        "one picture in all": [[[[]], [[]]], [[[]], [[(1, 6, 4)]]]],
        "one clip in all": [[[[]], [[(4, 6, 4)]]], [[[]], [[SMALL]]]],
        "exchange in one micro-batch only": [[[[(1, 8, 8)], [(1, 8, 6)]], [[SMALL]]], [[[]], [[SMALL]]]],
    },
    3: {
        "a clip on three": [[[[]]], [[[(3, 4, 10)], [SMALL]]], [[[]]]],
        "fewer pictures than ranks": [[[[(1, 4, 4), (1, 4, 6)]]], [[[]]], [[[]]]],
        "many pictures on the last rank": [
            [[[SMALL]]],
            [[[]]],
            [[[(1, 2, 2 * n) for n in range(1, 5)], [(1, 4, 2 * n) for n in range(1, 5)]]],
        ],
    },
}


def random_step(ranks: int, seed: int) -> Step:
    """Two micro-batches a rank with any number of pictures and clips, none included."""
    rng = random.Random(seed)

    def picture() -> Grid:
        return rng.choice([1, 1, 2, 4]), 2 * rng.randint(1, 4), 2 * rng.randint(1, 4)

    return [
        [
            [[picture() for _ in range(rng.choice([0, 0, 1, 3]))] for _ in range(rng.randint(1, 3))]
            for _ in range(2)
        ]
        for _ in range(ranks)
    ]


def names(world: int) -> list[str]:
    """Every case of so many ranks."""
    return [*CASES[world], *(f"random {seed}" for seed in range(4 - world))]


def step_of(world: int, name: str) -> Step:
    return CASES[world].get(name) or random_step(world, int(name.split()[-1]))


# The norms, biases and projector of the first generation.
FIRST = {"norm": "layer", "bias": True, "projector": "v1", "pos_emb_interpolation": "bicubic"}


def config(seed: int = 0) -> FusionConfig:
    """KDA and MLA, MoE, AttnRes; odd widths; clips of four frames; both generations of towers."""
    return FusionConfig(
        text=tiny_text(initializer_range=0.1),
        vision=VisionConfig.preset("tiny", patch_size=4, num_hidden_layers=2, **FIRST if seed % 2 else {}),
        media_token_id=MEDIA,
    )


def model(seed: int, dtype: torch.dtype) -> NativeFusion:
    torch.manual_seed(seed)
    fusion = NativeFusion(config(seed))
    with torch.no_grad():  # queries that start at zero would hide what passes through them
        for name, parameter in fusion.named_parameters():
            if name.endswith("_res_query"):
                parameter.normal_(0.0, 0.5)
    return fusion.to(dtype).train()


def batch(documents: list[list[Grid]], seed: int) -> PackedBatch:
    """Documents of random text with their pictures in the middle."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, grids in enumerate(documents):
        text = torch.randint(6, 97, (6 + 5 * number,), generator=generator)
        pads = sum(num_tokens(grid) for grid in grids)
        ids = torch.cat([text[:3], torch.full((pads,), MEDIA), text[3:]])
        weights = torch.where(ids == MEDIA, 0.0, torch.rand(len(ids), generator=generator) + 0.5)
        count = sum(num_patches(grid) for grid in grids)
        patches = (
            torch.randint(0, 256, (count, 3, 4, 4), generator=generator, dtype=torch.uint8) if grids else None
        )
        made.append(Encoded(ids, weights, patches, grids, [], torch.arange(3, 3 + pads), "s", str(number)))
    return assemble(made, tokens=TOKENS, pad_id=PAD, sources=["s"], patch_size=4)


def batches(step: Step, rank: int, seed: int) -> list[PackedBatch]:
    """The micro-batches of a rank."""
    return [batch(documents, 1000 * seed + 10 * rank + k) for k, documents in enumerate(step[rank])]


def grids_of(step: Step) -> list[list[list[Grid]]]:
    """[rank][micro-batch]: grids in packed order."""
    return [[[grid for grids in documents for grid in grids] for documents in rank] for rank in step]


def scattered(step: Step, seed: int) -> list[Exchange]:
    """Plans that send every picture anywhere, whether it helps or not."""
    rng, ranks, plans = random.Random(seed), len(step), []
    for part in zip(*grids_of(step)):
        plan = exchange(part, VisionCost.from_config(config().vision))
        owner = tuple(tuple(rng.randrange(ranks) for _ in row) for row in part)
        plans.append(Exchange(plan.grids, owner, plan.merge, plan.work))
    return plans


def gradients(
    runtime: Runtime,
    prepared: Any,
    fusion: NativeFusion,
    parts: list[PackedBatch],
    routes: list[Route | None] | tuple = (),
    encoder: DecoupledEncoder | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of one step, as the optimizer would see them."""
    fusion.zero_grad(set_to_none=False)
    loss = forward_backward(runtime, prepared, parts, LossMeter(["s"]), routes, encoder)
    return loss, {name: parameter.grad.clone() for name, parameter in fusion.named_parameters()}
