"""The product of a handful of rows: each group that has some meets its matrix where it lies.

A step of decoding has a few rows. A custom operator, and a copy of the matrices that a batched product wants, cost more there
than the products themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_ROWS = 16


def is_few(x: Tensor, ends: Tensor) -> bool:
    """Whether the loads may be read by the host, and are worth it: on a CPU, without gradients, with nobody tracing."""
    return (
        x.shape[0] <= FEW_ROWS and x.device.type == "cpu" and not torch.is_grad_enabled() and type(ends) is Tensor
        and type(x) is Tensor and not torch.compiler.is_compiling()
    )


def linear_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (s i), weight (e i o), ends (e) -> (s o), zero for the rows of no group."""
    y, start = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for group, stop in enumerate(ends.tolist()):
        if stop > start:
            y[start:stop] = x[start:stop] @ weight[group].to(x.dtype)
            start = stop
    return y
