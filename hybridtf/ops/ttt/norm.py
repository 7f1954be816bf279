"""The layer norm inside the memory, and the gradient of its loss.

Axes: p channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of z (... p)."""
    unit, _ = _unit(z, eps)
    return torch.addcmul(bias, unit, weight)


def loss_gradient(z: Tensor, target: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The gradient in z (... p) of |norm(z) - target|^2 / 2."""
    unit, rate = _unit(z, eps)
    of_unit = (torch.addcmul(bias, unit, weight) - target) * weight
    along = (of_unit * unit).mean(-1, keepdim=True)
    return (of_unit - of_unit.mean(-1, keepdim=True) - unit * along) * rate


def fused_loss_gradient(z: Tensor, goal: Tensor, square: Tensor, eps: float) -> Tensor:
    """The same in three calls: ``goal`` is (bias - target) weight, ``square`` weight^2. Differentiable once."""
    shape = z.shape[-1:]
    unit, mean, rate = torch.native_layer_norm(z, shape, None, None, eps)
    of_unit = torch.addcmul(goal, unit, square)
    backward = torch.ops.aten.native_layer_norm_backward
    found: Tensor = backward(of_unit, z, shape, mean, rate, None, None, [True, False, False])[0]
    return found


def _unit(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z with mean 0 and variance 1, and what it was multiplied by."""
    centred = z - z.mean(-1, keepdim=True)
    rate = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rate, rate
