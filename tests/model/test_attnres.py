"""Attention Residuals in the decoder, against the paper's loop written out with plain softmax."""

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from tests.model.tiny import build, close, gradients, text_documents, tiny_fusion

TOLERANCE = 1e-10  # fp64; online softmax against one softmax


def mix(sources, query, norm):
    """h and weights from the definition: softmax over sources of <w, RMSNorm_g(v)>, values as they are."""
    values = torch.stack(sources)
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight
    weights = (keys @ query).softmax(0)
    return (weights[..., None] * values).sum(0), weights


def paper_forward(decoder, x, segments, layers_per_block):
    """Figure 2 of the paper for blocks of transformer layers; layers_per_block 0 = full, every sub-layer a
    source."""
    blocks, partial = [x], None
    weights = []
    for index, layer in enumerate(decoder.layers):
        for part in ("self_attention", "mlp"):
            first = part == "self_attention"
            boundary = layers_per_block == 0 or (index % layers_per_block == 0 and first)
            if boundary and partial is not None:
                blocks, partial = [*blocks, partial], None
            query, norm = getattr(layer, f"{part}_res_query"), getattr(layer, f"{part}_res_norm")
            h, p = mix(blocks if partial is None else [*blocks, partial], query, norm)
            weights.append(p)
            if first:
                out = layer.attend(layer.input_layernorm(h), segments)
            else:
                out = layer.feed_forward(layer.post_attention_layernorm(h))
            partial = out if partial is None else partial + out
    h, p = mix([*blocks, partial], decoder.output_attn_res_query, decoder.output_attn_res_norm)
    return decoder.norm(h), [*weights, p]


MODES = [("full", 0, 4), ("block", 1, 4), ("block", 2, 5), ("block", 3, 4), ("block", 9, 4)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("mode", "size", "layers"), MODES)
def test_decoder_equals_the_papers_loop(mode, size, layers, seed):
    """Odd last blocks (5 layers in blocks of 2, 4 in blocks of 3) and one block for all are among the
    modes."""
    config = tiny_fusion(attn_res=mode, attn_res_block_size=size or 1, num_hidden_layers=layers)
    model = build(config, seed, torch.float64)
    decoder, segments = model.decoder, Segments((7, 30))
    x = torch.randn(37, 24, dtype=torch.float64, requires_grad=True)
    target = torch.randn(37, 24, dtype=torch.float64)
    (decoder(x, segments) * target).sum().backward()
    got = {**gradients(decoder), "x": x.grad}
    x.grad = None
    expected, weights = paper_forward(decoder, x, segments, size)
    torch.testing.assert_close(decoder(x, segments), expected, atol=TOLERANCE, rtol=0)
    (expected * target).sum().backward()
    close(got, {**gradients(decoder), "x": x.grad}, 1e-8, 1e-8)
    masks = {"first": segments.ids() == 0, "all": torch.ones(37, dtype=torch.bool)}
    recorder = decoder.attnres_weights(x.detach(), segments, masks)
    assert len(recorder.rows) == len(weights) == 2 * layers + 1
    assert [len(means["all"]) for _, means in recorder.rows] == [len(p) for p in weights]
    inside = [index % (2 * size or 1) > 0 for index in range(2 * layers)]  # a block has a sum of its own
    assert recorder.has_partial == [*inside, False]
    names = "0.kda 0.mlp 1.kda 1.moe 2.kda 2.moe 3.mla 3.moe".split()
    assert layers > 4 or [name for name, _ in recorder.rows] == [*(f"layers.{n}" for n in names), "output"]
    for (_, means), p in zip(recorder.rows, weights):
        torch.testing.assert_close(means["all"], p.mean(1), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(means["first"], p[:, :7].mean(1), atol=TOLERANCE, rtol=0)


def test_zero_queries_start_as_a_uniform_average_and_learn():
    """But for the query of a single source, whose mix is the identity: exact zeros."""
    torch.manual_seed(0)
    model = NativeFusion(tiny_fusion(attn_res="block", attn_res_block_size=2))
    every = {"all": torch.ones(5, dtype=torch.bool)}
    for _, means in model.decoder.attnres_weights(torch.randn(5, 24), Segments((5,)), every).rows:
        torch.testing.assert_close(means["all"], torch.full_like(means["all"], 1 / len(means["all"])))
    model(text_documents([40], model.config)).loss_sum.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("_res_query"):
            assert (parameter.grad.abs().max() > 0) == ("layers.0.self_attention" not in name), name
    with pytest.raises(ValueError, match="no mixing weights"):
        build(tiny_fusion(attn_res="none")).decoder.attnres_weights(torch.randn(5, 24), Segments((5,)), {})
