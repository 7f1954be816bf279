"""Drawn rows beyond the trained length: held against answers by hand, in flat memory, with failures as results."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, measure_extrapolation
from hybridtf.bench.bootstrap import interval_of_share
from hybridtf.bench.reading import Stopped, out_of_memory, read, rows_that_fit
from hybridtf.core import ConfigError, active
from hybridtf.cost import state_size
from hybridtf.cost.live_bytes import LiveBytes
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from hybridtf.tasks import IGNORE, InductionHeadsConfig, NeedlesConfig, NeedlesTextConfig, RowsOf
from tests.bench.bench_cases import BLOCKS, Table

INDUCTION = InductionHeadsConfig(vocab_size=16, train=(RowsOf(length=32, n_rows=50),)).load(0)


def mamba(pattern: str = "m m", vocab_size: int = 16) -> Subject:
    blocks = {name: BLOCKS[name] for name in sorted(set(pattern) & set(BLOCKS))}
    model = LanguageModelConfig(vocab_size=vocab_size, d_model=16, pattern=pattern, blocks=blocks)
    return Subject.from_recipe(Recipe(model=model), "m")


class Solver(nn.Module):
    """Solves induction heads from its state: (special token came last, the token to say), as far as ``reach`` tokens."""

    def __init__(self, reach: float = math.inf, *, spoil: str = "guess") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.reach, self.spoil, self.longest_call = reach, spoil, 0

    def init_state(self, batch_size: int, max_len: int | None = None):
        return torch.zeros(batch_size, dtype=torch.int64), torch.full((batch_size,), -1), torch.zeros((), dtype=torch.int64)

    def forward(self, ids, *, segments=None, state=None):
        after, say, read_before = state
        t = ids.shape[1]
        self.longest_call = max(self.longest_call, t)
        special = torch.cat([after[:, None], (ids == 15).long()], dim=1)
        follows = torch.where(special[:, :-1] == 1, ids, -1)
        said = torch.cat([say[:, None], follows], dim=1).cummax(1).values[:, 1:]
        logits = 5.0 * nn.functional.one_hot(said.clamp(min=0), 16)
        place = read_before + torch.arange(t)
        beyond = (place >= self.reach)[None, :, None]
        fault = {"guess": -logits, "nan": logits * torch.nan, "inf": torch.full_like(logits, torch.inf)}[self.spoil]
        logits = torch.where(beyond, fault, logits)
        return Answer(logits, (special[:, -1], said[:, -1], read_before + t))


class Answer:
    def __init__(self, logits, state) -> None:
        self.logits, self.state = logits, state


def solver(**more) -> Subject:
    return Subject("solver", lambda: Solver(**more), vocab_size=16)


def measure(one: Subject, task=INDUCTION, model=None, **more):
    options = {"trained_length": 32, "multiples": (1, 4), "max_rows": 12, "chunk": 24, **more}
    return measure_extrapolation(one, model or one.build(), task, **options)


def test_a_model_that_solves_the_task_is_right_at_every_length_depth_and_distance():
    found = measure(solver(), multiples=(1, 2, 64), max_rows=30)
    assert found["protocol"] == "rows"
    assert [e["length"] for e in found["by_length"]] == [32, 64, 2048]
    assert [e["ratio"] for e in found["by_length"]] == [1, 2, 64]
    for entry in found["by_length"]:
        assert (entry["accuracy"], entry["row_accuracy"], entry["n_rows"], entry["result"]) == (1, 1, 30, "ok")
        assert entry["interval"] == [pytest.approx(0.025 ** (1 / 30)), 1]
        assert entry["chance"] == 1 / 15
    assert found["grid"]["lengths"] == [32, 64, 2048]
    assert found["grid"]["depths"] == [i / 10 for i in range(10)]
    assert [sum(row) for row in found["grid"]["n"]] == [30, 30, 30]
    assert {a for row in found["grid"]["accuracy"] for a in row} <= {1.0, None}
    assert sum(n for _, _, n in found["by_distance"]) == 90
    assert found["by_place"] == [[16, 1, 30], [32, 1, 30], [1024, 1, 30]]  # said after positions 31, 63 and 2047
    assert found["collapse"] is None


def test_depth_and_distance_are_those_of_the_rows():
    """A model that says what followed the special token only where that lies in the last quarter of the row."""
    one = solver()
    model = one.build()
    whole = model.forward

    def late_only(ids, *, segments=None, state=None):
        out = whole(ids, state=state)
        seen = (ids[:, :96] == 15).any(1)
        out.logits = torch.where(seen[:, None, None], -out.logits, out.logits)
        return out

    model.forward = late_only  # type: ignore[method-assign]
    found = measure(one, multiples=(4,), max_rows=200, chunk=128, model=model)
    grid = found["grid"]
    for depth, accuracy, n in zip(grid["depths"], grid["accuracy"][0], grid["n"][0], strict=True):
        if n and depth + 0.1 <= 0.75:
            assert accuracy == 0
        if n and depth >= 0.8:
            assert accuracy == 1
    for distance, accuracy, n in found["by_distance"]:
        assert n > 0
        if distance >= 32:
            assert accuracy == 0
        if distance <= 8:
            assert accuracy == 1
    rows = next(INDUCTION.at_length(128, 200).eval_batches(200, 128))
    share = (rows.evidence[:, -1] - 1 >= 96).float().mean()
    assert found["by_length"][0]["accuracy"] == pytest.approx(float(share))


@pytest.mark.parametrize("pattern", ["m m", "m a"])
def test_rows_in_chunks_are_answered_as_in_one_call(pattern):
    one = mamba(pattern, vocab_size=64)
    model = one.build().double()
    task = NeedlesConfig(train=NeedlesConfig.tiny().train).load(0)
    batch = next(task.at_length(100, 6).eval_batches(6, 100))
    with torch.no_grad():
        right = model(batch.inputs).logits.argmax(-1) == batch.targets
        pieces = list(read(model, batch.inputs, batch.targets, chunk=17))
    assert torch.equal(torch.cat([p.right for p in pieces], dim=1), right)
    found = measure(one, task, model, trained_length=20, multiples=(5,), max_rows=6)
    (entry,) = found["by_length"]
    scored = batch.targets != IGNORE
    assert entry["accuracy"] == pytest.approx(float(right[scored].float().mean()))
    assert entry["row_accuracy"] == pytest.approx(float((right | ~scored).all(1).float().mean()))
    assert entry["state_bytes"] == state_size(model, 100)["used"]
    assert entry["largest_state"] > 0


def test_padded_rows_are_read_as_in_one_call():
    """Answers of differing length: the state is carried over what is padding in some rows."""
    options = {"n_letters": 8, "form": "suffix", "train": [{"length": 12, "min_length": 6, "n_rows": 9}]}
    task = active()["tasks"].get("copying")(**options).load(0)
    model = mamba("m a").build().double()
    batch = next(task.at_length(48, 8).eval_batches(8, 48))
    assert batch.segments is not None
    with torch.no_grad():
        whole = model(batch.inputs, segments=batch.segments).logits.argmax(-1) == batch.targets
        pieces = list(read(model, batch.inputs, batch.targets, batch.segments, chunk=11))
    scored = batch.targets != IGNORE
    assert torch.equal(torch.cat([p.right for p in pieces], dim=1)[scored], whole[scored])


def test_memory_beside_the_rows_is_that_of_a_chunk():
    model = mamba().build()
    peaks = []
    for length in (64, 16 * 64):
        batch = next(INDUCTION.at_length(length, 2).eval_batches(2, length))
        with torch.no_grad(), LiveBytes() as live:
            for piece in read(model, batch.inputs, batch.targets, chunk=32):
                assert piece.stop - piece.start == 32
            peaks.append(live.peak)
    whole = 2 * length * 8  # a view makes the memory of the inputs, and of the targets, known
    assert peaks[1] - 2 * whole <= peaks[0] - 2 * whole // 16


@pytest.mark.slow
def test_a_million_tokens_by_carried_state():
    one = mamba()
    began = time.monotonic()
    found = measure(one, multiples=(1,), lengths=[32, 1 << 20], max_rows=1, chunk=4096)
    entry = found["by_length"][1]
    assert (entry["length"], entry["ratio"], entry["n_rows"], entry["result"]) == (1 << 20, 32768, 1, "ok")
    assert entry["state_bytes"] == found["by_length"][0]["state_bytes"]
    assert time.monotonic() - began < 600


def test_runs_of_one_model_on_several_tasks_are_known_as_such():
    one, wider = mamba(), mamba(vocab_size=64)
    hashes = {measure(s, max_rows=1, multiples=(1,))["model_hash"] for s in (one, wider)}
    assert len(hashes) == 1
    assert measure(mamba("m m m"), max_rows=1, multiples=(1,))["model_hash"] not in hashes
    assert measure(solver(), max_rows=1, multiples=(1,))["model_hash"] is None


# -- what ends a length early ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["nan", "inf"])
def test_scores_that_are_not_finite_are_found_at_their_position(spoil):
    found = measure(solver(reach=70, spoil=spoil), multiples=(1, 2, 4))
    assert [e["result"] for e in found["by_length"]] == ["ok", "ok", "non_finite"]
    last = found["by_length"][2]
    assert (last["accuracy"], last["interval"], last["non_finite_at"]) == (None, None, 70)
    assert "128 tokens: scores are not finite from position 70 on" in found["note"]
    assert found["grid"]["accuracy"][2] == [None] * 10


class Fails(Solver):
    """Refuses the second call beyond 50 tokens with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, ids, *, segments=None, state=None):
        if state[2] > 50:
            raise self.error
        return super().forward(ids, state=state)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9")],
)
def test_out_of_memory_is_a_result_and_the_sweep_goes_on(error):
    found = measure(Subject("fails", lambda: Fails(error), vocab_size=16), multiples=(1, 4, 8))
    assert [e["result"] for e in found["by_length"]] == ["ok", "out_of_memory", "out_of_memory"]
    assert found["by_length"][0]["accuracy"] == 1
    assert found["by_length"][1]["accuracy"] is None


def test_a_state_that_cannot_fit_is_not_begun(monkeypatch):
    one = mamba("m a")
    model = one.build()
    short, long = (state_size(model, n)["used"] for n in (32, 128))
    monkeypatch.setattr("hybridtf.bench.reading.main_memory", lambda: (short + long) // 2)
    found = measure(one, model=model, batch_size=4)
    assert [e["result"] for e in found["by_length"]] == ["ok", "out_of_memory"]
    assert f"128 tokens: the state of a row takes {long:,} of {(short + long) // 2:,} bytes of memory" in found["note"]
    assert found["by_length"][0]["n_rows"] == 12  # fewer at once, all of them in the end
    assert rows_that_fit(model, 32, 4) == (short + long) // 2 // short < 4
    fixed = measure(mamba("m m"), batch_size=4)  # whose state does not grow
    assert [e["result"] for e in fixed["by_length"]] == ["ok", "ok"]


def test_another_error_is_no_result():
    with pytest.raises(RuntimeError, match="a fault"):
        measure(Subject("fails", lambda: Fails(RuntimeError("a fault")), vocab_size=16))
    assert not out_of_memory(ValueError("out of memory"))


class Slow(Solver):
    def forward(self, ids, *, segments=None, state=None):
        time.sleep(0.02)
        return super().forward(ids, state=state)


def test_a_length_has_its_time_and_finished_rows_count():
    one = Subject("slow", lambda: Slow(), vocab_size=16)
    found = measure(one, multiples=(1, 512), timeout=0.5, batch_size=12, chunk=32)
    assert [e["result"] for e in found["by_length"]] == ["ok", "timed_out"]  # 512 calls of 0.02 s
    assert (found["by_length"][1]["n_rows"], found["by_length"][1]["accuracy"]) == (0, None)
    assert "out of time after" in found["note"]
    found = measure(one, multiples=(64,), timeout=2.5, batch_size=1, chunk=32)
    (entry,) = found["by_length"]  # 64 calls a row: one row has the time, not all 12
    assert entry["result"] == "ok"
    assert 0 < entry["n_rows"] < 12
    assert f"out of time after {entry['n_rows']} of 12 rows" in found["note"]


def test_a_length_of_which_the_task_has_no_rows_is_not_run():
    sizes = [{"length": 5, "n_rows": 9}]
    options = {"n_letters": 3, "n_digits": 2, "train": sizes, "test": sizes}
    task = active()["tasks"].get("phonebook")(**options).load(0)
    found = measure(mamba(vocab_size=task.vocab_size), task, trained_length=task.row_length, multiples=(1, 40))
    assert [e["result"] for e in found["by_length"]] == ["ok", "not_run"]
    assert "there are only 9 names" in found["note"]
    with pytest.raises(ConfigError, match="'phonebook' has no rows of"):
        measure(mamba(vocab_size=task.vocab_size), task, trained_length=10_000)


def test_what_a_call_refuses():
    with pytest.raises(ConfigError, match="stride is of windows over documents"):
        measure(solver(), stride=4)
    with pytest.raises(ConfigError, match="lengths must rise"):
        measure(solver(), lengths=[64, 32])


# -- collapse ----------------------------------------------------------------------------------------------------------


def test_answers_at_chance_beyond_the_trained_length_are_a_collapse():
    found = measure(solver(reach=100), multiples=(1, 2, 4, 8))
    assert [e["accuracy"] for e in found["by_length"]] == [1, 1, 0, 0]
    assert (found["collapse"]["length"], found["collapse"]["ratio"]) == (128, 4)
    assert found["collapse"]["why"] == "accuracy 0.000 over 12 rows is no better than chance (0.067)"


def test_what_was_never_learnt_cannot_collapse():
    found = measure(solver(reach=0), max_rows=40)
    assert found["collapse"] is None
    assert "no better than chance at the trained length" in found["note"]


def test_without_the_trained_length_there_is_no_collapse():
    """The model says nothing right, but whether it ever did is not known."""
    found = measure(solver(reach=0), multiples=(2, 4), max_rows=40)
    assert [e["accuracy"] for e in found["by_length"]] == [0, 0]
    assert found["collapse"] is None
    assert "no length up to the trained 32 tokens was measured" in found["note"]


class Oracle(nn.Module):
    """Says the targets of the rows ``task`` is measured on, but for a fault in each answer that ``wrong`` (b t) marks."""

    def __init__(self, task, lengths, max_rows, wrong) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.said = {}
        for length in lengths:
            for batch in task.at_length(length, max_rows).eval_batches(max_rows, length):
                said = torch.where(wrong(batch, length), (batch.targets + 1) % 257, batch.targets).clamp(min=0)
                self.said.update({tuple(i): s for i, s in zip(batch.inputs.tolist(), said, strict=True)})

    def forward(self, ids, *, segments=None, state=None):
        said = torch.stack([self.said[tuple(row)] for row in ids.tolist()])
        return Answer(nn.functional.one_hot(said, 257).double(), None)


def test_answers_of_text_are_measured_and_collapse_by_their_own_chance():
    """Half the answers have their last token wrong: half are right, no row is, and most tokens are. At the longest length
    all answers have one wrong token of six: accuracy far above chance, answers at it."""
    size = {"length": 600, "n_keys": 1, "n_values": 4, "n_rows": 9}
    task = NeedlesTextConfig(n_digits=5, train=[size], test=[size]).load()
    assert task.metric == "answer_accuracy"

    def wrong(batch, length):
        last = (batch.targets != IGNORE) & (batch.answers != batch.answers.roll(-1, 1))
        return last & ((length > 900) | (batch.answers % 2 == 1))

    model = Oracle(task, (600, 1200), 8, wrong)
    one = Subject("oracle", lambda: model, vocab_size=task.vocab_size)
    found = measure(one, task, model, trained_length=600, multiples=(1, 2), max_rows=8)
    short, long = found["by_length"]
    assert (short["n_rows"], short["result"]) == (8, "ok")
    assert (short["answer_accuracy"], short["row_accuracy"]) == (0.5, 0)
    low, high = short["answer_interval"]  # two of four in every row, and no surer than as many single throws
    assert 0.2 < low < 0.5 < high < 0.8
    assert short["accuracy"] == pytest.approx(1 - 2 / 24)
    assert (short["answer_chance"], short["row_chance"], short["chance"]) == (1 / 90_000, None, None)
    assert (long["answer_accuracy"], long["accuracy"]) == (0, pytest.approx(5 / 6))
    assert found["collapse"] == {
        "length": 1200, "ratio": 2, "why": "answer accuracy 0.000 over 8 rows is no better than chance (0.000)",
    }


def test_a_row_that_asks_for_one_answer_has_it_right_with_the_row():
    found = measure(solver(reach=100), multiples=(1, 2, 4))
    for entry in found["by_length"]:
        assert (entry["answer_accuracy"], entry["answer_interval"]) == (entry["row_accuracy"], entry["row_interval"])
        assert (entry["row_chance"], entry["answer_chance"]) == (None, None)  # the task's measure is of tokens


def test_a_model_without_state_reads_rows_in_one_call():
    weight = torch.zeros(16, 16)
    weight[:, 3] = 1.0  # always says 3
    found = measure(Subject("table", lambda: Table(weight), vocab_size=16), max_rows=300)
    batch = next(INDUCTION.at_length(32, 300).eval_batches(300, 32))
    share = float((batch.targets[:, -1] == 3).float().mean())
    assert found["by_length"][0]["accuracy"] == pytest.approx(share)
    assert found["by_length"][0]["state_bytes"] is None


def test_interval_of_a_share():
    ones = np.ones(16)
    assert interval_of_share(ones, ones) == (pytest.approx(0.794, abs=1e-3), 1)  # 16 of 16: the exact binomial bound
    assert interval_of_share(0 * ones, ones) == (0, pytest.approx(0.206, abs=1e-3))
    low, high = interval_of_share(np.arange(16) % 2, ones)
    assert 0.2 < low < 0.5 < high < 0.8
    assert interval_of_share(ones[:0], ones[:0]) is None


@pytest.mark.parametrize("tokens", [1, 2, 4, 32])
@pytest.mark.parametrize("n", [2, 16, 100])
def test_a_row_more_that_is_right_never_lowers_the_interval(n, tokens):
    """100 of 100 rows had a lower end of 0.964, and 99 of them one of 0.970."""
    scored = np.full(n, tokens)
    ends = np.array([interval_of_share(tokens * (np.arange(n) < k), scored) for k in range(n + 1)])
    shares = np.arange(n + 1) / n
    assert (np.diff(ends, axis=0) >= -1e-9).all()
    assert ((ends[:, 0] <= shares) & (shares <= ends[:, 1])).all()
    assert (ends[-1, 0], ends[-1, 1]) == (pytest.approx(0.025 ** (1 / n)), 1.0)


@pytest.mark.parametrize("n", [2, 16, 100])
def test_no_sample_is_surer_of_a_high_share_than_one_that_is_all_right(n):
    generator = np.random.default_rng(n)
    scored = generator.integers(1, 60, n)
    for wrong in (1, 2, 5, 20):
        right = np.maximum(scored - generator.multinomial(wrong, np.full(n, 1 / n)), 0)
        low, high = interval_of_share(right, scored)
        assert low <= interval_of_share(scored, scored)[0] + 1e-9 < high
        low, high = interval_of_share(scored - right, scored)
        assert low < interval_of_share(0 * scored, scored)[1] <= high + 1e-9


@pytest.mark.parametrize(("n", "tokens"), [(5, 1), (5, 20), (30, 20), (100, 4)])
def test_the_interval_of_a_share_covers_the_truth(n, tokens):
    """Rows that differ: each has its own chance of a right token."""
    generator = np.random.default_rng(n)
    rows = [generator.binomial(tokens, generator.beta(8, 2, n)) for _ in range(500)]
    found = [interval_of_share(right, np.full(n, tokens)) for right in rows]
    assert sum(low <= 0.8 <= high for low, high in found) >= 0.93 * 500


def test_a_deadline_ends_a_reading_between_calls():
    with pytest.raises(Stopped, match="out of time after 0 tokens"), torch.no_grad():
        list(read(Solver(), torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64), chunk=3, deadline=0.0))
