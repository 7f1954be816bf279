"""The selection bias, moved by the counted load after each optimizer step (https://arxiv.org/abs/2408.15664)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init
from hybridtf.nn import accumulation_dtype


class SelectionBias(nn.Module):
    """``bias`` (e), a parameter without gradient, and ``load`` (e): tokens that chose each expert since the last step.

    The load is counted in forward passes of training with gradients on, over all passes of an accumulation window, and is
    no part of a checkpoint: one is written between steps, where it is zero. A layer that is computed again in the backward
    pass does not count again. ``bias`` is float32 at least, whatever the model is cast to: its small steps would be lost.
    """

    load: Tensor

    def __init__(self, n_experts: int, step: float, ctx: BuildContext) -> None:
        super().__init__()
        self.step = step
        wide = accumulation_dtype(ctx.param_dtype)
        self.bias = nn.Parameter(torch.empty(n_experts, dtype=wide, device=ctx.device), requires_grad=False)
        self.register_buffer("load", torch.zeros(n_experts, dtype=torch.int64, device=ctx.device), persistent=False)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"bias": ParamSpec("bias", init.constant(0.0))}

    def steering(self) -> tuple[nn.Parameter, ...]:
        """What no gradient trains, and published counts of parameters leave out."""
        return (self.bias,)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelectionBias:
        bias = self.bias.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        wide = accumulation_dtype(self.bias.dtype)
        if self.bias.dtype != wide:
            self.bias.data = bias.to(device=self.bias.device, dtype=wide)
        self.load.zero_()  # a move starts the count anew, and memory from ``to_empty`` holds anything
        return self

    def count(self, experts: Tensor) -> None:
        """Add the choices ``experts`` (n k) of one pass; the number past the last expert stands for none."""
        if not (self.step and self.training and torch.is_grad_enabled()):
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # inside a backward pass: counted when it first ran
        chosen = experts.flatten()
        counted = self.load.new_zeros(self.load.shape[0] + 1).index_add(0, chosen, torch.ones_like(chosen))
        self.load.add_(counted[:-1])

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias by one step towards even loads, over the tokens of all ranks, and count anew.

        An expert with exactly the average load keeps its bias. The training loop calls this after each optimizer step.
        """
        if not self.step:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.load)
        # Multiplied by the number of experts instead of a division, so that the comparison is exact.
        self.bias.add_((self.load.sum() - self.load * self.load.shape[0]).sign().to(self.bias.dtype), alpha=self.step)
        self.load.zero_()
