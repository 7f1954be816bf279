"""``mqar``: multi-query associative recall (Arora et al., *Zoology*, https://arxiv.org/abs/2312.04927).

A row begins with ``n_pairs`` pairs of a key and a value. Each key then comes once more, and there the model must say its
value. With ``vocab_size = 16``, ``length = 16`` and ``n_pairs = 2`` a row may be

    inputs    5 12  3  9  5  0  0  0  3  0  0  0  0  0  0  0
    targets   .  .  .  . 12  .  .  .  9  .  .  .  .  .  .  .      (. is not scored)

Procedure, per row: keys are ``n_pairs`` different ids of [1, V/2), values as many of [V/2, V), both drawn evenly. What
follows the pairs is (length - 2 n_pairs) / 2 slots of two tokens. A key comes at the first token of its slot; slots are
drawn without replacement, slot i = 1, 2, ... in proportion to i^(power - 1), so that most keys come early. All other tokens
are id 0, or with ``random_fill`` drawn evenly from the whole vocabulary.

The measure is accuracy over the asked keys. A model that has learnt which ids are values reaches 1 / (V - V/2) by chance,
and one that says one of the row's values 1 / n_pairs.

Sizes of the paper (figure 2): vocab_size 8192, (length, n_pairs) of (64, 4), (128, 8), (256, 16) or (512, 64), 100,000 rows
to train on and 3,000 to test, batches of 512, 512, 256 and 128 rows, 64 epochs, two layers without channel mixers. Presets:
``mqar_based``, the mixture of https://arxiv.org/abs/2402.18668 (train up to 64 pairs in 256 tokens, test up to 256 in 1024),
and ``mqar_small``, which a model of 60,000 parameters learns in minutes on a CPU.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE, NO_EVIDENCE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import TEST, Rows, RowsOf, SyntheticConfig, sizes

# What a draw is for; part of its key, so that no two draws share numbers.
_KEYS, _VALUES, _SLOTS, _FILL = range(4)


class MQARRows(RowsOf):
    """``n_rows`` rows of ``length`` tokens, with ``n_pairs`` pairs of a key and a value."""

    n_pairs: int = Field(gt=0)

    @property
    def name(self) -> str:
        return f"{self.length} tokens, {self.n_pairs} pairs"

    @model_validator(mode="after")
    def _keys_have_slots(self) -> Self:
        if 4 * self.n_pairs > self.length:
            raise ValueError(f"{self.n_pairs} pairs and a slot for each need {4 * self.n_pairs} tokens; length = {self.length}")
        return self


class MQARConfig(SyntheticConfig):
    """Multi-query associative recall: say the value of each key again, as Zoology asks it.

    See the module for procedure, measure and sizes. ``train`` and ``test`` list the sizes of rows; a batch has rows of one
    size, and ``train.seq_len`` must be the longest trained one.
    """

    type: Literal["mqar"] = "mqar"
    vocab_size: int = Field(default=8192, ge=4)
    """Ids below half of it are keys, the others values."""
    train: tuple[MQARRows, ...] = Field(default=(MQARRows(length=64, n_pairs=4, n_rows=100_000),), min_length=1)
    test: tuple[MQARRows, ...] = Field(default=(MQARRows(length=64, n_pairs=4, n_rows=3_000),), min_length=1)
    power: float = Field(default=0.01, gt=0)
    """The smaller, the earlier the keys are asked."""
    random_fill: bool = False
    """Tokens that are no pair and no query are random ids, not 0."""
    fresh: bool = False
    """As in the paper, the same training rows come again in every epoch."""

    @model_validator(mode="after")
    def _enough_ids(self) -> Self:
        keys = self.vocab_size // 2 - 1
        for where in ("train", "test"):
            for i, rows in enumerate(getattr(self, where)):
                if rows.n_pairs > keys:
                    raise ValueError(
                        f"{where}[{i}].n_pairs = {rows.n_pairs}, and vocab_size = {self.vocab_size} has only {keys} keys"
                    )
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = MQARRows(length=12, n_pairs=2, n_rows=24)
        return cls(vocab_size=16, train=(rows,), test=(rows, MQARRows(length=16, n_pairs=4, n_rows=10)))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def scored(self, size: MQARRows, split: int = TEST) -> float:
        return size.n_pairs

    def bits(self, size: MQARRows) -> float:
        keys, values = self.vocab_size // 2 - 1, self.vocab_size - self.vocab_size // 2
        return math.log2(math.perm(keys, size.n_pairs) * math.perm(values, size.n_pairs))

    def draw(self, size: MQARRows, key: tuple[int, ...], index: Longs) -> Rows:
        """Inputs and targets (b length) of the rows ``index`` of the set ``key``."""
        half, n = self.vocab_size // 2, size.n_pairs
        name = (*key, self.vocab_size, size.length, n)
        keys = 1 + Draws((*name, _KEYS), index).distinct(n, half - 1)
        values = half + Draws((*name, _VALUES), index).distinct(n, self.vocab_size - half)
        weights = np.arange(1, (size.length - 2 * n) // 2 + 1, dtype=np.float64) ** (self.power - 1)
        place = 2 * n + 2 * Draws((*name, _SLOTS), index).without_replacement(n, weights)
        inputs = np.zeros((len(index), size.length), dtype=np.int64)
        if self.random_fill:
            inputs = Draws((*name, _FILL), index).integers(size.length, self.vocab_size)
        inputs[:, 0 : 2 * n : 2], inputs[:, 1 : 2 * n : 2] = keys, values
        np.put_along_axis(inputs, place, keys, axis=1)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, place, values, axis=1)
        evidence = np.full_like(inputs, NO_EVIDENCE)
        np.put_along_axis(evidence, place, np.broadcast_to(1 + 2 * np.arange(n), place.shape), axis=1)
        return Rows(inputs, targets, evidence=evidence)

    def baselines(self) -> dict[str, float]:
        """``chance``: any value; ``own_value``: any value of the row, the mean over the keys that are asked."""
        values = self.vocab_size - self.vocab_size // 2
        return {"chance": 1 / values, "own_value": self.mean_over_test([1 / size.n_pairs for size in self.test])}


_SIZE = ("length", "n_pairs", "n_rows")

PRESETS = (
    Preset("mqar_small", "mqar", {
        "vocab_size": 256, "fresh": True, "train": sizes(_SIZE, (64, 8, 20_000)),
        "test": sizes(_SIZE, (64, 8, 512), (128, 16, 256), (256, 32, 128)),
    }),
    Preset("mqar_based", "mqar", {
        "vocab_size": 8192,
        "train": sizes(_SIZE, (64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "test": sizes(
            _SIZE,
            (64, 4, 1_000), (64, 8, 1_000), (64, 16, 1_000), (128, 32, 1_000), (256, 64, 1_000), (512, 128, 1_000),
            (1024, 256, 1_000),
        ),
    }),
)
