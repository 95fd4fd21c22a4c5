"""Triton experts through the interpreter against the loop over experts in float64."""

import pytest
import torch
from triton_cases import needs_interpreter, relative_error, values_and_gradients

from earlyfusion.kernels.moe import naive, triton_experts

pytestmark = needs_interpreter
FP32 = 1e-5  # relative to the largest entry; float32 sums in another order
FP16 = 6e-3  # activations and outputs are rounded to 11 bits
SHAPES = [(1, 1, 16, 3, 16), (37, 2, 24, 5, 20), (50, 3, 40, 8, 33)]  # T, J, D, E, F


def tensors(T, J, D, E, F, dtype=torch.float32, seed=0, busy=None):
    """`busy`: how many experts receive tokens (all by default)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = draw(T, busy or E).topk(J, dim=1).indices
    leaves = [
        x.to(dtype)
        for x in (draw(T, D), draw(T, J).softmax(-1), draw(E, 2 * F, D) * D**-0.5, draw(E, D, F) * F**-0.5)
    ]
    return ids, leaves, draw(T, D)


def run(implementation, ids, leaves, dy):
    return values_and_gradients(lambda x, w, g, d: implementation.moe_experts(x, ids, w, g, d), leaves, [dy])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_the_definition(shape, seed):
    ids, leaves, dy = tensors(*shape, seed=seed)
    for g, w in zip(run(triton_experts, ids, leaves, dy), run(naive, ids, [x.double() for x in leaves], dy)):
        assert relative_error(g, w) < FP32


def test_half_precision_loses_only_roundings():
    ids, leaves, dy = tensors(37, 2, 24, 5, 20, torch.float16)
    for g, w in zip(run(triton_experts, ids, leaves, dy), run(naive, ids, [x.double() for x in leaves], dy)):
        assert g.dtype == torch.float16 and relative_error(g, w) < FP16


def test_experts_without_tokens_get_zero_gradients():
    ids, leaves, dy = tensors(20, 2, 16, 7, 16, busy=2)
    _, _, _, dgate_up, ddown = run(triton_experts, ids, leaves, dy)
    assert (dgate_up[2:] == 0).all() and (ddown[2:] == 0).all() and (dgate_up[:2] != 0).any()


def test_all_tokens_on_one_expert_are_all_computed():
    ids, leaves, dy = tensors(40, 1, 16, 4, 16)
    ids = torch.full_like(ids, 3)
    for g, w in zip(run(triton_experts, ids, leaves, dy), run(naive, ids, [x.double() for x in leaves], dy)):
        assert relative_error(g, w) < FP32


def test_a_token_does_not_notice_the_rest_of_the_batch():
    ids, leaves, _ = tensors(37, 2, 24, 5, 20)
    together = triton_experts.moe_experts(leaves[0], ids, *leaves[1:])
    for token in (0, 17, 36):
        alone = triton_experts.moe_experts(
            leaves[0][token : token + 1], ids[token : token + 1], leaves[1][token : token + 1], *leaves[2:]
        )
        assert relative_error(alone[0], together[token]) < 1e-6


def test_a_second_run_is_bit_identical():
    ids, leaves, dy = tensors(37, 2, 24, 5, 20)
    for a, b in zip(run(triton_experts, ids, leaves, dy), run(triton_experts, ids, leaves, dy)):
        assert torch.equal(a, b)


def test_the_tile_table_covers_every_row_once():
    for seed, (rows, experts) in enumerate([(1, 1), (7, 5), (300, 4), (513, 9)]):
        ids = torch.randint(0, experts, (rows, 1), generator=torch.Generator().manual_seed(seed))
        plan = triton_experts.make_plan(ids, torch.ones(rows, 1), experts)
        covered = []
        for expert, start, stop in zip(
            plan.tile_expert.tolist(), plan.tile_start.tolist(), plan.tile_stop.tolist()
        ):
            assert stop - start <= plan.rows_tile
            assert all(ids[plan.pair_R[row], 0] == expert for row in range(start, stop))
            covered += range(start, stop)
        assert sorted(covered) == list(range(rows))


def test_an_id_outside_the_experts_gives_nan_for_its_token_only():
    ids, leaves, _ = tensors(9, 2, 16, 4, 16)
    good = triton_experts.moe_experts(leaves[0], ids, *leaves[1:])
    ids[4, 1] = 99
    bad = triton_experts.moe_experts(leaves[0], ids, *leaves[1:])
    assert bad[4].isnan().all() and torch.equal(bad[[0, 8]], good[[0, 8]])


def test_an_empty_row_is_fine():
    ids, leaves, dy = tensors(0, 2, 16, 4, 16)
    y, dx, *_, ddown = run(triton_experts, ids, leaves, dy)
    assert y.shape == (0, 16) and dx.shape == (0, 16) and (ddown == 0).all()


def test_bad_input_names_the_argument():
    ids, (x, weights, gate_up, down), _ = tensors(4, 2, 16, 3, 16)
    with pytest.raises(ValueError, match="expert_ids_TJ"):
        triton_experts.moe_experts(x, ids.int(), weights, gate_up, down)
    with pytest.raises(ValueError, match="gate_up_ECD is"):
        triton_experts.moe_experts(x, ids, weights, gate_up.long(), down)
    with pytest.raises(ValueError, match=r"\[E, D, F\]"):
        triton_experts.moe_experts(x, ids, weights, gate_up, down[:2])
    with pytest.raises(ValueError, match="down_EDF is on"):
        triton_experts.moe_experts(x, ids, weights, gate_up, down.to("meta"))


def test_more_tiles_than_a_grid_has_blocks():
    ids = torch.zeros(65_536 * 16, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"moe_experts: .* tiles of 16 rows .* at most 65,535"):
        triton_experts.make_plan(ids, torch.ones_like(ids, dtype=torch.float32), experts=80_000)
