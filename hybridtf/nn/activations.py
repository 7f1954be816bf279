"""Pointwise activations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""``relu2`` is the squared ReLU (https://arxiv.org/abs/2109.08668); ``gelu_tanh`` the tanh approximation."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2,
}


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of a name."""
    return _ACTIVATIONS[name]
