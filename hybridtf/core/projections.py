"""Projections: when their weight alone says what they compute."""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def raw_weight(linear: nn.Module) -> Tensor | None:
    """The weight of a plain ``nn.Linear`` that nothing has changed; None where only its ``forward`` tells the truth.

    Hooks, parametrisations, subclasses (LoRA, quantised) answer None: the caller then runs the forward form. A shape without
    memory is as plain as the tensor that it stands for, so that what is planned is what will run.
    """
    if type(linear) is not nn.Linear:
        return None
    if type(linear.weight) not in (Tensor, nn.Parameter, FakeTensor):
        return None
    hooks = (
        linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks,
    )
    if any(hooks) or hasattr(linear, "parametrizations") or "forward" in vars(linear):
        return None
    return linear.weight
