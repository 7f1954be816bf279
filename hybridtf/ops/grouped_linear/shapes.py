"""What every form of the op checks before it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError


def check(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: x (s i), weight (e i o), ends (e), bias (e o)."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"grouped_linear: x must be (s i) and weight (e i o); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if ends.shape != weight.shape[:1] or ends.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"grouped_linear: ends must be integers of shape (e) = ({weight.shape[0]},); got {ends.dtype} {tuple(ends.shape)}"
        )
    if bias is not None and bias.shape != (weight.shape[0], weight.shape[2]):
        raise ConfigError(
            f"grouped_linear: bias must be (e o) = {(weight.shape[0], weight.shape[2])}; got {tuple(bias.shape)}"
        )


def group_ids(ends: Tensor, n_rows: int) -> Tensor:
    """(s) int64: the group of each row; e for rows that belong to none."""
    rows = torch.arange(n_rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, rows, right=True)
