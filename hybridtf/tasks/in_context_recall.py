"""``in_context_recall``: pairs of a key and a value in random order; a key that came before must give its value again.

Each row has a table of its own, one value a key, both drawn evenly. A row is a sequence of pairs whose keys are drawn evenly;
where a key was already there, the model must say its value. The last pair always repeats a key. With ``vocab_size = 8`` and
``length = 12`` a row may be

    inputs    1 5  3 4  1 5  0 7  3 4  1 5
    targets   . .  . .  5 .  . .  4 .  5 .       (. is not scored)

With ``noise`` that share of the pairs (never the last, and one other) is two tokens of ``n_noise`` ids that mean nothing.
``queries = "last"`` scores the last pair alone: the associative recall of H3 (Fu et al., https://arxiv.org/abs/2212.14052).
``train_on = "all"`` trains on every next token, as MAD does (Poli et al., https://arxiv.org/abs/2403.17844); rows that are
held out score answers alone.

Ids: keys are below (V - n_noise) / 2, values below V - n_noise, then the noise. The measure is accuracy over the answers
(MAD's own is a mean over classes, which weighs rare values more; with values drawn evenly the two agree up to chance).
``chance`` is one in as many as there are values; ``own_value`` a value of the row.

Sizes of MAD: 16 ids, 128 tokens, 12,800 rows for 200 epochs, 1,280 to test, two pairs of mixer and SwiGLU of d_model 128,
batches of 128, AdamW, learning rates 1e-4, 5e-4, 1e-3, weight decay 0 or 0.1. Presets: ``mad_in_context_recall``,
``mad_noisy_recall`` (16 more ids of noise, a fifth of the pairs), ``associative_recall`` (Fu et al.: 20 ids and 20 tokens),
and ``in_context_recall_small``.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import IGNORE, NO_EVIDENCE
from hybridtf.tasks.draws import Draws, Longs, first_of_their_kind, last_places
from hybridtf.tasks.synthetic import TRAIN, Rows, RowsOf, SyntheticConfig, next_tokens, sizes

_TABLE, _KEYS, _NOISE, _WHERE, _PROBE = range(5)


class InContextRecallConfig(SyntheticConfig):
    """Say the value of a key that came before."""

    type: Literal["in_context_recall"] = "in_context_recall"
    length_step: ClassVar[int] = 2
    vocab_size: int = Field(default=16, ge=4)
    n_noise: int = Field(default=0, ge=0)
    """Ids of the vocabulary that are noise."""
    noise: float = Field(default=0.0, ge=0, lt=1, examples=[0.25])
    """Share of the pairs that are noise."""
    queries: Literal["all", "last"] = "all"
    train_on: Literal["answers", "all"] = "answers"
    train: tuple[RowsOf, ...] = (RowsOf(length=128, n_rows=12_800),)
    test: tuple[RowsOf, ...] = (RowsOf(length=128, n_rows=1_280),)

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if self.vocab_size - self.n_noise < 4:
            raise ValueError(f"vocab_size = {self.vocab_size} less n_noise = {self.n_noise} leaves no two keys and two values")
        if self.noise and not self.n_noise:
            raise ValueError(f"noise = {self.noise} needs ids: set n_noise")
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length % 2 or size.length < 4:
                    raise ValueError(f"{where}[{i}].length = {size.length}; two pairs or more need an even length from 4 on")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            vocab_size=10, n_noise=2, train=(RowsOf(length=12, n_rows=40),),
            test=(RowsOf(length=12, n_rows=16), RowsOf(length=16, n_rows=10)),
        )

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    @property
    def n_keys(self) -> int:
        return (self.vocab_size - self.n_noise) // 2

    @property
    def n_values(self) -> int:
        return self.vocab_size - self.n_noise - self.n_keys

    def bits(self, size: RowsOf) -> float:
        pairs = math.floor((size.length // 2 - 1) * (1 - self.noise))
        return pairs * math.log2(self.n_keys) + min(pairs, self.n_keys) * math.log2(self.n_values) / 2

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        n, split = size.length // 2, key[0]
        key = (*key, self.vocab_size, size.length)
        table = self.n_keys + Draws((*key, _TABLE), index).integers(self.n_keys, self.n_values)
        keys = Draws((*key, _KEYS), index).integers(n, self.n_keys)
        where = Draws((*key, _WHERE), index)
        noisy = where.uniform(n) < self.noise
        row = np.arange(len(index))
        noisy[row, where.integers(n, n - 1)[:, -1]] = False  # one pair at least is there to be asked for
        noisy[:, -1] = False
        # The last key is one of those that were there: the first of them behind a place that is drawn.
        turn = Draws((*key, _PROBE), index).uniform(n - 1)
        shown = first_of_their_kind(np.where(noisy, self.n_keys + np.arange(n), keys))[:, :-1] & ~noisy[:, :-1]
        keys[:, -1] = keys[row, np.where(shown, turn, -1.0).argmax(1)]
        before = last_places(np.where(noisy, self.n_keys + np.arange(n), keys))
        repeats = before >= 0
        pairs = np.stack([keys, np.take_along_axis(table, keys, axis=1)], axis=-1)
        if self.noise:
            ids = self.vocab_size - self.n_noise + Draws((*key, _NOISE), index).integers(2 * n, self.n_noise)
            pairs = np.where(noisy[..., None], ids.reshape(pairs.shape), pairs)
        inputs = pairs.reshape(len(index), 2 * n)
        if self.train_on == "all" and split == TRAIN:
            return Rows(inputs, next_tokens(inputs))
        if self.queries == "last":
            repeats[:, :-1] = False
        targets = np.full_like(inputs, IGNORE)
        targets[:, ::2] = np.where(repeats, pairs[..., 1], IGNORE)
        evidence = np.full_like(inputs, NO_EVIDENCE)
        evidence[:, ::2] = np.where(repeats, 2 * before + 1, NO_EVIDENCE)
        return Rows(inputs, targets, evidence=evidence)

    def baselines(self) -> dict[str, float]:
        """``chance``: any value; ``own_value``: any value of the row's table, where all keys have come."""
        seen = self.n_values * (1 - (1 - 1 / self.n_values) ** self.n_keys)  # different values of a table, on average
        return {"chance": 1 / self.n_values, "own_value": 1 / seen}


_SIZE = ("length", "n_rows")
_MAD = {"fresh": False, "train_on": "all", "train": sizes(_SIZE, (128, 12_800)), "test": sizes(_SIZE, (128, 1_280))}

PRESETS = (
    Preset("mad_in_context_recall", "in_context_recall", {**_MAD, "vocab_size": 16}),
    Preset("mad_noisy_recall", "in_context_recall", {**_MAD, "vocab_size": 32, "n_noise": 16, "noise": 0.2}),
    Preset("associative_recall", "in_context_recall", {
        "vocab_size": 20, "queries": "last", "train": sizes(_SIZE, (20, 5_000)), "test": sizes(_SIZE, (20, 500)),
    }),
    Preset("in_context_recall_small", "in_context_recall", {
        "vocab_size": 32, "train": sizes(_SIZE, (64, 20_000)), "test": sizes(_SIZE, (64, 512), (128, 256), (256, 128)),
    }),
)
