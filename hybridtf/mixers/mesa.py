"""MesaNet (https://arxiv.org/abs/2506.05233): each token reads the linear map that fits all values so far best.

    q, k = conv(q_proj(x)), conv(k_proj(x)), each through silu and scaled to length 1;  v = v_proj(x)
    a_t = sigmoid(a_proj(x_t));  b_t = sigmoid(b_proj(x_t));  L = Diag(softplus(ridge) + ridge_floor)
    K_t = a_t K_{t-1} + b_t k_t k_t^T;  V_t = a_t V_{t-1} + b_t k_t v_t^T;  y_t = V_t^T (K_t + L)^-1 q_t
    out = out_proj(norm(y))

Linear attention with the queries of a second memory's inverse: where keys overlap, they no longer answer for each other. The
system is solved by ``n_cg_steps`` steps of conjugate gradients, and the gradients are those of its solution. The norm is over
each head's channels, with one weight for all heads; with ``output_gate`` its output is multiplied by silu(gate_proj(x)).

``a_proj`` and ``b_proj`` start as any projection, weights of variance 1 / d and bias 0: at first a_t and b_t lie around 1/2.
``ridge`` starts where L is 1, or twice ``ridge_floor`` where that is more.

Axes: b batch, t time, d d_model, h heads, k width of a head.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Fixed,
    ParamSpec,
    Segments,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import GatedRMSNorm, MemoryConfig, MemoryMixer, ShortConvs, accumulation_dtype, head_width, l2_normalised


class MesaConfig(MemoryConfig):
    """Least squares over all tokens so far, as a mixer."""

    source: ClassVar[str] = "https://arxiv.org/abs/2506.05233"

    type: Literal["mesa"] = "mesa"
    n_heads: int = Field(gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    """None: d_model / n_heads."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    ridge_floor: float = Field(default=0.25, gt=0)
    """The least that is added to the diagonal of the system; it starts at 1, or at twice the floor where that is more."""
    n_cg_steps: int = Field(default=30, gt=0)
    """Steps of the solver. As many as ``head_dim`` solve it but for rounding; fewer do where keys point in few directions."""
    output_gate: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=3, n_cg_steps=12, chunk_size=4)

    def build(self, ctx: BuildContext) -> Mesa:
        return Mesa(self, ctx)


class Mesa(MemoryMixer):
    """See :class:`MesaConfig`. Its state: K and V side by side, (b h k 2k), and the windows of the convolutions."""

    roles, op = ("q", "k"), "mesa"

    def __init__(self, config: MesaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, heads = config, config.n_heads
        self.head_dim = config.head_dim or head_width(ctx, heads)
        inner = heads * self.head_dim
        self.q_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory)
        self.a_proj = nn.Linear(ctx.d_model, heads, bias=True, **ctx.factory)
        self.b_proj = nn.Linear(ctx.d_model, heads, bias=True, **ctx.factory)
        self.ridge = nn.Parameter(torch.empty(heads, self.head_dim, **ctx.factory))
        place, widths = ctx.child("conv"), {"q": inner, "k": inner}
        self.conv = ShortConvs(place, widths, config.d_conv, bias=config.conv_bias, kernel=config.conv_kernel)
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory) if config.output_gate else None
        at = ctx.child("norm", d_model=inner)
        self.norm = GatedRMSNorm(at, n_groups=heads, eps=config.eps, norm_first=True, shared_weight=True)
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=False, **ctx.factory)
        sizes = {"n_heads": heads, "head_dim": self.head_dim, "v_dim": self.head_dim}
        self.mesa = ctx.bind_kernel("mesa", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        floor = self.config.ridge_floor
        start = math.log(math.expm1(max(1 - floor, floor)))
        return {
            "ridge": ParamSpec("state", init.constant(start)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.config.n_heads, self.head_dim, 2 * self.head_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        wide, heads = accumulation_dtype(x.dtype), self.config.n_heads
        # Not rounded after the norm: the solver sees what the keys' lengths do to the system.
        q, k = (l2_normalised(given[name].to(wide).unflatten(-1, (heads, -1))) for name in self.roles)
        v: Tensor = self.v_proj(x).unflatten(-1, (heads, -1))
        ridge = F.softplus(self.ridge.to(wide)) + self.config.ridge_floor
        y, S = self.mesa(
            q, k, v, torch.sigmoid(self.b_proj(x).to(wide)), F.logsigmoid(self.a_proj(x).to(wide)), ridge=ridge,
            initial_state=None if memory is None else memory["S"], segments=segments, chunk_size=self.config.chunk_size,
            n_steps=self.config.n_cg_steps, n_tokens=x.shape[1],
        )
        return self.out_proj(self.norm(y.flatten(-2), None if self.gate_proj is None else self.gate_proj(x))), {"S": S}
