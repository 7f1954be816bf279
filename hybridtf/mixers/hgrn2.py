"""HGRN2 (https://arxiv.org/abs/2404.07904): a gated linear recurrence whose keys are what its forget gate lets go.

    f_t = bound + (1 - bound) sigmoid(f_proj(x));   S_t = Diag(f_t) S_{t-1} + (1 - f_t) i_t^T;   y_t = S_t^T silu(q_t) k^(-1/2)
    out = out_proj(norm(y));   q, i = q_proj(x), i_proj(x)

The norm is over all heads' channels together; before it the published code divides by the root of the key width. The lower
bound rises with depth, by one parameter for the whole stack: the first HGRN2 layer owns it, has the bound 0, and writes an
edge for each later layer (:class:`~hybridtf.nn.LowerBounds`). A layer used alone, or the only one of a stack, has the bound 0.

Axes: b batch, t time, d d_model, h heads, k key width of a head, v value width, the same.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    EdgeSpec,
    Extras,
    Fixed,
    ParamSpec,
    Segments,
    State,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    LowerBounds,
    MemoryConfig,
    MemoryMixer,
    RMSNorm,
    head_count,
    idle_beside,
    log_forget,
    short_convs,
)


class HGRN2Config(MemoryConfig):
    """HGRN2: matrix states whose forget gates have lower bounds that rise with depth; d_model / head_dim heads."""

    source: ClassVar[str] = "https://arxiv.org/abs/2404.07904"

    type: Literal["hgrn2"] = "hgrn2"
    head_dim: int = Field(default=128, gt=0)
    """Key and value width of a head, the paper's expand_ratio: rows of the state for each channel. Must divide d_model."""
    lower_bound: bool = True
    """Forget gates have a lower bound that rises with depth. False: 0 everywhere."""
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of short convolutions on queries, gates and inputs, without an activation; 0: none."""

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(head_dim=4, chunk_size=4)

    def build(self, ctx: BuildContext) -> HGRN2:
        return HGRN2(self, ctx)


class HGRN2(MemoryMixer):
    """See :class:`HGRN2Config`. Its state: one matrix S (b h k v) a head, and the windows of convolutions, if any."""

    roles, op = ("q", "f", "i"), "gla"

    def __init__(self, config: HGRN2Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        width, d = config.head_dim, ctx.d_model
        self.n_heads = head_count(ctx, width)
        self.q_proj, self.f_proj, self.i_proj, self.out_proj = (
            nn.Linear(d, d, bias=False, **ctx.factory) for _ in range(4)
        )
        self.bounds = LowerBounds(ctx.child("bounds"), "hgrn2") if config.lower_bound else None
        if self.bounds is not None:
            self.reads, self.writes = self.bounds.reads, self.bounds.writes
        self.norm = RMSNorm(ctx.child("norm"), config.eps)
        channels = dict.fromkeys(self.roles, d)
        self.conv = short_convs(ctx.child("conv"), channels, config.d_conv, activation=None, kernel=config.conv_kernel)
        sizes = {"n_heads": self.n_heads, "n_groups": self.n_heads, "head_dim": width, "v_dim": width}
        self.gla = ctx.bind_kernel("gla", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {} if self.bounds is None else self.bounds.edge_specs()

    def unread(self, edges: frozenset[str]) -> None:
        if self.bounds is not None:
            self.bounds.unread(edges)
            self.writes = self.bounds.writes

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, self.config.head_dim, self.config.head_dim)}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Any, ...]:
        bound, written = (None, {}) if self.bounds is None else self.bounds(x, edges)
        out = self.remember(x, segments, state, bound=bound)
        return (*out, Extras(written)) if self.writes else out

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_f = log_forget(given["f"], more["bound"])
        k = -torch.expm1(log_f)
        q = F.silu(given["q"]) * self.config.head_dim**-0.5
        q, k, v, log_f = (y.unflatten(-1, (self.n_heads, -1)) for y in (q, k.to(q.dtype), given["i"], log_f))
        y, S = self.gla(
            q, k, v, log_f, initial_state=None if memory is None else memory["S"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        return self.out_proj(self.norm(y.flatten(-2))), {"S": S}
