"""Pareto fronts against brute force, and axes from records."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.bench import pareto_axes, pareto_front
from hybridtf.core import DataError

NUMBERS = st.integers(-3, 3).map(float)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=25), st.tuples(*[st.sampled_from(["lower", "higher"])] * 3))
def test_the_front_is_what_nobody_dominates(points, better):
    def beats(a, b):
        pairs = [(x, y) if word == "lower" else (-x, -y) for x, y, word in zip(a, b, better, strict=True)]
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    wanted = [i for i, mine in enumerate(points) if not any(beats(other, mine) for other in points)]
    assert pareto_front(points, better) == wanted
    assert bool(wanted) == bool(points)


def test_points_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="point 1 is not finite"):
        pareto_front([(1.0, 2.0), (math.nan, 0.0)], ("lower", "lower"))
    with pytest.raises(DataError, match="every point needs 2"):
        pareto_front([(1.0,)], ("lower", "lower"))


def record(kind, recipe, seed=0, **fields):
    return {"kind": kind, "recipe": recipe, "recipe_hash": recipe, "seed": seed, **fields}


def scored(recipe, *values):
    same = {"task": "mqar", "metric": "accuracy", "higher_is_better": True}
    return [record("quality", recipe, seed, value=value, **same) for seed, value in enumerate(values)]


def test_axes_of_the_means_over_seeds():
    state = {"a": 100, "b": 400, "c": 500}
    records = [*scored("a", 0.5, 0.7), *scored("b", 0.9, 0.9), *scored("c", 0.8, 0.8), *scored("d", 0.99, 0.99)]
    for name, size in state.items():
        records += [record("model", name, s, state_bytes={"65536": {"used": size}}) for s in (0, 1)]
        records += [record("train", name, s, failed=None, result="ok", flops=10 * size) for s in (0, 1)]
    records.append(record("speed", "a", phase="decode", batch_size=1, length=32, tokens_per_s=50.0))
    axes = {axis.cost: axis for axis in pareto_axes(records)}
    assert set(axes) == {"state_bytes", "train_flops", "decode_seconds"}
    points = {p.recipe: p for p in axes["state_bytes"].points}
    assert {name: (p.cost, p.on_front) for name, p in points.items()} == {
        "a": (100, True), "b": (400, True), "c": (500, False),
    }
    assert points["a"].value == pytest.approx(0.6)
    assert points["a"].n_seeds == 2
    assert axes["state_bytes"].left_out == {"d": "state_bytes was not measured"}
    assert [p.cost for p in axes["decode_seconds"].points] == [1 / 50]
    assert (axes["train_flops"].task, axes["train_flops"].metric) == ("mqar", "accuracy")


def test_a_recipe_with_a_failed_seed_has_no_point():
    records = [*scored("a", 0.5, 0.7), *scored("b", 0.9)]
    records += [record("train", name, failed=None, flops=1) for name in "ab"]
    records += [record("train", "a", 1, failed=None, flops=1), record("train", "b", 1, failed="late", result="timed_out")]
    (axis,) = pareto_axes(records)
    assert [p.recipe for p in axis.points] == ["a"]
    assert axis.left_out == {"b": "seed 1: timed_out"}
