"""The sum of the weights that a read-out of ``ssd`` gives to the values: a column of ones among the values, carried along."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def with_ones(v: Tensor) -> Tensor:
    """``v`` (b t h p) with a last column of ones, (b t h p+1): read out, that column is the sum of the weights."""
    return F.pad(v, (0, 1), value=1.0)


def normalised(y: Tensor, eps: float = 0.0) -> Tensor:
    """``y`` (b t h p+1), read out of what :func:`with_ones` gave, as an average (b t h p): divided by its last column + eps.

    Where that is 0 nothing was weighed: the average is 0, and so is its gradient. Meaningful where weights are not negative.
    """
    total = y[..., -1:] + eps
    nothing = total == 0
    return (y[..., :-1] / total.masked_fill(nothing, 1)).masked_fill(nothing, 0)
