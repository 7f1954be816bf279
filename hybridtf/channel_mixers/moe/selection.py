"""The selection bias, moved by the counted load after each optimizer step (https://arxiv.org/abs/2408.15664)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init


class SelectionBias(nn.Module):
    """``bias`` (e), a parameter without gradient, and ``load`` (e): tokens that chose each expert since the last step.

    The load is counted in forward passes of training with gradients on, over all passes of an accumulation window, and is
    no part of a checkpoint: one is written between steps, where it is zero. Layers that are computed again in the
    backward pass count all their tokens twice, which moves nothing: only the sign of (average - load) is used.
    """

    load: Tensor

    def __init__(self, n_experts: int, step: float, ctx: BuildContext) -> None:
        super().__init__()
        self.step = step
        self.bias = nn.Parameter(torch.empty(n_experts, **ctx.factory), requires_grad=False)
        self.register_buffer("load", torch.zeros(n_experts, dtype=torch.int64, device=ctx.device), persistent=False)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"bias": ParamSpec("bias", init.constant(0.0))}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelectionBias:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.load.zero_()  # a move starts the count anew, and memory from ``to_empty`` holds anything
        return self

    def count(self, experts: Tensor) -> None:
        """Add the choices ``experts`` (n k) of one pass; the number past the last expert stands for none."""
        if not (self.step and self.training and torch.is_grad_enabled()):
            return
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
