"""``ttt_linear``: a memory that is a small linear model, trained at each mini-batch of tokens (TTT-Linear)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.ttt.cases import CASES
from hybridtf.ops.ttt.chunked import ttt_linear_chunked
from hybridtf.ops.ttt.reference import ttt_linear_reference


def _reference() -> Callable[..., Any]:
    return ttt_linear_reference


def _chunked() -> Callable[..., Any]:
    return ttt_linear_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("ttt_linear", "reference", 0, always, _reference),
    Kernel("ttt_linear", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "ttt_linear_chunked", "ttt_linear_reference"]
