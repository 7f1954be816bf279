"""Copying and the phone book, answered by Python's own strings and dictionaries."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import IGNORE, CopyingConfig, PhonebookConfig
from hybridtf.tasks.draws import Draws
from hybridtf.tasks.layout import shared_out, spelled, strewn
from tests.tasks.rows import rows_of, whole

STRINGS = {
    "train": [{"length": 12, "min_length": 5, "n_rows": 300}],
    "test": [{"length": 12, "n_rows": 60}, {"length": 25, "n_rows": 50}],
}


def text(tokens: list[int], n_letters: int) -> str:
    return "".join((*map(chr, range(97, 97 + n_letters)), "$", "|", ".")[t] for t in tokens)


@pytest.mark.parametrize("n_answer", [None, 1, 7, 40])
@pytest.mark.parametrize("n_letters", [26, 2])
def test_strings_are_said_again(n_letters, n_answer) -> None:
    config = CopyingConfig(n_letters=n_letters, n_answer=n_answer, **STRINGS)
    lengths, letters = set(), Counter()
    for inputs, targets in rows_of(config.load(), 300):
        tokens, n = whole(inputs, targets)
        row = text(tokens, n_letters)
        string, answer = row[1:-1].split("|")
        assert row == f"${string}|{answer}."
        assert answer == string[:n_answer]
        assert n == len(answer) + 1
        lengths.add(len(string))
        letters.update(string)
    assert lengths == {*range(5, 13), 25}
    assert len(letters) == n_letters
    assert max(letters.values()) < 1.5 * min(letters.values())


def test_they_are_compared_by_rows_that_are_right_as_a_whole() -> None:
    """A model that says any of two letters and knows the end: 2^-n, over strings of two lengths."""
    sizes = {"train": [{"length": 6, "n_rows": 9}], "test": [{"length": 6, "n_rows": 30}, {"length": 3, "n_rows": 10}]}
    task = CopyingConfig(n_letters=2, **sizes).load()
    assert task.metric == "row_accuracy"
    assert task.baselines() == {"chance": pytest.approx((30 / 64 + 10 / 8) / 40)}
    book = PhonebookConfig(n_digits=2, train=[{"length": 5, "n_rows": 9}], test=[{"length": 5, "n_rows": 9}]).load()
    assert book.metric == "row_accuracy"
    assert book.baselines() == {"chance": pytest.approx(0.01)}


@pytest.mark.parametrize("form", ["whole", "prefix"])
def test_the_size_of_the_sides_is_what_the_rows_have(form) -> None:
    task = CopyingConfig(form=form, n_gram=2, n_answer=7, **STRINGS).load()
    train, held_out = task.splits()
    n_held_out = sum(batch.n_tokens for batch in task.eval_batches(50, 10))
    assert held_out.n_tokens == (n_held_out if form == "whole" else pytest.approx(n_held_out, rel=0.04))
    assert train.n_tokens == pytest.approx(next(task.train_batches(300, task.row_length)).n_tokens, rel=0.04)


@pytest.mark.parametrize("form", ["prefix", "suffix"])
@pytest.mark.parametrize(("n_letters", "n_gram", "n_answer"), [(26, 2, None), (4, 3, 4), (26, 1, 1), (3, 3, 9)])
def test_what_follows_an_n_gram(form, n_letters, n_gram, n_answer) -> None:
    config = CopyingConfig(form=form, n_letters=n_letters, n_gram=n_gram, n_answer=n_answer, **STRINGS)
    lengths, places = set(), set()
    for inputs, targets in rows_of(config.load(), 300):
        tokens, n = whole(inputs, targets)
        row = text(tokens, n_letters)
        if form == "prefix":
            asked, string, answer = row[1:-1].split("|")
            assert row == f"${asked}|{string}|{answer}."
        else:
            string, asked = row[1:-1].split("|")
            asked, answer = asked[:n_gram], asked[n_gram:]
            assert row == f"${string}|{asked}{answer}."
        assert len(asked) == n_gram
        places.add(string.index(asked))
        assert sum(string[i:].startswith(asked) for i in range(len(string))) == 1
        following = string.split(asked)[1]
        assert answer == following[:n_answer]
        assert answer
        assert n == len(answer) + 1
        lengths.add(len(string))
    assert lengths == {*range(5, 13), 25}
    assert {0, 25 - n_gram - 1} <= places


def test_strings_without_such_an_n_gram_are_drawn_again() -> None:
    """Of strings of two letters over two, the four are as likely; only two of them have a letter that stands once."""
    sizes = {"train": [{"length": 2, "n_rows": 2000}], "test": [{"length": 2, "n_rows": 10}]}
    config = CopyingConfig(form="suffix", n_letters=2, n_gram=1, **sizes)
    rows = config.draw(config.train[0], (0, 0, 0), np.arange(2000))
    strings = Counter(map(tuple, rows.inputs[:, 1:3].tolist()))
    assert set(strings) == {(0, 1), (1, 0)}
    assert 850 < strings[0, 1] < 1150


@pytest.mark.parametrize(("options", "match"), [
    ({"form": "suffix", "n_gram": 5}, "strings of 5 letters have nothing behind 5"),
    ({"form": "prefix", "n_letters": 3, "n_gram": 2}, "of 9 n-grams few would stand once"),
    ({"train": [{"length": 4, "min_length": 5, "n_rows": 5}]}, "above length"),
], ids=lambda x: str(x)[:20])
def test_copying_refuses(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "copying", **STRINGS, **options})


@pytest.mark.parametrize("options", [
    {}, {"n_shots": 2, "n_digits": 3}, {"n_queries": 3, "n_name": 1},
    {"n_shots": 1, "n_queries": 4, "n_letters": 3, "n_name": 3},
], ids=str)
def test_phonebook(options) -> None:
    sizes = {"train": [{"length": 9, "min_length": 5, "n_rows": 300}], "test": [{"length": 14, "n_rows": 60}]}
    config = PhonebookConfig(**options, **sizes)
    end, ask = 10 + config.n_letters, 11 + config.n_letters
    asked_places, lengths = set(), set()
    for inputs, targets in rows_of(config.load(), 300):
        tokens = [*inputs, targets[-1], end]
        middle = tokens.index(ask)
        book: dict[tuple[int, ...], tuple[int, ...]] = {}
        entry = config.n_name + config.n_digits + 1
        assert middle % entry == 0
        for i in range(0, middle, entry):
            name, number = tuple(tokens[i : i + config.n_name]), tuple(tokens[i + config.n_name : i + entry - 1])
            assert all(10 <= t < end for t in name)
            assert all(0 <= t < 10 for t in number)
            assert tokens[i + entry - 1] == end
            assert name not in book
            book[name] = number
        lengths.add(len(book))
        expected, seen = [IGNORE] * len(targets), set()
        for j, i in enumerate(range(middle + 1, len(tokens), entry)):
            name, number = tuple(tokens[i : i + config.n_name]), tuple(tokens[i + config.n_name : i + entry - 1])
            assert book[name] == number
            assert tokens[i + entry - 1] == end
            assert name not in seen
            seen.add(name)
            asked_places.add(list(book).index(name))
            if j >= config.n_shots:
                expected[i + config.n_name - 1 : i + entry - 2] = number
        assert len(seen) == config.n_shots + config.n_queries
        assert targets == expected
    assert lengths == {5, 6, 7, 8, 9, 14}
    assert asked_places == set(range(14))


@pytest.mark.parametrize(("options", "match"), [
    ({"n_shots": 4, "n_queries": 2}, "5 entries, of which n_shots"),
    ({"n_letters": 2, "n_name": 2}, "there are only 4 names"),
    ({"n_letters": 300, "n_name": 5}, "more than 2"),
], ids=lambda x: str(x)[:20])
def test_phonebook_refuses(options, match) -> None:
    sizes = {"train": [{"length": 9, "min_length": 5, "n_rows": 300}]}
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "phonebook", **sizes, **options})


# -- how rows are laid out ---------------------------------------------------------------------------------------------


def test_items_lie_everywhere_and_never_overlap() -> None:
    """Two items of three tokens among nine: 10 arrangements, each as often."""
    starts = strewn(Draws((1,), np.arange(10_000)), 2, 3, 9)
    counts = Counter(map(tuple, starts.tolist()))
    assert set(counts) == {(i, j) for i in range(7) for j in range(i + 3, 7)}
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 27.9  # 9 degrees of freedom, p = 0.001


def test_places_are_shared_out_evenly() -> None:
    shares = shared_out(Draws((1,), np.arange(6000)), 2, 2)
    counts = Counter(map(str, shares.tolist()))
    assert len(counts) == math.comb(4, 2)
    assert all(sorted(np.ravel(share)) == [0, 1, 2, 3] for share in shares.tolist())
    assert (np.diff(shares, axis=2) > 0).all()
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 20.5


def test_numbers_are_spelled() -> None:
    assert spelled(np.array([407, 5]), 10, 4).tolist() == [[0, 4, 0, 7], [0, 0, 0, 5]]
    assert [int("".join(map(str, d)), 3) for d in spelled(np.arange(81), 3, 4).tolist()] == list(range(81))
