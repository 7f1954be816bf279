"""Needles and chains of variables, found by reading each row from left to right."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import IGNORE, NeedlesConfig, Totals, VariableTrackingConfig
from tests.tasks.rows import rows_of, whole


def needles_of(tokens: list[int], config: NeedlesConfig) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(place, key, value) of each needle before the question; all else must be filler."""
    found, i, size = [], 0, config.n_key + config.n_digits
    while i < len(tokens):
        if tokens[i] >= 10 + config.n_key_ids:
            i += 1
            continue
        key, value = tuple(tokens[i : i + config.n_key]), tuple(tokens[i + config.n_key : i + size])
        assert all(10 <= t < 10 + config.n_key_ids for t in key)
        assert all(0 <= t < 10 for t in value)
        found.append((i, key, value))
        i += size
    return found


@pytest.mark.parametrize(("options", "counts"), [
    ({}, {}),
    ({"filler": "repeated"}, {}),
    ({"n_key_ids": 7, "vocab_size": 20, "n_digits": 2}, {"n_keys": 4}),
    ({"n_key_ids": 3, "n_key": 2}, {"n_keys": 5, "n_queries": 3}),
    ({"n_digits": 1}, {"n_values": 4}),
    ({"n_key_ids": 4, "n_digits": 2}, {"n_keys": 3, "n_values": 2, "n_queries": 3}),
], ids=str)
def test_the_values_of_a_key_are_all_that_stand_behind_it(options, counts) -> None:
    sizes = {"train": [{"length": 60, "n_rows": 200, **counts}], "test": [{"length": 101, "n_rows": 60, **counts}]}
    config = NeedlesConfig(**options, **sizes)
    asked_ranks, filler, lengths = set(), Counter(), set()
    for inputs, targets in rows_of(config.load()):
        tokens, _ = whole(inputs, targets)
        lengths.add(len(inputs))
        ask = tokens.index(config.vocab_size - 1)
        values: dict[tuple[int, ...], list[int]] = defaultdict(list)
        found = needles_of(tokens[:ask], config)
        for _, key, value in found:
            values[key] += value
        assert len(values) == config.train[0].n_keys
        assert {len(value) for value in values.values()} == {config.train[0].n_values * config.n_digits}
        expected, rest = [IGNORE] * (ask + 1), tokens[ask + 1 :]
        asked = []
        while rest:
            key = tuple(rest[: config.n_key])
            asked.append(key)
            expected += [IGNORE] * config.n_key + values[key]
            rest = rest[config.n_key + len(values[key]) :]
        assert targets == expected[1:]
        assert len(set(asked)) == len(asked) == config.train[0].n_queries
        asked_ranks.add([key for _, key, _ in found].index(asked[0]))
        between = [t for t in tokens[:ask] if t >= 10 + config.n_key_ids]
        filler.update(between)
        if config.filler == "repeated":
            steps = (np.diff(tokens[: found[0][0]]) % config.n_filler).tolist()
            assert set(steps) <= {1}
    assert lengths == {60, 101}
    assert set(filler) == set(range(10 + config.n_key_ids, config.vocab_size - 1))
    assert len(asked_ranks) >= min(len(found), config.train[0].n_keys)


@pytest.mark.parametrize("n_keys", [1, 4])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_needle_that_is_asked_for_lies_at_its_depth(depth, n_keys) -> None:
    size = {"length": 200, "n_rows": 100, "n_keys": n_keys, "depth": depth}
    config = NeedlesConfig(n_key_ids=9, train=[{"length": 200, "n_rows": 50}], test=[size])
    assert config.test[0].name == f"200 tokens{', 4 keys' if n_keys > 1 else ''}, depth {depth:g}"
    others = []
    for inputs, _ in [*rows_of(config.load(), 50)][50:]:
        found = needles_of(inputs[: inputs.index(63)], config)
        asked = tuple(inputs[inputs.index(63) + 1 :][:1])
        place = next(i for i, key, _ in found if key == asked)
        others += [i for i, key, _ in found if key != asked]
        assert len(found) == n_keys
        if n_keys == 1:
            assert place == round(depth * (200 - 4 - 4))
        assert abs(place - depth * (200 - 4 - 4)) <= 3 * (n_keys - 1) + 0.5
    if n_keys > 1:
        assert np.mean(others) == pytest.approx(96, abs=12)  # the others lie anywhere


def test_each_value_is_an_answer_of_its_own() -> None:
    """Two keys of two values are asked for: four answers of three digits."""
    size = {"length": 80, "n_keys": 3, "n_values": 2, "n_queries": 2, "n_rows": 20}
    config = NeedlesConfig(n_key_ids=5, n_key=2, n_digits=3, train=[size], test=[size])
    (batch,) = config.load().eval_batches(20, 80)
    assert batch.per_row == 4
    for targets, answers in zip(batch.targets.tolist(), batch.answers.tolist(), strict=True):
        assert [a for t, a in zip(targets, answers, strict=True) if t != IGNORE] == [i for i in range(4) for _ in range(3)]
    perfect = Totals(0.0, 240, 240, 0, 20, 10, 80, 60)
    assert config.load().metrics(perfect)["answer_accuracy"] == 0.75


@pytest.mark.parametrize("config", [NeedlesConfig, VariableTrackingConfig])
def test_training_on_all_tokens_leaves_the_held_out_side_as_it_is(config) -> None:
    sizes = {"train": [{"length": 60, "n_rows": 40}], "test": [{"length": 60, "n_rows": 20}]}
    tasks = [config(train_on=what, **sizes).load() for what in ("answers", "all")]
    one, batch = (next(task.train_batches(8, 60)) for task in tasks)
    assert torch.equal(one.inputs, batch.inputs)
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])
    assert torch.equal(one.targets[:, -1], batch.targets[:, -1])
    assert tasks[1].splits()[0].n_tokens == 40 * 60
    (left,), (right,) = (task.eval_batches(20, 60) for task in tasks)
    assert torch.equal(left.targets, right.targets)


def test_needles_may_leave_no_filler_between_them() -> None:
    """A haystack of needles: ten keys of two tokens and their digits, and one token to spare."""
    size = {"length": 34, "n_keys": 10, "n_rows": 100}
    config = NeedlesConfig(n_key_ids=5, n_key=2, n_digits=1, train=[size], test=[size])
    places = set()
    for inputs, _ in rows_of(config.load(), 100):
        found = needles_of(inputs[: inputs.index(63)], config)
        assert len({key for _, key, _ in found}) == 10
        places.add(tuple(i for i, _, _ in found))
    assert len(places) == 11


@pytest.mark.parametrize(("options", "size", "match"), [
    ({}, {"n_queries": 2}, "n_queries = 2 is above n_keys = 1"),
    ({}, {"n_values": 2, "depth": 0.5}, "depth is of one needle"),
    ({}, {"n_keys": 2}, "there are 1"),
    ({"n_digits": 48}, {}, "needles and questions take 98"),
    ({"vocab_size": 20, "n_key_ids": 9}, {}, "leave no filler"),
    ({}, {"depth": 1.5}, "less than or equal to 1"),
], ids=lambda x: str(x)[:30])
def test_needles_refuse(options, size, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "needles", "train": [{"length": 96, "n_rows": 5, **size}], **options})


def test_the_small_passkey_is_tested_at_every_length_and_depth() -> None:
    config = active()["tasks"].make({"type": "passkey_small"})
    assert len({size.name for size in config.test}) == len(config.test) == 30
    assert config.test[-1].name == "4096 tokens, depth 1"
    assert config.load().splits()[1].n_tokens == 3 * 5 * (4 * 64 + 32 + 16)


# -- chains of variables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["value", "variables"])
@pytest.mark.parametrize(("n_chains", "n_hops"), [(2, 1), (1, 4), (3, 0), (3, 3)])
def test_variables_are_followed(ask, n_chains, n_hops) -> None:
    counts = {"n_chains": n_chains, "n_hops": n_hops}
    sizes = {"train": [{"length": 60, "n_rows": 200, **counts}], "test": [{"length": 101, "n_rows": 60, **counts}]}
    config = VariableTrackingConfig(vocab_size=40, n_variables=13, n_values=6, ask=ask, **sizes)
    ranks, turns = set(), set()
    for inputs, targets in rows_of(config.load()):
        tokens, n = whole(inputs, targets)
        end = tokens.index(1)
        value_of: dict[int, int] = {}
        chain_of: dict[int, list[int]] = {}
        order = []
        for i in range(end):
            if tokens[i] != 0:
                continue
            variable, right = tokens[i - 1], tokens[i + 1]
            assert 2 <= variable < 15
            assert variable not in value_of
            value_of[variable] = value_of[right] if right < 15 else right  # a name that stands to the right was set before
            chain_of.setdefault(value_of[variable], []).append(variable)
            order.append(value_of[variable])
        assert sum(t < 21 for t in tokens[:end]) == 3 * n_chains * (n_hops + 1)  # all else is filler
        assert all(15 <= value < 21 for value in chain_of)
        assert [len(chain) for chain in chain_of.values()] == [n_hops + 1] * n_chains
        turns.add(tuple(list(chain_of).index(value) for value in order))
        if ask == "value":
            question, answer = tokens[end + 1], tokens[end + 2 :]
            assert chain_of[value_of[question]][-1] == question
            assert answer == [value_of[question]]
            ranks.add(list(chain_of).index(answer[0]))
        else:
            assert tokens[end + 2 :] == chain_of[tokens[end + 1]]
            ranks.add(list(chain_of).index(tokens[end + 1]))
        assert n == len(tokens) - end - 2
    assert ranks == set(range(n_chains))
    assert len(turns) >= (3 if n_chains > 1 and n_hops else 1)


@pytest.mark.parametrize(("n_chains", "n_hops", "n_asked"), [(2, 1, 4), (2, 2, 3), (1, 3, 2)])
def test_several_variables_are_asked_for(n_chains, n_hops, n_asked) -> None:
    counts = {"n_chains": n_chains, "n_hops": n_hops, "n_asked": n_asked}
    sizes = {"train": [{"length": 60, "n_rows": 200, **counts}], "test": [{"length": 90, "n_rows": 60, **counts}]}
    orders = set()
    for inputs, targets in rows_of(VariableTrackingConfig(vocab_size=40, n_variables=13, n_values=6, **sizes).load()):
        tokens, _ = whole(inputs, targets)
        end, value_of, names = tokens.index(1), {}, []
        for i in (i for i in range(end) if tokens[i] == 0):
            names.append(tokens[i - 1])
            value_of[tokens[i - 1]] = value_of.get(tokens[i + 1], tokens[i + 1])
        asked = tokens[end + 1 :: 2]
        assert tokens[end + 2 :: 2] == [value_of[name] for name in asked]
        assert targets[end + 1 :: 2] == tokens[end + 2 :: 2]
        assert targets[end::2] == [IGNORE] * n_asked
        assert len(set(asked)) == len(asked) == n_asked
        chain = [name for name in names if value_of[name] == value_of[asked[0]]]
        assert chain[-1] == asked[0]  # the first is the last of its chain
        orders.add(tuple(names.index(name) for name in asked))
    assert len(orders) >= 2 * n_asked - 1


@pytest.mark.parametrize(("options", "match"), [
    ({"train": [{"length": 96, "n_rows": 5, "n_asked": 5}]}, "the row has 4 variables"),
    ({"ask": "variables", "train": [{"length": 96, "n_rows": 5, "n_asked": 2}]}, "asks once"),
    ({"train": [{"length": 13, "n_rows": 5}]}, "take 14"),
    ({"train": [{"length": 96, "n_rows": 5, "n_hops": 10}]}, "need 22 variables and 2 values; there are 20 and 10"),
    ({"train": [{"length": 96, "n_rows": 5, "n_chains": 11, "n_hops": 0}]}, "there are 20 and 10"),
    ({"vocab_size": 32}, "two signs, 20 variables"),
], ids=lambda x: str(x)[:30])
def test_variable_tracking_refuses(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "variable_tracking", **options})
