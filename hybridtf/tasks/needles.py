"""``needles``: values of keys that lie in a long filler (Hsieh et al., *RULER*, https://arxiv.org/abs/2404.06654, over
tokens).

A needle is a key and a value behind it; between needles lies filler. At the end stands ``?``, then ``n_queries`` keys one
after the other, and behind each the values that it has in the row must be said, in their order. With keys of one token (a b),
numbers of two digits and dots for the filler a row may be

    inputs    . . b 4 0 . . . . a 1 7 . ? b 4         n_keys 2
    targets   - - - - - - - - - - - - - - 4 0         (- is not scored)

    inputs    . a 9 3 . . . a 2 2 . ? a 9 3 2         n_values 2: a has two values
    targets   - - - - - - - - - - - - 9 3 2 2

Each arrangement of the needles is as likely. With ``depth`` the needle that is asked for lies at that share of what comes
before the question (0: first, 1: last), counted in needles and tokens of filler: a size of its own for every depth.

Ids: digits 0 to 9; then ``n_key_ids`` tokens of keys, a key being ``n_key`` of them, the keys of a row all different; ``?`` is
V - 1 and those between are filler. ``filler = "random"`` draws it evenly, ``"repeated"`` says the same sentence (all filler
tokens in their order) again and again. The measure is accuracy over digits, the digits before being given; ``chance`` is 1 /
10.

Sizes of RULER: one needle of 7 digits (``niah_single``), 4 keys of which one is asked (``niah_multikey``), one key of 4 values
(``niah_multivalue``), 4 keys that are all asked (``niah_multiquery``), 4,096 to 131,072 tokens, 500 rows a length, in words.
Presets: those four, trained on 4,096 tokens and tested to 16,384; ``passkey_small`` (64 ids, one key, 3 digits, trained on 96
tokens and tested to 4,096 at five depths) and ``needles_small`` (4 keys that are all asked, trained on 128 tokens).
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import NO_EVIDENCE, Totals
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.layout import asked, put, shared_out, spelled, strewn
from hybridtf.tasks.synthetic import TEST, TRAIN, Rows, RowsOf, SyntheticConfig, SyntheticTask, sizes

_FILLER, _KEYS, _DIGITS, _PLACES, _OWNERS = range(5)
_MOST_KEYS = 2**32
"""What ``Draws`` can tell apart."""


class NeedleRows(RowsOf):
    """``n_rows`` rows of ``length`` tokens, with ``n_values`` needles for each of ``n_keys`` keys."""

    n_keys: int = Field(default=1, gt=0)
    n_values: int = Field(default=1, gt=0)
    n_queries: int = Field(default=1, gt=0)
    """Keys that are asked for."""
    depth: float | None = Field(default=None, ge=0, le=1, examples=[0.5])
    """Where the needle that is asked for lies, 0 to 1; None: anywhere."""

    @property
    def name(self) -> str:
        counts = [(self.n_keys, "keys"), (self.n_values, "values"), (self.n_queries, "queries")]
        said = [f"{n} {what}" for n, what in counts if n > 1] + ([] if self.depth is None else [f"depth {self.depth:g}"])
        return ", ".join([f"{self.length} tokens", *said])

    @property
    def n_needles(self) -> int:
        return self.n_keys * self.n_values

    @model_validator(mode="after")
    def _asked_for_one(self) -> Self:
        if self.n_queries > self.n_keys:
            raise ValueError(f"n_queries = {self.n_queries} is above n_keys = {self.n_keys}")
        if self.depth is not None and self.n_queries * self.n_values > 1:
            raise ValueError("depth is of one needle: it needs n_queries = 1 and n_values = 1")
        return self


class NeedlesConfig(SyntheticConfig):
    """Say the values of keys that lie in filler."""

    type: Literal["needles"] = "needles"
    vocab_size: int = Field(default=64, ge=13)
    n_key_ids: int = Field(default=1, gt=0)
    """Ids that keys are made of."""
    n_key: int = Field(default=1, gt=0)
    """Tokens of a key."""
    n_digits: int = Field(default=3, gt=0)
    filler: Literal["random", "repeated"] = "random"
    train_on: Literal["answers", "all"] = "answers"
    """``all``: training rows have every next token as a target. Held-out rows score answers alone."""
    train: tuple[NeedleRows, ...] = (NeedleRows(length=96, n_rows=20_000),)
    test: tuple[NeedleRows, ...] = (NeedleRows(length=96, n_rows=500),)

    @model_validator(mode="after")
    def _needles_fit(self) -> Self:
        keys = self.n_key_ids**self.n_key
        if self.n_filler < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}: 10 digits, n_key_ids = {self.n_key_ids} and ? leave no filler")
        if keys > _MOST_KEYS:
            raise ValueError(f"n_key_ids = {self.n_key_ids}, n_key = {self.n_key}: more than 2^32 keys")
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                least = size.length - self._room(size) + size.n_needles * self._needle
                if size.length < least:
                    raise ValueError(f"{where}[{i}].length = {size.length}; needles and questions take {least}")
                if size.n_keys > keys:
                    raise ValueError(f"{where}[{i}].n_keys = {size.n_keys}; there are {keys} (n_key_ids, n_key)")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_digits=2, train=(NeedleRows(length=20, n_rows=40),),
            test=(NeedleRows(length=20, n_rows=12), NeedleRows(length=30, n_rows=9, depth=0.5)),
        )

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    @property
    def n_filler(self) -> int:
        """Ids of the filler."""
        return self.vocab_size - 11 - self.n_key_ids

    @property
    def _needle(self) -> int:
        """Tokens of a needle."""
        return self.n_key + self.n_digits

    def _room(self, size: NeedleRows) -> int:
        """Tokens before the question."""
        return size.length - size.n_queries * (self.n_key + size.n_values * self.n_digits)

    def scored(self, size: NeedleRows, split: int = TEST) -> float:
        if self.train_on == "all" and split == TRAIN:
            return size.length
        return size.n_queries * size.n_values * self.n_digits

    def bits(self, size: NeedleRows) -> float:
        filler = self._room(size) - size.n_needles * self._needle
        digits = size.n_needles * self.n_digits * math.log2(10)
        return digits + (filler * math.log2(self.n_filler) if self.filler == "random" else 0)

    def draw(self, size: NeedleRows, key: tuple[int, ...], index: Longs) -> Rows:
        b, n, room = len(index), size.n_keys, self._room(size)
        key = (*key, self.vocab_size, size.length, n, size.n_values)
        starts, of_key = self._places(size, key, index)
        numbers = Draws((*key, _KEYS), index).distinct(n, self.n_key_ids**self.n_key)
        keys = 10 + spelled(numbers, self.n_key_ids, self.n_key)
        digits = Draws((*key, _DIGITS), index).integers(size.n_needles * self.n_digits, 10)
        values = digits.reshape(b, n, size.n_values, self.n_digits)
        needles = np.concatenate([np.broadcast_to(keys[:, :, None], (*values.shape[:3], self.n_key)), values], axis=3)

        tokens = np.empty((b, size.length + 1), dtype=np.int64)
        tokens[:, :room] = self._filler(key, index, room)
        begin = np.take_along_axis(starts, of_key.reshape(b, -1), axis=1)
        put(tokens, begin, needles.reshape(b, -1, self._needle))
        answers = np.concatenate([keys[..., None, :], values.reshape(b, n, 1, -1)], axis=3)[:, : size.n_queries]
        tokens[:, room] = self.vocab_size - 1
        tokens[:, room + 1 :] = answers.reshape(b, -1)
        scored = np.zeros(tokens.shape, dtype=np.bool_)
        scored[:, room + 1 :] = np.tile(np.arange(answers.shape[-1]) >= self.n_key, size.n_queries)
        shown = np.full_like(tokens, NO_EVIDENCE)
        digit = (begin.reshape(b, n, -1, 1) + self.n_key + np.arange(self.n_digits)).reshape(b, n, -1)[:, : size.n_queries]
        shown[:, room + 1 :] = np.pad(digit, ((0, 0), (0, 0), (self.n_key, 0)), constant_values=NO_EVIDENCE).reshape(b, -1)
        if self.train_on == "all" and key[0] == TRAIN:
            return asked(tokens, np.ones_like(scored), shown=shown)
        place = np.maximum(np.arange(scored.shape[1]) - room - 1, 0)  # among what is asked
        query, within = place // answers.shape[-1], place % answers.shape[-1] - self.n_key
        of = query * size.n_values + np.maximum(within, 0) // self.n_digits
        return asked(tokens, scored, shown=shown, answers=np.broadcast_to(of, scored.shape))

    def _places(self, size: NeedleRows, key: tuple[int, ...], index: Longs) -> tuple[Longs, Longs]:
        """(b needles) where needles begin, rising; (b keys values) which of them belong to each key, rising.

        The first keys are those that are asked for.
        """
        m, room = size.n_needles, self._room(size)
        places = Draws((*key, _PLACES), index)
        of_key = shared_out(Draws((*key, _OWNERS), index), size.n_keys, size.n_values)
        if size.depth is None:
            return strewn(places, m, self._needle, room), of_key
        units = room - m * (self._needle - 1)  # needles and tokens of filler
        asked_for = round(size.depth * (units - 1))
        others = places.distinct(m - 1, units - 1)
        others += others >= asked_for
        found = np.concatenate([np.full((len(index), 1), asked_for), others], axis=1)
        rank = (others < asked_for).sum(1)  # of the needle that is asked for, in the row
        swap = of_key[:, 0, 0].copy()  # whoever has this place takes the first key's
        of_key = np.where(of_key == rank[:, None, None], swap[:, None, None], of_key)
        of_key[:, 0, 0] = rank
        return np.sort(found, axis=1) + np.arange(m) * (self._needle - 1), of_key

    def _filler(self, key: tuple[int, ...], index: Longs, n: int) -> Longs:
        """(b n) filler."""
        if self.filler == "random":
            return 10 + self.n_key_ids + Draws((*key, _FILLER), index).integers(n, self.n_filler)
        return np.broadcast_to(10 + self.n_key_ids + np.arange(n) % self.n_filler, (len(index), n))

    def baselines(self) -> dict[str, float]:
        """``chance``: any digit."""
        return {"chance": 0.1}

    def load(self, seed: int = 0) -> NeedlesTask:
        return NeedlesTask(self, seed)


class NeedlesTask(SyntheticTask):
    """See :class:`NeedlesConfig`."""

    def metrics(self, totals: Totals) -> dict[str, float]:
        """``answer_accuracy`` too, the share of values of which all digits are right."""
        return {**super().metrics(totals), "answer_accuracy": totals.answer_accuracy}


_SIZE = ("length", "n_keys", "n_values", "n_queries", "n_rows")


def _ruler(name: str, filler: str, *counts: int) -> Preset:
    """A preset of RULER's sizes; ``counts``: keys, values, queries."""
    return Preset(name, "needles", {
        "vocab_size": 256, "n_key_ids": 100, "n_key": 1, "n_digits": 7, "filler": filler,
        "train": sizes(_SIZE, (4096, *counts, 20_000)),
        "test": sizes(_SIZE, (4096, *counts, 500), (8192, *counts, 200), (16_384, *counts, 100)),
    })


_DEPTHS = [
    {"length": length, "depth": depth, "n_rows": n_rows}
    for length, n_rows in ((96, 64), (192, 64), (384, 64), (768, 64), (1536, 32), (4096, 16))
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
]

PRESETS = (
    _ruler("niah_single", "repeated", 1, 1, 1),
    _ruler("niah_multikey", "random", 4, 1, 1),
    _ruler("niah_multivalue", "random", 1, 4, 1),
    _ruler("niah_multiquery", "random", 4, 1, 4),
    Preset("needles_small", "needles", {
        "vocab_size": 64, "n_key_ids": 20, "n_key": 1, "n_digits": 1, "filler": "random",
        "train": sizes(_SIZE, (128, 4, 1, 4, 20_000)),
        "test": sizes(_SIZE, (128, 4, 1, 4, 256), (256, 4, 1, 4, 128), (512, 4, 1, 4, 64), (512, 8, 1, 4, 64)),
    }),
    Preset("passkey_small", "needles", {
        "vocab_size": 64, "n_key_ids": 1, "n_key": 1, "n_digits": 3, "filler": "random",
        "train": sizes(("length", "n_rows"), (96, 20_000)), "test": _DEPTHS,
    }),
)
