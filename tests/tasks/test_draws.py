import math

import numpy as np
import pytest

from hybridtf.tasks.draws import Draws


def test_a_row_is_the_same_whatever_is_drawn_beside_it() -> None:
    alone, together = Draws((3, 1), np.array([17])), Draws((3, 1), np.arange(40))
    weights = np.linspace(1, 2, 9)
    for draw in (
        lambda d: d.words(5), lambda d: d.uniform(5), lambda d: d.integers(5, 7), lambda d: d.distinct(6, 7),
        lambda d: d.without_replacement(4, weights),
    ):
        np.testing.assert_array_equal(draw(alone)[0], draw(together)[17])


def test_other_keys_and_examples_share_nothing() -> None:
    words = [Draws(key, np.arange(500)).words(40) for key in ((0, 0), (0, 1), (1, 0))]
    assert len(np.unique(np.concatenate(words))) == 3 * 500 * 40


def test_the_known_stream() -> None:
    """SplitMix64 itself, by Python integers."""
    start = int(Draws((5,), np.array([3]))._start[0])

    def following(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    want = [following((start + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(6)]
    assert Draws((5,), np.array([3])).words(6)[0].tolist() == want


def test_integers_and_uniforms_are_even() -> None:
    draws = Draws((0,), np.arange(2000))
    counts = np.bincount(draws.integers(50, 7).ravel(), minlength=7)
    expected = 2000 * 50 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # chi-square, 6 degrees of freedom, p = 0.001
    uniform = draws.uniform(50)
    assert 0 < uniform.min() < 1e-4
    assert abs(uniform.mean() - 0.5) < 4 / math.sqrt(12 * uniform.size)


@pytest.mark.parametrize(("n", "high"), [(0, 4), (1, 1), (3, 4), (4, 4), (60, 64)])
def test_distinct_are_distinct(n: int, high: int) -> None:
    drawn = Draws((1,), np.arange(300)).distinct(n, high)
    assert drawn.shape == (300, n)
    assert all(len(set(row)) == n and set(row) <= set(range(high)) for row in drawn.tolist())


def test_every_ordered_choice_is_as_likely() -> None:
    drawn = Draws((2,), np.arange(12_000)).distinct(2, 4)
    counts = np.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    counts = counts[counts > 0]
    assert len(counts) == 12
    assert ((counts - 1000) ** 2 / 1000).sum() < 31.3  # 11 degrees of freedom, p = 0.001


def test_too_many_distinct_are_refused() -> None:
    with pytest.raises(ValueError, match="5 different integers below 4"):
        Draws((0,), np.arange(2)).distinct(5, 4)


def test_weighted_draws_without_replacement() -> None:
    """Against the probabilities of drawing one after the other."""
    weights, n = np.array([1.0, 2.0, 5.0]), 30_000
    drawn = Draws((4,), np.arange(n)).without_replacement(2, weights)
    p = weights / weights.sum()
    for i in range(3):
        for j in range(3):
            want = 0.0 if i == j else p[i] * p[j] / (1 - p[i])
            got = float(((drawn[:, 0] == i) & (drawn[:, 1] == j)).mean())
            assert abs(got - want) < 4 * math.sqrt(want * (1 - want) / n) + 1e-12
