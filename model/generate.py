"""Text from the model: cached decoding of a batch of prompts with images, greedy or sampled.

The prompts are packed into one row and read at once (prefill); then every unfinished sequence gets one token a step
from the decoder's cache (KDA states, convolution taps, MLA latents). Finished sequences leave the cache at once.
What a prompt gets does not depend on its neighbours: prompt i draws from its own generator, seeded by (seed, i).

Shapes: T tokens of all prompts, N sequences, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion

END_OF_MSG = "<|end_of_msg|>"
MEDIA_TOKENS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")


class Prompt(Protocol):
    """An open document, as `data.encode.encode(..., eos=False)` makes it: ids [n] int64, patches uint8 [P, 3, p, p] or
    None, grids [(t, h, w)], media_positions (places of the image placeholders in ids, in feature order)."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def patches(self) -> Tensor | None: ...
    @property
    def grids(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def media_positions(self) -> Tensor: ...


@dataclass(frozen=True)
class Row:
    """Prompts packed into one row: the part of a PackedBatch that the embedding needs."""

    ids: Tensor
    segments: Segments
    patches: Tensor
    grids: list[tuple[int, int, int]]
    media_positions: Tensor


def pack_prompts(model: NativeFusion, prompts: Sequence[Prompt]) -> Row:
    """One packed row on the model's device. Raises ValueError for an empty prompt, or no prompt at all."""
    if not prompts:
        raise ValueError("no prompts given; pass at least one")
    lengths = [int(prompt.ids.shape[0]) for prompt in prompts]
    if min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} has no tokens; a prompt needs at least [BOS]")
    segments = Segments.from_lengths(lengths)
    vision = model.config.vision
    none = torch.empty(0, vision.in_channels, vision.patch_size, vision.patch_size, dtype=torch.uint8)
    patches = [prompt.patches for prompt in prompts if prompt.patches is not None]
    places = [torch.as_tensor(p.media_positions).long() + start for p, start in zip(prompts, segments.offsets)]
    device = model.decoder.embed_tokens.weight.device
    return Row(
        ids=torch.cat([prompt.ids.long() for prompt in prompts]).to(device),
        segments=segments,
        patches=torch.cat(patches).to(device) if patches else none.to(device),
        grids=[(t, h, w) for prompt in prompts for t, h, w in prompt.grids],
        media_positions=torch.cat(places).to(device),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, the mode restored after.

    Not inference_mode: plans cached on Segments and grids may be used by a training step later on.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def generate(
    model: NativeFusion,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Iterable[int] | None = None,
) -> list[str]:
    """Continue every prompt until a stop token (default [EOS], <|end_of_msg|>) or `max_new_tokens`; -> texts.

    temperature 0 is greedy. Image placeholders and other tokens that only stand in inputs are never produced.
    Special tokens are left out of the texts. tokenizer: `data.tokenizer.Tokenizer` or anything with `special_ids`
    (name -> id), `vocab_size` and `decode(ids, skip_special=...)`. Raises ValueError for options out of range.
    """
    special = tokenizer.special_ids
    text = model.config.text
    stops = {text.eos_token_id, *_ids(special, (END_OF_MSG,))} if stop_ids is None else set(stop_ids)
    silent = {text.bos_token_id, text.pad_token_id, *_ids(special, MEDIA_TOKENS)}
    silent.update(range(tokenizer.vocab_size, text.vocab_size))  # rows of the embedding beyond the tokenizer
    answers = generate_ids(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature, top_p, seed),
        stop_ids=stops,
        silent_ids=silent - stops,
    )
    return [tokenizer.decode(ids, skip_special=True) for ids in answers]


def _ids(special: Mapping[str, int], names: Iterable[str]) -> list[int]:
    return [special[name] for name in names if name in special]


class Sampler:
    """Chooses the next token of each sequence; greedy for temperature 0.

    Otherwise softmax(logits / temperature) restricted to the smallest set of likeliest tokens with mass >= top_p,
    drawn by inverting its distribution function at a uniform number from the sequence's own generator.
    Raises ValueError unless temperature >= 0 and 0 < top_p <= 1.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature >= 0.0:
            raise ValueError(f"temperature={temperature}: must be at least 0 (0 is greedy)")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p={top_p}: must lie in (0, 1]")
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self._generators: dict[int, torch.Generator] = {}

    def _uniform(self, sequence: int) -> float:
        if sequence not in self._generators:
            mixed = (self.seed * 0x9E3779B97F4A7C15 + sequence * 0xD1B54A32D192ED03) % 2**63
            self._generators[sequence] = torch.Generator().manual_seed(mixed)
        return float(torch.rand((), generator=self._generators[sequence], dtype=torch.float64))

    def __call__(self, logits_NV: Tensor, sequences: Sequence[int]) -> Tensor:
        """logits_NV fp32, row n belongs to prompt sequences[n] -> chosen ids [N]."""
        if self.temperature == 0.0:
            return logits_NV.argmax(dim=-1)
        ordered_NV, ids_NV = (logits_NV / self.temperature).sort(dim=-1, descending=True, stable=True)
        p_NV = ordered_NV.double().softmax(-1)
        before_NV = p_NV.cumsum(-1) - p_NV  # mass of the likelier tokens; 0 for the first, so it always stays
        p_NV = p_NV.masked_fill(before_NV >= self.top_p, 0.0)
        mass_NV = p_NV.cumsum(-1)
        uniform_N1 = torch.tensor([[self._uniform(i)] for i in sequences], dtype=torch.float64, device=p_NV.device)
        rank_N1 = torch.searchsorted(mass_NV, uniform_N1 * mass_NV[:, -1:], right=True)
        last_N1 = (p_NV > 0).sum(-1, keepdim=True) - 1  # rounding may point past the last token that may be drawn
        return ids_NV.gather(1, torch.minimum(rank_N1, last_N1)).squeeze(1)


def generate_ids(
    model: NativeFusion,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampler: Callable[[Tensor, Sequence[int]], Tensor] | None = None,
    stop_ids: Iterable[int] = (),
    silent_ids: Iterable[int] = (),
) -> list[list[int]]:
    """New token ids of every prompt, without the stop token. `silent_ids` (and the image placeholder) never appear.

    One host sync a step: which sequences are done decides the shapes of the next step.
    """
    choose, stops = sampler or Sampler(), frozenset(stop_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    row = pack_prompts(model, prompts)
    if max_new_tokens <= 0:
        return answers
    device = row.ids.device
    silent = torch.tensor(sorted({*silent_ids, model.config.media_token_id} - stops), dtype=torch.long, device=device)
    alive = list(range(len(prompts)))
    with evaluating(model):
        cache = model.decoder.new_cache(len(prompts))
        h_TD = model.hidden(row, cache)
        last = torch.tensor(row.segments.offsets[1:], device=device) - 1
        logits_NV = model.logits(h_TD.index_select(0, last)).float()
        for step in range(max_new_tokens):
            ids_N = choose(logits_NV.index_fill(1, silent, float("-inf")), alive)
            kept = []
            for slot, (sequence, token) in enumerate(zip(alive, ids_N.tolist())):
                if token not in stops:
                    answers[sequence].append(token)
                    kept.append(slot)
            if not kept or step + 1 == max_new_tokens:
                break
            if len(kept) < len(alive):
                cache.reorder(kept)
                alive = [alive[slot] for slot in kept]
                ids_N = ids_N[torch.tensor(kept, device=device)]
            logits_NV = model.step(ids_N, cache).float()
    return answers
