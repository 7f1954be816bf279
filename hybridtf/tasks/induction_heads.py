"""``induction_heads``: what followed the special token? (Olsson et al., https://arxiv.org/abs/2209.11895).

A row is random tokens, among which a special one stands once; it stands again at the end, and the model must say what followed
it the first time. With ``vocab_size = 8`` a row may be

    inputs    3 1 7 4 0 2 2 7
    targets   . . . . . . . 4        (. is not scored)

Ids: V - 1 is the special token, all others are drawn evenly. The place is drawn evenly from all that have a token behind them
before the end. The measure is accuracy of the one answer; ``chance`` is 1 / (V - 1).

Sizes of Mamba (appendix E.1, https://arxiv.org/abs/2312.00752): 16 ids, 256 tokens, batches of 8 rows, 204,800 steps, two
layers of d_model 64; tested from 64 to 1,048,576 tokens. Presets: ``induction_heads_mamba`` with those lengths, and
``induction_heads_small``, trained on 64 tokens and tested to 4,096.
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

_TOKENS, _PLACE = range(2)


class InductionHeadsConfig(SyntheticConfig):
    """Say what followed the special token."""

    type: Literal["induction_heads"] = "induction_heads"
    vocab_size: int = Field(default=16, ge=3)
    train: tuple[RowsOf, ...] = (RowsOf(length=256, n_rows=65_536),)
    test: tuple[RowsOf, ...] = (RowsOf(length=256, n_rows=500),)

    @model_validator(mode="after")
    def _something_follows(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if size.length < 3:
                    raise ValueError(f"{where}[{i}].length = {size.length}; a token, what follows it and the question are 3")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            vocab_size=6, train=(RowsOf(length=10, n_rows=40),),
            test=(RowsOf(length=10, n_rows=16), RowsOf(length=17, n_rows=9)),
        )

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def scored(self, size: RowsOf, split: int = TEST) -> float:
        return 1.0

    def bits(self, size: RowsOf) -> float:
        return (size.length - 2) * math.log2(self.vocab_size - 1)

    def draw(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Rows:
        key = (*key, self.vocab_size, size.length)
        inputs = Draws((*key, _TOKENS), index).integers(size.length, self.vocab_size - 1)
        place = Draws((*key, _PLACE), index).integers(1, size.length - 2)
        np.put_along_axis(inputs, place, self.vocab_size - 1, axis=1)
        inputs[:, -1] = self.vocab_size - 1
        targets, evidence = np.full_like(inputs, IGNORE), np.full_like(inputs, NO_EVIDENCE)
        targets[:, -1:], evidence[:, -1:] = np.take_along_axis(inputs, place + 1, axis=1), place + 1
        return Rows(inputs, targets, evidence=evidence)

    def baselines(self) -> dict[str, float]:
        """``chance``: any token but the special one."""
        return {"chance": 1 / (self.vocab_size - 1)}


_SIZE = ("length", "n_rows")

PRESETS = (
    Preset("induction_heads_mamba", "induction_heads", {
        "train": sizes(_SIZE, (256, 65_536)),
        "test": sizes(_SIZE, *((2**i, 512 if i <= 12 else 64 if i <= 16 else 16) for i in range(6, 21))),
    }),
    Preset("induction_heads_small", "induction_heads", {
        "train": sizes(_SIZE, (64, 20_000)),
        "test": sizes(_SIZE, (64, 512), (128, 256), (256, 256), (1024, 128), (4096, 64)),
    }),
)
