"""Stick-breaking attention: each query breaks a stick from the nearest key backwards; no softmax, no positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.stick_breaking.cases import CASES
from hybridtf.ops.stick_breaking.chunked import stick_breaking_chunked
from hybridtf.ops.stick_breaking.reference import stick_breaking_reference

__all__ = ["CASES", "KERNELS", "stick_breaking_chunked", "stick_breaking_reference"]


def _load_reference() -> Callable[..., tuple[Tensor, Tensor]]:
    return stick_breaking_reference


def _load_chunked() -> Callable[..., tuple[Tensor, Tensor]]:
    return stick_breaking_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("stick_breaking", "reference", 0, always, _load_reference),
    Kernel("stick_breaking", "chunked", 10, always, _load_chunked),
)
