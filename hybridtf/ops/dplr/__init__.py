"""``dplr``: a linear recurrence whose transition is diagonal plus low rank (RWKV-7, Comba, Gated DeltaNet-2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.dplr.cases import CASES
from hybridtf.ops.dplr.chunked import dplr_chunked
from hybridtf.ops.dplr.reference import dplr_reference
from hybridtf.ops.dplr.summary import dplr_combine, dplr_summary


def _reference() -> Callable[..., Any]:
    return dplr_reference


def _chunked() -> Callable[..., Any]:
    return dplr_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("dplr", "reference", 0, always, _reference),
    Kernel("dplr", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "dplr_chunked", "dplr_combine", "dplr_reference", "dplr_summary"]
