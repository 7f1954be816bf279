"""Extrapolation: equal to a brute-force loss of the whole document, in flat memory, over the same documents."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hybridtf.bench import Subject, measure_extrapolation
from hybridtf.bench.extrapolation import choose_documents
from hybridtf.bench.loss_by_position import by_multiple, by_position
from hybridtf.bench.scoring import score_carried
from hybridtf.core import ConfigError, DataError
from hybridtf.cost import state_size
from hybridtf.cost.live_bytes import LiveBytes
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from tests.bench.bench_cases import TASK, Table, subject

TEXT = TASK.load(0)
LONG = list(TEXT.eval_documents(min_tokens=384, max_documents=3))


def brute_force(model, document, length):
    """(t) float64 nats of the first ``length`` tokens, in one call without state."""
    with torch.no_grad():
        logits = model(document.inputs[None, :length]).logits[0].double()
    return F.cross_entropy(logits, document.targets[:length], reduction="none").numpy()


@pytest.mark.parametrize("pattern", ["a w", "m a"])
@pytest.mark.parametrize("chunk", [24, 37, 384])
def test_carried_equals_the_whole_document_in_one_call(pattern, chunk):
    model = subject(pattern).build().double()
    scored = score_carried(model, LONG, length=384, chunk=chunk, batch_size=2)
    assert scored.stopped is None
    assert scored.nats.shape == (3, 384)
    for row, document in zip(scored.nats, LONG, strict=True):
        np.testing.assert_allclose(row, brute_force(model, document, 384), rtol=0, atol=1e-10)


def test_a_model_that_cannot_be_cut_reads_a_document_in_one_call():
    scaling = {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 24, "mode": "running"}
    mixer = {"type": "attention", "n_heads": 2, "position": {"type": "rope", "scaling": scaling}}
    config = LanguageModelConfig(vocab_size=TEXT.vocab_size, d_model=8, pattern="a", blocks={"a": {"mixer": mixer}})
    model = config.build().double()
    scored = score_carried(model, LONG, length=384, chunk=24, batch_size=2)
    for row, document in zip(scored.nats, LONG, strict=True):
        np.testing.assert_allclose(row, brute_force(model, document, 384), rtol=0, atol=1e-10)


def test_the_record_equals_sums_by_hand():
    one = subject("m a")
    model = one.build().double()
    found = measure_extrapolation(one, model, TEXT, trained_length=24, batch_size=2, max_documents=3)
    documents = list(TEXT.eval_documents(min_tokens=384, max_documents=3))
    nats = np.stack([brute_force(model, d, 384) for d in documents])
    assert found["multiples"] == [1, 2, 4, 8, 16]
    assert found["n_documents"] == 3
    ranges = [(0, 24), (24, 48), (48, 96), (96, 192), (192, 384)]
    for i, (start, stop) in enumerate(ranges):
        assert found["bits_per_byte"][i] == pytest.approx(nats[:, start:stop].mean() / math.log(2), abs=1e-9)
        assert found["cumulative"][i] == pytest.approx(nats[:, :stop].mean() / math.log(2), abs=1e-9)
        low, high = found["interval"][i]
        assert low <= found["bits_per_byte"][i] <= high
        assert found["state_bytes"][i] == state_size(model, stop)["used"]
    assert found["change"][0] is None
    for (start, stop), change in zip(ranges[1:], found["change"][1:], strict=True):
        paired = (nats[:, start:stop].mean(1) - nats[:, :24].mean(1)) / math.log(2)
        low, high = change["interval"]
        assert change["value"] == pytest.approx(paired.mean(), abs=1e-9)
        assert low <= change["value"] <= high
    assert [b[0] for b in found["by_position"]] == list(range(0, 384, 3))
    assert found["by_position"][5][1:] == [pytest.approx(nats[:, 15:18].mean(), abs=1e-9), 9]
    assert found["note"] is None


def test_multiples_that_no_document_reaches_are_null_and_said():
    one = subject("a")
    longest = sorted(len(d.targets) for d in TEXT.eval_documents())
    trained = longest[-2] // 2  # two documents reach twice as far, none four times
    found = measure_extrapolation(one, one.build(), TEXT, trained_length=trained, multiples=(1, 2, 1000))
    assert found["bits_per_byte"][0] is not None
    assert found["bits_per_byte"][1] is not None
    assert found["bits_per_byte"][2] is found["interval"][2] is found["cumulative"][2] is None
    assert found["n_documents"] == 2  # the same at every multiple
    assert f"fewer than 2 documents have more than {2 * trained} tokens" in found["note"]
    with pytest.raises(DataError, match="fewer than 2 held-out documents"):
        measure_extrapolation(one, one.build(), TEXT, trained_length=longest[-1] + 1)


@pytest.mark.parametrize("more", [{}, {"stride": 24}])
def test_too_few_documents_can_be_a_record_of_the_same_fields(more):
    one = subject("a w")
    model, options = one.build(), {"max_documents": 1, **more}
    with pytest.raises(DataError, match="fewer than 2 held-out documents of the 1 that are read at most have 24 tokens"):
        measure_extrapolation(one, model, TEXT, trained_length=24, **options)
    none = measure_extrapolation(one, model, TEXT, trained_length=24, too_few="record", **options)
    some = measure_extrapolation(one, model, TEXT, trained_length=24, multiples=(1, 2), **{**options, "max_documents": 3})
    assert set(none) == set(some)
    assert [set(e) for e in none["by_length"]] == [set(some["by_length"][0])] * 5
    assert {e["result"] for e in none["by_length"]} == {"not_run"}
    assert none["n_documents"] == 0
    assert "fewer than 2 held-out documents" in none["note"]
    if not more:
        assert none["bits_per_byte"] == [None] * 5
        assert none["state_bytes"][:2] == some["state_bytes"]
        assert set(none["beyond"]) == set(some["beyond"])


def test_every_multiple_uses_the_same_documents():
    documents, reached, notes = choose_documents(TEXT, (24, 48, 384), 2, None)
    assert (reached, notes) == (384, [])
    assert {d.name for d in documents} == {d.name for d in TEXT.eval_documents(min_tokens=24 * 16)}


def test_memory_does_not_grow_with_length():
    model = subject("m w").build()
    peaks = []
    for length in (96, 384):
        with LiveBytes() as live:
            score_carried(model, LONG, length=length, chunk=24, batch_size=3)
        nats = 3 * length * 8  # the result itself, and what stacks ids and targets
        peaks.append(live.peak - 6 * nats)
    assert peaks[1] <= peaks[0]


def test_a_length_that_the_model_cannot_place_is_null_with_the_reason():
    model = LanguageModelConfig(
        vocab_size=257, d_model=16, pattern="a", max_seq_len=100,
        blocks={"a": {"mixer": {"type": "attention", "n_heads": 2}}},
        stem={"type": "token_embedding", "position": {"type": "learned"}},
    )
    one = Subject.from_recipe(Recipe(model=model), "learned")
    found = measure_extrapolation(one, one.build(), TEXT, trained_length=50, multiples=(1, 2, 4), chunk=50)
    assert [b is None for b in found["bits_per_byte"]] == [False, False, True]
    assert "no further than 100 tokens" in found["note"]
    assert max(b[0] for b in found["by_position"]) < 100


def test_a_model_without_state_reads_each_document_in_one_call():
    weight = torch.randn(257, 257, dtype=torch.float64)
    one = Subject("table", lambda: Table(weight), vocab_size=257)
    model = one.build()
    found = measure_extrapolation(one, model, TEXT, trained_length=24, max_documents=3)
    documents = list(TEXT.eval_documents(min_tokens=384, max_documents=3))
    table = weight.log_softmax(-1)
    expected = [-float(table[d.inputs[:24], d.targets[:24]].sum()) for d in documents]
    assert found["bits_per_byte"][0] == pytest.approx(sum(expected) / 72 / math.log(2), abs=1e-9)
    assert found["state_bytes"] == [None] * 5
    assert "carries no state" in found["note"]


def test_bytes_of_a_token_scale_the_bits():
    nats = np.full((2, 4), math.log(2) * 3)
    out = by_multiple(nats, [2, 4, 8], 1.5, 2)
    assert out["bits_per_byte"] == [pytest.approx(2), pytest.approx(2), None]
    assert by_position(nats, 8) == [[i, pytest.approx(3 * math.log(2)), 2] for i in range(4)]


def test_wrong_multiples_are_refused():
    one = subject("a")
    for multiples in ((), (2, 1), (0, 1), (1, 1)):
        with pytest.raises(ConfigError, match="multiples must rise"):
            measure_extrapolation(one, one.build(), TEXT, trained_length=24, multiples=multiples)
