"""``modular_arithmetic``: the value of an expression of small numbers, modulo a prime, with brackets or without.

A row is an expression and a sign that asks for its value, the one token that is scored. Without brackets operators are worked
off from left to right, or, with ``precedence``, products first. With ``modulus = 5`` a row may be

    inputs    3 + 4 * 2 - 1 =          ((3 + 4) * 2 - 1) mod 5 = 3
    targets   . . . . . . . 3          (. is not scored)

With ``brackets`` every operation has its own, but for the outermost: ``( 3 + ( 4 * 2 ) ) - 1 =``. Which neighbours are joined
first is drawn evenly, so that the depth varies from row to row. Numbers and operators are drawn evenly.

Ids: the numbers below ``modulus``, then ``+``, ``-``, ``*``, ``=``, ``(`` and ``)``. The task follows Deletang et al.
(https://arxiv.org/abs/2207.02098) as Grazzi et al. (https://arxiv.org/abs/2411.12537) use it: without brackets it is regular
(a state of ``modulus`` values, or two of them with ``precedence``, is enough), with brackets it asks for a stack.

The measure is accuracy of the value; ``chance`` is 1 / modulus, and ``most_frequent`` the share of the commonest value among
the test rows (products make 0 more frequent). Sizes of the paper: 3 to 40 tokens to train on, 40 to 256 to test. Presets:
``modular_arithmetic_paper`` and ``modular_arithmetic_brackets_paper`` (those lengths; the shortest expression is of 4 tokens),
``modular_arithmetic_small`` and ``modular_arithmetic_brackets_small``.
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

_NUMBERS, _OPERATORS, _COUNTS, _JOINS = range(4)
_PLUS, _MINUS, _TIMES = range(3)
_ASK, _OPEN, _CLOSE = 3, 4, 5  # behind the numbers, after the operators


class ModularArithmeticConfig(SyntheticConfig):
    """Say the value of an expression modulo a number.

    Rows have as many numbers as their tokens allow: n without brackets take 2 n tokens, the question included, with brackets
    4 n - 4 (and 2 where n is 1). Each count of numbers from the shortest to the longest row is as likely.
    """

    type: Literal["modular_arithmetic"] = "modular_arithmetic"
    modulus: int = Field(default=5, ge=2)
    brackets: bool = False
    precedence: bool = False
    """Products are worked off before sums; brackets leave no doubt, and do not go with it."""
    train: tuple[VaryingRows, ...] = (VaryingRows(length=40, min_length=4, n_rows=100_000),)
    test: tuple[VaryingRows, ...] = (VaryingRows(length=40, n_rows=500), VaryingRows(length=256, n_rows=500))

    @model_validator(mode="after")
    def _rows_hold_two_numbers(self) -> Self:
        if self.brackets and self.precedence:
            raise ValueError("precedence = true does not go with brackets = true: every operation has its own brackets")
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.shortest < 4:
                    raise ValueError(f"{where}[{i}]: rows of {size.shortest} tokens; two numbers and the question take 4")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            modulus=3, train=(VaryingRows(length=16, min_length=8, n_rows=40),),
            test=(VaryingRows(length=16, n_rows=12), VaryingRows(length=20, n_rows=9)),
        )

    @property
    def n_ids(self) -> int:
        return self.modulus + 6

    def n_numbers(self, length: int) -> int:
        """How many numbers a row of ``length`` tokens holds."""
        return (length + 4) // 4 if self.brackets else length // 2

    def scored(self, size: VaryingRows, split: int = TEST) -> float:
        return 1.0

    def bits(self, size: VaryingRows) -> float:
        n = self.n_numbers(size.shortest)
        return n * math.log2(self.modulus) + (n - 1) * math.log2(3)

    def draw(self, size: VaryingRows, key: tuple[int, ...], index: Longs) -> Rows:
        low, high = self.n_numbers(size.shortest), self.n_numbers(size.length)
        key = (*key, self.modulus, size.length)
        numbers = Draws((*key, _NUMBERS), index).integers(high, self.modulus)
        operators = Draws((*key, _OPERATORS), index).integers(high - 1, 3)
        counts = low + Draws((*key, _COUNTS), index).integers(1, high - low + 1)[:, 0]
        if self.brackets:
            joins = Draws((*key, _JOINS), index).uniform(high - 1)
            value, opened, closed = bracketed(numbers, operators, counts, joins, self.modulus)
        else:
            value = (in_turn, products_first)[self.precedence](numbers, operators, counts, self.modulus)
            opened = closed = np.zeros_like(numbers)
        inputs, lengths = self._written(numbers, operators, counts, opened, closed, size.length)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, lengths[:, None] - 1, value[:, None], axis=1)
        return Rows(inputs, targets, lengths=None if low == high and (lengths == size.length).all() else lengths)

    def _written(
        self, numbers: Longs, operators: Longs, counts: Longs, opened: Longs, closed: Longs, length: int
    ) -> tuple[Longs, Longs]:
        """Tokens (b length) and how many there are (b): each number with the brackets around it, and operators between."""
        n = numbers.shape[1]
        inside = np.arange(n) < counts[:, None]
        width = np.where(inside, opened + closed + 2, 0)  # the brackets, the number, and what comes behind it
        end = width.cumsum(1)
        start = end - width
        inputs = np.zeros((len(numbers), length), dtype=np.int64)
        behind = np.full_like(numbers, self.modulus + _ASK)
        behind[:, :-1] = np.where(np.arange(1, n) < counts[:, None], self.modulus + operators, behind[:, :-1])
        for tokens, place in ((numbers, start + opened), (behind, end - 1)):
            _put(inputs, place, tokens, inside)
        # A run of brackets is written as far as the longest run; no row has more than its numbers.
        for i in range(int(opened.max(initial=0))):
            _put(inputs, start + i, np.full_like(numbers, self.modulus + _OPEN), inside & (i < opened))
        for i in range(int(closed.max(initial=0))):
            _put(inputs, start + opened + 1 + i, np.full_like(numbers, self.modulus + _CLOSE), inside & (i < closed))
        return inputs, end[:, -1]

    def baselines(self) -> dict[str, float]:
        """``chance``: any value; ``most_frequent``: the one that most of the first test rows of each size have."""
        return {"chance": 1 / self.modulus, "most_frequent": self.most_frequent()}


def _put(out: Longs, place: Longs, tokens: Longs, where: NDArray[np.bool_]) -> None:
    row = np.nonzero(where)[0]
    out[row, place[where]] = tokens[where]


def apply(left: Longs, operator: Longs, right: Longs, modulus: int) -> Longs:
    """``left`` and ``right`` joined by each operator, modulo ``modulus``."""
    joined = np.where(operator == _PLUS, left + right, np.where(operator == _MINUS, left - right, left * right))
    return np.asarray(joined % modulus)


def in_turn(numbers: Longs, operators: Longs, counts: Longs, modulus: int) -> Longs:
    """(b) the values of the first ``counts`` numbers (b n), from left to right."""
    value = numbers[:, 0]
    for i in range(1, numbers.shape[1]):
        value = np.where(i < counts, apply(value, operators[:, i - 1], numbers[:, i], modulus), value)
    return value


def products_first(numbers: Longs, operators: Longs, counts: Longs, modulus: int) -> Longs:
    """(b) the values, products before sums: what is done, and the signed product that is still open."""
    done, term = np.zeros_like(numbers[:, 0]), numbers[:, 0]
    for i in range(1, numbers.shape[1]):
        operator, number = operators[:, i - 1], numbers[:, i]
        times = operator == _TIMES
        next_done = np.where(times, done, (done + term) % modulus)
        next_term = np.where(times, term * number, np.where(operator == _MINUS, -number, number)) % modulus
        going = i < counts
        done, term = np.where(going, next_done, done), np.where(going, next_term, term)
    return (done + term) % modulus


def bracketed(
    numbers: Longs, operators: Longs, counts: Longs, joins: NDArray[np.float64], modulus: int
) -> tuple[Longs, Longs, Longs]:
    """Values (b), and the brackets that open before and close behind each number (b n).

    Neighbours are joined one pair after the other, the operators in the order of ``joins`` (b n - 1), until one value is left;
    every join but the last has brackets.
    """
    b, n = numbers.shape
    order = np.where(np.arange(n - 1) < counts[:, None] - 1, joins, np.inf).argsort(axis=1, kind="stable")
    value, opened, closed = numbers.copy(), np.zeros_like(numbers), np.zeros_like(numbers)
    first, last = np.broadcast_to(np.arange(n), (b, n)).copy(), np.broadcast_to(np.arange(n), (b, n)).copy()
    row = np.arange(b)
    for i in range(n - 1):
        going = i < counts - 1
        at = order[:, i]
        # The span left of the operator ends at number ``at``, the one right of it begins at the next.
        begin, end = first[row, at], last[row, at + 1]
        joined = apply(value[row, begin], operators[row, at], value[row, at + 1], modulus)
        value[row, begin] = np.where(going, joined, value[row, begin])
        last[row, begin] = np.where(going, end, last[row, begin])
        first[row, end] = np.where(going, begin, first[row, end])
        inner = (going & (i < counts - 2)).astype(np.int64)
        opened[row, begin] += inner
        closed[row, end] += inner
    return value[:, 0], opened, closed


_SIZE, _TEST = ("length", "min_length", "n_rows"), ("length", "n_rows")

_PAPER = {"train": sizes(_SIZE, (40, 4, 100_000)), "test": sizes(_SIZE, (256, 40, 500))}

PRESETS = (
    Preset("modular_arithmetic_paper", "modular_arithmetic", _PAPER),
    Preset("modular_arithmetic_brackets_paper", "modular_arithmetic", {"brackets": True, **_PAPER}),
    Preset("modular_arithmetic_small", "modular_arithmetic", {
        "train": sizes(_SIZE, (24, 4, 20_000)), "test": sizes(_TEST, (24, 256), (64, 128), (128, 128), (256, 128)),
    }),
    Preset("modular_arithmetic_brackets_small", "modular_arithmetic", {
        "brackets": True, "train": sizes(_SIZE, (24, 4, 20_000)), "test": sizes(_TEST, (24, 256), (64, 128), (128, 128)),
    }),
)
