"""A learned table of positions, added to the input."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, InputPosition, LengthError, ParamSpec, PositionConfig, Site, init


class LearnedPositionConfig(PositionConfig):
    """A learned vector for each of the model's ``max_seq_len`` positions, added to the input; longer documents are refused."""

    type: Literal["learned"] = "learned"
    site: ClassVar[Site] = "input"
    unused_rows: int = Field(default=0, ge=0)
    """Rows of the table before that of position 0, which nothing reads (OPT, BART: 2)."""

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> LearnedPosition:
        return LearnedPosition(ctx, self.unused_rows)


class LearnedPosition(InputPosition):
    """x + table[position]."""

    def __init__(self, ctx: BuildContext, unused_rows: int = 0) -> None:
        super().__init__()
        self.where, self.unused_rows = ctx.where, unused_rows
        self.table = nn.Parameter(torch.zeros(unused_rows + ctx.max_seq_len, ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"table": ParamSpec("embedding", init.normal(0.02))}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        n = self.table.shape[0] - self.unused_rows
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= n:
            raise LengthError(
                f"{self.where}: a document of {int(positions.max()) + 1} tokens is longer than the learned position table "
                f"(max_seq_len = {n})"
            )
        return x + self.table[positions.clamp(max=n - 1) + self.unused_rows].to(x.dtype)
