import random

import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.mixture import Mixture


@pytest.mark.parametrize("seed", [0, 1])
def test_realised_shares_are_off_by_less_than_one_document(seed):
    rng = random.Random(seed)
    weights = {"a": 5.0, "b": 3.0, "c": 2.0}
    longest = {"a": 900, "b": 60, "c": 15}
    mixture = Mixture(weights)
    for _ in range(3000):
        name = mixture.pick(weights)
        mixture.add(name, rng.randint(1, longest[name]))
    total = sum(mixture.emitted.values())
    for name, weight in weights.items():
        assert abs(mixture.emitted[name] - weight / 10 * total) <= 900


def test_new_weights_hold_from_the_moment_they_are_set():
    mixture = Mixture({"a": 1, "b": 0})
    for _ in range(100):
        mixture.add(mixture.pick({"a", "b"}), 10)
    assert mixture.emitted == {"a": 1000, "b": 0}
    mixture.set_weights({"a": 1, "b": 3})
    for _ in range(400):
        mixture.add(mixture.pick({"a", "b"}), 10)
    assert mixture.emitted == {"a": 1000, "b": 3000}  # b does not make up for the time before


def test_an_exhausted_source_leaves_its_share_to_the_others():
    mixture = Mixture({"a": 2, "b": 1, "c": 1})
    for _ in range(300):
        mixture.add(mixture.pick({"b", "c"}), 1)
    assert mixture.emitted == {"a": 0, "b": 150, "c": 150}
    assert mixture.pick(set()) is None and mixture.pick({"a"}) == "a"


def test_the_account_survives_saving():
    one = Mixture({"a": 2, "b": 1})
    for _ in range(7):
        one.add(one.pick({"a", "b"}), 3)
    two = Mixture({"a": 1, "b": 1})
    two.load_state_dict(one.state_dict())
    for _ in range(50):
        name = one.pick({"a", "b"})
        assert two.pick({"a", "b"}) == name
        one.add(name, 3)
        two.add(name, 3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"tezt": 1}, "did you mean 'text'"),
        ({"text": -1}, "expected 0 or more"),
        ({"text": 0}, "every mixture weight is 0"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Mixture({"text": 1, "image": 1}).set_weights(weights)
