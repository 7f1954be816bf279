"""The network of a router that is more than one projection (ZAYA1: https://arxiv.org/abs/2511.17127, as transformers has it).

    s = in(x) + scale * s_before,    h = gelu(W2 gelu(W1 norm(s) + b1) + b2)

s_before is what the layer before has as s: routers along the depth of a model look at a running sum. The logits are a
projection of h.

Axes: n tokens, d d_model, r width of the router.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, NormConfig, ParamSpec, init, raw_weight
from hybridtf.nn import accumulation_dtype
from hybridtf.ops.autocast import no_autocast


def wide_linear(linear: nn.Linear, x: Tensor, narrow: torch.dtype) -> Tensor:
    """``linear`` of x in float32 at least: a choice between near scores must not hang on rounding to bfloat16. One that is no
    plain projection any more is called, in ``narrow``."""
    wide, weight = accumulation_dtype(x.dtype), raw_weight(linear)
    with no_autocast(x.device):
        if weight is not None:
            bias = linear.bias
            return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        y: Tensor = linear(x.to(narrow))
        return y.to(wide)


class RouterNetwork(nn.Module):
    """See the module. ``follows``: there is an s of the layer before."""

    def __init__(self, ctx: BuildContext, width: int, norm: NormConfig, *, follows: bool) -> None:
        super().__init__()
        self.in_proj = nn.Linear(ctx.d_model, width, **ctx.factory)
        self.norm = norm.build(ctx.child("norm", d_model=width))
        self.hidden = nn.ModuleList(nn.Linear(width, width, **ctx.factory) for _ in range(2))
        self.state_scale = nn.Parameter(torch.empty(width, **ctx.factory)) if follows else None

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.state_scale is None else {"state_scale": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor, before: Tensor | None, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
        """x (n d) and the s before (n r) to h (n r) and s (n r), in float32 at least."""
        state = wide_linear(self.in_proj, x, narrow)
        if before is not None and self.state_scale is not None:
            state = state + before.to(state.dtype) * self.state_scale.to(state.dtype)
        hidden: Tensor = self.norm(state)
        for layer in self.hidden:
            hidden = F.gelu(wide_linear(cast("nn.Linear", layer), hidden, narrow))  # or what an adapter put in its place
        return hidden, state
