"""``listops``: the value of nested lists of digits (Nangia and Bowman, https://arxiv.org/abs/1804.06028).

A list is an operator, its arguments and a closing bracket; arguments are digits or lists. Operators are ``MAX``, ``MIN``,
``MED`` (the median, rounded down where there are two in the middle) and ``SM`` (the sum modulo 10). A row is an expression
and a sign that asks for its value, the one token that is scored:

    inputs    [MAX 2 [SM 5 8 1 ] 9 [MIN 4 7 ] ] =        (the sum is 4, the least 4, the greatest of 2 4 9 4 is 9)
    targets   . . . . . . . . . . . . . . 9

Drawn from the inside out: a row starts as digits, and neighbours are joined into lists of 2 to ``max_args`` until one value is
left, so that every depth comes up. (The published sets draw trees from the outside, with up to 10 arguments and a depth of 10,
and keep those of 500 to 2,000 tokens, as Long Range Arena does; that shape makes most of a row arguments of few lists.)

Ids: digits 0 to 9, then the four operators with their opening brackets, ``]`` and ``=``. The measure is accuracy of the value;
``chance`` is 1 / 10, ``most_frequent`` the share of the commonest value among the test rows. A row of n digits in m lists has
n + 2 m + 1 tokens; as m varies, rows of up to ``length`` tokens have (length + 1) / 3 digits at most, and none is longer.
Sizes of Long Range Arena: 2,000 tokens, 96,000 rows to train on, 2,000 to test. Presets: ``listops_lra`` (500 to
2,000 tokens) and ``listops_small``.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import TEST, Rows, SyntheticConfig, VaryingRows, sizes

_DIGITS, _OPERATORS, _COUNTS, _PLACES, _ARGS = range(5)
_CLOSE, _ASK = 14, 15


class ListOpsConfig(SyntheticConfig):
    """Say the value of nested lists of digits. Each count of digits that rows allow is as likely."""

    type: Literal["listops"] = "listops"
    max_args: int = Field(default=5, ge=2)
    """Arguments of a list, at the most."""
    train: tuple[VaryingRows, ...] = (VaryingRows(length=2000, min_length=500, n_rows=96_000),)
    test: tuple[VaryingRows, ...] = (VaryingRows(length=2000, min_length=500, n_rows=2_000),)

    @model_validator(mode="after")
    def _rows_hold_a_list(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.shortest < 5:
                    raise ValueError(f"{where}[{i}]: rows of {size.shortest} tokens; a list of two and the question take 5")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            train=(VaryingRows(length=24, min_length=14, n_rows=40),), test=(VaryingRows(length=24, n_rows=20),), max_args=3,
        )

    @property
    def n_ids(self) -> int:
        return _ASK + 1

    def scored(self, size: VaryingRows, split: int = TEST) -> float:
        return 1.0

    def bits(self, size: VaryingRows) -> float:
        return _n_digits(size.shortest) * math.log2(10)

    def draw(self, size: VaryingRows, key: tuple[int, ...], index: Longs) -> Rows:
        low, high = _n_digits(size.shortest), _n_digits(size.length)
        key = (*key, size.length, self.max_args)
        digits = Draws((*key, _DIGITS), index).integers(high, 10)
        counts = low + Draws((*key, _COUNTS), index).integers(1, high - low + 1)[:, 0]
        operators = Draws((*key, _OPERATORS), index).integers(high - 1, 4)
        places = Draws((*key, _PLACES), index).uniform(high - 1)
        args = 2 + Draws((*key, _ARGS), index).integers(high - 1, self.max_args - 1)
        value, lists = nested(digits, counts, operators, places, args)
        inputs, lengths = _written(digits, counts, lists, size.length)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, lengths[:, None] - 1, value[:, None], axis=1)
        return Rows(inputs, targets, lengths=lengths)

    def baselines(self) -> dict[str, float]:
        """``chance``: any digit; ``most_frequent``: the one that most of the first test rows of each size have."""
        return {"chance": 0.1, "most_frequent": self.most_frequent()}


def _n_digits(length: int) -> int:
    """Digits that fit whatever the lists: n digits are joined by n - 1 lists at the most."""
    return (length + 1) // 3


def apply(operator: Longs, values: Longs, n: Longs) -> Longs:
    """(b) each operator over the first ``n`` (b) of ``values`` (b k)."""
    inside = np.arange(values.shape[1]) < n[:, None]
    ordered = np.sort(np.where(inside, values, 10), axis=1)
    row = np.arange(len(values))
    median = (ordered[row, (n - 1) // 2] + ordered[row, n // 2]) // 2
    total = np.where(inside, values, 0).sum(1) % 10
    return np.choose(operator, [ordered[row, n - 1], ordered[:, 0], median, total])


Lists = list[tuple[NDArray[np.bool_], Longs, Longs, Longs]]


def nested(digits: Longs, counts: Longs, operators: Longs, places: NDArray[np.float64], args: Longs) -> tuple[Longs, Lists]:
    """Values (b) of the first ``counts`` of ``digits`` (b n), and the lists that were made, from the inside out.

    Each step makes a list in every row that has more than one item left: of ``args`` neighbours (or all, where fewer are left)
    from a place that ``places`` draws. A list is (which rows have it, its operator, its first digit, its last digit), (b) each.
    """
    b, n = digits.shape
    value, left = digits.copy(), counts.copy()
    first, last = (np.broadcast_to(np.arange(n), (b, n)).copy() for _ in range(2))
    column, row = np.arange(n), np.arange(b)
    lists: Lists = []
    for i in range(n - 1):
        going = left > 1
        if not going.any():
            break
        k = np.where(going, np.minimum(args[:, i], left), 1)
        at = (places[:, i] * (left - k + 1)).astype(np.int64)
        window = np.minimum(at[:, None] + np.arange(int(k.max())), n - 1)
        joined = np.where(going, apply(operators[:, i], np.take_along_axis(value, window, axis=1), k), value[row, at])
        lists.append((going, operators[:, i], first[row, at], last[row, at + k - 1]))
        ends = last[row, at + k - 1]
        # Items behind the list move up.
        source = np.minimum(np.where(column <= at[:, None], column, column + k[:, None] - 1), n - 1)
        value, first, last = (np.take_along_axis(a, source, axis=1) for a in (value, first, last))
        value[row, at], last[row, at] = joined, ends
        left = left - k + 1
    return value[:, 0], lists


def _written(digits: Longs, counts: Longs, lists: Lists, length: int) -> tuple[Longs, Longs]:
    """Tokens (b length) and how many there are (b)."""
    b, n = digits.shape
    opened, closed = np.zeros((b, n), dtype=np.int64), np.zeros((b, n), dtype=np.int64)
    for rows, _, first, last in lists:
        opened[rows, first[rows]] += 1
        closed[rows, last[rows]] += 1
    inside = np.arange(n) < counts[:, None]
    width = np.where(inside, opened + 1 + closed, 0)
    end = width.cumsum(1)
    digit = end - width + opened
    inputs = np.zeros((b, length), dtype=np.int64)
    row, column = np.nonzero(inside)
    inputs[row, digit[row, column]] = digits[row, column]
    written = np.zeros((b, n), dtype=np.int64)  # lists from the inside out: each opens before those that it holds
    for rows, operator, first, last in lists:
        which, begin, stop = np.flatnonzero(rows), first[rows], last[rows]
        inputs[which, digit[which, begin] - 1 - written[which, begin]] = 10 + operator[rows]
        written[which, begin] += 1
        inputs[which, digit[which, stop] + closed[which, stop]] = _CLOSE
        closed[which, stop] -= 1
    total = end[:, -1]
    inputs[np.arange(b), total] = _ASK
    return inputs, total + 1


_SIZE = ("length", "min_length", "n_rows")

PRESETS = (
    Preset("listops_lra", "listops", {
        "max_args": 10, "train": sizes(_SIZE, (2000, 500, 96_000)), "test": sizes(_SIZE, (2000, 500, 2_000)),
    }),
    Preset("listops_small", "listops", {
        "max_args": 3, "train": sizes(_SIZE, (48, 12, 20_000)), "test": sizes(_SIZE, (48, 12, 256), (96, 49, 256)),
    }),
)
