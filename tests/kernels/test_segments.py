"""Segments: the derived tensors agree with a loop over documents, and plans are built once."""

import pickle

import pytest
import torch

from earlyfusion.kernels.segments import Segments

ROWS = [(), (1,), (7,), (1, 1, 1), (3, 1, 40, 2), (5, 300, 1)]


@pytest.mark.parametrize("lengths", ROWS)
def test_derived_tensors_match_a_loop_over_documents(lengths):
    segments = Segments(lengths)
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    position = [p for length in lengths for p in range(length)]
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert segments.ids().tolist() == ids
    assert segments.position().tolist() == position
    assert list(segments.offsets) == offsets
    assert segments.cu_seqlens().tolist() == offsets
    assert segments.ids().dtype == segments.position().dtype == segments.cu_seqlens().dtype == torch.int32
    assert (segments.total, segments.num) == (sum(lengths), len(lengths))
    assert segments.max_length == max(lengths, default=0)


@pytest.mark.parametrize("lengths", ROWS)
def test_every_constructor_gives_the_same_segments(lengths):
    segments = Segments(lengths)
    assert Segments.from_lengths(list(lengths)) == segments
    assert Segments.from_lengths(torch.tensor(lengths, dtype=torch.int64)) == segments
    assert hash(Segments.from_lengths(lengths)) == hash(segments)


def test_a_plan_is_built_once_and_does_not_travel_with_a_pickle():
    segments = Segments((4, 2))
    calls = []
    build = lambda: calls.append(1) or torch.arange(3)
    assert segments.cached("plan", build) is segments.cached("plan", build)
    assert len(calls) == 1
    copy = pickle.loads(pickle.dumps(segments))
    assert copy == segments and copy._cache == {}


def test_a_plan_built_during_inference_can_be_used_in_training():
    segments = Segments((3, 2))
    # An evaluation may be the first to ask for the plan of a row.
    with torch.inference_mode():
        position = segments.position()
    weight = torch.ones(5, requires_grad=True)
    # An inference tensor would be refused by autograd.
    (weight * position).sum().backward()
    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("lengths", "error"), [((3, 0), ValueError), ((-1,), ValueError), ((2.0,), TypeError)]
)
def test_bad_lengths_are_refused_with_the_document_named(lengths, error):
    with pytest.raises(error, match=f"document {len(lengths) - 1}"):
        Segments(lengths)
