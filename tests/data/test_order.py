import random

import pytest

from earlyfusion.data.loading.order import Permutation, held_out


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_permutation_visits_every_place_once(size, seed):
    order = Permutation(size, seed, "name", 3)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_epochs_seeds_and_names_have_orders_of_their_own():
    orders = {
        tuple(Permutation(50, *key)[i] for i in range(50))
        for key in [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0)]
    }
    assert len(orders) == 4


def test_a_permutation_of_any_size_is_read_at_any_place_at_once():
    order = Permutation(10**12, 5)
    seen = {order[random.Random(i).randrange(10**12)] for i in range(500)}
    assert len(seen) == 500 and max(seen) > 10**11
    with pytest.raises(IndexError, match="position 1000000000000 of a permutation of 1000000000000"):
        order[10**12]
    with pytest.raises(ValueError, match="expected at least 1"):
        Permutation(0)


def test_neighbours_are_not_kept_together():
    """Of 10,000 neighbours in order, about as many are neighbours after it as chance allows (2 expected)."""
    order = Permutation(10_000, 7)
    assert sum(abs(order[i] - order[i + 1]) == 1 for i in range(9_999)) <= 10
    below = sum(order[i] < 5_000 for i in range(5_000))
    assert abs(below - 2_500) < 5 * 25, "five deviations of a fair split"


def test_held_out_is_a_matter_of_the_name_alone():
    names = [f"folder/{i}.png" for i in range(20_000)]
    held = {name for name in names if held_out(name, 0.1)}
    assert abs(len(held) - 2_000) < 5 * 42
    assert held < {name for name in names if held_out(name, 0.2)}, "a larger fraction only adds"
    assert not any(held_out(name, 0.0) for name in names)
