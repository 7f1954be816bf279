"""``variable_tracking``: what is a variable's value, through a chain of assignments? (Hsieh et al., *RULER*,
https://arxiv.org/abs/2404.06654, over tokens.)

A chain begins with a variable that is set to a value, and every further one is set to the one before it; ``n_chains`` chains
of ``n_hops`` further variables lie interleaved in filler, each in its own order. All variables and all values of a row differ.
With ``ask = "value"`` the last variable of one chain is named and its value must be said; with ``"variables"`` (RULER's) the
value is named and all variables of its chain must be said, in their order. With variables a b c d, values 1 2 and dots for the
filler a row of two chains and one hop may be

    inputs    . a = 2 . . c = 1 . d = a . . b = c . ? d        value
    targets   - - - - - - - - - - - - - - - - - - - - 2        (- is not scored)

    inputs    . a = 2 . . c = 1 . d = a . . b = c . ? 2 a      variables
    targets   - - - - - - - - - - - - - - - - - - - - a d

``n_asked`` names more variables behind the first, each with its value to be said: rows that are trained on teach more so, and
rows of one and of several can be tested alike.

Ids: ``=``, ``?``, then ``n_variables`` variables, ``n_values`` values and filler up to V = ``vocab_size``, drawn evenly. Every
arrangement of the assignments that keeps the chains' order is as likely. ``chance`` is any value (or variable), ``own`` any
that the row has.

Sizes of RULER: one chain of 4 hops, 4,096 to 131,072 tokens, 500 rows a length. Presets: ``ruler_variable_tracking`` (trained
on 4,096 tokens, tested to 16,384), ``variable_tracking_small`` (two chains of one hop, tested from 96 tokens to 4,096 with
one question; trained on 96 and fewer tokens with four, chains without hops among them).
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.base import NO_EVIDENCE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.layout import asked, put, shared_out, strewn
from hybridtf.tasks.synthetic import TEST, TRAIN, Rows, RowsOf, SyntheticConfig, sizes

_FILLER, _VARIABLES, _VALUES, _PLACES, _CHAINS, _ASKED = range(6)
_IS, _ASK, _NAMES = range(3)
_STATEMENT = 3
"""Tokens of an assignment."""


class ChainRows(RowsOf):
    """``n_rows`` rows of ``length`` tokens, with ``n_chains`` chains of ``n_hops`` variables behind their first."""

    n_chains: int = Field(default=2, gt=0)
    n_hops: int = Field(default=1, ge=0)
    n_asked: int = Field(default=1, gt=0)
    """Variables whose value is asked for, with ``ask = "value"``: the last of a chain, then others of the row in any order."""

    @property
    def name(self) -> str:
        chains, hops = ("" if n == 1 else "s" for n in (self.n_chains, self.n_hops))
        asked = "" if self.n_asked == 1 else f", {self.n_asked} asked"
        return f"{self.length} tokens, {self.n_chains} chain{chains}, {self.n_hops} hop{hops}{asked}"

    @property
    def n_statements(self) -> int:
        return self.n_chains * (self.n_hops + 1)


class VariableTrackingConfig(SyntheticConfig):
    """Say a variable's value through a chain of assignments."""

    type: Literal["variable_tracking"] = "variable_tracking"
    vocab_size: int = Field(default=64, ge=6)
    n_variables: int = Field(default=20, gt=0)
    n_values: int = Field(default=10, gt=1)
    ask: Literal["value", "variables"] = "value"
    train_on: Literal["answers", "all"] = "answers"
    """``all``: training rows have every next token as a target. Held-out rows score answers alone."""
    train: tuple[ChainRows, ...] = (ChainRows(length=96, n_rows=20_000),)
    test: tuple[ChainRows, ...] = (ChainRows(length=96, n_rows=500),)

    @model_validator(mode="after")
    def _chains_fit(self) -> Self:
        if self.n_filler < 1:
            raise ValueError(
                f"vocab_size = {self.vocab_size}: two signs, {self.n_variables} variables and {self.n_values} values leave "
                "no filler"
            )
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.n_asked > (size.n_statements if self.ask == "value" else 1):
                    why = f"the row has {size.n_statements} variables" if self.ask == "value" else "ask = 'variables' asks once"
                    raise ValueError(f"{where}[{i}].n_asked = {size.n_asked}: {why}")
                least = size.length - self._room(size) + _STATEMENT * size.n_statements
                if size.length < least:
                    raise ValueError(f"{where}[{i}].length = {size.length}; assignments and the question take {least}")
                if size.n_statements > self.n_variables or size.n_chains > self.n_values:
                    raise ValueError(
                        f"{where}[{i}]: {size.n_chains} chains of {size.n_hops} hops need {size.n_statements} variables and "
                        f"{size.n_chains} values; there are {self.n_variables} and {self.n_values}"
                    )
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = ChainRows(length=24, n_rows=40)
        return cls(train=(rows,), test=(rows, ChainRows(length=33, n_rows=9)))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    @property
    def n_filler(self) -> int:
        """Ids of the filler."""
        return self.vocab_size - _NAMES - self.n_variables - self.n_values

    def _room(self, size: ChainRows) -> int:
        """Tokens before the question."""
        return size.length - size.n_asked - self._n_answers(size)

    def _n_answers(self, size: ChainRows) -> int:
        return size.n_asked if self.ask == "value" else size.n_hops + 1

    def scored(self, size: ChainRows, split: int = TEST) -> float:
        if self.train_on == "all" and split == TRAIN:
            return size.length
        return self._n_answers(size)

    def bits(self, size: ChainRows) -> float:
        filler = self._room(size) - _STATEMENT * size.n_statements
        names = math.log2(math.perm(self.n_variables, size.n_statements)) + math.log2(math.perm(self.n_values, size.n_chains))
        return names + filler * math.log2(self.n_filler)

    def draw(self, size: ChainRows, key: tuple[int, ...], index: Longs) -> Rows:
        b, n, links, room = len(index), size.n_chains, size.n_hops + 1, self._room(size)
        key = (*key, self.vocab_size, size.length, n, links)
        names = Draws((*key, _VARIABLES), index).distinct(size.n_statements, self.n_variables)
        variables = _NAMES + names.reshape(b, n, links)
        values = _NAMES + self.n_variables + Draws((*key, _VALUES), index).distinct(n, self.n_values)
        right = np.concatenate([values[..., None], variables[..., :-1]], axis=2)  # what each variable is set to
        statements = np.stack([variables, np.full_like(variables, _IS), right], axis=-1)
        starts = strewn(Draws((*key, _PLACES), index), size.n_statements, _STATEMENT, room)
        turns = shared_out(Draws((*key, _CHAINS), index), n, links)

        tokens = np.empty((b, size.length + 1), dtype=np.int64)
        first_filler = _NAMES + self.n_variables + self.n_values
        tokens[:, :room] = first_filler + Draws((*key, _FILLER), index).integers(room, self.n_filler)
        begin = np.take_along_axis(starts, turns.reshape(b, -1), axis=1)
        put(tokens, begin, statements.reshape(b, -1, _STATEMENT))
        tokens[:, room] = _ASK
        tokens[:, room + 1 :], scored, found = self._asked(size, key, index, variables, values, begin)
        shown = np.full_like(tokens, NO_EVIDENCE)
        shown[:, room + 1 :] = found
        if self.train_on == "all" and key[0] == TRAIN:
            return asked(tokens, np.ones(tokens.shape, dtype=np.bool_), shown=shown)
        scored = np.concatenate([np.zeros(room + 1, dtype=np.bool_), scored])
        return asked(tokens, np.broadcast_to(scored, tokens.shape), shown=shown)

    def _asked(
        self, size: ChainRows, key: tuple[int, ...], index: Longs, variables: Longs, values: Longs, begin: Longs
    ) -> tuple[Longs, NDArray[np.bool_], Longs]:
        """What follows the question mark (b m), which of it are answers (m), and where each answer stands (b m): a value on the
        right of its chain's first assignment, a variable on the left of its own. The first chain is asked for, as chains are
        shared out evenly. ``variables`` (b chains links), ``values`` (b chains), ``begin`` (b chains*links) of assignments."""
        b, n, links = variables.shape
        if self.ask == "variables":
            shown = np.concatenate([np.full((b, 1), NO_EVIDENCE), begin[:, :links]], axis=1)
            return np.concatenate([values[:, :1], variables[:, 0]], axis=1), np.arange(size.n_hops + 2) > 0, shown
        last = links - 1  # the place of the first chain's last variable among all of the row
        others = Draws((*key, _ASKED), index).distinct(size.n_asked - 1, n * links - 1)
        turn = np.concatenate([np.full((b, 1), last), others + (others >= last)], axis=1)
        chain = turn // links
        named = np.take_along_axis(variables.reshape(b, -1), turn, axis=1)
        found = np.take_along_axis(values, chain, axis=1)
        first = np.take_along_axis(begin, chain * links, axis=1) + _STATEMENT - 1
        shown = np.stack([np.full_like(first, NO_EVIDENCE), first], axis=2).reshape(b, -1)
        return np.stack([named, found], axis=2).reshape(b, -1), np.arange(2 * size.n_asked) % 2 == 1, shown

    def baselines(self) -> dict[str, float]:
        """``chance``: any value (or variable); ``own``: any that the row has, counted over the test sizes."""
        if self.ask == "value":
            return {"chance": 1 / self.n_values, "own": self.mean_over_test([1 / size.n_chains for size in self.test])}
        return {"chance": 1 / self.n_variables, "own": self.mean_over_test([1 / size.n_statements for size in self.test])}


_SIZE = ("length", "n_chains", "n_hops", "n_rows")

PRESETS = (
    Preset("ruler_variable_tracking", "variable_tracking", {
        "vocab_size": 256, "n_variables": 100, "n_values": 50, "ask": "variables",
        "train": sizes(_SIZE, (4096, 1, 4, 20_000)),
        "test": sizes(_SIZE, (4096, 1, 4, 500), (8192, 1, 4, 200), (16_384, 1, 4, 100)),
    }),
    Preset("variable_tracking_small", "variable_tracking", {
        "vocab_size": 64, "n_variables": 20, "n_values": 10, "ask": "value",
        # Values of names come first, and several a row: one question about a hop a row is too little to begin with.
        "train": sizes((*_SIZE, "n_asked"), (32, 4, 0, 20_000, 4), (64, 2, 1, 20_000, 4), (96, 2, 1, 20_000, 4)),
        "test": sizes(
            _SIZE, (96, 2, 1, 256), (192, 2, 1, 128), (384, 2, 1, 64), (768, 2, 1, 64), (1536, 2, 1, 32), (4096, 2, 1, 32)
        ),
    }),
)
