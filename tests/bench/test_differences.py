"""Differences: paired, with intervals that hold, and no verdict where a seed failed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hybridtf.bench import pairwise
from hybridtf.bench.differences import unit_table
from hybridtf.bench.quality import COLUMNS, RATIOS, units_of
from hybridtf.core import DataError
from hybridtf.tasks import Totals


def quality(recipe, seed, correct, tokens=20, **more):
    """A record of rows of ``tokens`` tokens each, of which ``correct`` (n) are right."""
    rows = [Totals(n_correct=int(c), n_tokens=tokens, nats=float(tokens - c), n_rows=1) for c in correct]
    value = sum(r.n_correct for r in rows) / sum(r.n_tokens for r in rows)
    return {
        "kind": "quality", "recipe": recipe, "recipe_hash": recipe, "seed": seed, "task": "mqar", "metric": "accuracy",
        "higher_is_better": True, "value": value, "n_documents": len(rows), "units": units_of(rows), **more,
    }


def draws(generator, level, difficulty):
    return generator.binomial(20, np.clip(level + difficulty, 0.01, 0.99))


def test_units_are_the_sums_again():
    rows = [Totals(1.23456, 1, 4, 9, 1, 0, 2, 0), Totals(2.0, 3, 4, 7, 1, 0, 2, 1)]
    units = units_of(rows)
    assert units == {
        "nats": [1.2346, 2.0], "n_correct": [1, 3], "n_tokens": 4, "n_bytes": [9, 7], "n_rows": 1, "n_rows_correct": 0,
        "n_answers": 2, "n_answers_correct": [0, 1],
    }
    table = unit_table({"units": units, "n_documents": 2})
    total = sum(rows, Totals())
    sums = dict(zip(COLUMNS, table.sum(0), strict=True))
    for metric, (over, under, factor) in RATIOS.items():
        assert sums[over] / sums[under] * factor == pytest.approx(getattr(total, metric), abs=1e-4)
    assert len(COLUMNS) == table.shape[1]


def test_a_paired_interval_is_narrower_than_two_side_by_side():
    generator = np.random.default_rng(0)
    hard = generator.uniform(-0.4, 0.4, 200)  # rows differ much more than the recipes do
    records = []
    for seed in range(3):
        records.append(quality("a", seed, draws(generator, 0.53, hard)))
        records.append(quality("b", seed, draws(generator, 0.5, hard)))
    (found,) = pairwise(records)
    wanted = np.mean([a["value"] - b["value"] for a, b in zip(records[::2], records[1::2], strict=True)])
    assert found.value == pytest.approx(wanted)
    assert found.low < found.value < found.high
    assert (found.recipe, found.other, found.n_seeds, found.n_documents) == ("a", "b", 3, 200)
    alone = np.std([row / 20 for row in draws(generator, 0.5, hard)]) * 1.96 / math.sqrt(200)
    one_seed = pairwise([r for r in records if r["seed"] == 0])[0]
    assert one_seed.high - one_seed.low < 2 * math.sqrt(2) * alone * 0.7
    assert "one seed" in one_seed.note


def test_which_way_is_better_and_what_does_not_show():
    generator = np.random.default_rng(1)
    hard = np.zeros(100)
    levels = {"good": 0.8, "bad": 0.4, "as bad": 0.4}
    records = [quality(name, seed, draws(generator, level, hard)) for name, level in levels.items() for seed in range(4)]
    verdicts = {(d.recipe, d.other): d.verdict for d in pairwise(records)}
    assert verdicts == {("good", "bad"): "better", ("good", "as bad"): "better", ("bad", "as bad"): "~"}
    for r in records:
        r |= {"higher_is_better": False}
    assert pairwise(records, "accuracy")[0].verdict == "worse"
    with pytest.raises(DataError, match=r"no quality record has the metric 'accurracy'.*'accuracy'"):
        pairwise(records, "accurracy")


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
def test_the_interval_covers_the_truth(n_seeds):
    """Seeds that differ: of 100 comparisons of equals, about 95 % hold zero. (A plain bootstrap of three covers about 75 %.)"""
    generator = np.random.default_rng(n_seeds)
    inside = found = 0
    for _ in range(100):
        records = [
            quality(name, seed, draws(generator, 0.5 + 0.1 * generator.standard_normal(), np.zeros(40)))
            for seed in range(n_seeds) for name in "ab"
        ]
        (difference,) = pairwise(records)
        inside += difference.low <= 0 <= difference.high
        found += difference.verdict != "~"
    assert inside >= 89
    assert found <= 11


def test_holm_takes_the_number_of_pairs_into_account():
    generator = np.random.default_rng(3)
    records = [quality(f"r{i}", seed, draws(generator, 0.5, np.zeros(60))) for i in range(8) for seed in range(3)]
    pairs = pairwise(records)
    assert len(pairs) == 28
    assert all(d.verdict == "~" for d in pairs)
    few = pairwise([r for r in records if r["recipe"] in ("r0", "r1")])
    same = next(d for d in pairs if (d.recipe, d.other) == ("r0", "r1"))
    assert (same.value, same.low, same.high) == (few[0].value, few[0].low, few[0].high)
    assert same.p >= few[0].p


def test_a_failed_seed_leaves_the_verdict_unknown():
    records = [quality(name, seed, [10, 12, 9]) for name in "ab" for seed in range(2)]
    records.append({
        "kind": "train", "recipe": "b", "recipe_hash": "b", "seed": 2, "failed": "timed out", "result": "timed_out",
    })
    (found,) = pairwise(records)
    assert (found.value, found.low, found.p, found.verdict) == (None, None, None, "unknown")
    assert found.note == "b, seed 2: timed_out"


def test_other_documents_are_not_paired():
    records = [quality("a", s, [10 + s, 12, 9]) for s in range(3)] + [quality("b", s, [5, 6 + s, 3, 2]) for s in range(3)]
    (found,) = pairwise(records)
    assert found.n_documents == 0
    assert "different documents" in found.note
    assert found.low < found.value < found.high


def falsely(n_recipes, n_seeds, record, trials=300):
    """The share of comparisons of equals in which some pair has a verdict; ``record`` (recipe, seed, generator)."""
    generator = np.random.default_rng(100 * n_recipes + n_seeds)
    wrong = 0
    for _ in range(trials):
        records = [record(f"r{i}", s, generator) for i in range(n_recipes) for s in range(n_seeds)]
        wrong += any(d.verdict not in ("~", "unknown") for d in pairwise(records))
    return wrong / trials


def bare(recipe, seed, generator):
    return quality(recipe, seed, [1], value=generator.normal(), units=None)


def with_documents(n):
    """Documents that differ, and models that differ by chance on each of them."""
    return lambda recipe, seed, generator: quality(recipe, seed, draws(generator, 0.5, np.linspace(-0.3, 0.3, n)))


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("n_recipes", [4, 6])
def test_of_equals_trained_with_few_seeds_none_is_better(n_recipes, n_seeds):
    """A bootstrap of two seeds has four draws, and called 33 % of four equals better."""
    assert falsely(n_recipes, n_seeds, bare) <= 0.07
    assert falsely(n_recipes, n_seeds, with_documents(12), trials=40) <= 0.07


@pytest.mark.parametrize("n", [2, 5, 9])
def test_one_seed_and_few_documents_bear_no_verdict(n):
    (found,) = pairwise([quality("a", 0, [19] * (n - 1) + [18]), quality("b", 0, [2] * n)])
    assert found.low < found.value < found.high
    assert (found.p, found.verdict) == (None, "unknown")
    assert f"one seed and {n} documents are too few" in found.note


@pytest.mark.parametrize("n", [10, 20])
def test_of_equals_scored_on_few_documents_none_is_better(n):
    assert falsely(2, 1, with_documents(n), trials=500) <= 0.07


@pytest.mark.parametrize("n", [2, 5, 10, 40])
def test_the_interval_over_documents_covers_the_truth(n):
    generator = np.random.default_rng(n)
    inside = 0
    for _ in range(400):
        (found,) = pairwise([with_documents(n)(name, 0, generator) for name in "ab"])
        inside += found.low is None or found.low <= 0 <= found.high
    assert inside >= 0.93 * 400


@pytest.mark.parametrize("n_seeds", [1, 2])
def test_sums_without_a_scored_row_leave_the_seeds(n_seeds):
    records = [
        quality(name, seed, [3, 4], value=0.1 * seed * (name == "a"), units=units_of([Totals(n_bytes=1)] * 2))
        for name in "ab" for seed in range(n_seeds)
    ]
    (found,) = pairwise(records)
    assert "nothing scored" in found.note
    assert (found.verdict, found.n_documents) == ("unknown" if n_seeds == 1 else "~", 0)


def test_seeds_that_all_say_the_same_show_no_spread():
    levels = {"a": 0.9, "b": 0.8}
    (found,) = pairwise([quality(n, seed, [1], value=level, units=None) for n, level in levels.items() for seed in (0, 1)])
    assert (found.verdict, found.p) == ("unknown", None)
    assert "2 seeds show no spread" in found.note


def test_only_scored_documents_count():
    rows = [Totals(n_tokens=4, n_correct=c, n_answers=a, n_answers_correct=a) for c, a in ((1, 0), (2, 1), (3, 0))]
    more = {"metric": "answer_accuracy", "units": units_of(rows), "n_documents": 3}
    (found,) = pairwise([quality(name, 0, [1], **more) for name in "ab"])
    assert (found.n_documents, found.verdict) == (1, "unknown")
