"""What noise lets be said: known numbers, and trials on times that were recorded on a real machine."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hybridtf.bench import noise
from hybridtf.core import ConfigError

TRACES = {
    name: np.array(values, float)
    for name, values in json.loads((Path(__file__).parent / "noise_traces.json").read_text()).items() if name != "what"
}
STEADY, BUSY, CROWDED = TRACES
ROUNDS = 20
TURNS = 40
"""A round of the steady trace is then as long as the default one."""


def trial(trace, rng, *, rounds=ROUNDS, turns=TURNS, slower=1.0):
    """The verdict of one run that takes its times from a trace: the first subject, its control, and another one."""
    start = rng.integers(len(trace) - 3 * rounds * turns + 1)
    times = trace[start : start + 3 * rounds * turns].reshape(rounds, turns, 3)
    first, again, other = np.median(rng.permuted(times, axis=2), axis=1).T
    control = noise.control_of(first, again)
    return noise.verdict_of(noise.ratio_of(other * slower, first), control)[0], control


def verdicts(trace, n, **how):
    rng = np.random.default_rng(7)
    return [trial(trace, rng, **how)[0] for _ in range(n)]


def test_the_same_code_twice_is_told_apart_in_at_most_one_of_a_hundred_trials():
    alarms = {name: sum(v != "~" for v in verdicts(trace, 1000, turns=20)) for name, trace in TRACES.items()}
    assert max(alarms.values()) <= 10, alarms


def test_three_per_cent_are_found_where_the_noise_allows_it():
    found = verdicts(TRACES[STEADY], 400, slower=1.03)
    assert found.count("slower") >= 0.95 * 400
    assert "faster" not in found
    faster = verdicts(TRACES[STEADY], 400, slower=1 / 1.03)
    assert faster.count("faster") >= 0.95 * 400
    assert "slower" not in faster


def test_the_detectable_effect_is_one_that_is_found():
    rng = np.random.default_rng(3)
    effects = [trial(TRACES[STEADY], rng)[1].detectable for _ in range(100)]
    assert 0.01 < float(np.median(effects)) < 0.03
    half = 1 + float(np.median(effects)) / 2
    assert verdicts(TRACES[STEADY], 200, slower=half).count("slower") < 0.9 * 200  # half of it is not


def test_a_machine_that_varies_by_half_gives_no_verdict_on_three_per_cent():
    for name, turns in ((BUSY, 10), (CROWDED, 40)):
        found = verdicts(TRACES[name], 300, slower=1.03, turns=turns)
        assert "faster" not in found
        assert found.count("~") >= 0.8 * 300
    assert verdicts(TRACES[CROWDED], 300, slower=1.03).count("~") == 300
    assert "faster" not in verdicts(TRACES[CROWDED], 300, slower=3.0)  # what is beyond all noise may be said
    assert verdicts(TRACES[CROWDED], 300, slower=3.0).count("slower") >= 0.95 * 300


def test_rounds_grow_with_the_square_of_the_noise():
    rng = np.random.default_rng(0)
    quiet, loud = (noise.control_of(*np.exp(rng.normal(0, sd, (2, 200)))) for sd in (0.01, 0.02))
    assert 3 < loud.rounds_for(0.03) / quiet.rounds_for(0.03) < 5.5
    assert loud.rounds_for(0.015) / loud.rounds_for(0.03) == pytest.approx(4, rel=0.1)


# -- known numbers -----------------------------------------------------------------------------------------------------


def test_the_estimate_is_the_median_of_the_averages_of_pairs():
    times = [math.e**x for x in (1.0, 2.0, 6.0)]
    ratio = noise.ratio_of(times, [1.0] * 3)  # averages 1, 1.5, 2, 3.5, 4, 6
    assert ratio.time == pytest.approx(math.exp(2.75))
    assert (ratio.low, ratio.high, ratio.rounds) == (None, None, 3)


def test_the_interval_is_that_of_the_signed_rank_test():
    # Tables of Wilcoxon's test, two-sided 1 %: 10 pairs 3, 20 pairs 37 (Hollander & Wolfe 1999, A.4); the interval leaves
    # out as many averages as are at most the critical sum.
    logs = np.random.default_rng(1).normal(0, 1, 20)
    for n, critical in ((10, 3), (20, 37)):
        walsh = np.sort([(logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n)])
        ratio = noise.ratio_of(np.exp(logs[:n]), np.ones(n))
        assert math.log(ratio.low) == pytest.approx(walsh[critical])
        assert math.log(ratio.high) == pytest.approx(walsh[-1 - critical])


def test_the_exact_and_the_normal_interval_meet():
    exact = noise._left_out(noise._EXACT_UP_TO, noise.LEVEL)
    after = noise._left_out(noise._EXACT_UP_TO + 1, noise.LEVEL)
    assert 0 < after - exact < 0.03 * after


def test_a_shift_that_both_share_within_a_round_does_not_count():
    drift = np.linspace(1, 3, 20)
    jitter = 1 + 1e-3 * np.random.default_rng(2).normal(size=(3, 20))
    control = noise.control_of(drift * jitter[0], drift * jitter[1])
    assert noise.verdict_of(noise.ratio_of(1.03 * drift * jitter[2], drift * jitter[0]), control) == ("slower", ())
    assert noise.drift_of(drift) == pytest.approx(0.714, abs=1e-3)


def test_below_the_floor_nothing_is_said():
    rng = np.random.default_rng(5)
    first, other = 1 + 1e-4 * rng.normal(size=(2, 20))
    shifted = noise.control_of(first, first * (1 + 0.02 * rng.choice([-1, 1], 20)))
    assert shifted.floor > 0.01
    ratio = noise.ratio_of(other * 1.01, first)
    assert ratio.low > 1  # by itself it would be a difference
    assert noise.verdict_of(ratio, shifted)[0] == "~"


def test_a_control_that_differs_from_itself_refuses_all_verdicts():
    first = 1 + 1e-4 * np.random.default_rng(5).normal(size=20)
    control = noise.control_of(first, first * 1.02)
    verdict, reasons = noise.verdict_of(noise.ratio_of(first * 1.5, first), control)
    assert verdict == "~"
    assert "1.020 times as long as itself" in reasons[0]


def test_times_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="timed both"):
        noise.ratio_of([1.0], [1.0, 2.0])
    with pytest.raises(ConfigError, match="did not move"):
        noise.ratio_of([0.0], [1.0])
