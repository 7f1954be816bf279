"""Feature maps of linear attention: phi with phi(q).phi(k) in the place of exp(q.k)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

FeatureMap: TypeAlias = Literal["elu1", "relu", "identity", "taylor"]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 (https://arxiv.org/abs/2006.16236): exp(x) below 0, 1 + x above.

    Not by subtracting 1 and adding it again: what is far below 0 would round to 0.
    """
    return x.clamp(max=0).exp() + x.relu()


def quadratic(x: Tensor) -> Tensor:
    """(... k) to (... k (k + 1) / 2) with quadratic(q).quadratic(k) = (q.k)^2.

    Of the outer product of x with itself, which is symmetric, one half is kept and weighed twice: the same scores from half
    the features.
    """
    n = x.shape[-1]
    square = x[..., :, None] * x[..., None, :]
    row, column = torch.triu_indices(n, n, offset=1, device=x.device)
    return torch.cat([square.diagonal(dim1=-2, dim2=-1), square[..., row, column] * 2**0.5], dim=-1)


def taylor(x: Tensor) -> Tensor:
    """(... k) to (... 1 + k + k (k + 1) / 2) with taylor(q).taylor(k) = 1 + s + s^2 / 2, s = q.k.

    Second order of exp (https://arxiv.org/abs/2402.18668).
    """
    return torch.cat([torch.ones_like(x[..., :1]), x, quadratic(x) * 0.5**0.5], dim=-1)


def identity(x: Tensor) -> Tensor:
    """x itself: weights may be negative, so that their sum is no normaliser."""
    return x


FEATURE_MAPS: Mapping[FeatureMap, Callable[[Tensor], Tensor]] = {
    "elu1": elu1, "relu": torch.relu, "identity": identity, "taylor": taylor,
}
