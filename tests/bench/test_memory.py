"""Memory: counts against hand arithmetic, predictions against counts, and independence of what ran before."""

import dataclasses
import gc
import itertools

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, count_bytes, measure_memory
from hybridtf.bench.leaks import find_leak
from hybridtf.bench.memory import on_gpu
from hybridtf.bench.peak import AllocatorPeak
from hybridtf.core import ConfigError, DataError, param_specs
from hybridtf.cost import Predictor, predict_bytes
from hybridtf.cost.live_bytes import LiveBytes, WithoutMemory, storage_bytes
from hybridtf.cost.longest import longest_length
from hybridtf.cost.phases import PHASES, make_step
from tests.bench.bench_cases import TRAIN, Line, Table, recipe, subject


def test_live_bytes_follow_tensors():
    with LiveBytes() as live:
        a = torch.zeros(100)
        assert live.now == 400
        view = a[:10]
        b = a + 1
        assert live.now == 800
        del a
        assert live.now == 800  # the view holds it
        del view
        assert live.now == 400
        del b
    assert (live.now, live.peak) == (0, 800)


def test_live_bytes_see_what_autograd_holds():
    w = torch.randn(50, 50, requires_grad=True)
    with LiveBytes() as live:
        live.watch([w])
        y = (w @ w).tanh()
        loss = y.square().sum()
        del y
        # tanh keeps its output, square its input, which is the same tensor.
        assert live.now == 20_000 + 4
        loss.backward()
        del loss
        assert live.now == 20_000  # w and its gradient
    assert w.grad is not None


def test_shared_memory_counts_once():
    a = torch.zeros(10)
    assert storage_bytes([a, a[2:], a.view(2, 5)]) == 40


def test_a_model_that_is_counted_by_hand():
    v, d, b, t = 11, 6, 2, 5
    found = count_bytes(Subject("line", lambda: Line(v, d), vocab_size=v), "train", b, t)
    weights = 2 * v * d * 4
    assert (found.weights, found.gradients, found.state, found.reserved) == (weights, weights, 0, None)
    # Two moments of each weight, and a step count of four bytes for each of the two parameters.
    assert found.optimizer == 2 * weights + 2 * 4
    # What the backward pass needs: the codes, the hidden layer, log-probabilities and their total weight; beside them
    # the loss itself.
    assert found.activations == 4 * (b * t * v + b * t * d + b * t * v + 1 + 1)
    assert found.peak >= found.weights + found.optimizer + found.activations


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("pattern", ["a w", "m a"])
def test_predictions_equal_counts_byte_for_byte(phase, pattern):
    one = subject(pattern)
    predictor = Predictor(one, phase)
    for length in (1, 37):
        assert predictor.at(length, 2) == count_bytes(one, phase, 2, length)


def test_the_optimizer_of_the_recipe_is_counted():
    def measured(optimizer):
        made = recipe("m a", train={**TRAIN, "optimizer": optimizer})
        one = Subject.from_recipe(made, "tiny")
        found = count_bytes(one, "train", 2, 9)
        assert predict_bytes(one, "train", 2, 9) == found
        return one.build(), found.optimizer

    model, with_muon = measured("muon")
    specs = param_specs(model)
    matrices = [p for name, p in model.named_parameters() if specs[name].role == "matrix"]
    rest = [p for name, p in model.named_parameters() if specs[name].role != "matrix"]
    moments = 4 * sum(p.numel() for p in matrices) + sum(8 * p.numel() + 4 for p in rest)
    assert with_muon == moments
    assert with_muon < measured("adamw")[1]


def test_a_prediction_needs_no_memory():
    width = 1 << 18  # each matrix would take 256 GiB
    one = Subject("huge", lambda: Line(width, width), vocab_size=width)
    predicted = predict_bytes(one, "train", 1, 2)
    assert predicted.weights == predicted.gradients == 2 * width * width * 4
    assert predicted.peak > predicted.weights + predicted.gradients + predicted.optimizer


def test_models_that_stand_already_are_predicted_too():
    model = subject("w m").build()
    one = Subject.from_model(model, "stands")
    for phase in ("train", "decode"):
        assert predict_bytes(one, phase, 1, 19) == count_bytes(one, phase, 1, 19)
    with WithoutMemory().enter() as live:  # the model itself keeps its memory, and none of it was counted
        assert live.now == 0
        assert all(p.untyped_storage().data_ptr() for p in model.parameters())


def test_order_does_not_matter():
    large, small = subject("a m"), subject("a")
    for phase in ("train", "decode"):
        first = [count_bytes(s, phase, 2, n) for s, n in ((large, 40), (small, 10), (large, 40))]
        second = [count_bytes(s, phase, 2, n) for s, n in ((small, 10), (large, 40), (small, 10))]
        assert first[0] == first[2] == second[1]
        assert second[0] == second[2] == first[1]


def test_nothing_stays_behind():
    one = subject("m a")
    count_bytes(one, "train", 2, 16)
    gc.collect()
    before = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    count_bytes(one, "train", 2, 16)
    gc.collect()
    assert sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) == before


def test_the_record_says_how_and_how_far():
    one = subject("a")
    found = measure_memory(one, phase="decode", batch_size=2, length=33, limit_bytes=1 << 20)
    assert found["kind"] == "memory"
    assert found["state"] > 0
    assert found["activations"] == found["peak"] - found["weights"] - found["state"]
    assert {"weights", "gradients", "optimizer", "activations", "state", "peak", "rest"} <= set(found["how"])
    longest = found["longest"]
    assert (longest["limit_bytes"], longest["phase"], longest["at_least"]) == (1 << 20, "decode", False)
    assert longest["predicted"]
    predictor = Predictor(one, "decode")
    assert predictor.at(longest["length"], 2).peak <= 1 << 20 < predictor.at(int(longest["length"] * 1.01) + 1, 2).peak


def test_a_model_that_reads_values_back_is_measured_but_not_predicted():
    class Reads(Table):
        def forward(self, ids, segments=None):
            return super().forward(ids) * float(self.weight.sum())

    one = Subject("reads", lambda: Reads(torch.ones(5, 5)), vocab_size=5)
    assert count_bytes(one, "prefill", 1, 4).peak > 0
    with pytest.raises(ConfigError, match="memory cannot be predicted"):
        predict_bytes(one, "prefill", 1, 4)


def test_shapes_keep_integers_and_forget_floats():
    with WithoutMemory().enter():
        lengths = torch.zeros(3, dtype=torch.int64) + 4
        assert int(lengths.max()) == 4
        assert torch.randint(7, (2,)).max() < 7
        layer = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
        y = layer(torch.zeros(1, 1 << 20))
        assert y.shape == (1, 1 << 20)
        assert y.device.type == "cpu"


# -- the longest length ------------------------------------------------------------------------------------------------


class Probe:
    """A memory curve that counts how often it was asked."""

    def __init__(self, curve, fails_at=None):
        self.curve, self.fails_at, self.asked = curve, fails_at, []

    def __call__(self, n):
        self.asked.append(n)
        return None if self.fails_at is not None and n >= self.fails_at else self.curve(n)


@pytest.mark.parametrize("curve", [lambda n: 1000 + 7 * n, lambda n: 50 + n * n, lambda n: 5000 + 64 * (n // 64)])
@pytest.mark.parametrize("best", [1, 2, 63, 64, 65, 1000, 77_777])
def test_the_longest_length_is_found(curve, best):
    limit = curve(best)
    exact = best
    while curve(exact + 1) <= limit:
        exact += 1
    assert longest_length(Probe(curve), limit, resolution=0.0) == exact
    probe = Probe(curve)
    found = longest_length(probe, limit)
    assert curve(found) <= limit < curve(max(int(found * 1.01), found + 1))
    assert len(probe.asked) < 40


def test_a_straight_line_takes_few_probes():
    probe = Probe(lambda n: 123_456 + 777 * n)
    assert longest_length(probe, 1 << 28) == pytest.approx(345_000, rel=0.02)
    assert len(probe.asked) <= 10


def test_out_of_memory_is_an_answer():
    probe = Probe(lambda n: 0, fails_at=1234)
    assert longest_length(probe, 1 << 40, resolution=0.0) == 1233
    assert longest_length(Probe(lambda n: 0, fails_at=1), 1 << 40) == 0
    assert longest_length(lambda n: 2 * n, 1) == 0


def test_the_search_ends_at_the_longest_allowed():
    assert longest_length(lambda n: n, 1 << 60, max_length=1000) == 1000
    assert longest_length(lambda n: n, 1 << 60, max_length=1) == 1
    with pytest.raises(ConfigError, match="at least 1"):
        longest_length(lambda n: n, 0)


@pytest.mark.gpu
def test_the_allocator_on_a_gpu_does_not_depend_on_order():
    big = Subject("big", lambda: Line(64, 4096).cuda(), vocab_size=64)
    little = Subject("little", lambda: Line(64, 64).cuda(), vocab_size=64)
    first = [measure_memory(s, length=512)["peak"] for s in (big, little, big)]
    second = [measure_memory(s, length=512)["peak"] for s in (little, big, little)]
    assert first[0] == pytest.approx(second[1], rel=0.05)
    assert first[1] == pytest.approx(second[0], rel=0.05)
    assert first[0] == pytest.approx(first[2], rel=0.05)


# -- the path of a GPU, with an allocator that is a count --------------------------------------------------------------


@pytest.fixture
def allocator(monkeypatch):
    """``torch.cuda``'s statistics, answered by a count of live tensors."""
    retries = itertools.count(5, 2)  # two more each time they are asked for
    with LiveBytes() as live:
        answers = {
            "memory_allocated": lambda *device: live.now, "max_memory_allocated": lambda *device: live.peak,
            "max_memory_reserved": lambda *device: live.peak + 1, "reset_peak_memory_stats": lambda *d: live.reset_peak(),
            "empty_cache": lambda: None, "synchronize": lambda *device: None,
            "memory_reserved": lambda *device: live.now + 1, "mem_get_info": lambda *device: (1000, 10_000_000),
            "memory_stats": lambda *device: {"num_alloc_retries": next(retries), "num_ooms": 0},
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        yield live


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_both_ways_of_measuring_agree(allocator, phase):
    one = subject("w m")
    other = torch.zeros(1000)  # what was there before is none of the model's
    counted = count_bytes(one, phase, 2, 21)
    found = on_gpu(one, phase, 2, 21)
    assert other.numel() == 1000
    assert found.footprint.reserved == allocator.peak + 1
    assert dataclasses.replace(found.footprint, reserved=None) == counted
    assert found.rest["unused"] == 1
    assert found.rest["alloc_retries"] == 2  # since the phase was set up, not since the process began
    assert found.rest["driver"] == 10_000_000 - 1000
    assert found.rest["driver"] - found.rest["beyond_allocator"] > counted.weights  # what was reserved then


def test_refusal_4_a_peak_that_was_not_reset(allocator):
    peak = AllocatorPeak()
    with pytest.raises(DataError, match="was not reset"):
        peak.allocated()
    with pytest.raises(DataError, match="was not reset"):
        peak.rest()
    large = torch.zeros(10_000)
    del large
    peak.reset()
    kept = torch.zeros(100)
    assert peak.allocated() == kept.nbytes == 400  # not the 40,000 of before
    with pytest.raises(DataError, match="was not reset"):  # nor is it told for the next phase
        peak.allocated()


def test_a_cpu_that_resets_no_peak_gives_no_rest(monkeypatch):
    def trial(*args):
        return {"outcome": "fits", "error": None, "resident": {"before": 1, "peak": None}, "seconds": 1.0}

    monkeypatch.setattr("hybridtf.bench.memory.run_trial", trial)
    found = measure_memory(subject("a"), length=9, rest=True)
    assert found["rest"] is None
    assert "not reset is refused" in found["how"]["rest"]


def test_refusal_10_no_search_by_trial_inside_one_process(allocator, monkeypatch):
    measured = []

    def once(*args):
        measured.append(args)
        return real(*args)

    real = on_gpu
    monkeypatch.setattr("hybridtf.bench.memory.on_gpu", once)
    monkeypatch.setattr("hybridtf.bench.memory.device_of", lambda model: torch.device("cuda"))
    found = measure_memory(subject("a"), phase="prefill", length=8, limit_bytes=100_000, max_length=64)
    assert len(measured) == 1  # the length that was asked for; the longest is predicted
    assert found["longest"]["predicted"]
    assert found["reserved"] != found["peak"]


def test_out_of_memory_is_an_outcome_without_numbers(allocator, monkeypatch):
    one = subject("a")

    def full(self):
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(torch.Tensor, "backward", full)
    monkeypatch.setattr("hybridtf.bench.memory.device_of", lambda model: torch.device("cuda"))
    record = measure_memory(one, length=8)
    assert record["result"] == "out_of_memory"
    assert record["peak"] is record["weights"] is record["rest"] is record["leak"] is None
    assert "does not fit the device" in record["note"]


# -- computed and checked, logical and held, the rest ------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_computed_is_what_lives(phase):
    found = measure_memory(subject("m a w"), phase=phase, batch_size=2, length=19)
    assert found["differs"] == {}
    assert found["computed"] == {kind: found[kind] for kind in ("weights", "gradients", "optimizer", "state")}
    assert (found["result"], found["note"], found["leak"]["bytes"]) == ("ok", None, 0)


def test_what_differs_from_the_plan_is_said(monkeypatch):
    real = predict_bytes

    def wrong(*args):
        return dataclasses.replace(real(*args), optimizer=7)

    monkeypatch.setattr("hybridtf.bench.memory.predict_bytes", wrong)
    found = measure_memory(subject("a"), length=9)
    assert found["differs"] == {"optimizer": [7, found["optimizer"]]}
    assert "optimizer: 7 bytes computed" in found["note"]


def test_a_model_that_cannot_be_planned_says_so():
    class Reads(Table):
        def forward(self, ids, segments=None):
            return super().forward(ids) * float(self.weight.sum())

    found = measure_memory(Subject("reads", lambda: Reads(torch.ones(5, 5)), vocab_size=5), phase="prefill", length=4)
    assert found["computed"] is found["differs"] is None
    assert "nothing computed to check against" in found["note"]
    assert found["weights"] == 100


def test_held_and_used_bytes_of_a_state_are_told_apart():
    found = measure_memory(subject("a"), phase="decode", length=500)
    full = measure_memory(subject("a"), phase="prefill", length=500)
    for one in (found, full):
        assert one["state_used"] <= one["state"]
        assert one["state_ratio"] == one["state"] / one["state_used"]
        assert 1 <= one["state_ratio"] < 1.05
    kept = 2 * 2 * 4 * 4  # keys and values of two heads of four channels, four bytes each
    assert full["state_used"] == 500 * kept
    assert found["state_used"] == 516 * kept


@pytest.mark.slow
def test_the_rest_of_a_cpu_is_what_a_fresh_process_holds_beyond():
    found = measure_memory(subject("a"), length=512, batch_size=4, rest=True)
    rest = found["rest"]
    assert rest["beyond_counted"] == rest["resident"] - found["peak"]
    assert rest["resident"] > found["weights"] + found["activations"]
    assert -(1 << 20) < rest["beyond_counted"] < 200 << 20


# -- leaks -------------------------------------------------------------------------------------------------------------


class Leaky(Line):
    """Keeps 1 MiB of every ``every``-th call."""

    def __init__(self, every=1):
        super().__init__(5, 3)
        self.every, self.calls, self.kept = every, 0, []

    def forward(self, ids):
        self.calls += 1
        if self.calls % self.every == 0:
            self.kept.append(torch.ones(1 << 18))
        return super().forward(ids)


@pytest.mark.parametrize("phase", ["train", "prefill"])
def test_an_injected_leak_of_one_mebibyte_is_found(phase):
    one = Subject("leaky", Leaky, vocab_size=5)
    leak = find_leak(make_step(phase, one, one.build(), 1, 7), 20)
    assert leak.per_repeat == 1 << 20
    assert leak.bytes == 19 << 20
    found = measure_memory(one, phase=phase, length=7)
    assert found["leak"] == {"repeats": 3, "bytes": 2 << 20, "per_repeat": 1 << 20}
    assert f"leaks: {2 << 20} bytes" in found["note"]


def test_a_leak_now_and_then_is_found_too():
    one = Subject("leaky", lambda: Leaky(7), vocab_size=5)
    leak = find_leak(make_step("prefill", one, one.build(), 1, 7), 20)
    assert (leak.bytes, leak.per_repeat) == (3 << 20, 0)


@pytest.mark.parametrize("phase", PHASES)
def test_no_false_alarm_over_twenty_steps(phase):
    one = subject("m a w")
    leak = find_leak(make_step(phase, one, one.build(), 2, 13), 20)
    assert leak.bytes == leak.per_repeat == 0
    assert len(leak.live) == 20


def test_a_leak_needs_two_counts():
    with pytest.raises(ConfigError, match="at least 2"):
        find_leak(make_step("prefill", subject("a"), subject("a").build(), 1, 3), 1)
