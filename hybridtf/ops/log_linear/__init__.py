"""``log_linear``: linear attention with decay whose past is split into a logarithmic number of blocks, weighed apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.log_linear.cases import CASES
from hybridtf.ops.log_linear.chunked import log_linear_chunked
from hybridtf.ops.log_linear.reference import log_linear_reference
from hybridtf.ops.log_linear.shapes import LogLinearState


def _reference() -> Callable[..., Any]:
    return log_linear_reference


def _chunked() -> Callable[..., Any]:
    return log_linear_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("log_linear", "reference", 0, always, _reference),
    Kernel("log_linear", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "LogLinearState", "log_linear_chunked", "log_linear_reference"]
