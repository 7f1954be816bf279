"""How what a stem gives becomes several residual streams, where it is not repeated; and back.

Axes: b batch, t time, s streams, d d_model.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigTable, OneOf
from hybridtf.nn import accumulation_dtype


class ProjectedSpreadConfig(ConfigTable):
    """The first stream is what came in, each other one a projection of it with the same root mean square (Gemma 3n)."""

    type: Literal["projected"] = "projected"
    eps: float = Field(default=1e-5, gt=0)
    """The least mean square of a projection that is divided by."""

    def build(self, ctx: BuildContext, n_streams: int) -> ProjectedStreams:
        return ProjectedStreams(ctx, n_streams, self.eps)


SpreadConfig: TypeAlias = Annotated[ProjectedSpreadConfig, OneOf("spread", ProjectedSpreadConfig)]
"""A field that holds one of them."""


class ProjectedStreams(nn.Module):
    """``projs``: a matrix for each stream but the first."""

    def __init__(self, ctx: BuildContext, n_streams: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.projs = nn.ModuleList(nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory) for _ in range(n_streams - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(b t d) to (b t s d)."""
        return torch.stack([x, *(as_large(proj(x), x, self.eps) for proj in self.projs)], -2)

    def mean(self, x: Tensor) -> Tensor:
        """Streams (b t s d) to (b t d): the mean of the first and of the others' projections, as large as the first."""
        first, *others = x.unbind(-2)
        made = [as_large(proj(one), first, self.eps) for proj, one in zip(self.projs, others, strict=True)]
        return torch.stack([first, *made]).mean(0)


def as_large(y: Tensor, like: Tensor, eps: float) -> Tensor:
    """y (... d) with the root mean square of ``like`` (... d)."""
    wide = y.to(accumulation_dtype(y.dtype))
    wanted = like.to(wide.dtype).square().mean(-1, keepdim=True)
    has = wide.square().mean(-1, keepdim=True).clamp(min=eps)
    # The root of the quotient, and not a quotient of roots, whose gradient is none where like is 0.
    return (wide * (wanted / has + torch.finfo(wide.dtype).tiny).sqrt()).to(y.dtype)
