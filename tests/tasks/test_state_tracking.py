"""Words over groups and modular expressions, solved by people's own means: permutations as tuples, Python's own arithmetic."""

from __future__ import annotations

import itertools
import math
import re
import statistics

import numpy as np
import pytest

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import IGNORE, ListOpsConfig, ModularArithmeticConfig, VaryingRows, WordProblemConfig
from hybridtf.tasks.word_problem import table
from tests.tasks.rows import rows_of


def permutations(name: str) -> list[tuple[int, ...]]:
    n = int(name[1])
    found = list(itertools.permutations(range(n)))
    even = [p for p in found if np.linalg.det(np.eye(n)[list(p)]) > 0]
    return found if name[0] == "s" else even


@pytest.mark.parametrize("group", ["s3", "a5", "s5"])
def test_products_of_permutations(group) -> None:
    points = permutations(group)
    sizes = {"train": (VaryingRows(length=17, min_length=3, n_rows=300),), "test": (VaryingRows(length=33, n_rows=50),)}
    lengths = set()
    for word, said in rows_of(WordProblemConfig(group=group, **sizes).load(), 300):
        product = tuple(range(len(points[0])))
        lengths.add(len(word))
        for x, y in zip(word, said, strict=True):
            product = tuple(points[x][i] for i in product)  # x after what was before
            assert points[y] == product
    assert lengths == {*range(3, 18), 33}


@pytest.mark.parametrize(("group", "n"), [("z2", 2), ("z3", 3), ("z60", 60)])
def test_cyclic_groups_add_up(group, n) -> None:
    sizes = {"train": (VaryingRows(length=19, n_rows=300),), "test": (VaryingRows(length=64, n_rows=20),)}
    for word, said in rows_of(WordProblemConfig(group=group, **sizes).load(), 300):
        assert said == [int(x) for x in np.cumsum(word) % n]


def test_a4xz5_is_a_group_of_60_that_does_not_commute_and_has_both_parts() -> None:
    product = table("a4xz5")
    assert product.shape == (60, 60)
    assert all(sorted(row) == list(range(60)) for row in [*product.tolist(), *product.T.tolist()])
    assert product[0].tolist() == product[:, 0].tolist() == list(range(60))
    x, y, z = np.random.default_rng(0).integers(60, size=(3, 500))
    assert (product[product[x, y], z] == product[x, product[y, z]]).all()
    assert (product != product.T).any()
    powers = np.arange(60)
    for _ in range(5):
        powers = product[powers, np.arange(60)]
    # x^6 = x for the elements of Z5, and the Klein group's have x^6 = e: the number of solutions of x^6 = x is 1 * 5.
    assert int((powers == np.arange(60)).sum()) == 5


def test_swaps_are_the_identity_and_exchanges() -> None:
    config = WordProblemConfig(group="s5", elements="swaps", train=(VaryingRows(length=200, n_rows=20),))
    used = next(config.load().train_batches(20, 200)).inputs.unique().tolist()
    points = permutations("s5")
    assert [p for i, p in enumerate(points) if sum(a != b for a, b in enumerate(p)) in (0, 2)] == [points[i] for i in used]
    assert len(used) == 11
    with pytest.raises((ConfigError, ValueError), match="swaps"):
        WordProblemConfig(group="z2", elements="swaps")


def test_all_elements_come_as_often_as_products_of_long_words() -> None:
    task = WordProblemConfig(group="s3", train=(VaryingRows(length=30, n_rows=6000),)).load()
    last = next(task.train_batches(6000, 30)).targets[:, -1]
    counts = np.bincount(last.numpy(), minlength=6)
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # 5 degrees of freedom, p = 0.001


# -- expressions -------------------------------------------------------------------------------------------------------


def text(tokens: list[int], modulus: int) -> str:
    signs = [*map(str, range(modulus)), "+", "-", "*", "=", "(", ")"]
    return "".join(signs[t] for t in tokens)


def from_left(expression: str) -> int:
    parts = re.findall(r"\d+|[-+*]", expression)
    value = int(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=True):
        value = {"+": value + int(number), "-": value - int(number), "*": value * int(number)}[sign]
    return value


def by_python(expression: str) -> int:
    """Python's own parser, for a string of digits, operators and brackets alone."""
    import ast

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant):
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]

    return value(ast.parse(expression, mode="eval").body)


@pytest.mark.parametrize(
    "options", [{}, {"precedence": True}, {"brackets": True}, {"modulus": 7}, {"brackets": True, "modulus": 2}], ids=str
)
def test_expressions_have_the_value_that_is_said(options) -> None:
    sizes = {"train": (VaryingRows(length=25, min_length=4, n_rows=400),), "test": (VaryingRows(length=40, n_rows=60),)}
    config = ModularArithmeticConfig(**options, **sizes)
    solve = by_python if config.brackets or config.precedence else from_left
    counts, depths = set(), set()
    for tokens, said in rows_of(config.load(), 400):
        expression = text(tokens, config.modulus)
        assert expression[-1] == "="
        assert said[:-1] == [IGNORE] * (len(said) - 1)
        assert said[-1] == solve(expression[:-1]) % config.modulus, expression
        n = len(re.findall(r"\d", expression))
        counts.add(n)
        assert len(tokens) == (max(4 * n - 4, 2) if config.brackets else 2 * n)
        assert expression.count("(") == (max(n - 2, 0) if config.brackets else 0)
        depths.add(max(itertools.accumulate((c == "(") - (c == ")") for c in expression)))
    assert counts == ({2, 3, 4, 5, 6, 7, 11} if config.brackets else {*range(2, 13), 20})
    assert len(depths) > (4 if config.brackets else 0)


def test_brackets_join_any_neighbours() -> None:
    """Of three numbers, both ways of bracketing come, each about as often."""
    config = ModularArithmeticConfig(brackets=True, train=(VaryingRows(length=8, n_rows=2000),))
    batch = next(config.load().train_batches(2000, 8))
    opened_first = int((batch.inputs[:, 0] == 5 + 4).sum())
    assert 900 < opened_first < 1100


def test_baselines_know_that_products_favour_zero() -> None:
    baselines = ModularArithmeticConfig(brackets=True).load().baselines()
    assert baselines["chance"] == 0.2
    assert 0.25 < baselines["most_frequent"] < 0.6


@pytest.mark.parametrize(("options", "match"), [
    ({"brackets": True, "precedence": True}, "does not go with brackets"),
    ({"train": [{"length": 8, "min_length": 3, "n_rows": 5}]}, "take 4"),
    ({"train": [{"length": 8, "min_length": 9, "n_rows": 5}]}, "above length"),
    ({"modulus": 1}, "modulus"),
], ids=lambda x: str(x)[:20])
def test_wrong_options_are_refused_where_they_stand(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "modular_arithmetic", **options})


# -- lists -------------------------------------------------------------------------------------------------------------


def read_list(tokens: list[int]) -> int:
    """The value of a list by recursive descent, with Python's own max, min, median and sum."""
    rest = iter(tokens)

    def item(token: int) -> int:
        if token < 10:
            return token
        assert 10 <= token <= 13
        values = []
        while (inner := next(rest)) != 14:
            values.append(item(inner))
        assert 2 <= len(values) <= 4
        return [max, min, lambda v: math.floor(statistics.median(v)), lambda v: sum(v) % 10][token - 10](values)

    value = item(next(rest))
    assert list(rest) == []
    return value


def test_lists_have_the_value_that_is_said() -> None:
    sizes = {"train": (VaryingRows(length=40, min_length=5, n_rows=600),), "test": (VaryingRows(length=90, n_rows=40),)}
    depths, operators, values = set(), set(), []
    for tokens, said in rows_of(ListOpsConfig(max_args=4, **sizes).load(), 600):
        assert tokens[-1] == 15
        assert said[:-1] == [IGNORE] * (len(said) - 1)
        assert said[-1] == read_list(tokens[:-1])
        depths.add(max(itertools.accumulate((10 <= t <= 13) - (t == 14) for t in tokens)))
        operators |= {t for t in tokens if 10 <= t <= 13}
        values.append(said[-1])
    assert operators == {10, 11, 12, 13}
    assert {1, 2, 3, 4, 5} <= depths
    assert set(values) == set(range(10))


def test_short_rows_of_lists_are_refused() -> None:
    with pytest.raises((RecipeError, ConfigError), match="take 5"):
        active()["tasks"].make({"type": "listops", "train": [{"length": 8, "min_length": 4, "n_rows": 5}]})
