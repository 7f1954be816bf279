"""Student's t and the binomial's interval, held against printed tables and exact sums."""

from __future__ import annotations

import math

import pytest

from hybridtf.bench.distributions import (
    clopper_pearson,
    incomplete_beta,
    student95,
    student_p,
    student_point,
    summed_half,
    summed_p,
)  # fmt: skip


def test_student_is_that_of_the_tables():
    tables = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}
    assert {n: round(student95(n), 3) for n in tables} == tables
    assert student_point(0.001, 10) == pytest.approx(4.587, abs=1e-3)
    assert student_p(0.0, 3) == 1.0
    assert student_p(1.0, 1) == pytest.approx(0.5)  # Cauchy
    assert student_p(3.0, 2) == pytest.approx(1 - 3 / math.sqrt(11))


@pytest.mark.parametrize(("k", "n"), [(1, 3), (7, 10), (99, 100), (250, 1000)])
def test_the_ends_leave_a_fortieth_of_the_throws_on_either_side(k, n):
    low, high = clopper_pearson(k, n)
    assert sum(math.comb(n, i) * low**i * (1 - low) ** (n - i) for i in range(k, n + 1)) == pytest.approx(0.025)
    assert sum(math.comb(n, i) * high**i * (1 - high) ** (n - i) for i in range(k + 1)) == pytest.approx(0.025)
    assert clopper_pearson(0, n) == (0.0, pytest.approx(1 - 0.025 ** (1 / n)))
    assert clopper_pearson(n, n) == (pytest.approx(0.025 ** (1 / n)), 1.0)


def test_incomplete_beta_at_its_ends():
    assert incomplete_beta(2, 3, 0.0) == 0.0
    assert incomplete_beta(2, 3, 1.0) == 1.0
    assert incomplete_beta(2.5, 2.5, 0.5) == pytest.approx(0.5)


def test_a_sum_of_variances_is_no_narrower_than_a_part():
    parts = [(0.04, 1), (0.09, 20)]
    half = summed_half(0.05, parts)
    assert half == pytest.approx(math.hypot(0.2 * 12.7062, 0.3 * 2.08596), rel=1e-5)
    assert summed_p(half, parts) == pytest.approx(0.05, rel=2e-4)
    assert summed_p(3.0, parts) > max(student_p(3.0 / 0.2, 1), student_p(3.0 / 0.3, 20))
    assert summed_p(3.0, [*parts[:1], (0.0, 20)]) == pytest.approx(student_p(15.0, 1))
    assert summed_p(0.0, parts) == 1.0
    assert summed_p(1.0, [(0.0, 3)]) == 0.0
