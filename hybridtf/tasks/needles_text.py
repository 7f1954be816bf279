"""``needles_text``: sentences that are hidden in a long text, and asked for at its end; ``needles`` with a tokenizer.

``form = "ruler"`` (Hsieh et al., *RULER*, https://arxiv.org/abs/2404.06654): each of ``n_keys`` keys has ``n_values`` values,
each in a sentence of its own, strewn over filler; ``n_queries`` keys are asked for, with all their values, in the order of the
text (key by key). With the words of a row of one key shortened by "...":

    A special magic number is hidden within the following text. ... is yellow. One of the special magic numbers for banilo
    is: 4071398. Here we go. ... What is the special magic number for banilo mentioned in the text? It is 4071398
                                                                                                      ------- scored

``form = "passkey"`` (Mohtashami and Jaggi, https://arxiv.org/abs/2305.16300), its prompt word by word: "There is an important
info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the important information there.
The grass is green. ... The pass key is 40713. Remember it. 40713 is the pass key. ... What is the pass key? The pass key is
40713", a number from 1 to 50,000. (There the text is cut anywhere; here sentences stay whole.)

Values are drawn evenly: ``numbers`` of ``n_digits`` digits, ``words`` of three syllables or ``uuids``; keys likewise, and
different in a row. ``depth`` puts the sentence that is asked for at that share of the filler: with lengths and depths as
sizes, the scores of an evaluation are the grid of both. ``length`` is the longest row in tokens of the tokenizer; the filler
takes what is left. The measure is ``answer_accuracy``, values right as a whole; ``chance`` says any value, ``own`` any that
the row has.

Sizes of RULER: 4,096 to 131,072 tokens, 500 rows a length. Presets: ``passkey_text`` and ``passkey_text_small`` (with a grid of
lengths and depths), ``niah_single_text``, ``niah_corpus_text`` (sentences of a corpus), ``niah_multikey_text``,
``niah_lines_text`` (nothing but needles), ``niah_uuid_text``, ``niah_multivalue_text``, ``niah_multiquery_text``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hybridtf.core import Preset
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.needles import NeedleRows
from hybridtf.tasks.synthetic import MANY_BITS, TEST, sizes
from hybridtf.tasks.text_rows import HaystackConfig, Kind, Plan, Texts, n_names, names

Form: TypeAlias = Literal["ruler", "passkey"]

_KEYS, _VALUES, _OWNERS, _OTHERS = range(8, 12)
_MOST_PASSKEYS = 50_000


class NeedlesTextConfig(HaystackConfig):
    """Say the values that sentences hidden in a text give to keys."""

    type: Literal["needles_text"] = "needles_text"
    form: Form = "ruler"
    keys: Kind = "words"
    values: Kind = "numbers"
    n_digits: int = Field(default=7, ge=1, le=9)
    """Of keys and values that are numbers; a passkey is always from 1 to 50,000."""
    train: tuple[NeedleRows, ...] = (NeedleRows(length=1024, n_rows=20_000),)
    test: tuple[NeedleRows, ...] = (NeedleRows(length=1024, n_rows=500),)

    @model_validator(mode="after")
    def _form_has_them(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if self.form == "passkey" and size.n_needles > 1:
                    raise ValueError(f"{where}[{i}]: form = 'passkey' has one key and one value; other counts are of 'ruler'")
                for kind, n in ((self.keys, size.n_keys), (self.values, size.n_needles)):
                    if n > n_names(kind, self.n_digits):
                        raise ValueError(f"{where}[{i}] needs {n} different {kind}; n_digits = {self.n_digits} has fewer")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            train=(NeedleRows(length=400, n_rows=40),),
            test=(NeedleRows(length=400, n_rows=8), NeedleRows(length=500, n_rows=5, depth=0.5)),
        )

    def scored(self, size: NeedleRows, split: int = TEST) -> float:
        if self.train_on == "all" and split != TEST:
            return super().scored(size, split)
        if self.tokenizer == "bytes" and self.form == "ruler" and self.values != "words":
            return size.n_queries * size.n_values * (37 if self.values == "uuids" else 1 + self.n_digits)
        return super().scored(size, split)

    def bits(self, size: NeedleRows) -> float:
        if self.form == "passkey":
            return float(np.log2(_MOST_PASSKEYS))
        return min(float(np.log2(n_names(self.keys, self.n_digits)) + np.log2(n_names(self.values, self.n_digits))), MANY_BITS)

    def plan(self, size: NeedleRows, key: tuple[int, ...], index: Longs, texts: Texts) -> Plan:
        key = (*key, size.length, size.n_keys, size.n_values, size.n_queries)
        if self.form == "passkey":
            return self._passkey(size, key, index, texts)
        b, n, each = len(index), size.n_keys, size.n_values
        keys = names(self.keys, Draws((*key, _KEYS), index), n, self.n_digits)
        values = names(self.values, Draws((*key, _VALUES), index), size.n_needles, self.n_digits)
        owners = np.argsort(Draws((*key, _OWNERS), index).words(n * each), axis=1) // each  # (b m) in the order of the text
        depths, asked_at = self._depths(size, key, index)
        if asked_at is not None:
            first = owners.argmin(1)  # the one needle of the first key: it changes places with the one that is there
            rows = np.arange(b)
            owners[rows, first], owners[rows, asked_at] = owners[rows, asked_at], owners[rows, first].copy()
        noun = {"words": "word", "numbers": "number", "uuids": "uuid"}[self.values]
        strewn = texts.table(
            [f" One of the special magic {noun}s for {names_[o]} is: {value}." for o, value in zip(own, found, strict=True)]
            for names_, own, found in zip(keys, owners.tolist(), values, strict=True)
        )
        many = size.n_queries * each > 1
        head = texts.column(
            f"{f'Some special magic {noun}s are' if n * each > 1 else f'A special magic {noun} is'} hidden within the "
            "following text. Make sure to memorize it. I will quiz you about it afterwards.\n", b,
        )
        tails = [self._tail(noun, row, own, found, size.n_queries, many=many)
                 for row, own, found in zip(keys, owners.tolist(), values, strict=True)]
        answers = answers_of(size.n_queries * each)
        shown = np.full((b, len(answers)), -1)
        # Key by key, in the order of the text.
        shown[:, answers >= 0] = np.argsort(owners, axis=1, kind="stable")[:, : size.n_queries * each]
        return Plan(head, strewn, depths, texts.table(tails), np.tile(answers, (b, 1)), shown)

    def _tail(
        self, noun: str, keys: Sequence[str], owners: Sequence[int], values: Sequence[str], n_queries: int, *, many: bool
    ) -> list[str]:
        """The question, then the answers with commas between."""
        said = keys[0] if n_queries == 1 else f"{', '.join(keys[: n_queries - 1])} and {keys[n_queries - 1]}"
        question = (
            f"\nWhat are all the special magic {noun}s for {said} mentioned in the text? They are" if many
            else f"\nWhat is the special magic {noun} for {said} mentioned in the text? It is"
        )
        found = [f" {value}" for k in range(n_queries) for owner, value in zip(owners, values, strict=True) if owner == k]
        return [question, found[0], *(piece for value in found[1:] for piece in (",", value))]

    def _passkey(self, size: NeedleRows, key: tuple[int, ...], index: Longs, texts: Texts) -> Plan:
        b = len(index)
        numbers = 1 + Draws((*key, _VALUES), index).integers(1, _MOST_PASSKEYS)[:, 0]
        head = texts.column(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
            "about the important information there.", b,
        )
        strewn = texts.table([f" The pass key is {i}. Remember it. {i} is the pass key."] for i in numbers.tolist())
        tail = texts.table(["\nWhat is the pass key? The pass key is", f" {i}"] for i in numbers.tolist())
        return Plan(head, strewn, self._depths(size, key, index)[0], tail, np.tile([-1, 0], (b, 1)), np.tile([-1, 0], (b, 1)))

    def _depths(
        self, size: NeedleRows, key: tuple[int, ...], index: Longs
    ) -> tuple[NDArray[np.float64], Longs | None]:
        """(b m) depths of the needles, rising, and (b) which of them is the one that is asked for; None: any."""
        if size.depth is None:
            return self.depths(key, index, size.n_needles), None
        others = Draws((*key, _OTHERS), index).uniform(size.n_needles - 1)
        found = np.concatenate([np.full((len(index), 1), size.depth), others], axis=1)
        return np.sort(found, axis=1), (others < size.depth).sum(1)

    def baselines(self) -> dict[str, float]:
        """``chance``: any value; ``own``: any that the row has."""
        n = _MOST_PASSKEYS if self.form == "passkey" else n_names(self.values, self.n_digits)
        weights = [size.n_rows * size.n_queries * size.n_values for size in self.test]
        own = [1 / size.n_needles for size in self.test]
        chance = {"chance": 1 / n}
        if any(size.n_needles > 1 for size in self.test):
            chance["own"] = sum(w * p for w, p in zip(weights, own, strict=True)) / sum(weights)
        return chance


def answers_of(n: int) -> Longs:
    """(1 + 2 n - 1) which answer each piece of a question, n answers and the commas between them is of."""
    return np.concatenate([[-1], np.where(np.arange(2 * n - 1) % 2, -1, np.arange(2 * n - 1) // 2)])


_SIZE = ("length", "n_keys", "n_values", "n_queries", "n_rows")


def _ruler(name: str, *counts: int, **options: Any) -> Preset:
    """A preset of RULER's sizes; ``counts``: keys, values, queries."""
    return Preset(name, "needles_text", {
        **options, "train": sizes(_SIZE, (4096, *counts, 20_000)),
        "test": sizes(_SIZE, (4096, *counts, 500), (8192, *counts, 200), (16_384, *counts, 100)),
    })


def _grid(lengths: Sequence[tuple[int, int]], depths: Sequence[float]) -> list[dict[str, float]]:
    """Sizes of every length (tokens, rows) at every depth."""
    return [{"length": length, "depth": depth, "n_rows": n_rows} for length, n_rows in lengths for depth in depths]


_FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)

PRESETS = (
    Preset("passkey_text", "needles_text", {
        "form": "passkey", "train": sizes(("length", "n_rows"), (4096, 20_000)),
        "test": _grid([(4096, 20), (16_384, 20), (65_536, 10), (262_144, 5)], [i / 10 for i in range(11)]),
    }),
    Preset("passkey_text_small", "needles_text", {
        "form": "passkey", "train": sizes(("length", "n_rows"), (384, 20_000)),
        "test": _grid([(384, 32), (768, 32), (1536, 32), (4096, 16)], _FIVE),
    }),
    _ruler("niah_single_text", 1, 1, 1),
    _ruler("niah_corpus_text", 1, 1, 1, haystack="corpus"),
    _ruler("niah_uuid_text", 1, 1, 1, haystack="corpus", values="uuids"),
    _ruler("niah_multikey_text", 4, 1, 1, haystack="corpus"),
    Preset("niah_lines_text", "needles_text", {
        "train": sizes(_SIZE, (4096, 60, 1, 1, 20_000)),
        "test": sizes(_SIZE, (4096, 60, 1, 1, 500), (8192, 130, 1, 1, 200), (16_384, 270, 1, 1, 100)),
    }),
    _ruler("niah_multivalue_text", 1, 4, 1, haystack="corpus"),
    _ruler("niah_multiquery_text", 4, 1, 4, haystack="corpus"),
)
