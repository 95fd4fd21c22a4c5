"""Noted copies and clearings give what they would give one by one."""

import random

import pytest
import torch

from earlyfusion.model.engine.cache import Pending


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_copies_and_clearings(seed):
    draw = random.Random(seed)
    rows = 6
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, 2, generator=generator)]
    want, work = [tensor.clone() for tensor in tensors], Pending()
    for _ in range(draw.randrange(1, 25)):
        target = draw.randrange(rows)
        if draw.random() < 0.3:
            work.clear(target)
            for tensor in want:
                tensor[target] = 0
        elif draw.random() < 0.9:
            source = draw.choice([row for row in range(rows) if row != target])
            work.copy(source, target)
            for tensor in want:
                tensor[target] = tensor[source]
        else:
            work.settle(tensors)
    work.settle(tensors)
    assert all(torch.equal(got, expected) for got, expected in zip(tensors, want))
    assert not work.copies and not work.cleared


def test_clearing_removes_what_is_no_number():
    tensor, work = torch.full((3, 2), torch.nan), Pending()
    work.clear(1)
    work.copy(1, 2)
    work.settle([tensor])
    assert tensor[0].isnan().all() and (tensor[1:] == 0).all()


def test_nothing_noted_touches_nothing():
    Pending().settle(iter([None]))
