"""KDA decoding in Triton through the interpreter: one token on slots in place."""

import pytest
import torch
from cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
# Relative to the largest entry.
FP32 = 1e-5
K, V = 16, 24


class Layer:
    """Raw inputs of several sequences with 1 query and 2 value heads, and the whole outputs by the definition
    in float64."""

    def __init__(self, lengths, lower_bound=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        self.lengths, self.lower_bound = lengths, lower_bound
        self.x = [normal(n, 2 * K + 2 * V) for n in lengths]
        self.f, self.b = [normal(n, 2, K) for n in lengths], [normal(n, 2) for n in lengths]
        self.weight, self.A_log, self.dt_bias = normal(2 * K + 2 * V, 4), normal(2), normal(2, K)

    def run(self, rows):
        """(o per sequence, final states, taps) of the first rows[n] tokens of each sequence."""
        segments = Segments(tuple(rows))
        first = lambda parts: torch.cat([part[:n] for part, n in zip(parts, rows)]).double()
        y, taps = naive.short_conv(first(self.x), self.weight.double(), segments, output_taps=True)
        q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(y.split([K, K, 2 * V], dim=1), (K, K, V)))
        gates = first(self.f), first(self.b), self.A_log.double(), self.dt_bias.double()
        options = {"lower_bound": self.lower_bound, "output_final_state": True}
        o, final = naive.kda(q, k, v, *gates, segments, **options)
        return o.split(segments.lengths), final, taps

    def cache(self, slots):
        return DecodeCache.new(slots, 1, 2, K, V, dtype=torch.float32)

    @staticmethod
    def fill(cache, slots, state, taps, lengths):
        """Prefilled sequences of at least as many tokens as a ring has rows, less one."""
        rows = cache.x_SRC.shape[1]
        cache.state_SGVK[slots] = state.float().transpose(2, 3)
        for slot, given, length in zip(slots, taps.float(), lengths):
            cache.x_SRC[slot, [(length - rows + 1 + i) % rows for i in range(rows - 1)]] = given.T

    def new(self, cache, slots, position):
        """decode() of the next token of every sequence, -1 slots getting the first sequence's inputs."""
        take = lambda parts: torch.stack([parts[max(i, 0)][p] for i, p in enumerate(position)])
        gates = take(self.f), take(self.b), self.weight, self.A_log, self.dt_bias
        places = torch.tensor(slots), torch.tensor(position)
        with poisoned_empties():
            return decode(take(self.x), *gates, cache, *places, lower_bound=self.lower_bound)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_then_decode_equals_the_whole(lower_bound):
    layer = Layer((12, 9), lower_bound=lower_bound, seed=1)
    whole, _, _ = layer.run((12, 9))
    prefilled = (7, 2)
    _, state, taps = layer.run(prefilled)
    cache = layer.cache(slots=4)
    slots = [3, 1]
    # What the engine does when a prompt has been read.
    layer.fill(cache, slots, state, taps, prefilled)
    # Slots of other sequences lie between those that are advanced.
    untouched = cache.state_SGVK[[0, 2]].clone()
    for t in range(5):
        position = [p + t for p in prefilled]
        o = layer.new(cache, slots, position)
        for n in range(2):
            assert relative_error(o[n], whole[n][position[n]]) < FP32
    _, after, _ = layer.run((12, 7))
    assert relative_error(cache.state_SGVK[slots].transpose(2, 3), after) < FP32
    assert torch.equal(cache.state_SGVK[[0, 2]], untouched), "other slots stay as they are"


@pytest.mark.parametrize("padding", [-1, 7])
def test_padded_sequences_touch_nothing(padding):
    layer = Layer((8, 8), seed=5)
    _, state, taps = layer.run((4, 4))
    cache = layer.cache(slots=2)
    layer.fill(cache, [0, 1], state, taps, (4, 4))
    before = [x.clone() for x in (cache.state_SGVK, cache.x_SRC)]
    o = layer.new(cache, [1, padding], [4, 4])
    after = (cache.state_SGVK, cache.x_SRC)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(after, before))
    assert not torch.equal(after[0][1], before[0][1])
