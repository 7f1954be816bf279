"""Where a loss or gradient that is not finite began: the window is run again, under hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn


def locate(model: nn.Module, run: Callable[[], object], teacher: nn.Module | None = None) -> str:
    """The first module whose output is not finite, else the first parameter with such a gradient, in words.

    ``run`` does the forward and backward passes again, those of ``teacher`` among them. Modules come in the order in which they
    finish, inner ones before those that hold them; parameters in the order of the backward pass, which starts at the loss.
    """
    outputs: list[str] = []
    gradients: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(_output_hook(name or "model", outputs)))
    for name, module in [] if teacher is None else teacher.named_modules():
        handles.append(module.register_forward_hook(_output_hook(f"the teacher's {name or 'model'}", outputs)))
    for name, param in model.named_parameters():
        if param.requires_grad:
            handles.append(param.register_post_accumulate_grad_hook(_gradient_hook(name, gradients)))
    try:
        # Compiled code runs no hooks.
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()
    if outputs:
        return f"the first output that is not finite is that of {outputs[0]}"
    if gradients:
        return f"every output is finite; the first gradient that is not is that of {gradients[0]}"
    return "every output and every gradient is finite on its own: their norm overflows"


def _output_hook(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if found or _finite(output):
            return
        weights = dict(module.named_parameters(recurse=False))
        broken = [weight for weight, value in weights.items() if not _finite(value)]
        if broken:
            cause = f"its {broken[0]} is not finite"
        elif not _finite(args):
            cause = "its input is not finite"
        else:
            cause = "its input is finite"
        found.append(f"{name} ({type(module).__name__}): {cause}")

    return hook


def _gradient_hook(name: str, found: list[str]) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        if not found and param.grad is not None and not _finite(param.grad):
            found.append(name)

    return hook


def _finite(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
