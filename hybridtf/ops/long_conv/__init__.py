"""``long_conv``: a causal convolution over the whole document (Hyena)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.long_conv.cases import CASES
from hybridtf.ops.long_conv.chunked import long_conv_chunked
from hybridtf.ops.long_conv.reference import long_conv_reference


def _reference() -> Callable[..., Any]:
    return long_conv_reference


def _chunked() -> Callable[..., Any]:
    return long_conv_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("long_conv", "reference", 0, always, _reference),
    Kernel("long_conv", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "long_conv_chunked", "long_conv_reference"]
