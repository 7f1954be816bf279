"""``fuzzy_recall``: recall whose keys and values are several tokens long (Poli et al., *MAD*,
https://arxiv.org/abs/2403.17844).

A key is 1 to ``max_key`` different key tokens, a value 1 to ``max_value`` different value tokens; what is a key's value is the
same all over a row. Where a key was already there, each token of its value must be said. With ``max_key = max_value = 2`` and
the keys' tokens 0, 1, 2 a row may be

    inputs    1 0  5    2  3 4    1  6    1 0  5    2  3 4
    targets   .    .    .  .  .   .  .    . 5  .    3  4 .       (. is not scored)

The last pair always repeats one that was there; held-out rows have keys of ``max_key`` tokens alone. ``train_on = "all"``
trains on every next token, as MAD does. Rows are filled with as many pairs as fit before the last one, so they differ in
length.

Ids: with V = ``vocab_size``, key tokens are below (V - 1) / 2, value tokens below V - 1; the last is not used (MAD pads with
it). The measure is accuracy over the tokens of answers; ``chance`` is one in as many as there are value tokens.

Sizes of MAD: 16 ids, 128 tokens, motifs of up to 3, 12,800 rows for 200 epochs, 1,280 to test. Presets: ``mad_fuzzy_recall``
and ``fuzzy_recall_small`` (64 tokens, motifs of up to 2).
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.draws import Draws, Longs, first_places
from hybridtf.tasks.synthetic import TRAIN, Rows, RowsOf, SyntheticConfig, next_tokens, sizes

_KEYS, _VALUES, _KEY_SIZES, _VALUE_SIZES, _PROBE = range(5)


class FuzzyRecallConfig(SyntheticConfig):
    """Say the value, of several tokens, of a key that came before."""

    type: Literal["fuzzy_recall"] = "fuzzy_recall"
    vocab_size: int = Field(default=16, ge=5)
    max_key: int = Field(default=3, gt=0)
    max_value: int = Field(default=3, gt=0)
    train_on: Literal["answers", "all"] = "answers"
    train: tuple[RowsOf, ...] = (RowsOf(length=128, n_rows=12_800),)
    test: tuple[RowsOf, ...] = (RowsOf(length=128, n_rows=1_280),)

    @model_validator(mode="after")
    def _motifs_fit(self) -> Self:
        if self.max_key > self.n_keys or self.max_value > self.n_values:
            raise ValueError(
                f"motifs of {self.max_key} and {self.max_value} different tokens; vocab_size = {self.vocab_size} has "
                f"{self.n_keys} key tokens and {self.n_values} value tokens"
            )
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length < 2 * self._longest:
                    raise ValueError(f"{where}[{i}].length = {size.length}; two pairs may take {2 * self._longest} tokens")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            vocab_size=9, max_key=2, max_value=2, train=(RowsOf(length=20, n_rows=40),),
            test=(RowsOf(length=20, n_rows=16), RowsOf(length=24, n_rows=10)),
        )

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    @property
    def n_keys(self) -> int:
        """Different key tokens."""
        return (self.vocab_size - 1) // 2

    @property
    def n_values(self) -> int:
        """Different value tokens."""
        return self.vocab_size - 1 - self.n_keys

    @property
    def _longest(self) -> int:
        return self.max_key + self.max_value

    def bits(self, size: RowsOf) -> float:
        # Pairs that surely fit, the last one apart, and the first token of each key.
        return (size.length // self._longest - 1) * math.log2(self.n_keys)

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        b, n, split = len(index), size.length // 2, key[0]  # pairs: no row has more than n
        key = (*key, self.vocab_size, size.length, self.max_key, self.max_value)
        pairs = (index[:, None] * n + np.arange(n)).reshape(-1)  # each pair is an example of its own
        keys = Draws((*key, _KEYS), pairs).distinct(self.max_key, self.n_keys).reshape(b, n, -1)
        values = self.n_keys + Draws((*key, _VALUES), pairs).distinct(self.max_value, self.n_values).reshape(b, n, -1)
        key_size = 1 + Draws((*key, _KEY_SIZES), index).integers(n, self.max_key)
        if split != TRAIN:
            key_size = np.full_like(key_size, self.max_key)
        value_size = 1 + Draws((*key, _VALUE_SIZES), index).integers(n, self.max_value)

        first = first_places(self._numbers(keys, key_size))  # (b n) where each key came first: its value is from there
        values, value_size = np.take_along_axis(values, first[..., None], axis=1), np.take_along_axis(value_size, first, axis=1)
        n_pairs = ((key_size + value_size).cumsum(1) <= size.length - self._longest).sum(1)
        probe = (Draws((*key, _PROBE), index).uniform(1)[:, 0] * n_pairs).astype(np.int64)
        source = np.broadcast_to(np.arange(n), (b, n)).copy()
        source[np.arange(b), n_pairs] = probe  # the last pair is one of those before it
        first = np.take_along_axis(first, source, axis=1)
        keys, values = (np.take_along_axis(a, source[..., None], axis=1) for a in (keys, values))
        key_size, value_size = (np.take_along_axis(a, source, axis=1) for a in (key_size, value_size))
        return self._written(size.length, keys, values, key_size, value_size, n_pairs + 1, first, split)

    def _numbers(self, keys: Longs, key_size: Longs) -> Longs:
        """(b n) a number a motif: its tokens as digits, 0 behind its end."""
        digits = np.where(np.arange(self.max_key) < key_size[..., None], keys + 1, 0)
        return np.asarray(digits @ (self.n_keys + 1) ** np.arange(self.max_key))

    def _written(
        self, length: int, keys: Longs, values: Longs, key_size: Longs, value_size: Longs, n_pairs: Longs, first: Longs,
        split: int,
    ) -> Rows:
        """The first ``n_pairs`` pairs one behind the other; a pair whose key came before is scored."""
        n = keys.shape[1]
        there = np.arange(n) < n_pairs[:, None]
        end = np.where(there, key_size + value_size, 0).cumsum(1)
        start = end - key_size - value_size
        repeats = there & (first < np.arange(n))
        inputs = np.zeros((len(keys), length), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        for tokens, sizes_, begin, scored in ((keys, key_size, start, False), (values, value_size, start + key_size, True)):
            for i in range(tokens.shape[2]):
                row, pair = np.nonzero(there & (i < sizes_))
                place = begin[row, pair] + i
                inputs[row, place] = tokens[row, pair, i]
                if scored:
                    targets[row, place - 1] = np.where(repeats[row, pair], tokens[row, pair, i], IGNORE)
        lengths = end[:, -1]
        if self.train_on == "all" and split == TRAIN:
            targets = np.where(np.arange(1, length + 1) < lengths[:, None], next_tokens(inputs), IGNORE)
        return Rows(inputs, targets, lengths=lengths)

    def baselines(self) -> dict[str, float]:
        """``chance``: any value token."""
        return {"chance": 1 / self.n_values}


_SIZE = ("length", "n_rows")

PRESETS = (
    Preset("mad_fuzzy_recall", "fuzzy_recall", {
        "fresh": False, "train_on": "all", "train": sizes(_SIZE, (128, 12_800)), "test": sizes(_SIZE, (128, 1_280)),
    }),
    Preset("fuzzy_recall_small", "fuzzy_recall", {
        "max_key": 2, "max_value": 2, "train_on": "all", "train": sizes(_SIZE, (64, 6_400)),
        "test": sizes(_SIZE, (64, 512), (128, 256)),
    }),
)
