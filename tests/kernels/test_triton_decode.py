"""KDA decoding in Triton through the interpreter: one token on slots in place."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.decode import DecodeCache, decode
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
FP32 = 1e-5  # relative to the largest entry


class Layer:
    """Raw inputs of several sequences, and the whole outputs by the definition in float64."""

    def __init__(self, lengths, heads=1, groups=2, key_dim=16, value_dim=24, lower_bound=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        self.lengths, self.heads, self.groups, self.dims = lengths, heads, groups, (key_dim, value_dim)
        self.channels, self.lower_bound = 2 * heads * key_dim + groups * value_dim, lower_bound
        self.x = [normal(n, self.channels) for n in lengths]
        self.f = [normal(n, groups, key_dim) for n in lengths]
        self.b = [normal(n, groups) for n in lengths]
        self.weight, self.A_log, self.dt_bias = (
            normal(self.channels, 4),
            normal(groups),
            normal(groups, key_dim),
        )

    def run(self, rows, dtype=torch.float64):
        """(o per sequence, final states, taps) of the first rows[n] tokens of each sequence."""
        segments = Segments(tuple(rows))
        x, f, b = (
            torch.cat([a[:n] for a, n in zip(parts, rows)]).to(dtype) for parts in (self.x, self.f, self.b)
        )
        y, taps = naive.short_conv(x, self.weight.to(dtype), segments, output_taps=True)
        key_dim, value_dim = self.dims
        q, k, v = y.split([self.heads * key_dim, self.heads * key_dim, self.groups * value_dim], dim=1)
        o, final = naive.kda(
            q.unflatten(1, (self.heads, key_dim)),
            k.unflatten(1, (self.heads, key_dim)),
            v.unflatten(1, (self.groups, value_dim)),
            f,
            b,
            self.A_log.to(dtype),
            self.dt_bias.to(dtype),
            segments,
            lower_bound=self.lower_bound,
            output_final_state=True,
        )
        return o.split(segments.lengths), final, taps

    def cache(self, slots):
        return DecodeCache.new(slots, self.heads, self.groups, *self.dims, dtype=torch.float32)

    def new(self, cache, slots, position):
        """decode() of the next token of every sequence, -1 slots getting the first sequence's inputs."""
        take = lambda parts: torch.stack([parts[max(i, 0)][p] for i, p in enumerate(position)])
        with poisoned_empties():
            return decode(
                take(self.x),
                take(self.f),
                take(self.b),
                self.weight,
                self.A_log,
                self.dt_bias,
                cache,
                torch.tensor(slots),
                torch.tensor(position),
                lower_bound=self.lower_bound,
            )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_then_decode_equals_the_whole(lower_bound):
    layer = Layer((12, 9), lower_bound=lower_bound, seed=1)
    whole, _, _ = layer.run((12, 9))
    prefilled = (7, 2)
    _, state, taps = layer.run(prefilled)
    cache = layer.cache(slots=4)
    slots = [3, 1]
    cache.fill(slots, state.float(), taps.float(), prefilled)
    untouched = cache.state_SGVK[[0, 2]].clone()
    for t in range(5):
        position = [p + t for p in prefilled]
        o = layer.new(cache, slots, position)
        for n in range(2):
            assert relative_error(o[n], whole[n][position[n]]) < FP32
    _, after, _ = layer.run((12, 7))
    assert relative_error(cache.state_SGVK[slots].transpose(2, 3), after) < FP32
    assert torch.equal(cache.state_SGVK[[0, 2]], untouched), "other slots stay as they are"


def test_decoding_from_nothing_equals_the_whole():
    layer = Layer((6,), seed=2)
    whole, final, _ = layer.run((6,))
    cache = layer.cache(slots=1)
    for t in range(6):
        o = layer.new(cache, [0], [t])
        assert relative_error(o[0], whole[0][t]) < FP32
    assert relative_error(cache.state_SGVK.transpose(2, 3), final) < FP32


@pytest.mark.parametrize("padding", [-1, 7])
def test_padded_sequences_touch_nothing(padding):
    layer = Layer((8, 8), seed=5)
    _, state, taps = layer.run((4, 4))
    cache = layer.cache(slots=2)
    cache.fill([0, 1], state.float(), taps.float(), (4, 4))
    before = [x.clone() for x in (cache.state_SGVK, cache.x_SRC)]
    o = layer.new(cache, [1, padding], [4, 4])
    after = (cache.state_SGVK, cache.x_SRC)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(after, before))
    assert not torch.equal(after[0][1], before[0][1])


def test_bad_input_names_the_argument():
    layer = Layer((8,), seed=6)
    cache = layer.cache(slots=1)
    x, f, b = (part[0][:1] for part in (layer.x, layer.f, layer.b))
    good = dict(
        x_BC=x,
        f_BGK=f,
        b_BG=b,
        weight_CW=layer.weight,
        A_log_G=layer.A_log,
        dt_bias_GK=layer.dt_bias,
        cache=cache,
        slots_B=torch.tensor([0]),
        position_B=torch.tensor([0]),
    )
    bad = {
        "x_BC": [(x[:, :-1], "x has"), (x[None], "x is"), (x.double(), "x is torch.float64")],
        "f_BGK": [(f[0], "f is"), (f * torch.nan, "f holds NaN")],
        "b_BG": [(b[0], "b is")],
        "weight_CW": [(layer.weight.T.contiguous().T, "weight has strides"), (layer.weight[1:], "weight is")],
        "slots_B": [(torch.tensor([0.0]), "slots is torch.float32"), (torch.tensor([0, 0]), "slots is")],
        "position_B": [(torch.tensor([0, 1]), "position is")],
        "A_log_G": [(layer.A_log[:1], "A_log is")],
        "cache": [(DecodeCache(cache.state_SGVK, cache.x_SRC[:, 1:]), "3 ring rows")],
    }
    for name, changes in bad.items():
        for value, named in changes:
            with pytest.raises(ValueError, match=named):
                decode(**{**good, name: value})
