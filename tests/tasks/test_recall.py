"""Recall tasks, solved by reading each row with a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import (
    IGNORE,
    FuzzyRecallConfig,
    InContextRecallConfig,
    InductionHeadsConfig,
    MemorizationConfig,
    RowsOf,
    SelectiveCopyingConfig,
)
from tests.tasks.rows import rows_of

SIZES = {"train": (RowsOf(length=32, n_rows=200),), "test": (RowsOf(length=60, n_rows=40),)}


@pytest.mark.parametrize("options", [
    {"vocab_size": 16}, {"vocab_size": 17}, {"vocab_size": 16, "queries": "last"},
    {"vocab_size": 22, "n_noise": 6, "noise": 0.4},
], ids=str)
def test_in_context_recall(options) -> None:
    config = InContextRecallConfig(**options, **SIZES)
    n_noisy = n_pairs = 0
    for inputs, targets in rows_of(config.load()):
        table, answers = {}, {}
        for i in range(0, len(inputs), 2):
            key, value = inputs[i : i + 2]
            n_pairs += 1
            if key >= config.vocab_size - config.n_noise:
                assert value >= config.vocab_size - config.n_noise
                n_noisy += 1
                continue
            assert key < config.n_keys <= value < config.n_keys + config.n_values
            if key in table:
                answers[i] = table[key]
            assert table.setdefault(key, value) == value
        assert len(inputs) - 2 in answers  # the last pair always asks
        if config.queries == "last":
            answers = {len(inputs) - 2: answers[len(inputs) - 2]}
        assert {i: t for i, t in enumerate(targets) if t != IGNORE} == answers
    assert n_noisy / n_pairs == pytest.approx(config.noise * 0.93, abs=0.03)


def test_the_last_key_is_any_of_those_before_it() -> None:
    """Of a row with k different keys each is asked in one of k rows: no favour for the newest."""
    config = InContextRecallConfig(vocab_size=16, queries="last", train=(RowsOf(length=32, n_rows=4000),))
    batch = next(config.load().train_batches(4000, 32))
    keys = batch.inputs[:, :-2:2]
    newest = (batch.inputs[:, -2] == keys[:, -1]).float()
    expected = torch.tensor([1 / len(set(row)) for row in keys.tolist()])
    assert abs(float((newest - expected).sum())) < 4 * float((expected * (1 - expected)).sum().sqrt())


def test_training_on_all_tokens_leaves_the_held_out_side_as_it_is() -> None:
    both = [InContextRecallConfig(vocab_size=16, train_on=what, **SIZES).load() for what in ("answers", "all")]
    trained = next(both[1].train_batches(8, 32))
    assert torch.equal(trained.targets[:, :-1], trained.inputs[:, 1:])
    for one, other in zip(*(task.eval_batches(50, 32) for task in both), strict=True):
        assert torch.equal(one.targets, other.targets)
    assert both[1].splits()[0].n_tokens == 200 * 31


@pytest.mark.parametrize(("options", "match"), [
    ({"vocab_size": 8, "n_noise": 5}, "leaves no two keys"),
    ({"noise": 0.2}, "set n_noise"),
    ({"train": [{"length": 7, "n_rows": 5}]}, "even length"),
], ids=lambda x: str(x)[:20])
def test_in_context_recall_refuses(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "in_context_recall", **options})


def test_own_value_is_counted() -> None:
    """The mean number of different values among 8 drawn from 8, by drawing."""
    drawn = np.random.default_rng(0).integers(8, size=(20_000, 8))
    mean = np.mean([len(set(row)) for row in drawn.tolist()])
    assert InContextRecallConfig(vocab_size=16).load().baselines()["own_value"] == pytest.approx(1 / mean, rel=0.01)


def read_motifs(inputs: list[int], config) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(key, value, where the value begins) of each pair: a run of key tokens, then a run of value tokens."""
    pairs, i = [], 0
    while i < len(inputs):
        start = i
        while inputs[i] < config.n_keys:
            i += 1
        middle = i
        while i < len(inputs) and inputs[i] >= config.n_keys:
            i += 1
        pairs.append((tuple(inputs[start:middle]), tuple(inputs[middle:i]), middle))
    return pairs


@pytest.mark.parametrize(
    "options", [{}, {"max_key": 2, "max_value": 1}, {"max_key": 1, "max_value": 2, "vocab_size": 9}], ids=str
)
def test_fuzzy_recall(options) -> None:
    config = FuzzyRecallConfig(**options, **SIZES)
    n_repeats, key_sizes = 0, set()
    for inputs, targets in rows_of(config.load()):
        table, answers = {}, {}
        pairs = read_motifs(inputs, config)
        for key, value, place in pairs:
            assert len(set(key)) == len(key) <= config.max_key
            assert len(set(value)) == len(value) <= config.max_value
            key_sizes.add(len(key))
            if key in table:
                answers.update({place - 1 + i: token for i, token in enumerate(value)})
            assert table.setdefault(key, value) == value
        assert pairs[-1][0] in [key for key, _, _ in pairs[:-1]]
        n_repeats += len(answers) > len(pairs[-1][1])
        assert {i: t for i, t in enumerate(targets) if t != IGNORE} == answers
        assert max(inputs) < config.vocab_size - 1
        length = 32 if len(inputs) <= 32 else 60
        assert len(inputs) > length - 2 * (config.max_key + config.max_value)
    assert n_repeats
    assert key_sizes == set(range(1, config.max_key + 1))


def test_fuzzy_recall_asks_for_the_longest_keys_where_it_is_held_out() -> None:
    config = FuzzyRecallConfig(train_on="all", **SIZES)
    for batch in config.load().eval_batches(50, 32):
        for inputs, real in zip(batch.inputs, batch.segments.real, strict=True):
            assert {len(key) for key, _, _ in read_motifs(inputs[real].tolist(), config)} == {3}
    batch = next(config.load().train_batches(50, 32))
    for inputs, targets, real in zip(batch.inputs, batch.targets, batch.segments.real, strict=True):
        n = int(real.sum())
        assert torch.equal(targets[: n - 1], inputs[1:n])
        assert (targets[n - 1 :] == IGNORE).all()


def test_memorization_has_one_table_for_all_rows_and_seeds() -> None:
    config = MemorizationConfig(vocab_size=41, **SIZES)
    table: dict[int, int] = {}
    for seed in (0, 5):
        for batch in [next(config.load(seed).train_batches(200, 32)), *config.load(seed).eval_batches(50, 32)]:
            for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
                assert set(inputs[1::2]) == {40}
                assert set(targets[::2]) == {IGNORE}
                for key, value in zip(inputs[::2], targets[1::2], strict=True):
                    assert key < 20 <= value < 40
                    assert table.setdefault(key, value) == value
    assert len(table) == 20 == len(set(table.values()))


@pytest.mark.parametrize("cue", ["each", "once"])
def test_selective_copying(cue) -> None:
    sizes = [{"length": 32, "n_data": 5, "n_rows": 100}]
    config = SelectiveCopyingConfig(vocab_size=9, cue=cue, train=sizes, test=[{"length": 40, "n_data": 7, "n_rows": 30}])
    places = set()
    for inputs, targets in rows_of(config.load(), 100):
        n = 5 if len(inputs) == 32 else 7
        marker = inputs.index(8)
        data = [token for token in inputs[:marker] if token]
        places |= {i for i, token in enumerate(inputs[:marker]) if token} if n == 5 else set()
        assert inputs[marker:] == ([8] * n if cue == "each" else [8] + [0] * n)
        assert len(data) == n
        assert targets == [IGNORE] * (len(inputs) - n) + data
    assert places == set(range(27 - (cue == "once")))  # every place is used
    tight = SelectiveCopyingConfig(cue=cue, train=[{"length": 10 + (cue == "once"), "n_data": 5, "n_rows": 4}])
    assert next(tight.load().train_batches(4, tight.load().row_length)).n_tokens == 20


def test_induction_heads() -> None:
    sizes = {"train": (RowsOf(length=11, n_rows=400),), "test": (RowsOf(length=3, n_rows=4),)}
    config = InductionHeadsConfig(vocab_size=9, **sizes)
    places = set()
    for inputs, targets in rows_of(config.load(), 400):
        first = inputs.index(8)
        assert inputs.count(8) == 2
        assert inputs[-1] == 8
        assert first < len(inputs) - 2
        assert targets == [IGNORE] * (len(inputs) - 1) + [inputs[first + 1]]
        places.add(first)
    assert places == set(range(9))


@pytest.mark.parametrize(("name", "options", "match"), [
    ("fuzzy_recall", {"max_key": 8}, "has 7 key tokens"),
    ("fuzzy_recall", {"train": [{"length": 11, "n_rows": 5}]}, "may take 12"),
    ("memorization", {"train": [{"length": 11, "n_rows": 5}]}, "even length"),
    ("selective_copying", {"train": [{"length": 9, "n_data": 5, "n_rows": 5}]}, "need at least 10"),
    ("induction_heads", {"train": [{"length": 2, "n_rows": 5}]}, "are 3"),
], ids=lambda x: str(x)[:20])
def test_rows_that_cannot_be_are_refused(name, options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": name, **options})
