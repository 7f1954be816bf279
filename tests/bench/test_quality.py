"""Quality: a table whose loss is known, intervals that cover, and models that are not ours."""

import math

import numpy as np
import pytest
import torch

from hybridtf.bench import Subject, measure_quality
from hybridtf.bench.bootstrap import interval
from hybridtf.bench.quality import quality_fields
from hybridtf.tasks import CopyingConfig, InductionHeadsConfig, Totals
from tests.bench.bench_cases import TASK, Table, subject

TEXT = TASK.load(0)


@pytest.mark.parametrize(("seq_len", "stride"), [(512, 512), (512, 256), (97, 13)])
def test_a_table_has_its_exact_value_whatever_the_windows(seq_len, stride):
    weight = torch.randn(257, 257, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = Subject("table", lambda: Table(weight), vocab_size=257)
    found = measure_quality(one, one.build(), TEXT, seq_len=seq_len, stride=stride)
    table = weight.log_softmax(-1)
    documents = list(TEXT.eval_documents())
    nats = sum(-float(table[d.inputs, d.targets].sum()) for d in documents)
    n = sum(len(d.targets) for d in documents)
    assert (found["n_tokens"], found["n_bytes"], found["n_documents"]) == (n, n, len(documents))
    assert found["value"] == pytest.approx(nats / math.log(2) / n, abs=1e-9)
    assert found["metric"] == "bits_per_byte"
    assert found["baselines"] == TEXT.baselines()
    assert found["note"] is None
    assert (found["seq_len"], found["stride"]) == (seq_len, stride)


def test_a_part_of_the_text_is_said():
    one = subject("a")
    found = measure_quality(one, one.build(), TEXT, seq_len=32, max_tokens=500)
    assert found["n_tokens"] <= 500
    assert "baselines are of all" in found["note"]
    low, high = found["interval"]
    assert low < found["value"] < high


# -- intervals ---------------------------------------------------------------------------------------------------------


def mean_of(sums):
    return sums[:, 0] / sums[:, 1]


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        tokens = rng.integers(50, 150, size=30)
        units = np.stack([tokens * rng.normal(2.0, 0.3, size=30), tokens], axis=1)
        low, high = interval(units, mean_of, seed=trial, draws=400)
        covered += low <= 2.0 <= high
    assert 0.88 <= covered / 300 <= 0.98


def test_an_interval_repeats_and_follows_its_seed():
    units = np.stack([np.arange(1.0, 11.0), np.ones(10)], axis=1)
    assert interval(units, mean_of) == interval(units, mean_of)
    assert interval(units, mean_of) != interval(units, mean_of, seed=1)


def test_one_document_has_no_interval():
    assert interval(np.ones((1, 2)), mean_of) is None
    assert interval(np.ones((0, 2)), mean_of) is None


def test_the_interval_is_of_whole_documents():
    sizes = ((10, 1.0), (1000, 3.0))
    documents = [Totals(nats=n * bits * math.log(2), n_tokens=n, n_bytes=n) for n, bits in sizes]
    fields = quality_fields(TEXT, sum(documents, Totals()), documents)
    assert fields["value"] == pytest.approx(3010 / 1010)
    # Draws of one document twice are its own value; two documents have Student's t of one degree of freedom.
    value, factor = 3010 / 1010, math.sqrt(2) * 12.7062 / 1.95996
    assert fields["interval"] == (0.0, pytest.approx(value + factor * (3.0 - value), rel=1e-4))


@pytest.mark.parametrize("n", [2, 5, 10])
def test_few_documents_widen_the_interval(n):
    """Percentiles alone miss the truth with two documents every second time, and with five every sixth."""
    rng = np.random.default_rng(n)
    covered = 0
    for trial in range(400):
        low, high = interval(np.stack([rng.normal(2.0, 0.3, size=n), np.ones(n)], axis=1), mean_of, seed=trial, draws=400)
        covered += low <= 2.0 <= high
    assert covered >= 0.92 * 400


def test_the_interval_of_whole_rows_is_of_rows():
    """Seven of ten rows right, whatever their tokens: the interval is that of ten throws of a coin."""
    task = CopyingConfig.tiny().load()
    rows = [Totals(nats=3.0, n_correct=n if i < 7 else n - 1, n_tokens=n, n_rows=1, n_rows_correct=i < 7)
            for i, n in enumerate(range(5, 15))]
    fields = quality_fields(task, sum(rows, Totals()), rows)
    assert fields["metric"] == "row_accuracy"
    assert fields["value"] == 0.7
    assert fields["interval"] == (pytest.approx(0.3475, abs=1e-4), pytest.approx(0.9333, abs=1e-4))
    all_right = [Totals(n_correct=4, n_tokens=4, n_rows=1, n_rows_correct=1)] * 16
    assert quality_fields(task, sum(all_right, Totals()), all_right)["interval"] == (pytest.approx(0.794, abs=1e-3), 1.0)


def test_a_foreign_model_without_a_state_reads_long_rows_in_one_call():
    """Rows longer than what is read at once; the table has no state to carry."""
    rows = {"length": 2500, "n_rows": 6}
    task = InductionHeadsConfig(vocab_size=6, train=[rows], test=[rows]).load()
    weight = torch.randn(6, 6, dtype=torch.float64)
    one = Subject("table", lambda: Table(weight), vocab_size=6)
    found = measure_quality(one, one.build(), task, seq_len=64)
    batch = next(task.eval_batches(6, 64))
    right = weight[batch.inputs[:, -1]].argmax(-1) == batch.targets[:, -1]
    assert found["value"] == pytest.approx(float(right.double().mean()))
    assert found["n_tokens"] == 6
