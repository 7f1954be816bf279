"""``state_space``: a linear system that time does not change, one for each channel (S4, S4D, H3, Mega's moving average)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.state_space.cases import CASES
from hybridtf.ops.state_space.chunked import state_space_chunked
from hybridtf.ops.state_space.reference import state_space_reference


def _reference() -> Callable[..., Any]:
    return state_space_reference


def _chunked() -> Callable[..., Any]:
    return state_space_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("state_space", "reference", 0, always, _reference),
    Kernel("state_space", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "state_space_chunked", "state_space_reference"]
