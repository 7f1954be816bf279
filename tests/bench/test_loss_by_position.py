"""Loss along documents: buckets, slope, in-context score and windows, against sums by hand; what ends a reading is said."""

import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridtf.bench import Subject, measure_extrapolation
from hybridtf.bench.loss_by_position import beyond, by_bucket, collapse, in_context_score
from hybridtf.core import ConfigError
from hybridtf.tasks import EvalDocument
from tests.bench.bench_cases import TASK, Table, subject

TEXT = TASK.load(0)
LN2 = math.log(2)


def test_buckets_end_at_powers_of_two():
    nats = np.arange(80, dtype=np.float64)[None].repeat(3, 0)
    nats[:, 70:] = np.nan
    assert by_bucket(nats) == [[0, 16, 7.5, 48], [16, 32, 23.5, 48], [32, 64, 47.5, 96], [64, 80, 66.5, 18]]


def test_slope_is_bits_for_each_doubling_beyond_the_trained_length():
    """A loss that is flat within 64 and rises by 0.25 bits with every doubling of the bucket beyond."""
    nats = np.empty((5, 1024))
    for i, (start, stop) in enumerate([(0, 64), (64, 128), (128, 256), (256, 512), (512, 1024)]):
        nats[:, start:stop] = (2 + 0.25 * i) * LN2
    nats += np.arange(5)[:, None] * LN2  # documents differ in level, not in slope
    found = beyond(nats, 64, 1.0)
    assert found["slope"] == pytest.approx(0.25)
    assert found["interval"] == (pytest.approx(0.25), pytest.approx(0.25))
    assert (found["n_buckets"], found["rise"]) == (4, pytest.approx(1.0))
    assert beyond(nats, 64, 2.0)["slope"] == pytest.approx(0.125)  # of two bytes a token
    flat = beyond(np.ones((5, 1024)), 64, 1.0)
    assert (flat["slope"], flat["rise"]) == (pytest.approx(0), pytest.approx(0))


def test_a_slope_needs_two_buckets_that_all_documents_filled():
    nats = np.ones((2, 256))
    nats[1, 200:] = np.nan
    assert beyond(nats, 64, 1.0)["n_buckets"] == 1
    assert beyond(nats, 64, 1.0)["slope"] is None
    assert beyond(nats, 256, 1.0) == {"slope": None, "interval": None, "n_buckets": 0, "rise": None}


def test_in_context_score_is_loss_at_500_less_loss_at_50():
    nats = np.zeros((3, 600))
    nats[:, 49], nats[:, 499] = 3.0, np.array([2.0, 2.5, 2.7])
    found = in_context_score(nats)
    assert found["value"] == pytest.approx(-0.6)
    assert found["interval"][0] < -0.6 < found["interval"][1]
    assert in_context_score(nats[:, :499]) is None


def test_collapse_is_named_at_its_first_length():
    ends, level = [64, 128, 256, 512], [2.0, 2.9, 3.1, 9.0]
    found = collapse(level, ends, 2.0, 8.0, 64)
    assert (found["length"], found["ratio"]) == (256, 4)
    assert found["why"] == "3.100 bits/byte, more than 1 above the 2.000 within the trained length"
    found = collapse([2.0, 2.9, None, 9.0], ends, 2.0, 8.0, 64)
    assert (found["length"], found["why"]) == (512, "9.000 bits/byte, no better than the 8.000 of the uniform model")
    assert collapse([9.0, 2.5, None, None], ends, 2.0, 8.0, 64) is None


# -- records -----------------------------------------------------------------------------------------------------------


def brute(model, document, start, stop, score):
    """Nats of the tokens ``score:stop`` from the context ``start:stop`` alone."""
    with torch.no_grad():
        logits = model(document.inputs[None, start:stop]).logits[0].double()
    return float(F.cross_entropy(logits, document.targets[start:stop], reduction="none")[score - start :].sum())


class Short:
    """The first tokens of two documents, as documents of their own."""

    name = "short"

    def eval_documents(self, *, min_tokens: int = 1, max_documents: int | None = None):
        for d, n in zip(TEXT.eval_documents(min_tokens=300), (300, 271), strict=False):
            yield EvalDocument(d.name, d.inputs[:n], d.targets[:n], n)


def test_sliding_windows_score_whole_documents_with_enough_context():
    one = subject("m a")
    model = one.build().double()
    options = {"trained_length": 64, "multiples": (1, 4), "max_documents": 2, "chunk": 50}
    task = Short()
    found = measure_extrapolation(one, model, task, stride=24, **options)
    documents = list(task.eval_documents(min_tokens=256))
    assert (found["protocol"], found["stride"], found["n_documents"]) == ("windows", 24, 2)
    assert "bits_per_byte" not in found  # windows are no line along positions
    for entry, window in zip(found["by_length"], (64, 256), strict=True):
        nats = 0.0
        for document in documents:
            n = len(document.targets)
            nats += brute(model, document, 0, window, 0)
            for score in range(window, n, 24):  # every token once, behind window - 24 others at least
                stop = min(score + 24, n)
                nats += brute(model, document, stop - window, stop, score)
        n_bytes = sum(d.n_bytes for d in documents)
        assert entry["bits_per_byte"] == pytest.approx(nats / LN2 / n_bytes, abs=1e-9)
        assert entry["n_tokens"] == sum(len(d.targets) for d in documents)
        assert (entry["length"], entry["ratio"], entry["result"]) == (window, window / 64, "ok")
    with pytest.raises(ConfigError, match="stride must be from 1 to the shortest window, 64"):
        measure_extrapolation(one, model, task, stride=65, **options)


class Fails(Table):
    """A table that carries nothing but its position, and is spoilt from a position on."""

    def __init__(self, at: int, *, slow: float = 0.0, spoil: float = math.nan) -> None:
        super().__init__(torch.zeros(257, 257))
        self.at, self.slow, self.spoil = at, slow, spoil

    def init_state(self, batch_size: int, max_len: int | None = None):
        return torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, ids, segments=None, state=None):
        time.sleep(self.slow)
        logits = super().forward(ids).clone()
        place = state[:, None] + torch.arange(ids.shape[1])
        logits[place >= self.at] = self.spoil
        out = nn.Module()
        out.logits, out.state = logits, state + ids.shape[1]
        return out


def measure(model, **more):
    one = Subject("table", lambda: model, vocab_size=257)
    options = {"trained_length": 24, "multiples": (1, 2, 4, 8), "max_documents": 4, "batch_size": 2, **more}
    return measure_extrapolation(one, model, TEXT, **options)


def test_a_loss_that_is_not_finite_is_a_result_at_its_position():
    found = measure(Fails(60), chunk=16)
    assert [e["result"] for e in found["by_length"]] == ["ok", "ok", "non_finite", "non_finite"]
    assert found["non_finite_at"] == 60
    assert found["bits_per_byte"][2:] == [None, None]
    assert found["bits_per_byte"][0] == pytest.approx(math.log2(257), rel=1e-3)
    assert "scores are not finite from position 60 on" in found["note"]


def test_a_length_that_takes_too_long_is_a_result_and_shorter_ones_stand():
    found = measure(Fails(10**9, slow=0.05), chunk=12, timeout=0.65)  # 0.2, 0.2, 0.4 and 0.8 s of two batches each
    assert [e["result"] for e in found["by_length"]] == ["ok", "ok", "ok", "timed_out"]
    assert found["bits_per_byte"][3] is None
    assert "out of time after" in found["note"]


def test_a_uniform_model_beyond_the_trained_length_has_collapsed():
    found = measure(Fails(10**9))
    assert found["collapse"]["length"] == 48
    assert "no better than the 8.0" in found["collapse"]["why"]
    assert found["uniform"] == pytest.approx(math.log2(257) * sum_tokens_per_byte(), rel=1e-6)


def sum_tokens_per_byte() -> float:
    documents = list(TEXT.eval_documents(min_tokens=192, max_documents=4))
    return sum(len(d.targets) for d in documents) / sum(d.n_bytes for d in documents)


def test_lengths_may_be_given_in_tokens():
    one = subject("m a")
    found = measure_extrapolation(one, one.build(), TEXT, trained_length=24, lengths=[30, 96], max_documents=2)
    assert (found["lengths"], found["multiples"]) == ([30, 96], [1.25, 4])
    assert [e["ratio"] for e in found["by_length"]] == [1.25, 4]
    assert all(e["largest_state"] > 0 for e in found["by_length"])
