"""``wkv``: RWKV-4's weighted mean of values, with decaying weights exp(k) and a bonus for the present token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.wkv.cases import CASES
from hybridtf.ops.wkv.chunked import wkv_chunked
from hybridtf.ops.wkv.reference import wkv_reference


def _reference() -> Callable[..., Any]:
    return wkv_reference


def _chunked() -> Callable[..., Any]:
    return wkv_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("wkv", "reference", 0, always, _reference),
    Kernel("wkv", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "wkv_chunked", "wkv_reference"]
