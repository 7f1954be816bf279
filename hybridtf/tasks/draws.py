"""Random numbers by address: the same key and place always give the same number.

A generator that hands out numbers in order ties an example to all that were drawn before it. Here each number follows from
where it stands, so that an example does not depend on the batch, the rank or the order in which it is made, and a resumed
run draws what it would have drawn. numpy's generators may change their streams between versions; these cannot.

The numbers are those of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014). Axes: b
examples, n places.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Longs: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Words) -> Words:
    z = z + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _stream(key: tuple[int, ...]) -> np.uint64:
    base = 0
    for word in key:
        base = int(_mix(np.array([(base + word) % 2**64], dtype=np.uint64))[0])
    return np.uint64(base)


def hashed(key: tuple[int, ...], n: int) -> Words:
    """(n) uniform 64-bit words that follow from ``key`` alone."""
    return _mix(_stream(key) + np.arange(n, dtype=np.uint64) * _GAMMA)


def shuffled(key: tuple[int, ...], n: int) -> Longs:
    """A permutation of ``range(n)`` that follows from ``key`` alone."""
    return np.argsort(hashed(key, n), kind="stable").astype(np.int64)


class Draws:
    """Numbers of ``examples`` (b), whose stream ``key`` names (a seed, a split, a purpose, ...)."""

    def __init__(self, key: tuple[int, ...], examples: Longs) -> None:
        # Mixed twice: neighbouring examples must not have neighbouring streams, which would overlap.
        self._start = _mix(_mix(_stream(key) + examples.astype(np.uint64) * _GAMMA))  # [b]

    def words(self, n: int) -> Words:
        """(b n) uniform 64-bit words: the first ``n`` places."""
        return _mix(self._start[:, None] + np.arange(n, dtype=np.uint64) * _GAMMA)

    def uniform(self, n: int) -> NDArray[np.float64]:
        """(b n) uniform numbers in (0, 1), never 0 nor 1."""
        return ((self.words(n) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def integers(self, n: int, high: int) -> Longs:
        """(b n) integers in [0, high), for ``high`` up to 2^32 (a bias below high / 2^32)."""
        return ((self.words(n) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)).astype(np.int64)

    def distinct(self, n: int, high: int) -> Longs:
        """(b n) integers in [0, high), in each example all different, every ordered choice as likely.

        An example draws until it has ``n`` different ones; ``n`` must be at most ``high``.
        """
        if not 0 <= n <= high:
            raise ValueError(f"{n} different integers below {high} do not exist")
        tries = n + 8
        while True:
            drawn = self.integers(tries, high)
            first = first_of_their_kind(drawn)
            place = first.cumsum(1)
            if not n or bool((place[:, -1] >= n).all()):
                # Columns of the first n new values of each row, in the order in which they came.
                return drawn[first & (place <= n)].reshape(len(drawn), n)
            tries *= 2

    def without_replacement(self, n: int, weights: NDArray[np.float64]) -> Longs:
        """(b n) different indices into ``weights``, drawn one after the other in proportion to the weights left.

        The order of independent exponential times with these rates is exactly that draw (Efraimidis and Spirakis 2006).
        """
        times = -np.log(self.uniform(len(weights))) / weights
        return np.argsort(times, axis=1, kind="stable")[:, :n]


def first_places(values: Longs) -> Longs:
    """(b n) the first column of the row that holds the same value."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    begins = np.zeros(values.shape, dtype=np.int64)
    begins[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, values.shape[1]), 0)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, np.maximum.accumulate(begins, axis=1), axis=1), axis=1)
    return first


def last_places(values: Longs) -> Longs:
    """(b n) the column at which the row held the same value last before this one; -1 where it did not."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    before = np.full_like(order, -1)
    before[:, 1:] = np.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1], -1)
    last = np.empty_like(order)
    np.put_along_axis(last, order, before, axis=1)
    return last


def first_of_their_kind(values: Longs) -> NDArray[np.bool_]:
    """(b n) whether no earlier column of the row holds the same value."""
    return np.asarray(first_places(values) == np.arange(values.shape[1]))
