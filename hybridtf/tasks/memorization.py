"""``memorization``: a table that is in the weights, not in the row (Poli et al., *MAD*, https://arxiv.org/abs/2403.17844).

One table of keys and values, the same in all rows and for every seed, gives each key a value of its own. A row is keys drawn
evenly, each followed by a token that asks for its value. With the table 0: 5, 1: 3, 2: 4 a row may be

    inputs    2 7 0 7 0 7 1 7
    targets   . 4 . 5 . 5 . 3       (. is not scored)

Rows are never trained on and held out both, the table's facts are: that is the task. With V = ``vocab_size``, keys are ids
below (V - 1) / 2, values those below V - 1, and V - 1 asks. The measure is accuracy; ``chance`` is one in as many as there
are values.

Sizes of MAD: 256 ids, 32 tokens, 256 rows to train on for 200 epochs, 1,280 to test; its sweep goes to 8,192 ids. Presets:
``mad_memorization`` and ``memorization_small`` (2,048 ids: a table of 128 is learnt in seconds by everything).
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.draws import Draws, Longs, shuffled
from hybridtf.tasks.synthetic import TEST, Rows, RowsOf, SyntheticConfig, sizes

_KEYS, _TABLE = 0, 20240326


class MemorizationConfig(SyntheticConfig):
    """Say a key's value by heart."""

    type: Literal["memorization"] = "memorization"
    length_step: ClassVar[int] = 2
    vocab_size: int = Field(default=256, ge=5)
    train: tuple[RowsOf, ...] = (RowsOf(length=32, n_rows=256),)
    test: tuple[RowsOf, ...] = (RowsOf(length=32, n_rows=1_280),)

    @model_validator(mode="after")
    def _rows_are_pairs(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length % 2:
                    raise ValueError(f"{where}[{i}].length = {size.length}; keys and questions need an even length")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(vocab_size=16, train=(RowsOf(length=12, n_rows=40),), test=(RowsOf(length=12, n_rows=16),))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    @property
    def n_keys(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def table(self) -> Longs:
        """(n_keys) the value of each key."""
        return self.n_keys + shuffled((_TABLE, self.vocab_size), self.vocab_size - 1 - self.n_keys)[: self.n_keys]

    def scored(self, size: RowsOf, split: int = TEST) -> float:
        return size.length / 2

    def bits(self, size: RowsOf) -> float:
        return size.length / 2 * math.log2(self.n_keys)

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        keys = Draws((*key, self.vocab_size, size.length, _KEYS), index).integers(size.length // 2, self.n_keys)
        inputs = np.full((len(index), size.length), self.vocab_size - 1, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        inputs[:, ::2], targets[:, 1::2] = keys, self.table[keys]
        return Rows(inputs, targets)

    def baselines(self) -> dict[str, float]:
        """``chance``: any value."""
        return {"chance": 1 / (self.vocab_size - 1 - self.n_keys)}


_SIZE = ("length", "n_rows")

PRESETS = (
    Preset("mad_memorization", "memorization", {
        "fresh": False, "train": sizes(_SIZE, (32, 256)), "test": sizes(_SIZE, (32, 1_280)),
    }),
    Preset("memorization_small", "memorization", {
        "vocab_size": 2048, "fresh": False, "train": sizes(_SIZE, (32, 2_560)), "test": sizes(_SIZE, (32, 512)),
    }),
)
