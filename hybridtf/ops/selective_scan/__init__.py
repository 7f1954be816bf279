"""``selective_scan``: the recurrence of Mamba (S6), a decay for every channel and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.selective_scan.cases import CASES
from hybridtf.ops.selective_scan.chunked import selective_scan_chunked
from hybridtf.ops.selective_scan.reference import selective_scan_reference
from hybridtf.ops.selective_scan.summary import selective_scan_combine, selective_scan_summary


def _reference() -> Callable[..., Any]:
    return selective_scan_reference


def _chunked() -> Callable[..., Any]:
    return selective_scan_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("selective_scan", "reference", 0, always, _reference),
    Kernel("selective_scan", "chunked", 10, always, _chunked),
)

__all__ = [
    "CASES", "KERNELS", "selective_scan_chunked", "selective_scan_combine", "selective_scan_reference",
    "selective_scan_summary",
]
