"""``linear_scan``: h_t = a_t h_{t-1} + u_t, channel by channel, real or complex (RG-LRU, minGRU, HGRN, LRU, S4, S5, EMA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.linear_scan.cases import CASES
from hybridtf.ops.linear_scan.chunked import linear_scan_chunked
from hybridtf.ops.linear_scan.reference import linear_scan_reference
from hybridtf.ops.linear_scan.summary import linear_scan_combine, linear_scan_summary


def _reference() -> Callable[..., Any]:
    return linear_scan_reference


def _chunked() -> Callable[..., Any]:
    return linear_scan_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("linear_scan", "reference", 0, always, _reference),
    Kernel("linear_scan", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "linear_scan_chunked", "linear_scan_combine", "linear_scan_reference", "linear_scan_summary"]
