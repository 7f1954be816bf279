"""``rnn``: nonlinear recurrences (tanh, relu, LSTM, GRU) by torch's own loops over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.rnn.cases import CASES
from hybridtf.ops.rnn.fused import rnn_fused
from hybridtf.ops.rnn.reference import rnn_reference
from hybridtf.ops.rnn.shapes import GATES, STATES, Cell


def _reference() -> Callable[..., Any]:
    return rnn_reference


def _fused() -> Callable[..., Any]:
    return rnn_fused


KERNELS: tuple[Kernel, ...] = (
    Kernel("rnn", "reference", 0, always, _reference),
    Kernel("rnn", "fused", 10, always, _fused),
)

__all__ = ["CASES", "GATES", "KERNELS", "STATES", "Cell", "rnn_fused", "rnn_reference"]
