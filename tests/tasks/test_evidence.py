"""Where a row shows what is to be said, found again from the row's tokens alone; and rows of any length of every task."""

from __future__ import annotations

import numpy as np
import pytest

from hybridtf.core import ConfigError, active
from hybridtf.tasks import IGNORE, NO_EVIDENCE, Batch, SyntheticConfig, TextConfig
from hybridtf.tasks.draws import last_places

SMALL = {
    "mqar": {"vocab_size": 40, "train": [{"length": 32, "n_pairs": 4, "n_rows": 9}]},
    "induction_heads": {"vocab_size": 6, "train": [{"length": 12, "n_rows": 9}]},
    "in_context_recall": {"vocab_size": 12, "n_noise": 4, "noise": 0.3, "train": [{"length": 24, "n_rows": 9}]},
    "selective_copying": {"vocab_size": 8, "train": [{"length": 20, "n_data": 4, "n_rows": 9}]},
    "needles": {
        "n_key_ids": 4, "n_key": 2, "n_digits": 2,
        "train": [{"length": 40, "n_keys": 3, "n_values": 2, "n_queries": 2, "n_rows": 9}],
    },
    "variable_tracking": {"train": [{"length": 40, "n_chains": 2, "n_hops": 2, "n_rows": 9}]},
    "copying": {"n_letters": 5, "train": [{"length": 9, "min_length": 6, "n_rows": 9}]},
    "phonebook": {"n_digits": 2, "n_shots": 1, "n_queries": 2, "train": [{"length": 6, "min_length": 4, "n_rows": 9}]},
}
FORMS = [
    *((name, {}) for name in SMALL), ("variable_tracking", {"ask": "variables"}), ("copying", {"form": "prefix", "n_gram": 2}),
    ("copying", {"form": "suffix", "n_gram": 2}), ("selective_copying", {"cue": "once"}),
]


def config(name: str, **more) -> SyntheticConfig:
    return active()["tasks"].get(name)(**{**SMALL[name], "test": SMALL[name]["train"], **more})


def drawn(name: str, more: dict[str, object]) -> tuple[SyntheticConfig, Batch]:
    one = config(name, **more)
    return one, one.load(0).rows(one.train[0], (9,), np.arange(200))


def find(name: str, one: SyntheticConfig, tokens: list[int], at: int) -> int:
    """Where the token that is said after ``tokens[: at + 1]`` stands, by reading the row as a person would."""
    read, last = tokens[: at + 1], one.n_ids - 1
    if name in ("mqar", "in_context_recall"):
        places = [i for i in range(0, at - 1, 2) if read[i] == read[at]]
        return (places[0] if name == "mqar" else places[-1]) + 1
    if name == "induction_heads":
        return read.index(last) + 1
    if name == "selective_copying":
        data = [i for i, token in enumerate(read) if 0 < token < last]
        asked = read.index(last)
        return data[at - asked - (one.cue == "once")]
    if name == "needles":
        question = read.index(last)
        key, given = read[question + 1 : question + 3], at - question - 2
        if given >= 4:  # the second key: 2 tokens of it, 4 digits
            key, given = read[question + 7 : question + 9], given - 6
        starts = [i for i in range(question) if read[i : i + 2] == key]
        return starts[given // 2] + 2 + given % 2
    if name == "phonebook":
        entry = one.n_name + one.n_digits + 1
        bar = read.index(last)
        behind = (at - bar - 1) % entry  # the place in an entry of the token before the one to be said
        name_said = read[at - behind : at - behind + one.n_name]
        (start,) = (i for i in range(0, bar, entry) if read[i : i + one.n_name] == name_said)
        return start + behind + 1
    return find_in_string(one, read, at) if name == "copying" else find_in_chain(one, read, at)


def find_in_string(one: SyntheticConfig, read: list[int], at: int) -> int:
    bar = one.n_letters + 1
    if one.form == "whole":
        return 1 + at - read.index(bar)
    first, n = read.index(bar), one.n_gram
    if one.form == "suffix":
        string, n_gram, said = read[1:first], read[first + 1 : first + 1 + n], at - first - n
        start = 1
    else:
        second = read.index(bar, first + 1)
        string, n_gram, said, start = read[first + 1 : second], read[1:first], at - second, first + 1
    (place,) = (i for i in range(len(string)) if string[i : i + n] == n_gram)
    return start + place + n + said


def find_in_chain(one: SyntheticConfig, read: list[int], at: int) -> int:
    question = read.index(1)
    left = {read[i - 1]: i - 1 for i, token in enumerate(read[:question]) if token == 0}
    right = {read[place]: read[place + 2] for place in left.values()}
    if one.ask == "value":
        name = read[at]
        while right[name] in right:
            name = right[name]
        return left[name] + 2
    name = read[question + 1]
    for _ in range(at - question):
        (name,) = (one for one, value in right.items() if value == name)
    return left[name]


@pytest.mark.parametrize(("name", "more"), FORMS)
def test_evidence_is_where_the_row_shows_the_answer(name: str, more: dict[str, object]) -> None:
    one, batch = drawn(name, more)
    assert batch.evidence is not None
    found = 0
    for inputs, targets, evidence in zip(batch.inputs.tolist(), batch.targets.tolist(), batch.evidence.tolist(), strict=True):
        for at, (target, place) in enumerate(zip(targets, evidence, strict=True)):
            if target == IGNORE or (name == "copying" and target == one.n_ids - 1):  # the end is shown nowhere
                assert place == NO_EVIDENCE
            else:
                assert place == find(name, one, inputs, at)
                assert inputs[place] == target
                found += 1
    assert found >= 200


def test_rows_that_are_drawn_again_bring_their_evidence() -> None:
    """Sizes of few different rows: each side draws until it has its own."""
    one = config("selective_copying", vocab_size=4, train=[{"length": 9, "n_data": 2, "n_rows": 50}])
    assert one.bits(one.train[0]) < 20
    batch = one.load(0).rows(one.train[0], (0, 0, 0), np.arange(50))
    scored = batch.evidence >= 0
    assert bool((batch.inputs.gather(1, batch.evidence.clamp(min=0))[scored] == batch.targets[scored]).all())
    assert int(scored.sum()) == 100


def test_last_places() -> None:
    values = np.array([[3, 1, 3, 3, 2, 1]])
    assert last_places(values).tolist() == [[-1, -1, 0, 2, -1, 1]]


ROW_TASKS = [name for name, kind in active()["tasks"].configs().items() if issubclass(kind, SyntheticConfig)]


@pytest.mark.parametrize("name", ROW_TASKS)
@pytest.mark.parametrize("factor", [1, 4, 13])
def test_every_task_makes_its_rows_longer(name: str, factor: int) -> None:
    one = active()["tasks"].get(name).tiny()
    if name == "common_words":  # whose rare words grow in number
        one = type(one)(**{**one.to_dict(), "vocab_size": 600})
    task = one.load(0)
    n = factor * task.row_length
    longer = task.at_length(n, 6)
    (size,) = longer.config.test
    step = longer.config.length_step
    more = longer.config.n_tokens(size.model_copy(update={"length": size.length + step}))
    assert longer.config.n_tokens(size) <= n < more
    batches = list(longer.eval_batches(4, n))
    assert sum(len(b.inputs) for b in batches) == 6
    assert max(b.inputs.shape[1] for b in batches) == longer.config.n_tokens(size)
    assert longer.config.train == task.config.train
    assert 0 <= longer.baselines()["chance"] < 1
    if factor == 1:
        assert size.length == max(task.config.train, key=task.config.n_tokens).length


def test_what_a_size_has_beside_its_length_stays() -> None:
    longer = active()["tasks"].get("mqar").tiny().load(0).at_length(1000, 5)
    assert (longer.config.test[0].n_pairs, longer.config.test[0].length) == (2, 1000)


def test_a_task_that_has_no_rows_of_a_length_says_why() -> None:
    book = config("phonebook", n_letters=3).load(0)
    with pytest.raises(ConfigError, match=r"'phonebook' has no rows of 100000 tokens: .*there are only 9 names"):
        book.at_length(100_000, 4)
    with pytest.raises(ConfigError, match="'text' has no rows that could be made 64 tokens long"):
        TextConfig.tiny().load(0).at_length(64, 4)
