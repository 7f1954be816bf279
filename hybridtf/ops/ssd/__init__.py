"""``ssd``: a linear recurrence with one decay a head (Mamba-2, RetNet, Lightning, linear transformer, mLSTM, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.ssd.cases import CASES
from hybridtf.ops.ssd.chunked import ssd_chunked
from hybridtf.ops.ssd.normaliser import normalised, with_ones
from hybridtf.ops.ssd.reference import ssd_reference
from hybridtf.ops.ssd.summary import ssd_combine, ssd_summary


def _reference() -> Callable[..., Any]:
    return ssd_reference


def _chunked() -> Callable[..., Any]:
    return ssd_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("ssd", "reference", 0, always, _reference),
    Kernel("ssd", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "normalised", "ssd_chunked", "ssd_combine", "ssd_reference", "ssd_summary", "with_ones"]
