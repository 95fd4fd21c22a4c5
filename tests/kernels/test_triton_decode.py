"""KDA decoding in Triton through the interpreter: single steps, the fused step on slots, speculative
verification."""

import pytest
import torch
from triton_cases import needs_interpreter, poisoned_empties, relative_error

from earlyfusion.kernels.kda import naive
from earlyfusion.kernels.kda.decode import DecodeCache, decode, kda_step
from earlyfusion.kernels.segments import Segments

pytestmark = needs_interpreter
FP32 = 1e-5  # relative to the largest entry


def step_inputs(batch, heads, groups, key_dim, value_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    return [
        normal(batch, heads, key_dim),
        normal(batch, heads, key_dim),
        normal(batch, groups, value_dim),
        normal(batch, groups, key_dim),
        normal(batch, groups),
        normal(groups),
        normal(groups, key_dim),
        normal(batch, groups, key_dim, value_dim),
    ]


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shape", [(1, 1, 1, 32, 32), (3, 2, 4, 24, 40), (2, 1, 1, 128, 64)])
@pytest.mark.parametrize("value_first", [False, True])
def test_one_step_equals_the_definition(shape, lower_bound, value_first):
    tensors = step_inputs(*shape, seed=sum(shape))
    state = tensors[7]
    if value_first:
        tensors[7] = state.transpose(2, 3).contiguous().transpose(2, 3)
    before = state.clone()
    with poisoned_empties():
        o, new = kda_step(*tensors, lower_bound=lower_bound)
    want_o, want_new = naive.kda_step(*(x.double() for x in tensors), lower_bound=lower_bound)
    assert relative_error(o, want_o) < FP32 and relative_error(new, want_new) < FP32
    assert torch.equal(tensors[7], before), "the given state must not change"
    assert new.stride() == tensors[7].stride(), "the new state lies as the given one"


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

    def cache(self, slots, new_tokens=1):
        return DecodeCache.new(
            slots, self.heads, self.groups, *self.dims, new_tokens=new_tokens, dtype=torch.float32
        )

    def new(self, cache, slots, committed, position, tokens, commit):
        """decode() of the next `tokens` tokens of every sequence, -1 slots getting the first sequence's
        inputs."""
        take = lambda parts: torch.stack([parts[max(i, 0)][p : p + tokens] for i, p in enumerate(position)])
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
                torch.tensor(committed),
                torch.tensor(position),
                lower_bound=self.lower_bound,
                commit=commit,
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
        o = layer.new(cache, slots, position, position, 1, commit=True)
        for n in range(2):
            assert relative_error(o[n, 0], whole[n][position[n]]) < FP32
    _, after, _ = layer.run((12, 7))
    assert relative_error(cache.state_SGVK[slots].transpose(2, 3), after) < FP32
    assert torch.equal(cache.state_SGVK[[0, 2]], untouched), "other slots stay as they are"


def test_decoding_from_nothing_equals_the_whole():
    layer = Layer((6,), seed=2)
    whole, final, _ = layer.run((6,))
    cache = layer.cache(slots=1)
    for t in range(6):
        o = layer.new(cache, [0], [t], [t], 1, commit=True)
        assert relative_error(o[0, 0], whole[0][t]) < FP32
    assert relative_error(cache.state_SGVK.transpose(2, 3), final) < FP32


def test_verification_replays_what_was_accepted():
    """Drafts of 3 tokens; 0, 1, 2 or 3 of them accepted each time, differently per sequence; state always
    exact."""
    layer = Layer((40, 40), heads=2, groups=2, seed=3)
    whole, _, _ = layer.run((40, 40))
    prefilled = (5, 4)
    _, state, taps = layer.run(prefilled)
    cache = layer.cache(slots=2, new_tokens=3)
    cache.fill([0, 1], state.float(), taps.float(), prefilled)
    committed, position = list(prefilled), list(prefilled)
    for accepted in ((3, 0), (1, 2), (0, 3), (2, 1), (3, 3)):
        o = layer.new(cache, [0, 1], committed, position, 3, commit=False)
        for n in range(2):
            assert relative_error(o[n], whole[n][position[n] : position[n] + 3]) < FP32
        committed = list(position)
        _, at, _ = layer.run(committed)
        assert relative_error(cache.state_SGVK.transpose(2, 3), at) < FP32
        position = [p + a for p, a in zip(position, accepted)]
    o = layer.new(cache, [0, 1], committed, position, 2, commit=True)
    _, at, _ = layer.run([p + 2 for p in position])
    assert relative_error(cache.state_SGVK.transpose(2, 3), at) < FP32


def test_rejected_drafts_leave_no_trace():
    """What stood in a rejected draft has no influence on any later output, bit for bit."""
    found = []
    for noise in (0.0, 5.0):
        layer = Layer((20,), seed=4)
        _, state, taps = layer.run((6,))
        cache = layer.cache(slots=1, new_tokens=3)
        cache.fill([0], state.float(), taps.float(), (6,))
        saved = [part[0].clone() for part in (layer.x, layer.f, layer.b)]
        for part in (layer.x, layer.f, layer.b):
            part[0][7:9] += noise  # second and third token of the draft, both rejected
        layer.new(cache, [0], [6], [6], 3, commit=False)
        for part, good in zip((layer.x, layer.f, layer.b), saved):
            part[0].copy_(good)
        found.append(layer.new(cache, [0], [6], [7], 3, commit=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("padding", [-1, 7])
def test_padded_sequences_touch_nothing(padding):
    layer = Layer((8, 8), seed=5)
    _, state, taps = layer.run((4, 4))
    cache = layer.cache(slots=2)
    cache.fill([0, 1], state.float(), taps.float(), (4, 4))
    before = [x.clone() for x in (cache.state_SGVK, cache.x_SRC, cache.f_SRGK, cache.b_SRG)]
    o = layer.new(cache, [1, padding], [4, 4], [4, 4], 1, commit=True)
    after = (cache.state_SGVK, cache.x_SRC, cache.f_SRGK, cache.b_SRG)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(after, before))
    assert not torch.equal(after[0][1], before[0][1])


def test_bad_input_names_the_argument():
    layer = Layer((8,), seed=6)
    cache = layer.cache(slots=1)
    good = dict(
        x_BDC=layer.x[0][None, :1],
        f_BDGK=layer.f[0][None, :1],
        b_BDG=layer.b[0][None, :1],
        weight_CW=layer.weight,
        A_log_G=layer.A_log,
        dt_bias_GK=layer.dt_bias,
        cache=cache,
        slots_B=torch.tensor([0]),
        committed_B=torch.tensor([0]),
        position_B=torch.tensor([0]),
    )
    bad = {
        "x_BDC": [
            (layer.x[0][None], "x brings D = 8"),
            (layer.x[0][None, :1, :-1], "x has"),
            (layer.x[0][:1], "x is"),
            (layer.x[0][None, :1].double(), "x is torch.float64"),
        ],
        "f_BDGK": [(layer.f[0][:1], "f is"), (layer.f[0][None, :1] * torch.nan, "f holds NaN")],
        "b_BDG": [(layer.b[0][:1], "b is")],
        "weight_CW": [(layer.weight.T.contiguous().T, "weight has strides"), (layer.weight[1:], "weight is")],
        "slots_B": [(torch.tensor([0.0]), "slots is torch.float32"), (torch.tensor([0, 0]), "slots is")],
        "position_B": [(torch.tensor([0, 1]), "position is")],
        "A_log_G": [(layer.A_log[:1], "A_log is")],
    }
    for name, changes in bad.items():
        for value, named in changes:
            with pytest.raises(ValueError, match=named):
                decode(**{**good, name: value})


def test_a_bad_step_names_the_argument():
    tensors = step_inputs(2, 1, 1, 16, 16, seed=7)
    for index, value, named in (
        (7, tensors[7][:1], "state is"),
        (7, tensors[7].double(), "state is torch.float64"),
        (0, torch.zeros(2, 1, 300), "q"),
        (3, tensors[3] * torch.nan, "f holds NaN"),
        (2, tensors[2][:1], "v"),
    ):
        changed = list(tensors)
        changed[index] = value
        with pytest.raises(ValueError, match=named):
            kda_step(*changed)
