"""Foreign models in every harness, by nothing but a function from task to model."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

from hybridtf.bench import (
    Subject,
    measure_extrapolation,
    measure_memory,
    measure_model,
    measure_quality,
    measure_speed,
)
from hybridtf.bench.child import run_trial
from hybridtf.bench.leaks import find_leak
from hybridtf.core import ConfigError, Segments
from hybridtf.cost import make_plan, predict_bytes
from hybridtf.cost.calls import copy_state, has_state
from hybridtf.cost.devices import device_named
from hybridtf.cost.foreign import Foreign, ForeignWithCache, adapted, has_known_state
from hybridtf.cost.phases import PHASES, make_step
from tests.bench.bench_cases import TASK, Table, subject
from tests.bench.foreign_cases import jamba, line, llama, mamba2

MODELS = (llama, mamba2, jamba, line)
CACHED = (llama, mamba2, jamba)


@pytest.fixture(scope="module")
def task():
    return TASK.load(0)


def made(factory, task):
    return Subject.from_task(factory.__name__, factory, task, seed=3)


@pytest.mark.parametrize("factory", MODELS)
def test_every_harness_takes_it(factory, task):
    one = made(factory, task)
    model = one.build()
    phases = PHASES if factory in CACHED else ("train", "prefill")
    for record in measure_speed(one, phases=phases, length=12, repeats=1, warmup=0, floor=False):
        assert record["tokens_per_s"] > 0
    memory = {phase: measure_memory(one, phase=phase, length=12) for phase in phases}
    assert memory["train"]["differs"] == memory["prefill"]["differs"] == {}
    assert all(record["leak"]["bytes"] == 0 for record in memory.values())
    if factory in CACHED:
        assert memory["decode"]["state"] > 0
        assert "known by reading alone" in memory["decode"]["note"]
    quality = measure_quality(one, model, task, seq_len=24, max_tokens=30)
    assert 0 < quality["value"] < 20
    far = measure_extrapolation(one, model, task, trained_length=16, multiples=(1, 2), max_documents=2, chunk=8)
    assert all(0 < bits < 20 for bits in far["bits_per_byte"])
    assert far["state_bytes"] == [None, None]
    assert measure_model(one, model)["params"]["total"] == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("factory", [llama, line])  # scans that step through time are traced step by step: too slow here
def test_it_is_planned(factory, task):
    one = made(factory, task)
    small = dataclasses.replace(device_named("cpu"), memory=1 << 20)  # so that the longest length is soon found
    plan = make_plan(one, lengths=(12,), batch_size=1, device=small)
    assert set(plan["phases"]) == {"train", "prefill"}
    assert plan["phases"]["train"]["12"]["bytes"]["peak"] > 0


@pytest.mark.parametrize("factory", MODELS)
def test_documents_in_a_row_are_read_apart(factory, task):
    model = made(factory, task).build().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, task.vocab_size, (2, 11), generator=generator)
    marks = torch.tensor([[0, 1, 1, 1, 0, 2, 2, 5, 5, 5, 0], [1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        out = model(ids, segments=Segments(marks, torch.zeros(2, dtype=torch.bool)))
        assert out.logits.shape == (2, 11, task.vocab_size)
        for row, document in ((0, 1), (0, 2), (0, 5), (1, 1)):
            places = marks[row] == document
            alone = model.model(ids[row][places][None])
            alone = alone if isinstance(alone, torch.Tensor) else alone.logits
            torch.testing.assert_close(out.logits[row][places], alone[0], rtol=1e-4, atol=1e-5)
    assert (out.logits[marks == 0] == 0).all()


def test_gradients_reach_the_weights_from_documents_in_a_row(task):
    model = made(llama, task).build()
    ids = torch.randint(1, 9, (2, 6))
    marks = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    model(ids, segments=Segments(marks, torch.zeros(2, dtype=torch.bool))).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("factory", CACHED)
def test_its_cache_is_its_state(factory, task):
    model = made(factory, task).build().eval()
    ids = torch.randint(1, task.vocab_size, (2, 14))
    with torch.no_grad():
        whole = model(ids).logits
        state, found = model.init_state(2), []
        for start, stop in ((0, 5), (5, 6), (6, 14)):
            kept = copy_state(state)
            out = model(ids[:, start:stop], state=state)
            again = model(ids[:, start:stop], state=kept)  # a copy is independent of what became of the other
            torch.testing.assert_close(out.logits, again.logits, rtol=0, atol=0)
            found.append(out.logits)
            state = out.state
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-5)


def test_the_bytes_of_a_cache_are_those_of_its_tensors(task):
    found = measure_memory(made(llama, task), phase="prefill", batch_size=2, length=20)
    assert found["state"] == 2 * 2 * (2 * 2 * 20 * 4) * 4  # layers, keys and values, rows, heads, tokens, channels, bytes
    assert found["state_used"] is None  # a foreign cache does not say


@pytest.mark.slow
def test_twenty_steps_of_a_foreign_model_leak_nothing(task):
    one = made(llama, task)
    for phase in PHASES:
        assert find_leak(make_step(phase, one, one.build(), 1, 5), 20).bytes == 0, phase


def test_which_models_stay_as_they_are():
    own = subject("a").build()
    assert adapted(own) is own
    table = Table(torch.ones(3, 3))
    assert adapted(table) is table
    wrapped = adapted(nn.Linear(3, 3))
    assert adapted(wrapped) is wrapped
    assert isinstance(wrapped, Foreign)
    assert not has_state(wrapped)
    assert has_known_state(own)


def test_what_a_foreign_model_cannot_is_refused(task):
    model = made(llama, task).build()
    assert isinstance(model, ForeignWithCache)
    ids = torch.ones(1, 4, dtype=torch.int64)
    new = torch.zeros(1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="one document in each row"):
        model(ids, segments=Segments(torch.tensor([[1, 1, 2, 2]]), ~new), state=model.init_state(1))
    with pytest.raises(ConfigError, match="one document in each row"):
        model(ids, segments=Segments(ids, new), state=model.init_state(1))
    with pytest.raises(ConfigError, match="no prefix"):
        model(ids, segments=Segments(ids, new, prefix_len=ids))
    with pytest.raises(ConfigError, match="padding alone"):
        model(ids, segments=Segments(0 * ids, new))
    with pytest.raises(ConfigError, match="carries no state"):
        made(line, task).build()(ids, state=object())
    with pytest.raises(ConfigError, match="known by reading alone"):
        predict_bytes(made(llama, task), "decode", 1, 4)
    with pytest.raises(ConfigError, match="answered tuple"):
        adapted(Pair())(ids)


class Pair(nn.Module):
    """Answers no scores."""

    def forward(self, ids):
        return ids, ids


@pytest.mark.parametrize(
    ("experts", "words"), [("grouped_mm", "torch runs an operator"), ("eager", "reads a computed value back")]
)
def test_why_a_model_cannot_be_planned_is_told(experts, words, task):
    def other(task):
        model = jamba(task)
        model.set_experts_implementation(experts)
        return model

    with pytest.raises(ConfigError, match=f"cannot be predicted: .*{words}"):
        predict_bytes(Subject.from_task(experts, other, task), "prefill", 1, 8)


def test_the_function_is_called_under_the_seed_and_must_give_a_module(task):
    before = torch.get_rng_state()
    first, same = made(llama, task).build(), made(llama, task).build()
    other = Subject.from_task("llama", llama, task, seed=4).build()
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)
    with pytest.raises(ConfigError, match="none: the function from task to model gave int"):
        Subject.from_task("none", lambda task: 3, task).build()


def test_a_subject_by_a_function_travels(task):
    one = pickle.loads(pickle.dumps(made(llama, task)))
    assert measure_memory(one, length=5)["weights"] == measure_memory(made(llama, task), length=5)["weights"]


@pytest.mark.slow
def test_a_foreign_model_is_tried_in_a_child(task):
    assert run_trial(made(llama, task), "decode", 1, 9, 1 << 30, 300.0)["outcome"] == "fits"
