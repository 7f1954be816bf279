"""``ssd``: a linear recurrence with one decay a head (Mamba-2, RetNet, Lightning, linear transformer, mLSTM, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.ssd.cases import CASES
from hybridtf.ops.ssd.chunked import ssd_chunked
from hybridtf.ops.ssd.normaliser import normalised, with_ones
from hybridtf.ops.ssd.reference import ssd_reference
from hybridtf.ops.ssd.stabilised import stabilised_chunked, stabilised_reference
from hybridtf.ops.ssd.summary import ssd_combine, ssd_summary
from hybridtf.ops.ssd.trapezoid import trapezoid_chunked, trapezoid_reference


def _reference() -> Callable[..., Any]:
    return ssd_reference


def _chunked() -> Callable[..., Any]:
    return ssd_chunked


def _stabilised_reference() -> Callable[..., Any]:
    return stabilised_reference


def _stabilised_chunked() -> Callable[..., Any]:
    return stabilised_chunked


def _trapezoid_reference() -> Callable[..., Any]:
    return trapezoid_reference


def _trapezoid_chunked() -> Callable[..., Any]:
    return trapezoid_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("ssd", "reference", 0, always, _reference),
    Kernel("ssd", "chunked", 10, always, _chunked),
    Kernel("ssd_stabilised", "reference", 0, always, _stabilised_reference),
    Kernel("ssd_stabilised", "chunked", 10, always, _stabilised_chunked),
    Kernel("ssd_trapezoid", "reference", 0, always, _trapezoid_reference),
    Kernel("ssd_trapezoid", "chunked", 10, always, _trapezoid_chunked),
)

__all__ = [
    "CASES", "KERNELS", "normalised", "ssd_chunked", "ssd_combine", "ssd_reference", "ssd_summary", "stabilised_chunked",
    "stabilised_reference", "trapezoid_chunked", "trapezoid_reference", "with_ones",
]
