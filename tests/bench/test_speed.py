"""Speed: what counts and what does not, with clocks of our own; nothing here depends on how fast the machine is."""

import time

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, machine_floor, measure_speed
from hybridtf.bench.caches import Flush, cpu_cache_bytes
from hybridtf.bench.speed import speed_fields
from hybridtf.bench.threads import allowed_cores, pinned
from hybridtf.bench.timing import Timed, quartiles, seconds_of, time_rounds
from hybridtf.core import ConfigError
from hybridtf.cost import count_flops
from hybridtf.cost.phases import DECODE_TOKENS, Step, make_step
from tests.bench.bench_cases import Line, Table, subject


class FakeStep(Step):
    """Takes the next of ``seconds`` on a clock of its own."""

    def __init__(self, name, seconds, clock):
        self.name, self.seconds, self.clock = name, iter(seconds), clock

    def prepare(self):
        self.clock.now += 1000.0  # preparing is never counted

    def run(self):
        self.clock.log.append(self.name)
        self.clock.now += next(self.seconds)


class FakeClock:
    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now


def test_warm_up_is_left_out_and_rates_are_totals_over_totals():
    clock = FakeClock()
    timed = time_rounds([FakeStep("a", [10, 7, 1, 8, 1, 9, 4], clock)], rounds=3, warmup=1, clock=clock)[0]
    assert timed.cold == [7, 8, 9]
    assert timed.times == [1, 1, 4]
    fields = speed_fields(100, timed, flops=600)
    assert fields["tokens_per_s"] == 50  # the mean of the rates would be 75
    assert fields["times"] == [1, 1, 4]
    assert fields["median_s"] == 1
    assert fields["p20_s"] == 1
    assert fields["p80_s"] == pytest.approx(2.8)
    assert fields["spread_s"] == 1.5  # quartiles 1 and 2.5
    assert fields["drift"] == 3.0
    assert fields["flops_per_s"] == 300
    assert (fields["cold"]["median_s"], fields["cold"]["times"]) == (8, [7, 8, 9])


def test_subjects_take_turns_in_an_order_that_changes():
    clock = FakeClock()
    steps = [FakeStep(name, iter(lambda: 1.0, None), clock) for name in "abc"]
    time_rounds(steps, rounds=40, warmup=0, clock=clock)
    turns = ["".join(clock.log[i : i + 6]) for i in range(0, 240, 6)]
    assert all(sorted(turn) == list("aabbcc") and turn[0] == turn[1] for turn in turns)  # each twice in a row: cold, warm
    assert len(set(turns)) == 6


def test_short_runs_fill_a_round_and_only_its_first_turn_is_cold():
    clock, flushed = FakeClock(), []
    steps = [FakeStep(name, iter(lambda: 0.02, None), clock) for name in "ab"]
    timed = time_rounds(
        steps, rounds=4, warmup=1, clock=clock, round_s=0.05, flush=lambda: flushed.append(len(clock.log))
    )
    assert [len(turns) for turns in timed[0].warm] == [3] * 4
    assert timed[1].runs == 12
    assert len(timed[0].cold) == 4
    assert flushed == [2 + 12 * r + 2 * i for r in range(4) for i in range(2)]
    assert len(clock.log) == 2 + 2 * 2 * 3 * 4


def test_a_clock_that_stands_still_is_refused():
    with pytest.raises(ConfigError, match="did not move"):
        speed_fields(100, Timed([0.0], [[0.0]]))


def test_threads_are_pinned_and_let_go_again():
    threads, cores = torch.get_num_threads(), allowed_cores()
    with pinned(1):
        assert torch.get_num_threads() == 1
        assert cores is None or allowed_cores() == cores[:1]
    assert (torch.get_num_threads(), allowed_cores()) == (threads, cores)
    if cores is not None:
        with pytest.raises(ConfigError, match=f"at most {len(cores)}"), pinned(len(cores) + 1):
            pass


def test_the_flush_is_larger_than_the_last_cache(tmp_path):
    for i, size in enumerate(("32K", "1024K", "33M")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n")
    assert cpu_cache_bytes(tmp_path) == 33 << 20
    assert cpu_cache_bytes(tmp_path / "nothing") is None
    flush = Flush(torch.device("cpu"))
    flush.buffer.fill_(1)
    flush()
    assert not flush.buffer.any()
    assert flush.buffer.numel() >= 2 * (flush.cache_bytes or 0) > 0 or flush.cache_bytes is None


def test_quartiles_of_one_value():
    assert quartiles([3.0]) == (3.0, 3.0)


def test_records_of_all_phases_and_subjects():
    ticks = iter(range(10_000))
    records = measure_speed(
        subject("a", "one"), against=[subject("m", "two")], batch_size=2, length=9, repeats=3, warmup=1,
        clock=lambda: float(next(ticks)), floor=False,
    )
    assert [(r["phase"], r["recipe"]) for r in records] == [
        (phase, name) for phase in ("train", "prefill", "decode") for name in ("one", "two")
    ]
    for r in records:
        tokens = 2 * (DECODE_TOKENS if r["phase"] == "decode" else 9)
        assert (r["tokens"], r["tokens_per_s"], r["times"]) == (tokens, tokens, [1.0] * 3)
        assert r["flops"] > 0
        assert r["ratio"].items() >= {"against": "one", "time": 1.0, "interval": None, "verdict": "~"}.items()
        assert (r["noise"]["of"], r["noise"]["ratio"], r["noise"]["rounds"]) == ("one", 1.0, 3)
        assert r["cold"]["times"] == [1.0] * 3
        assert r["cache"]["flush_bytes"] > 0
        assert r["kernels"]["attention" if r["recipe"] == "one" else "ssd"][r["phase"]] != "none"
        assert (r["batch_size"], r["length"], r["threads"], r["dtype"], r["floor"]) == (2, 9, 1, "float32", None)


def test_foreign_models_without_state_train_and_prefill():
    table = Subject("table", lambda: Table(torch.zeros(5, 5)), vocab_size=5)
    ticks = iter(range(1000))
    records = measure_speed(
        table, phases=("train", "prefill"), length=4, clock=lambda: float(next(ticks)), floor=False
    )
    assert [r["recipe_hash"] for r in records] == [None, None]
    with pytest.raises(ConfigError, match=r"decode needs a model with init_state.*Table has none"):
        measure_speed(table, phases=("decode",), length=4, floor=False)


def test_wrong_work_is_refused():
    one = subject("a")
    with pytest.raises(ConfigError, match="Did you mean 'decode'"):
        measure_speed(one, phases=("decod",), floor=False)
    with pytest.raises(ConfigError, match="batch_size and length must be at least 1"):
        measure_speed(one, phases=("train",), length=0, floor=False)
    with pytest.raises(ConfigError, match="two subjects are called 'tiny'"):
        measure_speed(one, against=[one], floor=False)
    with pytest.raises(ConfigError, match="repeats must be at least 1"):
        measure_speed(one, phases=("train",), length=2, repeats=0, floor=False)


def test_decode_runs_are_equal_and_start_after_the_prompt():
    one = subject("a w m")
    step = make_step("decode", one, one.build(), 2, 11)
    for _ in range(3):
        step.prepare()
        lengths = {int(leaf.length.min()) for leaf in _leaves(step.state)}
        assert lengths == {11}
        step.run()
        assert {int(leaf.length.min()) for leaf in _leaves(step.state)} == {11 + DECODE_TOKENS}


def _leaves(state):
    from hybridtf.core import leaves

    return leaves(state)


def test_the_floor_is_measured_once_a_process():
    first = machine_floor(size=64, copy_bytes=1 << 12)
    assert first["matrix_flops_per_s"] > 0
    assert first["copy_bytes_per_s"] > 0
    assert machine_floor(size=64, copy_bytes=1 << 12) == first


# -- operations --------------------------------------------------------------------------------------------------------


def test_flops_of_a_linear_layer_are_known():
    layer = nn.Linear(7, 5, bias=False)
    x = torch.randn(3, 7, requires_grad=True)
    forward = 2 * 3 * 7 * 5
    assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * forward


def test_flops_of_cpu_attention_are_counted_with_grouped_heads():
    q, k, v = (torch.randn(2, h, 33, 8, requires_grad=True) for h in (4, 2, 2))

    def attend():
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    forward = 2 * (2 * 2 * 4 * 33 * 33 * 8)  # two products of 33 x 8 x 33, for 2 rows and 4 heads
    assert count_flops(attend) == forward
    assert count_flops(lambda: attend().sum().backward()) == forward + 5 * forward // 2


def test_flops_of_a_training_step_follow_from_its_matrices():
    one = Subject("line", lambda: Line(11, 6), vocab_size=11)
    step = make_step("train", one, one.build(), 2, 5)
    product = 2 * 10 * 11 * 6
    # The first matrix reads integers' codes, which need no gradient: two products there, three in the second.
    assert count_flops(step.run) == 5 * product


# -- the path of a GPU -------------------------------------------------------------------------------------------------


def test_device_events_time_a_gpu_and_other_clocks_wait_for_it(monkeypatch):
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def elapsed_time(self, end):
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    clock = FakeClock()
    step = FakeStep("run", [3, 5], clock)
    clock.log = calls
    assert seconds_of(step, time.perf_counter, torch.device("cuda")) == 0.25
    assert calls == ["wait", "record", "run", "record", "wait"]
    calls.clear()
    assert seconds_of(step, clock, torch.device("cuda")) == 5
    assert calls == ["wait", "run", "wait"]


def test_a_subject_without_room_does_not_stop_the_others():
    class Full(Table):
        def forward(self, ids, segments=None):
            raise torch.OutOfMemoryError("the device is full")

    full = Subject("full", lambda: Full(torch.zeros(5, 5)), vocab_size=5)
    fits = Subject("fits", lambda: Table(torch.zeros(5, 5)), vocab_size=5)
    ticks = iter(range(1000))
    found = measure_speed(
        full, against=[fits], phases=("prefill",), length=4, repeats=2, clock=lambda: float(next(ticks)), floor=False
    )
    assert [r["note"] for r in found] == ["out of memory", None]
    assert [r["tokens_per_s"] for r in found] == [None, 4.0]
    assert [r["ratio"] for r in found] == [None, None]
    assert found[0]["noise"]["of"] == "fits"


def test_models_that_cannot_be_measured_say_why():
    class Odd(Table):
        def forward(self, ids, segments=None):
            return {"scores": ids}

    with pytest.raises(ConfigError, match="answers scores as a tensor"):
        measure_speed(Subject("odd", lambda: Odd(torch.zeros(5, 5)), vocab_size=5), phases=("train",), floor=False)
    with pytest.raises(ConfigError, match="give vocab_size="):
        Subject.from_model(nn.Linear(2, 2), "bare")
