"""Pointwise activations by name, and the gate of gated linear units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.core.config import ConfigTable

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "identity"]
"""``relu2`` is the squared ReLU (https://arxiv.org/abs/2109.08668); ``gelu_tanh`` the tanh approximation of GELU, and
``quick_gelu`` the sigmoid one, x sigmoid(1.702 x)."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "relu": F.relu, "relu2": _relu2,
    "sigmoid": torch.sigmoid, "identity": _identity,
}


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of a name."""
    return _ACTIVATIONS[name]


class GateOptions(ConfigTable):
    """Options of a gated unit, act(gate) * (up + up_shift), where gate and up may be bounded first (gpt-oss)."""

    activation: Activation = "silu"
    gate_scale: float = Field(default=1.0, gt=0)
    """Multiplies gate before anything else (Falcon-H1)."""
    limit: float = Field(default=0.0, ge=0)
    """Bounds gate to at most this, and up to within plus and minus this; 0: no bound."""
    up_shift: float = Field(default=0.0)
    gate_softcap: float = Field(default=0.0, ge=0)
    """silu(gate) becomes c tanh(gate / c) sigmoid(gate) (Inkling 2); 0: no cap."""
    up_softcap: float = Field(default=0.0, ge=0)
    """up becomes c tanh(up / c); 0: no cap."""

    @model_validator(mode="after")
    def _cap_of_silu(self) -> Self:
        if self.gate_softcap and self.activation != "silu":
            raise ValueError(f"gate_softcap bounds the linear factor of silu, and activation = {self.activation!r}")
        return self

    def gate_with(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * (up + up_shift), of two tensors of one shape."""
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.up_shift:
            up = up + self.up_shift
        if self.up_softcap:
            up = self.up_softcap * torch.tanh(up / self.up_softcap)
        if self.gate_softcap:
            return self.gate_softcap * torch.tanh(gate / self.gate_softcap) * torch.sigmoid(gate) * up
        return _ACTIVATIONS[self.activation](gate) * up
