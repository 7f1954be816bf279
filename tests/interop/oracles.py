"""The reference models of ``tiny_oracles.py`` as checkpoints on disk, each written once, and what they answer."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtf.interop import FAMILIES

pytest.importorskip("transformers")
from tests.interop import tiny_oracles

LOOSER: dict[str, float] = {
    "llama@rope_dynamic": 1e-7,  # its base is a whole-number tensor times a float, which torch rounds to float32
    "bloom": 1e-8,  # the reference has sqrt(2 / pi) of its GELU to eight digits; with all of them there it is 1e-14
}
"""Oracles that are held to less than 1e-9, and why stands beside each."""

LEFT_OUT: dict[str, str] = {
    "qwen4_exp": "two heads of an indexer score several blocks 0, of which transformers takes those that topk happens to; here "
    "the later ones. qwen4_exp@heads has 16, and no two blocks that score the same",
}
"""Oracles of families that are read whose variant is not, and why."""

REWRITTEN: dict[str, str] = {
    "xlstm@fused": "transformers cannot load fused weights, whose initialisation fails: they are written one by one",
}
"""Oracles whose tensors are another layout when they are written, and why."""


def every_name() -> list[str]:
    """All oracles of models that tell the next token."""
    return [name for name, arch in tiny_oracles.ARCHS.items() if arch.kind == "causal"]


def names() -> list[str]:
    """Those of a family that is read."""
    return [name for name in every_name() if _model_type(name) in FAMILIES and name not in LEFT_OUT]


@functools.cache
def _model_type(name: str) -> str:
    return str(tiny_oracles.make_config(name).model_type)


@dataclass(frozen=True)
class Oracle:
    """One reference, a :class:`hybridtf.interop.parity.Reference`. ``folder``: in the published naming."""

    name: str
    seed: int = 0

    @property
    def folder(self) -> Path:
        return _saved(self.name, self.seed)

    @property
    def ids(self) -> Tensor:
        return tiny_oracles.inputs(self.name, self.seed)["input_ids"]

    @property
    def want(self) -> Tensor:
        """Its scores in strict float64."""
        return _scores(self.name, self.seed, torch.float64)

    @property
    def tolerance(self) -> float:
        return LOOSER.get(self.name, 1e-9)

    def scores(self, dtype: torch.dtype) -> Tensor:
        return _scores(self.name, self.seed, dtype)


_KEPT = tempfile.TemporaryDirectory(prefix="oracles-")


@functools.cache
def _saved(name: str, seed: int) -> Path:
    folder = Path(_KEPT.name) / f"{name}-{seed}"
    tiny_oracles.save(name, str(folder), seed)
    return folder


@functools.cache
def _scores(name: str, seed: int, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.float64:
        return tiny_oracles.reference(name, seed, dtype=dtype)
    model, batch = tiny_oracles.build64(name, seed), tiny_oracles.inputs(name, seed)  # float32 numbers, as in the files
    with tiny_oracles.strict_float64():
        return tiny_oracles.main_output(tiny_oracles.run(model, **batch, use_cache=False))


def oracle(name: str, seed: int = 0) -> Oracle:
    return Oracle(name, seed)
