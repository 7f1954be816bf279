"""The gate through which a layer of a loop takes what an earlier pass tells it (transformers ``inkling2_loop``).

    r = down_proj([norm(h), norm(m)])          norms without weights
    y = (1 - tanh(forget_proj(r))) h + tanh(message_proj(r)) m

Axes: b batch, t time, d d_model, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init
from hybridtf.nn.norms import RMSNorm, accumulation_dtype


class MessageGate(nn.Module):
    """Mixes an input h with a message m, each (b t d), channel by channel. ``rank``: width that the gates are made in."""

    def __init__(self, ctx: BuildContext, rank: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(ctx.child("norm"), eps, weight=False)
        self.down_proj = nn.Linear(2 * ctx.d_model, rank, bias=False, **ctx.factory)
        self.forget_proj, self.message_proj = (nn.Linear(rank, ctx.d_model, bias=False, **ctx.factory) for _ in range(2))

    def param_specs(self) -> dict[str, ParamSpec]:
        small = ParamSpec("matrix", init.normal(0.02))  # near to no message, as in transformers
        return {"forget_proj.weight": small, "message_proj.weight": small}

    def forward(self, h: Tensor, message: Tensor) -> Tensor:
        """(b t d) twice to (b t d), in h's dtype; gates in float32 at least."""
        wide = accumulation_dtype(h.dtype)
        told = self.down_proj(torch.cat([self.norm(h), self.norm(message)], dim=-1))
        forgotten, taken = (torch.tanh(proj(told).to(wide)) for proj in (self.forget_proj, self.message_proj))
        return ((1.0 - forgotten) * h.to(wide) + taken * message.to(wide)).to(h.dtype)
