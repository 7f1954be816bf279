"""``copying``: say a string again (Jelassi, Brandfonbrener, Kakade and Malach, *Repeat after me*,
https://arxiv.org/abs/2402.01032).

``form = "whole"``: a string of letters stands between ``$`` and ``|``, and is to be said again, then ``.``:

    inputs    $ c a d b | c a d b
    targets   . . . . . c a d b .        (. on its own is the sign that ends a row; the first five are not scored)

``form = "suffix"``: behind ``|`` stands an n-gram of the string, and what follows it is to be said, to the end of the string;
``"prefix"``: the n-gram stands before the string, so that it is known what will be asked. With ``n_gram = 2``:

    inputs    $ c a d b a | a d b a      suffix: the n-gram is a d, the answer b a
    targets   - - - - - - - - b a .      (- is not scored)

    inputs    $ a d | c a d b a | b a    prefix
    targets   - - - - - - - - - b a .

Strings are drawn evenly. The n-gram is any that stands once in its string and has a letter behind it; a string that has none
is drawn again. ``n_answer`` asks for so many letters at most. ``length`` counts the letters of the string; a row of n letters
has 2 n + 2 tokens, with n-grams up to 2 n + 2 (suffix) or 2 n + 3 (prefix).

Ids: letters are below V = ``n_letters``, then ``$``, ``|`` and ``.``. The measure is ``row_accuracy``, the share of answers
that are right as a whole; ``chance`` says any letters, and the end where it is.

Sizes of the paper: 26 letters, strings of 5 to 20 letters to train on, 2,000 steps, AdamW with weight decay 0.1, learning rate
1e-5, 12 layers of d_model 1024; tested to 1,000 letters, by the share of strings that are right as a whole. Presets:
``copying_paper``, ``suffix_lookup_small``, ``prefix_lookup_small`` and ``copying_small`` (4 to 16 letters, tested to 64).
"""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.draws import Draws, Longs, first_places
from hybridtf.tasks.layout import Piece, sign, written
from hybridtf.tasks.synthetic import TEST, Rows, SyntheticConfig, VaryingRows, WholeRowTask, sizes

_LETTERS, _LENGTHS, _PLACE = range(3)


class StringRows(VaryingRows):
    """``n_rows`` rows whose strings have ``min_length`` to ``length`` letters."""

    @property
    def name(self) -> str:
        return f"{self.length} letters" if self.min_length is None else f"{self.min_length} to {self.length} letters"


class CopyingConfig(SyntheticConfig):
    """Say a string again, or what follows an n-gram in it."""

    type: Literal["copying"] = "copying"
    n_letters: int = Field(default=26, ge=2)
    form: Literal["whole", "prefix", "suffix"] = "whole"
    n_gram: int = Field(default=3, gt=0)
    """Letters of the n-gram; for the forms that look one up."""
    n_answer: int | None = Field(default=None, gt=0)
    """Letters that are asked for at most; None: all to the end of the string."""
    train: tuple[StringRows, ...] = (StringRows(length=20, min_length=5, n_rows=100_000),)
    test: tuple[StringRows, ...] = (StringRows(length=20, n_rows=500), StringRows(length=50, n_rows=200))

    @model_validator(mode="after")
    def _strings_have_n_grams(self) -> Self:
        if self.form == "whole":
            return self
        n_grams = self.n_letters**self.n_gram
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.shortest <= self.n_gram:
                    raise ValueError(f"{where}[{i}]: strings of {size.shortest} letters have nothing behind {self.n_gram}")
                if size.length > n_grams:
                    raise ValueError(
                        f"{where}[{i}].length = {size.length}: of {n_grams} n-grams few would stand once; take a longer n_gram"
                    )
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_letters=6, train=(StringRows(length=9, min_length=5, n_rows=40),),
            test=(StringRows(length=9, n_rows=12), StringRows(length=13, n_rows=9)),
        )

    def load(self, seed: int = 0) -> WholeRowTask:
        return WholeRowTask(self, seed)

    @property
    def n_ids(self) -> int:
        return self.n_letters + 3

    def n_tokens(self, size: StringRows) -> int:
        answer = size.length if self.n_answer is None else min(size.length, self.n_answer)
        if self.form == "whole":
            return size.length + answer + 2
        read = size.length + self.n_gram + (2 if self.form == "suffix" else 3)
        return read + min(answer, size.length - self.n_gram)

    def scored(self, size: StringRows, split: int = TEST) -> float:
        if self.form != "whole":
            return super().scored(size, split)
        answers = np.arange(size.shortest, size.length + 1).clip(max=self.n_answer or size.length)
        return float(answers.mean()) + 1

    def bits(self, size: StringRows) -> float:
        return size.shortest * math.log2(self.n_letters)

    def draw(self, size: StringRows, key: tuple[int, ...], index: Longs) -> Rows:
        b, n = len(index), size.length
        key = (*key, self.n_letters, n)
        lengths = np.full(b, n)
        if size.min_length is not None:
            lengths = size.min_length + Draws((*key, _LENGTHS), index).integers(1, n - size.min_length + 1)[:, 0]
        text = Draws((*key, _LETTERS), index).integers(n, self.n_letters)
        begin, end, stop = (sign(self.n_letters + i, b) for i in range(3))
        stop = Piece(stop.tokens, scored=True)
        string = Piece(text, None if size.min_length is None else lengths)
        if self.form == "whole":
            answer = self._answer(text, np.zeros(b, dtype=np.int64), lengths, 1, fixed=size.min_length is None)
            return written([begin, string, end, answer, stop], self.n_tokens(size))
        text, place = self._looked_up(key, index, text, lengths)
        n_gram = Piece(np.take_along_axis(text, place[:, None] + np.arange(self.n_gram), axis=1))
        string = Piece(text, string.sizes)
        before = 1 if self.form == "suffix" else 2 + self.n_gram
        answer = self._answer(text, place + self.n_gram, lengths, before)
        if self.form == "suffix":
            return written([begin, string, end, n_gram, answer, stop], self.n_tokens(size))
        return written([begin, n_gram, end, string, end, answer, stop], self.n_tokens(size))

    def _answer(self, text: Longs, start: Longs, lengths: Longs, before: int, *, fixed: bool = False) -> Piece:
        """The letters from ``start`` (b) on, to the end of the string, which the row shows behind ``before`` tokens; ``fixed``:
        as many in all rows."""
        most = text.shape[1] if self.n_answer is None else min(self.n_answer, text.shape[1])
        places = (start[:, None] + np.arange(most)).clip(max=text.shape[1] - 1)
        sizes = None if fixed else np.minimum(lengths - start, most)
        return Piece(np.take_along_axis(text, places, axis=1), sizes, True, before + places)

    def _looked_up(self, key: tuple[int, ...], index: Longs, text: Longs, lengths: Longs) -> tuple[Longs, Longs]:
        """``text``, where strings without an n-gram that stands once are drawn again; (b) where the n-gram begins."""
        text, again = text.copy(), 0
        turn = Draws((*key, _PLACE), index).uniform(text.shape[1])
        while True:
            can = self._unique(text, lengths)
            wrong = np.flatnonzero(~can.any(1))
            if not len(wrong):
                return text, np.where(can, turn[:, : can.shape[1]], -1.0).argmax(1)
            again += 1
            text[wrong] = Draws((*key, _LETTERS, again), index[wrong]).integers(text.shape[1], self.n_letters)

    def _unique(self, text: Longs, lengths: Longs) -> Longs:
        """(b n) whether the n-gram that begins there stands once in its string, and has a letter behind it."""
        n = text.shape[1] - self.n_gram + 1
        inside = np.arange(n) + self.n_gram <= lengths[:, None]
        # One n-gram after the other gets the number of its first place; so numbers stay small whatever n_gram is.
        number = text[:, :n]
        for i in range(1, self.n_gram):
            number = first_places(number * self.n_letters + text[:, i : i + n])
        number = np.where(inside, number, -1 - np.arange(n))
        last = number.shape[1] - 1 - first_places(number[:, ::-1])[:, ::-1]
        once = (first_places(number) == np.arange(n)) & (last == np.arange(n))
        return np.asarray(once & (np.arange(n) + self.n_gram < lengths[:, None]))

    def baselines(self) -> dict[str, float]:
        """``chance``: any letters, and the end where it is."""
        return {"chance": self.guessed_rows(1 / self.n_letters, sure=1)}


_SIZE = ("length", "min_length", "n_rows")
_TEST = ("length", "n_rows")
_LOOKUP = {
    "n_letters": 26, "n_gram": 2, "n_answer": 4, "train": sizes(_SIZE, (16, 8, 20_000)),
    "test": sizes(_TEST, (16, 256), (32, 256), (64, 128)),
}

PRESETS = (
    Preset("copying_paper", "copying", {
        "n_letters": 26, "form": "whole",
        "train": sizes(_SIZE, (20, 5, 100_000)),
        "test": sizes(_TEST, (20, 500), (50, 500), (100, 200), (300, 100), (1000, 64)),
    }),
    Preset("copying_small", "copying", {
        "n_letters": 26, "form": "whole",
        "train": sizes(_SIZE, (16, 4, 20_000)), "test": sizes(_TEST, (16, 256), (24, 256), (32, 256), (64, 128)),
    }),
    Preset("prefix_lookup_small", "copying", {"form": "prefix", **_LOOKUP}),
    Preset("suffix_lookup_small", "copying", {"form": "suffix", **_LOOKUP}),
)
