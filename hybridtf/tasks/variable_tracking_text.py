"""``variable_tracking_text``: which variables have this value, through chains of assignments in a long text? (Hsieh et al.,
*RULER*, https://arxiv.org/abs/2404.06654); ``variable_tracking`` with a tokenizer.

A chain begins with a variable that is set to a number, and every further one is set to the one before it. The assignments of
``n_chains`` chains of ``n_hops`` further variables lie in filler, each chain in its own order; then the number of one chain is
named, and all its variables must be said in their order. With the filler shortened by "..." and one hop a row may be

    Memorize and track the chains of variable assignments hidden in the following text. ... is yellow. VAR QZKLW = 40713. ...
    VAR BOTUA = VAR QZKLW. ... Find all variables that are assigned the value 40713 in the text. They are QZKLW, BOTUA
                                                                                                          -----  ----- scored

Variables are five letters, numbers five digits, all of a row different. ``length`` is the longest row in tokens of the
tokenizer. The measure is ``answer_accuracy``: variables right as a whole, the right ones before them given; ``chance`` is any
name, ``own`` any that the row has.

Sizes of RULER: one chain of 4 hops, 4,096 to 131,072 tokens, 500 rows a length. Presets: ``ruler_variable_tracking_text`` and
``variable_tracking_text_small`` (two chains of one hop in 512 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import model_validator

from hybridtf.core import Preset
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.layout import shared_out
from hybridtf.tasks.needles_text import answers_of
from hybridtf.tasks.synthetic import TEST, sizes
from hybridtf.tasks.text_rows import HaystackConfig, Plan, Texts, names
from hybridtf.tasks.variable_tracking import ChainRows

_NAMES, _NUMBERS, _CHAINS = range(8, 11)
_LETTERS, _DIGITS = 5, 5


class VariableTrackingTextConfig(HaystackConfig):
    """Say the variables that have a value, through chains of assignments in a text."""

    type: Literal["variable_tracking_text"] = "variable_tracking_text"
    train: tuple[ChainRows, ...] = (ChainRows(length=1024, n_rows=20_000),)
    test: tuple[ChainRows, ...] = (ChainRows(length=1024, n_rows=500),)

    @model_validator(mode="after")
    def _asks_for_a_chain(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.n_asked > 1:
                    raise ValueError(f"{where}[{i}].n_asked = {size.n_asked}: a text asks for one chain")
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = ChainRows(length=360, n_rows=40)
        return cls(train=(rows,), test=(rows, ChainRows(length=420, n_rows=5)))

    def scored(self, size: ChainRows, split: int = TEST) -> float:
        if self.tokenizer == "bytes" and (self.train_on == "answers" or split == TEST):
            return (size.n_hops + 1) * (1 + _LETTERS)
        return super().scored(size, split)

    def plan(self, size: ChainRows, key: tuple[int, ...], index: Longs, texts: Texts) -> Plan:
        b, n, links = len(index), size.n_chains, size.n_hops + 1
        key = (*key, size.length, n, links)
        letters = Draws((*key, _NAMES), index).distinct(size.n_statements, 26**_LETTERS)
        numbers = names("numbers", Draws((*key, _NUMBERS), index), n, _DIGITS)
        turns = shared_out(Draws((*key, _CHAINS), index), n, links)  # (b chains links) places of each chain's assignments
        strewn, tails = [], []
        for row, values, places in zip(letters.tolist(), numbers, turns.reshape(b, -1).tolist(), strict=True):
            said = [_name(i) for i in row]
            strewn.append(_assignments(said, values, places, links))
            question = f"\nFind all variables that are assigned the value {values[0]} in the text. They are"
            tails.append([question, f" {said[0]}", *(piece for name in said[1:links] for piece in (",", f" {name}"))])
        head = texts.column("Memorize and track the chains of variable assignments hidden in the following text.\n", b)
        depths = self.depths(key, index, size.n_statements)
        answers = answers_of(links)
        shown = np.full((b, len(answers)), -1)
        shown[:, answers >= 0] = turns.reshape(b, -1)[:, :links]  # a variable's own assignment
        return Plan(head, texts.table(strewn), depths, texts.table(tails), np.tile(answers, (b, 1)), shown)

    def baselines(self) -> dict[str, float]:
        """``chance``: any name; ``own``: any variable of the row."""
        weights = [size.n_rows * (size.n_hops + 1) for size in self.test]
        own = sum(w / size.n_statements for w, size in zip(weights, self.test, strict=True)) / sum(weights)
        return {"chance": 26.0**-_LETTERS, "own": own}


def _name(number: int) -> str:
    return "".join(chr(65 + number // 26**i % 26) for i in range(_LETTERS))


def _assignments(said: Sequence[str], values: Sequence[str], places: Sequence[int], links: int) -> list[str]:
    """The sentences in the order of the text; variable i is number i % links of chain i // links, and stands at places[i]."""
    found = [""] * len(said)
    for i, (name, place) in enumerate(zip(said, places, strict=True)):
        right = f"VAR {said[i - 1]}" if i % links else values[i // links]
        found[place] = f" VAR {name} = {right}."
    return found


_SIZE = ("length", "n_chains", "n_hops", "n_rows")

PRESETS = (
    Preset("ruler_variable_tracking_text", "variable_tracking_text", {
        "train": sizes(_SIZE, (4096, 1, 4, 20_000)),
        "test": sizes(_SIZE, (4096, 1, 4, 500), (8192, 1, 4, 200), (16_384, 1, 4, 100)),
    }),
    Preset("variable_tracking_text_small", "variable_tracking_text", {
        "train": sizes(_SIZE, (512, 2, 1, 20_000)), "test": sizes(_SIZE, (512, 2, 1, 256), (1024, 2, 1, 128), (4096, 2, 1, 32)),
    }),
)
