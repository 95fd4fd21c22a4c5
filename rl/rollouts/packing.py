"""Rollouts: groups of samples from the engine, and what a trainer needs to know about them.

    groups = rollout(engine, prompts, group_size=8, params=SamplingParams(256, logprobs=True))
    row, places = pack(model, groups[0])    # one packed row; places of the generated tokens in it
    with used_experts(model, places):       # the experts that the engine used
        hidden_TD = model.hidden(row)

A prompt is read once for all samples of its group.

Shapes: T tokens of a packed row, M generated tokens in it, L MoE layers, J experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message
from earlyfusion.model.engine.engine import Engine, Row, pack_prompts
from earlyfusion.model.engine.requests import Completion, Prompt, Request, SamplingParams, TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import replaying_routing
from earlyfusion.vision.patches import Grid

UNKNOWN = -1
"""Routing entry of a token that the engine never fed: the trainer chooses for itself."""


@dataclass(frozen=True)
class Inserted:
    """Tokens that somebody else put into an answer, such as a tool's output, behind the first `at` generated
    ones, with their pictures: patches, grids, and the places of the placeholders in `ids`."""

    at: int
    ids: tuple[int, ...]
    patches: Tensor | None = None
    grids: tuple[Grid, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """One sample of a group, with the prompt it answers.

    The completion holds generated tokens alone, so lengths, log-probabilities, entropies and losses are
    theirs. inserted: what stands between them, in order; it is read and never trained. shown: the whole
    answer as people read it, "" where that is the completion's text. messages: the same as messages, for
    rewards. paid: what an environment gave for it, None without one that pays; counts: what it counted.
    """

    prompt: Prompt
    completion: Completion
    inserted: tuple[Inserted, ...] = ()
    shown: str = ""
    messages: tuple[Message, ...] = ()
    paid: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The generated tokens."""
        return self.completion.ids

    @property
    def text(self) -> str:
        """The whole answer as people read it; what a reward sees is `answer`."""
        # With tools the completion's text is that of the last message alone.
        return self.shown or self.completion.text

    @property
    def ended(self) -> bool:
        """Whether the policy ended its answer itself: no limit and no repetition cut it off."""
        return self.completion.finish_reason == "stop"

    @property
    def answer(self) -> str:
        """What a reward reads: the completion's text, and "" where it did not end. Paying for the beginning
        of an answer that a limit cut off would reward not stopping."""
        return self.completion.text if self.ended else ""

    @property
    def media(self) -> tuple[list[Tensor], list[Grid], list[int]]:
        """The pictures inside the answer: patches, grids, and the places of the placeholders in the whole
        document."""
        patches: list[Tensor] = []
        grids: list[Grid] = []
        places: list[int] = []
        begin = int(self.prompt.ids.shape[0])
        for part in self.inserted:
            # Behind the prompt stand generated tokens and what was put in before.
            places += [begin + part.at + place for place in part.places]
            begin += len(part.ids)
            grids += part.grids
            patches += [] if part.patches is None else [part.patches]
        return patches, grids, places

    @property
    def tail(self) -> tuple[list[int], list[bool]]:
        """All tokens behind the prompt in order, and which of them were generated."""
        ids: list[int] = []
        generated: list[bool] = []
        start = 0
        for part in (*self.inserted, Inserted(len(self.ids), ())):
            ids += [*self.ids[start : part.at], *part.ids]
            generated += [True] * (part.at - start) + [False] * len(part.ids)
            start = part.at
        return ids, generated

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return int(self.prompt.ids.shape[0]) + len(self.tail[0])


def rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    params: SamplingParams,
    capture_routing: bool = False,
    name: str = "rollout",
) -> list[list[Trajectory]]:
    """`group_size` samples of every prompt, grouped by prompt, in order.

    params: `n` is overruled by group_size and log-probabilities are always kept. name: part of the request
    ids and so of the random numbers; give every training step its own.
    """
    params = replace(params, n=group_size, logprobs=True)
    requests = [Request(f"{name}/{i}", prompt, params, capture_routing) for i, prompt in enumerate(prompts)]
    # The engine gives the samples of a request one after the other.
    done = iter(engine.generate(requests))
    return [[Trajectory(prompt, next(done)) for _ in range(group_size)] for prompt in prompts]


@dataclass(frozen=True)
class Places:
    """Where the generated tokens stand (inserted ones have no place). positions_M: row positions whose logits
    choose them; ids_M: the tokens. routing_TLJ: int16 experts of the row's tokens (UNKNOWN where the engine
    fed none), or None if not captured. feature_of_F: the feature that belongs at each media position of the
    row, where pictures are shared; else None."""

    positions_M: Tensor
    ids_M: Tensor
    routing_TLJ: Tensor | None
    feature_of_F: Tensor | None = None


def pack(
    model: NativeFusion, trajectories: Sequence[Trajectory], share_pictures: bool = False
) -> tuple[Row, Places]:
    """Trajectories as the documents of one packed row. Raises ValueError for none.

    share_pictures: answers to one prompt (one object) bring its pictures into the row once, for
    `model.embed(row, feature_of_M=places.feature_of_F)`.
    """
    documents, ids, positions, routing, features = [], [], [], [], []
    first_feature: dict[int, int] = {}  # of a prompt whose pictures are in the row
    start = known_features = 0
    for trajectory in trajectories:
        prompt, (tail, generated) = trajectory.prompt, trajectory.tail
        media = torch.as_tensor(prompt.media_positions).long()

        # The first answer to a prompt brings its pictures; the others point to their features.
        patches: list[Tensor] = []
        grids: list[Grid] = []
        if not share_pictures or id(prompt) not in first_feature:
            first_feature[id(prompt)] = known_features
            known_features += media.numel()
            patches += [] if prompt.patches is None else [prompt.patches]
            grids += prompt.grids
        features.append(first_feature[id(prompt)] + torch.arange(media.numel()))
        # What the environment showed is every answer's own.
        more, own_grids, pads = trajectory.media
        features.append(known_features + torch.arange(len(pads)))
        known_features += len(pads)
        document = torch.cat([torch.as_tensor(prompt.ids).long().cpu(), torch.tensor(tail, dtype=torch.long)])
        whole = torch.cat([*patches, *more]) if patches or more else None
        documents.append(TokenPrompt(document, whole, (*grids, *own_grids), (*media.tolist(), *pads)))

        # The logits at a position choose the next token, hence one place to the left.
        behind = start + int(prompt.ids.shape[0]) - 1
        positions.append(behind + torch.tensor(generated, dtype=torch.bool).nonzero().flatten())
        ids += trajectory.ids
        start += document.numel()

        # A token that the engine never fed chooses its experts for itself.
        chosen = trajectory.completion.routing
        if chosen is not None:
            missing = document.numel() - len(chosen)
            widths = ((0, missing), (0, 0), (0, 0))
            routing.append(np.pad(chosen.astype(np.int16), widths, constant_values=UNKNOWN))

    # Routing is replayed for whole rows: one answer without it would shift all others.
    row = pack_prompts(model, documents)
    device = row.ids.device
    replayed = routing and len(routing) == len(documents)
    places = Places(
        torch.cat(positions).to(device),
        torch.tensor(ids, dtype=torch.long, device=device),
        torch.from_numpy(np.concatenate(routing)) if replayed else None,
        torch.cat(features).to(device) if share_pictures else None,
    )
    return row, places


@contextmanager
def used_experts(model: NativeFusion, places: Places) -> Iterator[None]:
    """Replay the captured routing while open; nothing if none was captured."""
    if places.routing_TLJ is None:
        yield
    else:
        with replaying_routing(model, places.routing_TLJ):
            yield
