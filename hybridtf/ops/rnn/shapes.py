"""What both forms of the op share: the cells, the checks, the precision, and the state that a call starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments
from hybridtf.ops.documents import start_states

Cell: TypeAlias = Literal["tanh", "relu", "lstm", "gru"]

GATES: Mapping[str, tuple[str, ...]] = {
    "tanh": ("h",), "relu": ("h",), "lstm": ("i", "f", "g", "o"), "gru": ("r", "z", "n"),
}
"""The rows of a cell's matrices, in order, each as many as the state is wide; the order of ``torch.nn``."""

STATES: Mapping[str, tuple[str, ...]] = {"tanh": ("h",), "relu": ("h",), "lstm": ("h", "c"), "gru": ("h",)}
"""What a cell carries."""

State: TypeAlias = dict[str, Tensor]


class Weights(NamedTuple):
    """The matrices and biases of a cell, in the precision of its state."""

    hh: Tensor
    ih: Tensor | None
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    @property
    def width(self) -> int:
        return self.hh.shape[1]


def check(
    x: Tensor, weight_hh: Tensor, *, cell: str, weight_ih: Tensor | None, bias_ih: Tensor | None, bias_hh: Tensor | None,
    segments: Segments | None,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit."""
    if cell not in GATES:
        raise ConfigError(f"rnn: no cell named {cell!r}. {known_names(cell, GATES)}")
    gates = len(GATES[cell])
    if x.ndim != 3:
        raise ConfigError(f"rnn: x must be (b t d); got {tuple(x.shape)}")
    if weight_hh.ndim != 2 or weight_hh.shape[0] != gates * weight_hh.shape[1]:
        raise ConfigError(f"rnn: weight_hh of cell {cell!r} must be ({gates} h, h); got {tuple(weight_hh.shape)}")
    (b, t, d), rows = x.shape, weight_hh.shape[0]
    if weight_ih is None and bias_ih is not None:
        raise ConfigError("rnn: bias_ih belongs to weight_ih; without that, x must hold the bias already")
    if weight_ih is None and d != rows:
        raise ConfigError(f"rnn: x without weight_ih must be {rows} wide; got {d}")
    if weight_ih is not None and weight_ih.shape != (rows, d):
        raise ConfigError(f"rnn: weight_ih must be {(rows, d)}; got {tuple(weight_ih.shape)}")
    for name, bias in (("bias_ih", bias_ih), ("bias_hh", bias_hh)):
        if bias is not None and bias.shape != (rows,):
            raise ConfigError(f"rnn: {name} must be ({rows},); got {tuple(bias.shape)}")
    check_segments("rnn", segments, b, t)


def widened(
    weight_hh: Tensor, weight_ih: Tensor | None, bias_ih: Tensor | None, bias_hh: Tensor | None, dtype: torch.dtype
) -> Weights:
    """The weights in ``dtype``."""
    ih, b_ih, b_hh = (None if w is None else w.to(dtype) for w in (weight_ih, bias_ih, bias_hh))
    return Weights(weight_hh.to(dtype), ih, b_ih, b_hh)


def start_cell(
    initial_state: Mapping[str, Tensor] | None, cell: str, x: Tensor, width: int, dtype: torch.dtype,
    segments: Segments | None,
) -> State:
    """The incoming state, each (b h) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    shapes = dict.fromkeys(STATES[cell], (x.shape[0], width))
    return start_states("rnn", shapes, initial_state, x, dtype, segments, axes="(b h)")
