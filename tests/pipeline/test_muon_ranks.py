"""Distributed Muon: whatever the weights are sharded over, the step of one process
(pipeline/optim/owners.py).

The tiny model has rows that no number of ranks divides: three experts and three router rows on four ranks
leave one of them with nothing; heads that lie whole on a rank, and matrices that are cut.
"""

import os

import muon_rank
import pytest
import torch
from forked import Forked, finish
from torch import nn

from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.owners import Cut, buckets, owners, rows_of
from earlyfusion.pipeline.optim.routing import RoutingError

# The same sums of the same numbers; Newton-Schulz of other stacks rounds otherwise in the last bit.
TOL = 1e-6


@pytest.mark.parametrize(("seed", "together"), [(0, 1), (1, 2), (2, None)])
def test_every_sharding_takes_the_step_of_one_process(seed, together, tmp_path):
    """Uneven and empty shards, a gradient that comes late, and one that a rank lacks."""
    call = lambda world, names: [
        Forked(muon_rank.sharded, (rank, str(tmp_path), world, names, seed, together), {**os.environ})
        for rank in range(world)
    ]
    seen = {}
    for world, names in ((2, ["2"]), (4, ["4", "2x2"])):
        for code, errors in map(finish, call(world, names)):
            assert code == 0, errors
        (tmp_path / "rendezvous").unlink()
        for rank in range(world):
            found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
            seen |= {(name, rank): found[name] for name in names}

    for (name, rank), found in seen.items():
        want = muon_rank.train(ranks=muon_rank.MESHES[name][-1], seed=seed, together=together)
        assert found.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(found[key], value, rtol=TOL, atol=TOL, msg=f"{name}, {rank}: {key}")


class Group:
    def __init__(self, ranks):
        self.size = lambda: ranks


class Matrix(Cut):
    @property
    def group(self):
        return Group(4)


def matrix(rows, columns, spec=None):
    update = torch.zeros(rows // 4, columns)
    return Matrix("w", torch.empty(rows, columns, device="meta"), spec or [1, 1, rows], update)


def test_owners_are_balanced_by_the_work_of_newton_schulz():
    """Not by elements: a long thin matrix has as many as a square one, and a fraction of the work."""
    cuts = [matrix(512, 512), *(matrix(4096, 64) for _ in range(6))]
    chosen = owners(cuts)
    work = [0.0] * 4
    for cut, owner in zip(cuts, chosen):
        work[owner] += cut.flops()
    assert chosen.count(chosen[0]) == 1, "the square one has its owner to itself"
    assert max(work) < 0.4 * sum(work) + max(cut.flops() for cut in cuts)
    assert cuts[0].flops() == 4 * 512**3 + 2 * 512**3
    assert matrix(8, 6, [2, 2, 2]).flops() == 2 * (4 * 4 * 4 * 6 + 2 * 4**3), "blocks count, not the weight"


def test_buckets_hold_every_matrix_once_in_order(monkeypatch):
    monkeypatch.setattr("earlyfusion.pipeline.optim.owners.BUCKET_BYTES", 3000)
    found = buckets([matrix(64, 16) for _ in range(9)])
    assert [index for bucket in found for index in bucket] == list(range(9)) and len(found) == 3


def test_rows_are_those_of_torch_chunk():
    for rows in range(1, 12):
        for ranks in range(1, 6):
            parts = [len(part) for part in torch.arange(rows).chunk(ranks)]
            assert rows_of(rows, ranks) == parts + [0] * (ranks - len(parts))


@pytest.mark.parametrize(
    ("name", "weight", "said"),
    [
        ("encoder._flat_param", torch.ones(64), "shard with FSDP2"),
        ("norm.weight", torch.ones(8), "takes matrices"),
        ("embed_tokens.weight", torch.ones(8, 4), "lookup table"),
    ],
)
def test_what_is_no_matrix_is_refused_in_a_muon_group(name, weight, said):
    group = {"family": "muon", "fqns": [name], "blocks": [[1, 1, 8]], "params": [nn.Parameter(weight)]}
    with pytest.raises(RoutingError, match=said):
        MuonClip([{**group, "lr": 0.1, "weight_decay": 0.0}], nn.Linear(2, 2))
