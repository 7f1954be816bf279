"""``grouped_linear``: each group of rows times the matrix of its group (mixture of experts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.grouped_linear.cases import CASES
from hybridtf.ops.grouped_linear.grouped import grouped_linear_blocks, grouped_linear_grouped, why_not_grouped
from hybridtf.ops.grouped_linear.reference import grouped_linear_reference


def _reference() -> Callable[..., Any]:
    return grouped_linear_reference


def _grouped() -> Callable[..., Any]:
    return grouped_linear_grouped


def _blocks() -> Callable[..., Any]:
    return grouped_linear_blocks


KERNELS: tuple[Kernel, ...] = (
    Kernel("grouped_linear", "reference", 0, always, _reference),
    Kernel("grouped_linear", "blocks", 10, always, _blocks),
    Kernel("grouped_linear", "grouped", 20, why_not_grouped, _grouped),
)

__all__ = ["CASES", "KERNELS", "grouped_linear_blocks", "grouped_linear_grouped", "grouped_linear_reference"]
