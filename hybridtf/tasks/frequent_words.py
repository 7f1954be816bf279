"""``frequent_words``: which words came most often, in a text whose words follow Zipf's law? (Hsieh et al., *RULER*,
https://arxiv.org/abs/2404.06654, over tokens.)

The word of rank k comes in proportion to k^-alpha (a zeta distribution), in one random order; then ``?`` asks for the
``n_words`` most frequent, the most frequent first. With two words asked for a row may be

    inputs    b e b a c e b b d a e b ? b
    targets   - - - - - - - - - - - - b e        (- is not scored)

Counts are the same in all rows of a size: the share of each rank, rounded down, and what is left goes to the rarest words, one
each; counts of the words that are asked for all differ. Which word has which rank is drawn anew in each row, and every order is
as likely. ``length`` counts the whole row.

Ids: words are below V - 1 (``vocab_size`` V), ``?`` is V - 1. ``chance`` is any word, ``own`` any of the row.

Sizes of RULER: alpha = 2, 3 words, 4,096 to 131,072 tokens, 500 rows a length. Presets: ``ruler_frequent_words`` (2,048 ids,
trained on 4,096 tokens, tested to 16,384) and ``frequent_words_small`` (64 ids, trained on 96 tokens, tested to 1,536).
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


class FrequentWordsConfig(SyntheticConfig):
    """Say the most frequent words, the first first."""

    type: Literal["frequent_words"] = "frequent_words"
    vocab_size: int = Field(default=2048, ge=3)
    n_words: int = Field(default=3, gt=0)
    """Words that are asked for."""
    alpha: float = Field(default=2.0, gt=0, examples=[1.5])
    train: tuple[RowsOf, ...] = (RowsOf(length=4096, n_rows=20_000),)
    test: tuple[RowsOf, ...] = (RowsOf(length=4096, n_rows=500),)

    @model_validator(mode="after")
    def _counts_differ(self) -> Self:
        if self.n_words > self.vocab_size - 2:
            raise ValueError(f"n_words = {self.n_words} of {self.vocab_size - 1} words; one at least must not be asked for")
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length <= self.n_words:
                    raise ValueError(f"{where}[{i}].length = {size.length}; the answer alone takes {self.n_words}")
                top = self._counts(size)[: self.n_words + 1]
                if (np.diff(top) >= 0).any() or len(top) <= self.n_words:
                    raise ValueError(
                        f"{where}[{i}].length = {size.length}: the most frequent words come {top.tolist()} times, which "
                        f"does not tell {self.n_words} of them apart; use longer rows or another alpha"
                    )
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = RowsOf(length=40, n_rows=40)
        return cls(vocab_size=24, train=(rows,), test=(rows, RowsOf(length=60, n_rows=9)))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def _counts(self, size: RowsOf) -> Longs:
        """(n) how often each word comes, the most frequent first; words that do not come are left out."""
        room = size.length - self.n_words
        share = np.arange(1, self.vocab_size, dtype=np.float64) ** -self.alpha
        counts = np.floor(room * share / share.sum()).astype(np.int64)
        rarest = np.arange(len(counts)) >= len(counts) - (room - counts.sum())
        counts = counts + rarest
        return np.asarray(counts[counts > 0])

    def scored(self, size: RowsOf, split: int = TEST) -> float:
        return self.n_words

    def bits(self, size: RowsOf) -> float:
        return log2_orders(self._counts(size))

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        key = (*key, self.vocab_size, size.length)
        order, names = Draws((*key, _ORDER), index), Draws((*key, _NAMES), index)
        words, ids, _ = shuffled_words(order, names, self._counts(size), self.vocab_size - 1)
        answer = Piece(ids[:, : self.n_words], scored=True)
        return written([Piece(words), sign(self.vocab_size - 1, len(index)), answer], size.length)

    def baselines(self) -> dict[str, float]:
        """``chance``: any word; ``own``: any that the row has."""
        own = self.mean_over_test([1 / len(self._counts(size)) for size in self.test])
        return {"chance": 1 / (self.vocab_size - 1), "own": own}


_SIZE = ("length", "n_rows")

PRESETS = (
    Preset("frequent_words_small", "frequent_words", {
        "vocab_size": 64, "n_words": 3, "alpha": 2.0, "train": sizes(_SIZE, (96, 20_000)),
        "test": sizes(_SIZE, (96, 256), (192, 128), (384, 64), (768, 64), (1536, 32)),
    }),
    Preset("ruler_frequent_words", "frequent_words", {
        "vocab_size": 2048, "n_words": 3, "alpha": 2.0, "train": sizes(_SIZE, (4096, 20_000)),
        "test": sizes(_SIZE, (4096, 500), (8192, 200), (16_384, 100)),
    }),
)
