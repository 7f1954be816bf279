"""``short_conv``: causal depthwise convolution of a few taps (Mamba, Mamba-2, GatedDeltaNet, Griffin, LFM2, ...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.short_conv.cases import CASES
from hybridtf.ops.short_conv.reference import short_conv_reference
from hybridtf.ops.short_conv.taps import short_conv_taps


def _reference() -> Callable[..., Any]:
    return short_conv_reference


def _taps() -> Callable[..., Any]:
    return short_conv_taps


KERNELS: tuple[Kernel, ...] = (
    Kernel("short_conv", "reference", 0, always, _reference),
    Kernel("short_conv", "taps", 10, always, _taps),
)

__all__ = ["CASES", "KERNELS", "short_conv_reference", "short_conv_taps"]
