"""Common and frequent words, counted by Python's own Counter."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.tasks import CommonWordsConfig, FrequentWordsConfig
from hybridtf.tasks.draws import Draws
from hybridtf.tasks.layout import log2_orders, shuffled_words
from tests.tasks.rows import rows_of, whole


@pytest.mark.parametrize(("n_words", "n_common", "n_rare", "vocab_size"), [(3, 8, 2, 64), (1, 2, 1, 96), (5, 6, 4, 30)])
def test_common_words(n_words, n_common, n_rare, vocab_size) -> None:
    counts = {"n_words": n_words, "n_common": n_common, "n_rare": n_rare}
    sizes = {"train": [{"length": 63, "n_rows": 200, **counts}], "test": [{"length": 90, "n_rows": 60, **counts}]}
    common: Counter[int] = Counter()
    for inputs, targets in rows_of(CommonWordsConfig(vocab_size=vocab_size, **sizes).load()):
        tokens, n = whole(inputs, targets)
        assert len(inputs) in (63, 90)
        end = tokens.index(vocab_size - 1)
        words = Counter(tokens[:end])
        often = [word for word in words if words[word] == n_common]  # a Counter keeps the order of first appearance
        assert tokens[end + 1 :] == often
        assert len(often) == n == n_words
        others = sorted(count for word, count in words.items() if word not in often)
        assert others[1:] == [n_rare] * (len(others) - 1)
        assert 0 < others[0] <= n_rare
        common.update(often)
    assert len(common) > 0.85 * (vocab_size - 1)


@pytest.mark.parametrize("alpha", [2.0, 1.3])
@pytest.mark.parametrize("n_words", [1, 3])
def test_frequent_words(alpha, n_words) -> None:
    sizes = {"train": [{"length": 120, "n_rows": 200}], "test": [{"length": 333, "n_rows": 60}]}
    config = FrequentWordsConfig(vocab_size=33, alpha=alpha, n_words=n_words, **sizes)
    first: Counter[int] = Counter()
    for inputs, targets in rows_of(config.load()):
        tokens, n = whole(inputs, targets)
        end = tokens.index(32)
        ranked = Counter(tokens[:end]).most_common()
        assert tokens[end + 1 :] == [word for word, _ in ranked[:n_words]]
        assert n == n_words
        assert end == len(inputs) - n_words
        found = [count for _, count in ranked]
        assert all(a > b for a, b in itertools.pairwise(found[: n_words + 1]))
        total = sum(k**-alpha for k in range(1, 33))
        for k, count in enumerate(found[:6], 1):
            assert count == math.floor(end * k**-alpha / total)
        first[ranked[0][0]] += 1
    assert len(first) == 32


def test_every_order_of_words_is_as_likely() -> None:
    tokens, ids, first = shuffled_words(Draws((1,), np.arange(12_000)), Draws((2,), np.arange(12_000)), np.array([2, 1, 1]), 3)
    rows = [tuple(names.index(t) for t in row) for row, names in zip(tokens.tolist(), ids.tolist(), strict=True)]
    assert first.tolist() == [[row.index(i) for i in range(3)] for row in rows]
    counts = Counter(rows)
    assert len(counts) == 12 == round(2 ** log2_orders(np.array([2, 1, 1])))
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 31.3  # 11 degrees of freedom, p = 0.001
    assert len({tuple(row) for row in ids.tolist()}) == 6


@pytest.mark.parametrize(("name", "options", "match"), [
    ("common_words", {"train": [{"length": 309, "n_rows": 5}]}, "the answer take 310"),
    ("common_words", {"train": [{"length": 400, "n_rows": 5, "n_rare": 30}]}, "must be above n_rare"),
    ("common_words", {"vocab_size": 1000}, "vocab_size = 1000 too few"),
    ("frequent_words", {"train": [{"length": 20, "n_rows": 5}]}, r"come \[10, 2, 1, 1\] times"),
    ("frequent_words", {"n_words": 8, "vocab_size": 9}, "one at least must not"),
    ("frequent_words", {"train": [{"length": 3, "n_rows": 5}]}, "answer alone takes 3"),
], ids=lambda x: str(x)[:30])
def test_words_that_cannot_be_told_apart_are_refused(name, options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": name, **options})


@pytest.mark.parametrize("name", ["ruler_common_words", "ruler_frequent_words"])
def test_rows_of_the_published_size(name) -> None:
    batch = next(active()["tasks"].make({"type": name}).load().train_batches(4, 4096))
    assert batch.inputs.shape == (4, 4096)
    counts = Counter(batch.inputs[0, :4000].tolist())
    assert (counts.most_common(1)[0][1] > 2000) == (name == "ruler_frequent_words")
