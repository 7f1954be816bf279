"""``word_problem``: the running product of the elements of a finite group; ``parity`` is the group of two elements.

A row is a word x_1 x_2 ... x_t of elements, and after each of them the model must say the product x_1 x_2 ... x_i so far. With
``group = "z2"`` (element 1 flips, element 0 does not) that is the parity of the ones so far:

    inputs    1 0 1 1 0
    targets   1 1 0 1 1

Elements are drawn evenly and apart from each other, so that nothing but the whole past tells the product. Permutations are
numbered in the order of ``itertools.permutations`` (0: the identity), x y means "first y, then x", and the product grows to
the left: p_i = x_i p_(i-1), as a recurrence multiplies it. ``elements = "swaps"`` draws only the identity and the exchanges of
two points, of which the last product of a word of S5 can still be any element.

What it is for: a word over a group that is not solvable (A5, S5) is complete for NC1 (Barrington 1989), which a fixed number of
attention or diagonal positive state-space layers is believed not to reach (Merrill, Petty and Sabharwal,
https://arxiv.org/abs/2404.08819); recurrences whose transition may have negative eigenvalues reach parity, products of two
Householders a token S3 (Grazzi et al., https://arxiv.org/abs/2411.12537; Siems et al., https://arxiv.org/abs/2502.10297).

The measure is accuracy over all positions; ``chance`` is one in as many as there are elements. Sizes of the paper (Grazzi et
al.): rows of 3 to 40 elements to train on, 40 to 256 to test, batches of 256 rows, 100,000 steps, two layers of d_model 128,
learning rates 1e-3 to 1e-2. Presets: ``parity``, ``s3``, ``a5`` and ``s5`` (those lengths), ``s5_swaps`` (exchanges of two
points alone), ``parity_small`` (3 to 24, tested to 256) and ``s3_small`` (3 to 12, tested to 96), which models of 60,000
parameters learn in minutes on a CPU.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Literal, Self, TypeAlias

import numpy as np
from pydantic import model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import TEST, Rows, SyntheticConfig, VaryingRows, sizes

Group: TypeAlias = Literal["z2", "z3", "z60", "s3", "a4xz5", "a5", "s5"]

_ELEMENTS, _LENGTHS = range(2)


class WordProblemConfig(SyntheticConfig):
    """Say the product of a group's elements so far, after each of them."""

    type: Literal["word_problem"] = "word_problem"
    group: Group = "s3"
    """``z2``, ``z3``, ``z60``: addition modulo n; ``s3``, ``s5``: all permutations; ``a5``: the even ones of five points;
    ``a4xz5``: pairs of an even permutation of four points and a number modulo 5, numbered 5 i + j."""
    elements: Literal["all", "swaps"] = "all"
    """What words are made of; ``swaps``: the identity and exchanges of two points, for ``s3`` and ``s5``."""
    train: tuple[VaryingRows, ...] = (VaryingRows(length=40, min_length=3, n_rows=100_000),)
    test: tuple[VaryingRows, ...] = (VaryingRows(length=40, n_rows=500), VaryingRows(length=256, n_rows=200))

    @model_validator(mode="after")
    def _group_has_swaps(self) -> Self:
        if self.elements == "swaps" and self.group not in ("s3", "s5"):
            raise ValueError(f"elements = 'swaps' is for the groups s3 and s5, not {self.group!r}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            train=(VaryingRows(length=8, min_length=3, n_rows=40),),
            test=(VaryingRows(length=8, n_rows=12), VaryingRows(length=11, n_rows=9)),
        )

    @property
    def n_ids(self) -> int:
        return len(table(self.group))

    def scored(self, size: VaryingRows, split: int = TEST) -> float:
        return (size.shortest + size.length) / 2

    def bits(self, size: VaryingRows) -> float:
        return size.shortest * math.log2(len(self._letters()))

    def _letters(self) -> Longs:
        """(n) the elements that words are made of."""
        return np.arange(self.n_ids) if self.elements == "all" else swaps(3 if self.group == "s3" else 5)

    def draw(self, size: VaryingRows, key: tuple[int, ...], index: Longs) -> Rows:
        letters = self._letters()
        words = letters[Draws((*key, size.length, _ELEMENTS), index).integers(size.length, len(letters))]
        products = running_products(words, table(self.group))
        if size.min_length is None:
            return Rows(words, products)
        n = size.length - size.min_length + 1
        lengths = size.min_length + Draws((*key, size.length, _LENGTHS), index).integers(1, n)[:, 0]
        real = np.arange(size.length) < lengths[:, None]
        return Rows(np.where(real, words, 0), np.where(real, products, IGNORE), lengths=lengths)

    def baselines(self) -> dict[str, float]:
        """``chance``: any element."""
        return {"chance": 1 / self.n_ids}


def running_products(words: Longs, product: Longs) -> Longs:
    """(b t) of the words (b t): p_i = x_i x_(i-1) ... x_1, by the group's table; log2(t) steps of doubling."""
    out, step = words.copy(), 1
    while step < words.shape[1]:
        out[:, step:] = product[out[:, step:], out[:, :-step]]
        step *= 2
    return out


@cache
def table(group: Group) -> Longs:
    """(n n) the element x y of each x and y; element 0 is the neutral one."""
    if group == "a4xz5":
        return _pairs(_permutations(4, even=True), _cyclic(5))
    if group[0] == "z":
        return _cyclic(int(group[1:]))
    return _permutations(int(group[1:]), even=group[0] == "a")


def swaps(n: int) -> Longs:
    """Numbers of the identity and of the exchanges of two of ``n`` points, among all permutations."""
    points = np.array(list(itertools.permutations(range(n))))
    return np.flatnonzero((points != np.arange(n)).sum(1) <= 2)


def _cyclic(n: int) -> Longs:
    return (np.arange(n)[:, None] + np.arange(n)) % n


def _permutations(n: int, *, even: bool) -> Longs:
    points = [p for p in itertools.permutations(range(n)) if not even or _n_inversions(p) % 2 == 0]
    number = {p: i for i, p in enumerate(points)}
    return np.array([[number[tuple(x[i] for i in y)] for y in points] for x in points])


def _n_inversions(p: tuple[int, ...]) -> int:
    return sum(a > b for a, b in itertools.combinations(p, 2))


def _pairs(left: Longs, right: Longs) -> Longs:
    """The direct product; element (i, j) has the number i * len(right) + j."""
    n, m = len(left), len(right)
    both = left[:, None, :, None] * m + right[None, :, None, :]
    return both.reshape(n * m, n * m)


_SIZE = ("length", "min_length", "n_rows")
_TEST = ("length", "n_rows")
_PAPER = {
    "train": sizes(_SIZE, (40, 3, 100_000)), "test": sizes(_TEST, (40, 500), (64, 500), (128, 500), (256, 500)),
}

PRESETS = (
    Preset("parity", "word_problem", {"group": "z2", **_PAPER}),
    Preset("s3", "word_problem", {"group": "s3", **_PAPER}),
    Preset("a5", "word_problem", {"group": "a5", **_PAPER}),
    Preset("s5", "word_problem", {"group": "s5", **_PAPER}),
    Preset("s5_swaps", "word_problem", {"group": "s5", "elements": "swaps", **_PAPER}),
    Preset("parity_small", "word_problem", {
        "group": "z2", "train": sizes(_SIZE, (24, 3, 20_000)),
        "test": sizes(_TEST, (24, 256), (64, 128), (128, 128), (256, 128)),
    }),
    Preset("s3_small", "word_problem", {
        "group": "s3", "train": sizes(_SIZE, (12, 3, 20_000)), "test": sizes(_TEST, (12, 256), (24, 256), (48, 128), (96, 128)),
    }),
)
