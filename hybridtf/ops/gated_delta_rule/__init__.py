"""``gated_delta_rule``: a memory decayed, read at the key and corrected (DeltaNet, Gated DeltaNet, KDA, DeltaProduct)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.gated_delta_rule.cases import CASES
from hybridtf.ops.gated_delta_rule.chunked import gated_delta_rule_chunked
from hybridtf.ops.gated_delta_rule.reference import gated_delta_rule_reference
from hybridtf.ops.gated_delta_rule.summary import gated_delta_rule_combine, gated_delta_rule_summary


def _reference() -> Callable[..., Any]:
    return gated_delta_rule_reference


def _chunked() -> Callable[..., Any]:
    return gated_delta_rule_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("gated_delta_rule", "reference", 0, always, _reference),
    Kernel("gated_delta_rule", "chunked", 10, always, _chunked),
)

__all__ = [
    "CASES", "KERNELS", "gated_delta_rule_chunked", "gated_delta_rule_combine", "gated_delta_rule_reference",
    "gated_delta_rule_summary",
]
