"""``phonebook``: the number of a name, in a list of names and numbers (Jelassi et al., *Repeat after me*,
https://arxiv.org/abs/2402.01032, section 4).

A row is a list of entries, each a name of ``n_name`` tokens, a number of ``n_digits`` and ``;``. Then comes ``?``, then
``n_shots`` entries once more, as examples of how to answer, then ``n_queries`` names whose digits must be said. With the
letters a b c d, names of two of them, numbers of three digits and one example a row may be

    inputs    a c 4 0 7 ;  d d 1 9 9 ;  b a 3 0 5 ;  ?  b a 3 0 5 ;  a c 4 0
    targets   . . . . . .  . . . . . .  . . . . . .  .  . . . . . .  . 4 0 7      (. is not scored)

Names of a row are all different, digits are drawn evenly, and what is asked, examples included, is any choice of the entries,
each once. ``length`` counts entries.

Ids: digits 0 to 9, then ``n_letters`` tokens of names, then ``;`` and ``?``. The measure is ``row_accuracy``: all
digits that a row asks for are right; ``chance`` says any digits.

Sizes of the paper: numbers of 10 digits, two examples, up to some hundred entries, for language models that were not trained
on it; Samba (https://arxiv.org/abs/2406.07522) trains on 20 to 480 entries. Presets: ``phonebook_paper`` (those figures, names
of two tokens) and ``phonebook_small`` (2 to 8 entries, numbers of 3 digits, tested to 32 entries).
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.layout import Piece, sign, spelled, written
from hybridtf.tasks.synthetic import TEST, Rows, SyntheticConfig, VaryingRows, WholeRowTask, sizes

_NAMES, _DIGITS, _LENGTHS, _ASKED = range(4)
_MOST_NAMES = 2**32
"""What ``Draws`` can tell apart."""


class EntryRows(VaryingRows):
    """``n_rows`` rows of ``min_length`` to ``length`` entries."""

    @property
    def name(self) -> str:
        return f"{self.length} entries" if self.min_length is None else f"{self.min_length} to {self.length} entries"


class PhonebookConfig(SyntheticConfig):
    """Say the numbers of names in a list."""

    type: Literal["phonebook"] = "phonebook"
    n_letters: int = Field(default=26, ge=2)
    n_name: int = Field(default=2, gt=0)
    """Tokens of a name."""
    n_digits: int = Field(default=10, gt=0)
    n_shots: int = Field(default=0, ge=0)
    n_queries: int = Field(default=1, gt=0)
    train: tuple[EntryRows, ...] = (EntryRows(length=40, min_length=20, n_rows=50_000),)
    test: tuple[EntryRows, ...] = (EntryRows(length=40, n_rows=500),)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = self.n_letters**self.n_name
        if names > _MOST_NAMES:
            raise ValueError(f"n_letters = {self.n_letters}, n_name = {self.n_name}: more than 2^32 names")
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length > names:
                    raise ValueError(f"{where}[{i}].length = {size.length}: there are only {names} names")
                if size.shortest < self.n_shots + self.n_queries:
                    raise ValueError(
                        f"{where}[{i}]: {size.shortest} entries, of which n_shots + n_queries = "
                        f"{self.n_shots + self.n_queries} are asked for"
                    )
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_digits=2, n_shots=1, n_queries=2, train=(EntryRows(length=5, min_length=3, n_rows=40),),
            test=(EntryRows(length=5, n_rows=12), EntryRows(length=7, n_rows=9)),
        )

    def load(self, seed: int = 0) -> WholeRowTask:
        return WholeRowTask(self, seed)

    @property
    def n_ids(self) -> int:
        return 10 + self.n_letters + 2

    @property
    def _entry(self) -> int:
        """Tokens of an entry."""
        return self.n_name + self.n_digits + 1

    def n_tokens(self, size: EntryRows) -> int:
        return (size.length + self.n_shots + self.n_queries) * self._entry - 1  # the last digit is not read, nor ``;`` said

    def scored(self, size: EntryRows, split: int = TEST) -> float:
        return self.n_queries * self.n_digits

    def bits(self, size: EntryRows) -> float:
        return size.shortest * self.n_digits * math.log2(10)

    def draw(self, size: EntryRows, key: tuple[int, ...], index: Longs) -> Rows:
        b, n = len(index), size.length
        key = (*key, self.n_letters, self.n_name, self.n_digits, n)
        names = 10 + spelled(Draws((*key, _NAMES), index).distinct(n, self.n_letters**self.n_name), self.n_letters, self.n_name)
        numbers = Draws((*key, _DIGITS), index).integers(n * self.n_digits, 10).reshape(b, n, self.n_digits)
        closed = np.full((b, n, 1), 10 + self.n_letters)
        entries = np.concatenate([names, numbers, closed], axis=2)
        lengths = np.full(b, n)
        if size.min_length is not None:
            lengths = size.min_length + Draws((*key, _LENGTHS), index).integers(1, n - size.min_length + 1)[:, 0]
        # Which are asked: the first of an order of the row's own entries.
        turn = np.where(np.arange(n) < lengths[:, None], Draws((*key, _ASKED), index).uniform(n), 2.0)
        places = np.argsort(turn, axis=1, kind="stable")[:, : self.n_shots + self.n_queries]
        again = np.take_along_axis(entries, places[..., None], axis=1)
        listed = Piece(entries.reshape(b, -1), None if size.min_length is None else lengths * self._entry)
        shots = Piece(again[:, : self.n_shots].reshape(b, -1))
        queries: list[Piece] = []
        for i in range(self.n_shots, self.n_shots + self.n_queries):
            name, number, end = np.split(again[:, i], [self.n_name, self._entry - 1], axis=1)
            shown = places[:, i, None] * self._entry + self.n_name + np.arange(self.n_digits)
            queries += [Piece(name), Piece(number, scored=True, shown=shown), Piece(end)]
        return written([listed, sign(self.n_ids - 1, b), shots, *queries[:-1]], self.n_tokens(size))

    def baselines(self) -> dict[str, float]:
        """``chance``: any digits."""
        return {"chance": self.guessed_rows(0.1)}


_SIZE = ("length", "min_length", "n_rows")
_TEST = ("length", "n_rows")

PRESETS = (
    Preset("phonebook_paper", "phonebook", {
        "n_shots": 2, "n_queries": 1, "train": sizes(_SIZE, (160, 20, 50_000)),
        "test": sizes(_TEST, (20, 200), (80, 200), (160, 200), (320, 100), (480, 100)),
    }),
    Preset("phonebook_small", "phonebook", {
        "n_digits": 3, "n_shots": 0, "n_queries": 1, "train": sizes(_SIZE, (8, 2, 20_000)),
        "test": sizes(_TEST, (8, 256), (16, 256), (32, 128)),
    }),
)
