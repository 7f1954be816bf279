"""``gla``: a linear recurrence with a vector of decays (GLA, HGRN-2, RWKV-5 and -6, gated slot attention)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.gla.cases import CASES
from hybridtf.ops.gla.chunked import gla_chunked
from hybridtf.ops.gla.reference import gla_reference
from hybridtf.ops.gla.summary import gla_combine, gla_summary


def _reference() -> Callable[..., Any]:
    return gla_reference


def _chunked() -> Callable[..., Any]:
    return gla_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("gla", "reference", 0, always, _reference),
    Kernel("gla", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "gla_chunked", "gla_combine", "gla_reference", "gla_summary"]
