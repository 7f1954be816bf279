"""A projection through a narrow middle, for gates that are computed from every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext

_BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu}


class Bottleneck(nn.Module):
    """up_proj(act(down_proj(x))), from ``ctx.d_model`` over ``rank`` to ``d_out``; ``bias``: of ``up_proj``."""

    def __init__(
        self, ctx: BuildContext, rank: int, d_out: int, *, bias: bool, between: Literal["tanh", "sigmoid", "silu"] | None = None
    ) -> None:
        super().__init__()
        self.between = between
        self.down_proj = nn.Linear(ctx.d_model, rank, bias=False, **ctx.factory)
        self.up_proj = nn.Linear(rank, d_out, bias=bias, **ctx.factory)

    def forward(self, x: Tensor) -> Tensor:
        """(... d) to (... d_out)."""
        middle = self.down_proj(x)
        y: Tensor = self.up_proj(middle if self.between is None else _BETWEEN[self.between](middle))
        return y

    def extra_repr(self) -> str:
        return f"between={self.between}"
