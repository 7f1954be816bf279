"""``compression``: a whole row in one vector (Poli et al., *MAD*, https://arxiv.org/abs/2403.17844).

A row is tokens drawn evenly, then a token that says "now". The hidden state behind that token, one vector, is all that a
decoder is given; with the place beside it, it must say the token that stood there. With 8 ids a row may be

    inputs    3 0 6 6 1 4 2 7
    targets   3 0 6 6 1 4 2 .       (. is not scored)

Targets are the tokens of the row itself, so the model needs the head ``position_decoder``; any other is refused, as it would
copy what it sees. MAD scores the last token as well, which is the same in every row.

Ids: data below V - 1 (``vocab_size`` V), V - 1 says "now". The measure is accuracy over the data; ``chance`` is one in as many
as there are. A vector that keeps k of n tokens and guesses the others reaches k / n + (1 - k / n) / (V - 1).

Sizes of MAD: 16 ids, 32 tokens, 12,800 rows for 200 epochs, 1,280 to test, two pairs of mixer and SwiGLU of d_model 128; its
sweep goes to 128 ids and to 256 tokens. Presets: ``mad_compression`` and ``compression_small`` (16 tokens, fresh rows).
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hybridtf.core import Preset, Scores
from hybridtf.tasks.base import IGNORE
from hybridtf.tasks.draws import Draws, Longs
from hybridtf.tasks.synthetic import TEST, Rows, RowsOf, SyntheticConfig, SyntheticTask, sizes

_DATA = 0


class CompressionConfig(SyntheticConfig):
    """Say a row again from one vector; needs the head ``position_decoder``."""

    type: Literal["compression"] = "compression"
    vocab_size: int = Field(default=16, ge=3)
    train: tuple[RowsOf, ...] = (RowsOf(length=32, n_rows=12_800),)
    test: tuple[RowsOf, ...] = (RowsOf(length=32, n_rows=1_280),)

    @model_validator(mode="after")
    def _rows_have_data(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length < 2:
                    raise ValueError(f"{where}[{i}].length = {size.length}; one token of data and the last one take 2")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(train=(RowsOf(length=12, n_rows=40),), test=(RowsOf(length=12, n_rows=16), RowsOf(length=14, n_rows=9)))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def scored(self, size: RowsOf, split: int = TEST) -> float:
        return size.length - 1

    def bits(self, size: RowsOf) -> float:
        return (size.length - 1) * math.log2(self.vocab_size - 1)

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        data = Draws((*key, self.vocab_size, size.length, _DATA), index).integers(size.length - 1, self.vocab_size - 1)
        last = np.full((len(index), 1), self.vocab_size - 1)
        return Rows(np.concatenate([data, last], axis=1), np.concatenate([data, np.full_like(last, IGNORE)], axis=1))

    def baselines(self) -> dict[str, float]:
        """``chance``: any token of data."""
        return {"chance": 1 / (self.vocab_size - 1)}

    def load(self, seed: int = 0) -> CompressionTask:
        return CompressionTask(self, seed)


class CompressionTask(SyntheticTask):
    """See :class:`CompressionConfig`."""

    scores: ClassVar[Scores] = "read"


_SIZE = ("length", "n_rows")

PRESETS = (
    Preset("mad_compression", "compression", {
        "fresh": False, "train": sizes(_SIZE, (32, 12_800)), "test": sizes(_SIZE, (32, 1_280)),
    }),
    Preset("compression_small", "compression", {
        "train": sizes(_SIZE, (16, 20_000)), "test": sizes(_SIZE, (16, 512), (24, 256)),
    }),
)
