"""Greedy answers, samples and given answers to prompts that are read once, with the states that choose every
token.

    reading = Reading.of(model, house, prompts)              # prompts of one chunk, read in one pass
    greedy = write(reading, budgets)                          # likeliest tokens, and their states
    sampled = write(reading, budgets, ids=ids, samples=8)     # the samples an Engine would draw for requests
    of these ids
    states = forced(reading, [(rows' own tokens), ...])       # states that choose tokens which are given

The engine (model/engine) serves any mix of requests; here all prompts of a chunk march in step, which reads
each prompt once for all three uses and keeps hidden states, from which probabilities and entropies at any
temperature follow.

Legend: N rows, T tokens of a pass, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from earlyfusion.data.loading.encode import Encoded
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import DecoderCache
from earlyfusion.model.engine.sampler import gumbel, sequence_key
from earlyfusion.model.engine.sequence import House
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import pack_prompts


@dataclass
class Reading:
    """Prompts that have been read. last_ND: the state after each prompt's last token."""

    model: NativeFusion
    house: House
    cache: DecoderCache
    last_ND: Tensor

    @classmethod
    def of(cls, model: NativeFusion, house: House, prompts: Sequence[Encoded]) -> Reading:
        """Read all prompts in one pass."""
        cache = model.decoder.new_cache(len(prompts))
        row = pack_prompts(model, prompts)
        hidden_TD = model.hidden(row, cache)
        ends = torch.tensor([start + len(p) - 1 for start, p in zip(row.segments.offsets, prompts)])
        return cls(model, house, cache, hidden_TD.index_select(0, ends.to(hidden_TD.device)))

    def fork(self, index: Sequence[int]) -> Reading:
        """Rows index[0], index[1], ... with memories of their own."""
        copied = DecoderCache(
            [replace(memory) for memory in self.cache.layers], self.cache.lengths, self.cache.capacity
        )
        copied.reorder(list(index))
        chosen = torch.tensor(index, dtype=torch.long, device=self.last_ND.device)
        return Reading(self.model, self.house, copied, self.last_ND.index_select(0, chosen))

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """States [T, D] after each of these further tokens, rows one after the other; at least one token a
        row."""
        flat = torch.tensor([i for row in tokens for i in row], dtype=torch.long, device=self.last_ND.device)
        segments = Segments.from_lengths([len(row) for row in tokens])
        return self.model.decoder(self.model.decoder.embed_tokens(flat), segments, self.cache)


@dataclass(frozen=True)
class Written:
    """One answer: its tokens, the stop token included, their states [tokens, D] (None for samples), and the
    text. ended: it ends with a stop token, not because its budget was used up."""

    ids: list[int]
    states: Tensor | None
    text: str
    ended: bool = True

    @property
    def answer(self) -> str:
        """What is judged: the text, and "" where it did not end by itself (see rollout.Trajectory.answer)."""
        return self.text if self.ended else ""

    def within(self, house: House, budget: int) -> Written:
        """This greedy answer as it is with a smaller budget."""
        if len(self.ids) <= budget:
            return self
        return _written(house, self.ids[:budget], [] if self.states is None else list(self.states[:budget]))


def write(
    reading: Reading,
    budgets: Sequence[int],
    *,
    ids: Sequence[str] = (),
    samples: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Written]:
    """Answers of at most `budgets` tokens to every prompt: greedy for samples = 0, else `samples` for each
    prompt in a row, with the noise of engine requests of these ids and this seed."""
    each = max(1, samples)
    rows = [n for n in range(len(budgets)) for _ in range(each)]
    keys = [sequence_key(seed, ids[n], k) for n in range(len(budgets)) for k in range(samples)]
    state = reading.fork(rows)
    out: list[list[int]] = [[] for _ in rows]
    kept: list[list[Tensor]] = [[] for _ in rows]
    alive = list(range(len(rows)))
    silent = torch.tensor(sorted(reading.house.silent), device=state.last_ND.device)
    while alive:
        scores_NV = state.model.logits(state.last_ND).float().index_fill(1, silent, float("-inf"))
        if samples:
            at_N = torch.tensor([len(out[row]) for row in alive], device=scores_NV.device)
            keys_N = torch.tensor([keys[row] for row in alive], device=scores_NV.device)
            scores_NV = scores_NV / temperature + gumbel(keys_N, at_N, scores_NV.shape[1])
        stay: list[int] = []
        for place, (row, token) in enumerate(zip(alive, scores_NV.argmax(-1).tolist())):
            out[row].append(token)
            if not samples:
                kept[row].append(state.last_ND[place])
            if token not in reading.house.ends and len(out[row]) < budgets[rows[row]]:
                stay.append(place)
        if len(stay) < len(alive):
            alive = [alive[place] for place in stay]
            state = state.fork(stay) if stay else state
        if alive:
            state.last_ND = state.feed([[out[row][-1]] for row in alive])
    return [_written(reading.house, tokens, states) for tokens, states in zip(out, kept)]


def _written(house: House, ids: list[int], states: list[Tensor]) -> Written:
    ended = ids[-1] in house.ends
    said = ids[:-1] if ended else ids
    text = house.tokenizer.decode(said, skip_special=True) if house.tokenizer is not None else ""
    return Written(ids, torch.stack(states) if states else None, text, ended)


def forced(reading: Reading, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """States [tokens, D] that choose each of the given tokens, for every row; at least one token a row."""
    fed = [list(row[:-1]) or list(row) for row in tokens]  # the last token is chosen, never read
    hidden_TD = reading.fork(range(len(tokens))).feed(fed)
    after = hidden_TD.split([len(row) for row in fed])
    return [
        torch.cat([last.unsqueeze(0), rest])[: len(row)]
        for last, rest, row in zip(reading.last_ND, after, tokens)
    ]
