"""The reference models of ``tiny_oracles.py`` as checkpoints on disk, each written once, and what they answer."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from hybridtf.interop import FAMILIES

pytest.importorskip("transformers")
from tests.interop import tiny_oracles  # noqa: E402

LOOSER: dict[str, float] = {}
"""Oracles that are held to less than 1e-9, and why stands beside each."""

LEFT_OUT: dict[str, str] = {}
"""Oracles of families that are read whose variant is not, and why."""


def names() -> list[str]:
    """Oracles of a family that is read."""
    known = [name for name, arch in tiny_oracles.ARCHS.items() if _model_type(name) in FAMILIES]
    return [name for name in known if name not in LEFT_OUT]


@functools.cache
def _model_type(name: str) -> str:
    return str(tiny_oracles.make_config(name).model_type)


@dataclass(frozen=True)
class Oracle:
    """``folder``: in the published naming; ``want``: its scores of ``ids`` in strict float64."""

    name: str
    folder: Path
    ids: Tensor
    want: Tensor

    @property
    def tolerance(self) -> float:
        return LOOSER.get(self.name, 1e-9)


_KEPT = tempfile.TemporaryDirectory(prefix="oracles-")


@functools.cache
def oracle(name: str, seed: int = 0) -> Oracle:
    folder = Path(_KEPT.name) / f"{name}-{seed}"
    tiny_oracles.save(name, str(folder), seed)
    model = tiny_oracles.build64(name, seed)  # before: parameters that ask for float32 are to have the file's numbers
    given = tiny_oracles.inputs(name, seed)
    with tiny_oracles.strict_float64():
        want = tiny_oracles.main_output(tiny_oracles.run(model, **given, use_cache=False))
    return Oracle(name, folder, given["input_ids"], want)
