"""``titans``: a memory, linear or deep, trained on the tokens as they come, with momentum and weight decay (Titans)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.titans.cases import CASES
from hybridtf.ops.titans.chunked import titans_chunked
from hybridtf.ops.titans.memory import layer_shapes
from hybridtf.ops.titans.reference import titans_reference


def _reference() -> Callable[..., Any]:
    return titans_reference


def _chunked() -> Callable[..., Any]:
    return titans_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("titans", "reference", 0, always, _reference),
    Kernel("titans", "chunked", 10, always, _chunked),
)

__all__ = ["CASES", "KERNELS", "layer_shapes", "titans_chunked", "titans_reference"]
