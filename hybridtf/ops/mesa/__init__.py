"""``mesa``: the read-out of a decaying least-squares problem, solved anew at each token (MesaNet)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.mesa.cases import CASES
from hybridtf.ops.mesa.chunked import mesa_chunked
from hybridtf.ops.mesa.reference import mesa_reference


def _reference() -> Callable[..., Any]:
    return mesa_reference


def _chunked() -> Callable[..., Any]:
    return mesa_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("mesa", "reference", 0, always, _reference),
    Kernel("mesa", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "mesa_chunked", "mesa_reference"]
