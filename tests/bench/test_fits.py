"""The longest length by trial: the search on false trials, the child on real ones, and the record of both."""

import json
import math
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, measure_fits, search_fits
from hybridtf.bench.child import _answer, run_trial
from hybridtf.bench.fits import RESOLUTION, Probe
from hybridtf.bench.outcomes import OUTCOMES, speaks_of_memory
from hybridtf.core import ConfigError
from tests.bench.bench_cases import Line, Table, subject


class Trials:
    """False trials that remember what they were asked."""

    def __init__(self, outcome):
        self.outcome, self.asked = outcome, []

    def __call__(self, length):
        self.asked.append(length)
        return Probe(length, self.outcome(length, self.asked.count(length)))


def up_to(limit, how="out_of_memory"):
    return Trials(lambda n, turn: "fits" if n <= limit else how)


def limits():
    numbers = random.Random(0)
    return [1024, 1025, 1039, 8191, 8192, 65_535, 1_048_575, *(int(2 ** numbers.uniform(10, 20)) for _ in range(2000))]


def test_twelve_trials_find_any_limit_from_1k_to_1m():
    for limit in limits():
        trials = up_to(limit)
        found = search_fits(trials)
        assert found.fits <= limit < found.fails.length
        assert found.fails.length - found.fits <= found.fits * RESOLUTION
        assert found.resolution <= RESOLUTION
        assert (found.confirmed, found.ended) == (True, "resolved")
        assert len(trials.asked) == len(found.probes) <= 12
        assert trials.asked.count(found.fits) == 2


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 63, 64, 65, 100, 1023])
def test_limits_below_the_start_are_found_to_the_token(limit):
    found = search_fits(up_to(limit))
    assert found.fits <= limit < found.fails.length
    assert found.fails.length - found.fits <= max(1, found.fits * RESOLUTION)
    assert len(found.probes) <= 12


def test_what_never_fits_is_unknown_and_not_zero():
    found = search_fits(up_to(0))
    assert (found.fits, found.confirmed, found.ended, found.resolution) == (None, False, "nothing_fits", None)
    assert (found.fails.length, found.fails.outcome) == (1, "out_of_memory")
    assert len(found.probes) == 2


def test_the_longest_allowed_may_fit():
    trials = up_to(1 << 30)
    found = search_fits(trials, max_length=5000)
    assert (found.fits, found.fails, found.ended, found.confirmed) == (5000, None, "max_length", True)
    assert trials.asked == [1024, 5000, 5000]
    assert search_fits(up_to(9), max_length=9).fits == 9
    assert search_fits(up_to(1 << 30)).fits == 1 << 20


@pytest.mark.parametrize("how", [o for o in OUTCOMES if o != "fits"])
def test_every_way_to_fail_is_told_apart(how):
    found = search_fits(up_to(3000, how))
    assert found.fails.outcome == how
    assert {p.outcome for p in found.probes} == {"fits", how}


def test_outcomes_that_mix_each_keep_their_name():
    steps = ((5000, "fits"), (5500, "non_finite"), (60_000, "timed_out"), (1 << 40, "failed"))
    found = search_fits(Trials(lambda n, turn: next(how for end, how in steps if n < end)))
    assert found.fits < 5000 <= found.fails.length
    assert found.fails.outcome == "non_finite"
    assert all(p.outcome == next(how for end, how in steps if p.length < end) for p in found.probes)
    assert {p.outcome for p in found.probes} == {"fits", "non_finite", "timed_out", "failed"}


def test_a_length_that_fits_once_only_does_not_fit():
    trials = Trials(lambda n, turn: "fits" if n <= 2000 or (n <= 2500 and turn == 1) else "out_of_memory")
    found = search_fits(trials, trials=40)
    assert found.fits <= 2000 < found.fails.length
    assert found.confirmed
    assert found.resolution <= RESOLUTION
    unsure = search_fits(Trials(lambda n, turn: "fits" if turn == 1 and n < 3000 else "timed_out"))
    assert not unsure.confirmed
    assert len(unsure.probes) <= 12


def test_trials_that_follow_no_order_end_the_search_all_the_same():
    numbers = random.Random(1)
    for _ in range(200):
        trials = Trials(lambda n, turn: numbers.choice(OUTCOMES))
        found = search_fits(trials)
        assert len(trials.asked) <= 12
        lengths = [p.length for p in found.probes if p.fits]
        assert found.fits is None or found.fits in lengths
        assert found.fails is None or found.fits is None or found.fits < found.fails.length


def test_a_range_too_wide_for_the_trials_says_so():
    found = search_fits(up_to(1 << 29), max_length=1 << 30)
    assert found.ended == "trials"
    assert found.fits <= 1 << 29


@pytest.mark.parametrize("wrong", [{"start": 0}, {"max_length": 0}, {"resolution": 0.0}, {"trials": 2}])
def test_searches_of_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least"):
        search_fits(up_to(9), **wrong)


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_record_holds_every_trial():
    def trial(one, phase, batch_size, length, limit_bytes, timeout_s):
        assert (one.name, phase, batch_size, limit_bytes, timeout_s) == ("tiny", "decode", 2, 1 << 20, 7.0)
        return {"outcome": "fits" if length <= 1500 else "timed_out", "error": None, "seconds": 0.5, "peak": length}

    seen = []
    record = measure_fits(
        subject("a"), phase="decode", batch_size=2, limit_bytes=1 << 20, timeout_s=7.0, trial=trial, progress=seen.append
    )
    assert record["kind"] == "fits"
    assert record["fits"] <= 1500 < record["fails"]["length"]
    assert record["fails"]["outcome"] == "timed_out"
    assert record["confirmed"]
    assert record["note"] is None
    assert [p["length"] for p in record["probes"]] == [p.length for p in seen]
    assert all(p["peak"] == p["length"] for p in record["probes"])


def test_a_model_that_always_fails_is_recorded_and_ends_no_sweep():
    def trial(*args):
        return {"outcome": "failed", "error": "ValueError: no"}

    record = measure_fits(subject("a"), limit_bytes=1 << 30, trial=trial)
    assert (record["fits"], record["ended"]) == (None, "nothing_fits")
    assert record["fails"]["error"] == "ValueError: no"


# -- real children -----------------------------------------------------------------------------------------------------


class Grows(Table):
    """Takes 1 MiB a token; not finite from 300 tokens on, an error from 600 on."""

    def forward(self, ids, segments=None):
        taken = [torch.ones(1 << 18) for _ in range(ids.shape[1])]
        scores = super().forward(ids) * taken[0][0]
        if ids.shape[1] >= 600:
            raise ValueError("too many for me")
        return scores * (math.nan if ids.shape[1] >= 300 else 1.0)


def grows():
    return Grows(torch.ones(5, 5))


def never():
    raise KeyboardInterrupt


GROWS = Subject("grows", grows, vocab_size=5)


@pytest.mark.parametrize(
    ("length", "limit_mib", "outcome", "words"),
    [(20, 200, "fits", None), (400, 200, "out_of_memory", "memory"), (300, 1000, "non_finite", "finite"),
     (600, 2000, "failed", "too many for me")],
)
@pytest.mark.slow
def test_a_child_tells_its_outcomes_apart(length, limit_mib, outcome, words):
    found = run_trial(GROWS, "prefill", 1, length, limit_mib << 20, 200.0)
    assert found["outcome"] == outcome
    assert words is None or words in found["error"].lower()
    if outcome == "fits":
        assert 18 << 20 < found["peak"] < 40 << 20


def test_refusal_10_every_trial_is_a_process_of_its_own(monkeypatch):
    started = []

    class Child:
        """Answers what a child would, without being one."""

        def __init__(self, command, **options):
            started.append(command)
            self.returncode = 0

        def communicate(self, request, timeout):
            (_, _, length, limit_bytes, _), _ = pickle.loads(request)
            how = "fits" if length <= limit_bytes else "out_of_memory"
            return json.dumps({"outcome": how, "error": None}).encode(), b""

        def poll(self):
            return 0

    stand_in = SimpleNamespace(Popen=Child, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("hybridtf.bench.child.subprocess", stand_in)
    record = measure_fits(subject("a"), limit_bytes=5000)
    assert record["fits"] <= 5000 < record["fails"]["length"]
    assert len(started) == len(record["probes"]) <= 12
    assert all(command[0] == sys.executable for command in started)


@pytest.mark.parametrize(
    ("code", "err", "outcome"),
    [(-9, b"", "out_of_memory"), (-6, b"what: std::bad_alloc", "out_of_memory"), (-11, b"", "failed"), (3, b"no", "failed")],
)
def test_the_end_of_a_child_that_says_nothing_is_told(code, err, outcome):
    found = _answer(GROWS, code, b"", err)
    assert found["outcome"] == outcome
    assert found["error"]


def test_a_child_that_takes_too_long_is_ended():
    found = run_trial(GROWS, "prefill", 1, 1, None, 0.05)
    assert (found["outcome"], found["seconds"]) == ("timed_out", 0.05)


@pytest.mark.slow
def test_a_limit_is_found_by_real_children():
    limit = 100 << 20
    found = search_fits(
        lambda n: Probe(n, run_trial(GROWS, "prefill", 1, n, limit, 200.0)["outcome"]), start=64, max_length=128, resolution=0.3
    )
    assert 64 <= found.fits <= 101 < found.fails.length + 1
    assert found.fails.outcome == "out_of_memory"
    assert found.confirmed


def test_subjects_that_cannot_travel_are_refused():
    with pytest.raises(ConfigError, match="another process cannot build it"):
        run_trial(Subject("local", lambda: Line(3, 3), vocab_size=3), "train", 1, 1, None, 1.0)


@pytest.mark.slow
def test_functions_that_the_child_cannot_import_are_refused(monkeypatch):
    def made():
        return nn.Identity()

    made.__module__, made.__qualname__ = "nowhere_to_be_found", "made"
    module = type(sys)("nowhere_to_be_found")
    module.made = made
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", module)
    with pytest.raises(ConfigError, match="must be in a module"):
        run_trial(Subject("lost", made, vocab_size=3), "train", 1, 1, None, 200.0)


def test_words_of_memory_are_known():
    assert speaks_of_memory("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    assert speaks_of_memory("CUDA out of memory. Tried to allocate 2 TiB")
    assert not speaks_of_memory("the sizes of tensors must match")
