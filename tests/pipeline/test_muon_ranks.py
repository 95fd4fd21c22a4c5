"""Distributed Muon: whatever the weights are sharded over, the step of one process
(pipeline/optim/owners.py).

The tiny model has rows that no number of ranks divides: three experts and three router rows on four ranks
leave one of them with nothing; heads that lie whole on a rank, and matrices that are cut.
"""

import os
from dataclasses import replace

import muon_rank
import pytest
import torch
from forked import Forked, finish
from torch import nn

from earlyfusion.pipeline.optim.muonclip import MuonClip
from earlyfusion.pipeline.optim.owners import Cut, buckets, exchanged, owners, rows_of
from earlyfusion.pipeline.optim.routing import RoutingError, build_param_groups

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


def run(call, world, folder, *given):
    """`call(rank, folder, *given)` in so many processes; what each of them left."""
    processes = [Forked(call, (rank, str(folder), *given), {**os.environ}) for rank in range(world)]
    for code, errors in map(finish, processes):
        assert code == 0, errors
    (folder / "rendezvous").unlink()
    left = [folder / f"rank{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=True) for path in left if path.exists()]


@pytest.mark.slow
def test_the_optimizer_goes_on_on_another_number_of_ranks(tmp_path):
    """Four ranks take two steps and save; two, and one, take the third: the steps of one process. Shards are
    uneven and empty, one gradient had come late and one rank had lacked another."""
    run(muon_rank.moved, 4, tmp_path, 4, "4", "begin")
    found = run(muon_rank.moved, 2, tmp_path, 2, "2", "end")
    found.append(muon_rank.train(steps=range(2, 3), after=tmp_path / "saved"))
    want = muon_rank.train(ranks=4)
    for got in found:
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=TOL, atol=TOL, msg=key)


def test_rows_travel_in_bf16_where_newton_schulz_multiplies_in_it(tmp_path):
    for found in run(muon_rank.halves, 2, tmp_path):
        assert found["to_owners"] == [torch.bfloat16] * 2, "there and back"
        # Who has a gradient, and the largest logits of all layers.
        assert found["reduced"] == [torch.float32] * 2
        assert 0 < found["far"] < 2e-3, "an update is 4e-3 in the root mean square"


def test_a_bucket_is_worked_on_while_the_next_comes_and_the_one_before_goes_home(monkeypatch):
    seen = []

    class Noted:
        def __init__(self, cuts, owner):
            self.cuts = cuts
            seen.append(f"{cuts[0].name} starts")

        def work(self, orthogonalise):
            seen.append(f"{self.cuts[0].name} is worked on")

        def home(self):
            seen.append(f"{self.cuts[0].name} is home")
            yield from ((cut, cut.update) for cut in self.cuts)

    monkeypatch.setattr("earlyfusion.pipeline.optim.owners.Bucket", Noted)
    monkeypatch.setattr("earlyfusion.pipeline.optim.owners.BUCKET_BYTES", 1)
    cuts = [replace(matrix(8, 8), name=name) for name in "abc"]
    assert [cut.name for cut, _ in exchanged(cuts, lambda update, spec: update)] == ["a", "b", "c"]
    assert seen == [
        "a starts",
        "b starts",
        "a is worked on",
        "c starts",
        "b is worked on",
        "a is home",
        "c is worked on",
        "b is home",
        "c is home",
    ]


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


def test_a_model_without_a_matrix_is_refused():
    with pytest.raises(RoutingError, match="no parameter of Sequential is routed to Muon"):
        build_param_groups(nn.Sequential(nn.Embedding(8, 4), nn.RMSNorm(4)), lr=0.1, weight_decay=0.0)


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
