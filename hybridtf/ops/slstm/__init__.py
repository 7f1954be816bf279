"""``slstm``: scalar memories with exponential gates that see the last output (xLSTM): a nonlinear recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.slstm.cases import CASES
from hybridtf.ops.slstm.reference import slstm_reference
from hybridtf.ops.slstm.scripted import slstm_scripted
from hybridtf.ops.slstm.shapes import STATES


def _reference() -> Callable[..., Any]:
    return slstm_reference


def _scripted() -> Callable[..., Any]:
    return slstm_scripted


KERNELS: tuple[Kernel, ...] = (
    Kernel("slstm", "reference", 0, always, _reference),
    Kernel("slstm", "scripted", 10, always, _scripted),
)

__all__ = ["CASES", "KERNELS", "STATES", "slstm_reference", "slstm_scripted"]
