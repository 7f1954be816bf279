"""Attention over depth: a learned mix of what earlier layers gave (https://arxiv.org/abs/2603.15031).

    y = sum_i softmax_i(scale * q . norm(v_i)) v_i          v_i (b t d), one query q (d)

Every token mixes its own sources alone. The query starts at 0: all sources weigh the same. In float32 at least inside.

Axes: b batch, t time, i sources, d d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Component, ConfigTable, NormConfig, ParamSpec, init
from hybridtf.nn.norms import RMSNormConfig, accumulation_dtype


def group_sum(i: int) -> str:
    """The name of the edge that holds what group ``i`` of the layers gave."""
    return f"group_sum_{i}"


def group_sums(edges: Collection[str]) -> tuple[str, ...]:
    """The names of those that there are, in order."""
    names: list[str] = []
    while group_sum(len(names)) in edges:
        names.append(group_sum(len(names)))
    return tuple(names)


class DepthOptions(ConfigTable):
    """Options of :class:`DepthAttention`."""

    source_norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """The norm of the sources as the query sees them."""
    values: Literal["plain", "normed"] = "plain"
    """What is mixed: the sources as they are, or normed too (Inkling 2)."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the scores; Inkling 2 has d_model^-0.5."""


class DepthAttention(nn.Module):
    """One mix over depth; see :class:`DepthOptions`."""

    def __init__(self, options: DepthOptions, ctx: BuildContext) -> None:
        super().__init__()
        self.normed_values, self.scale = options.values == "normed", options.scale
        self.query = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.source_norm = options.source_norm.build(ctx.child("source_norm"))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"query": ParamSpec("norm", init.constant(0.0))}

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Sources (b t d), the last one last, to (b t d) in the dtype of the last."""
        dtype = sources[-1].dtype
        wide = [source.to(accumulation_dtype(dtype)) for source in sources]
        normed = [self.source_norm(source) for source in wide]
        query = self.query.to(wide[0].dtype) * self.scale
        weights = torch.stack([(one * query).sum(-1) for one in normed], -1).softmax(-1).unbind(-1)
        mixed = normed if self.normed_values else wide
        y = torch.zeros_like(wide[-1])
        for weight, value in zip(weights, mixed, strict=True):
            y = y + weight[..., None] * value
        return y.to(dtype)
