"""``common_words``: which words came often? (Hsieh et al., *RULER*, https://arxiv.org/abs/2404.06654, over tokens.)

``n_words`` words come ``n_common`` times each, others ``n_rare`` times each, all in one random order. Then ``?`` asks for the
common words, in the order in which they first came. With two words that come three times, others once, a row may be

    inputs    e b e c b a b d e ? e
    targets   - - - - - - - - - e b        (- is not scored)

(RULER takes the words in any order; one order is needed where each answer is a token that is given on.) Which words are common
is drawn anew in each row, and every order of a row's words is as likely. ``length`` counts the whole row; what is left after
the common words is filled with others, of which the last may come less often.

Ids: words are below V - 1 (``vocab_size`` V), ``?`` is V - 1. ``chance`` is any word, ``own`` any of the row.

Sizes of RULER: 10 words 30 times each, others 3 times, 4,096 to 131,072 tokens, 500 rows a length. Presets:
``ruler_common_words`` (4,096 ids, trained on 4,096 tokens and tested to 8,192) and ``common_words_small`` (64 ids, 3 words 8
times, others twice, trained on 96 tokens, tested to 768 with counts that grow as the length does).
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.layout import Piece, log2_orders, shuffled_words, sign, written
from hybridtf.tasks.synthetic import TEST, Rows, RowsOf, SyntheticConfig, sizes

_ORDER, _NAMES = range(2)


class WordRows(RowsOf):
    """``n_rows`` rows of ``length`` tokens, with ``n_words`` common words."""

    n_words: int = Field(default=10, gt=0)
    n_common: int = Field(default=30, gt=1)
    """How often each of them comes."""
    n_rare: int = Field(default=3, gt=0)
    """How often each other word comes."""

    @property
    def name(self) -> str:
        return f"{self.length} tokens, {self.n_words} words {self.n_common} times, others {self.n_rare}"

    @model_validator(mode="after")
    def _common_words_are_more_common(self) -> Self:
        if self.n_common <= self.n_rare:
            raise ValueError(f"n_common = {self.n_common} must be above n_rare = {self.n_rare}")
        return self


class CommonRows(WordRows):
    """The same over token alphabets, where the common words and the answer must have room."""

    @model_validator(mode="after")
    def _have_room(self) -> Self:
        least = self.n_words * (self.n_common + 1)
        if self.length < least:
            raise ValueError(f"length = {self.length}; the common words and the answer take {least}")
        return self

    @property
    def counts(self) -> Longs:
        """(n) how often each word comes, the common ones first."""
        left = self.length - self.n_words * (self.n_common + 1)
        rare = [self.n_rare] * (left // self.n_rare) + [left % self.n_rare] * (left % self.n_rare > 0)
        return np.array([self.n_common] * self.n_words + rare)


class CommonWordsConfig(SyntheticConfig):
    """Say the words that came often."""

    type: Literal["common_words"] = "common_words"
    vocab_size: int = Field(default=4096, ge=3)
    train: tuple[CommonRows, ...] = (CommonRows(length=4096, n_rows=20_000),)
    test: tuple[CommonRows, ...] = (CommonRows(length=4096, n_rows=500),)

    @model_validator(mode="after")
    def _there_are_words(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if len(size.counts) > self.vocab_size - 1:
                    raise ValueError(f"{where}[{i}] has {len(size.counts)} words; vocab_size = {self.vocab_size} too few")
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = CommonRows(length=20, n_words=2, n_common=4, n_rare=1, n_rows=40)
        return cls(train=(rows,), test=(rows, CommonRows(length=25, n_words=2, n_common=4, n_rare=2, n_rows=9)), vocab_size=24)

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def scored(self, size: CommonRows, split: int = TEST) -> float:
        return size.n_words

    def bits(self, size: CommonRows) -> float:
        return log2_orders(size.counts)

    def draw(self, size: CommonRows, key: tuple[int, ...], index: Longs) -> Rows:
        key = (*key, self.vocab_size, size.length, size.n_words, size.n_common, size.n_rare)
        order, names = Draws((*key, _ORDER), index), Draws((*key, _NAMES), index)
        words, ids, first = shuffled_words(order, names, size.counts, self.vocab_size - 1)
        turn = np.argsort(first[:, : size.n_words], axis=1)
        answer = Piece(np.take_along_axis(ids, turn, axis=1), scored=True)
        return written([Piece(words), sign(self.vocab_size - 1, len(index)), answer], size.length)

    def baselines(self) -> dict[str, float]:
        """``chance``: any word; ``own``: any that the row has."""
        own = self.mean_over_test([1 / len(size.counts) for size in self.test])
        return {"chance": 1 / (self.vocab_size - 1), "own": own}


_SIZE = ("length", "n_words", "n_common", "n_rare", "n_rows")

PRESETS = (
    Preset("common_words_small", "common_words", {
        "vocab_size": 64, "train": sizes(_SIZE, (96, 3, 8, 2, 20_000)),
        "test": sizes(_SIZE, (96, 3, 8, 2, 256), (192, 3, 16, 4, 128), (384, 3, 32, 8, 64), (768, 3, 64, 16, 64)),
    }),
    Preset("ruler_common_words", "common_words", {
        "vocab_size": 4096, "train": sizes(_SIZE, (4096, 10, 30, 3, 20_000)),
        "test": sizes(_SIZE, (4096, 10, 30, 3, 500), (8192, 10, 30, 3, 200)),
    }),
)
