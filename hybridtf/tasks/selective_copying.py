"""``selective_copying``: say the tokens that lie among blanks, in their order.

``n_data`` data tokens lie at random places among blanks; then a row asks for them. With ``cue = "each"`` a marker asks for
each of them (Gu and Dao, *Mamba*, appendix E.1, https://arxiv.org/abs/2312.00752); with ``cue = "once"`` a marker stands
once and blanks follow (Poli et al., *MAD*, https://arxiv.org/abs/2403.17844). With 8 ids and ``n_data = 3`` a row may be

    inputs    0 4 0 0 2 0 5 0 7 7 7        each: the marker is 7
    targets   . . . . . . . . 4 2 5        (. is not scored)

    inputs    0 4 0 0 2 0 5 0 7 0 0 0      once
    targets   . . . . . . . . . 4 2 5

Ids: 0 is blank, V - 1 the marker, data are between. ``length`` counts the whole row. What has to be filtered depends on the
content, which a time-invariant recurrence cannot see. The measure is accuracy over the data tokens; ``chance`` is one in as
many as there are data ids.

Sizes of Mamba: 16 ids, 4,096 tokens and 16 data tokens, 400,000 steps of 64 rows, two layers of d_model 64. Of MAD: 256
tokens, 16 of them data, 12,800 rows, 200 epochs. Of Griffin (https://arxiv.org/abs/2402.19427): 1,024 tokens. Presets:
``selective_copying_mamba``, ``mad_selective_copying``, ``selective_copying_small`` (64 tokens, 4 of them data).
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

_DATA, _PLACES = range(2)


class CopyRows(RowsOf):
    """``n_rows`` rows of ``length`` tokens, with ``n_data`` data tokens."""

    n_data: int = Field(gt=0)

    @property
    def name(self) -> str:
        return f"{self.length} tokens, {self.n_data} data"


class SelectiveCopyingConfig(SyntheticConfig):
    """Say the data tokens, not the blanks."""

    type: Literal["selective_copying"] = "selective_copying"
    vocab_size: int = Field(default=16, ge=4)
    cue: Literal["each", "once"] = "each"
    train: tuple[CopyRows, ...] = (CopyRows(length=4112, n_data=16, n_rows=100_000),)
    test: tuple[CopyRows, ...] = (CopyRows(length=4112, n_data=16, n_rows=500),)

    @model_validator(mode="after")
    def _rows_have_room(self) -> Self:
        for where in ("train", "test"):
            for i, size in enumerate(getattr(self, where)):
                if self._room(size) < size.n_data:
                    least = 2 * size.n_data + (self.cue == "once")
                    raise ValueError(f"{where}[{i}].length = {size.length}; {size.n_data} data tokens need at least {least}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = CopyRows(length=16, n_data=3, n_rows=40)
        return cls(vocab_size=8, train=(rows,), test=(rows, CopyRows(length=20, n_data=4, n_rows=10)))

    @property
    def n_ids(self) -> int:
        return self.vocab_size

    def _room(self, size: CopyRows) -> int:
        """Places for data, before the row asks."""
        return size.length - size.n_data - (self.cue == "once")

    def scored(self, size: CopyRows, split: int = TEST) -> float:
        return size.n_data

    def bits(self, size: CopyRows) -> float:
        return size.n_data * math.log2(self.vocab_size - 2) + math.log2(math.comb(self._room(size), size.n_data))

    def draw(self, size: CopyRows, key: tuple[int, ...], index: Longs) -> Rows:
        room, n = self._room(size), size.n_data
        key = (*key, self.vocab_size, size.length, n)
        data = 1 + Draws((*key, _DATA), index).integers(n, self.vocab_size - 2)
        places = np.sort(Draws((*key, _PLACES), index).distinct(n, room), axis=1)
        inputs = np.zeros((len(index), size.length), dtype=np.int64)
        np.put_along_axis(inputs, places, data, axis=1)
        inputs[:, room : size.length if self.cue == "each" else room + 1] = self.vocab_size - 1
        targets, evidence = np.full_like(inputs, IGNORE), np.full_like(inputs, NO_EVIDENCE)
        targets[:, size.length - n :], evidence[:, size.length - n :] = data, places
        return Rows(inputs, targets, evidence=evidence)

    def baselines(self) -> dict[str, float]:
        """``chance``: any data token."""
        return {"chance": 1 / (self.vocab_size - 2)}


_SIZE = ("length", "n_data", "n_rows")

PRESETS = (
    Preset("selective_copying_mamba", "selective_copying", {
        "train": sizes(_SIZE, (4112, 16, 100_000)), "test": sizes(_SIZE, (4112, 16, 500)),
    }),
    Preset("mad_selective_copying", "selective_copying", {
        "cue": "once", "fresh": False, "train": sizes(_SIZE, (256, 16, 12_800)), "test": sizes(_SIZE, (256, 16, 1_280)),
    }),
    Preset("selective_copying_small", "selective_copying", {
        "train": sizes(_SIZE, (64, 4, 20_000)), "test": sizes(_SIZE, (64, 4, 512), (128, 4, 256), (256, 4, 128), (1024, 4, 64)),
    }),
)
