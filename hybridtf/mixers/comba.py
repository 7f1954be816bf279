"""Comba (https://arxiv.org/abs/2506.02475): a delta rule with one decay a head, whose feedback and output are corrected.

    q, k, v = silu(conv(x W));  q, k of length 1;  beta = sigmoid(b_proj(x));  b = sigmoid(decay)
    log_a = -exp(A_log) softplus(a_proj(x) + dt_bias)
    S_t = (exp(log_a_t) - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    out = out_proj(norm(S_t^T (q_t - D k_t) / sqrt(k)) * sigmoid(gate_proj(x)))

The state is read at k before it decays: a scalar plus low rank, and not a product of both as in the gated delta rule.
Queries and keys are made 1 long before they are corrected and weakened; fla's layer, which does it after, is another function.

Axes: b batch, t time, d d_model, h heads, k head_dim, p value width.

No outside layer was run: the recurrence is held to fla's reference in chunks, and what is around it is spelled out in the
tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
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
from hybridtf.nn import (
    GatedRMSNorm,
    MemoryConfig,
    MemoryMixer,
    PositiveRange,
    ShortConvs,
    SoftplusDecayConfig,
    l2_normalised,
    softplus_log_decay,
)


class CombaConfig(SoftplusDecayConfig, MemoryConfig):
    """Comba: a delta rule whose feedback and output are corrected, with a transition that is a scalar plus low rank."""

    source: ClassVar[str] = "https://arxiv.org/abs/2506.02475"

    type: Literal["comba"] = "comba"
    n_heads: int = Field(default=6, gt=0)
    head_dim: int = Field(default=256, gt=0)
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a value head. None: twice ``head_dim``."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    feedback_decay: bool = True
    """Weakens the feedback by a learned factor between 0 and 1 a head. False: b = 1."""
    output_correction: bool = True
    """Reads at q - D k with a learned D a head. False: at q."""
    d_init: float = 1.0
    """D starts here. The authors take 1 for 1.3 billion parameters and find 0.02 better for 340 million."""
    a_range: PositiveRange = (0.01, 16.0)
    """The decay rates exp(A_log) start evenly in this range. The published code begins at 0, whose logarithm is infinite."""
    chunk_size: int = Field(default=32, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=4, v_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> Comba:
        return Comba(self, ctx)


class Comba(MemoryMixer):
    """See :class:`CombaConfig`. Its state: the windows of three convolutions, and the matrix S (b h k p) of each head."""

    op = "dplr"

    def __init__(self, config: CombaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        heads, self.v_dim = config.n_heads, config.v_dim or 2 * config.head_dim
        keys, values = heads * config.head_dim, heads * self.v_dim
        width, factory = ctx.d_model, ctx.factory
        self.q_proj = nn.Linear(width, keys, bias=False, **factory)
        self.k_proj = nn.Linear(width, keys, bias=False, **factory)
        self.v_proj = nn.Linear(width, values, bias=False, **factory)
        self.conv = ShortConvs(
            ctx.child("conv"), {"q": keys, "k": keys, "v": values}, config.d_conv, bias=config.conv_bias,
            kernel=config.conv_kernel,
        )
        self.a_proj = nn.Linear(width, heads, bias=False, **factory)
        self.b_proj = nn.Linear(width, heads, bias=False, **factory)
        self.gate_proj = nn.Linear(width, values, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(heads, **factory))
        self.decay = nn.Parameter(torch.empty(heads, **factory)) if config.feedback_decay else None
        self.D = nn.Parameter(torch.empty(heads, **factory)) if config.output_correction else None
        self.norm = GatedRMSNorm(
            ctx.child("norm", d_model=values), n_groups=heads, eps=config.eps, norm_first=True, activation="sigmoid",
            shared_weight=True,
        )
        self.out_proj = nn.Linear(values, width, bias=False, **factory)
        sizes = {"n_heads": heads, "head_dim": self.v_dim, "d_state": config.head_dim}
        self.dplr = ctx.bind_kernel("dplr", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {
            **self.config.decay_specs(),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }
        if self.decay is not None:
            specs["decay"] = ParamSpec("state", init.constant(1.0))
        if self.D is not None:
            specs["D"] = ParamSpec("state", init.constant(self.config.d_init))
        return specs

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.config.n_heads, self.config.head_dim, self.v_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        q, k, v = (given[name].unflatten(-1, (self.config.n_heads, -1)) for name in self.roles)
        q, k = l2_normalised(q), l2_normalised(k)
        if self.D is not None:
            q = q - self.D.to(q.dtype)[:, None] * k
        beta = torch.sigmoid(self.b_proj(x))[..., None]
        feedback = beta if self.decay is None else beta * torch.sigmoid(self.decay.to(beta.dtype))[:, None]
        log_a = softplus_log_decay(self.a_proj(x), self.A_log, self.dt_bias)[..., None]
        y, S = self.dplr(
            q * self.config.head_dim**-0.5, beta * k, v, log_a, -feedback * k, k,
            initial_state=None if memory is None else memory["S"], segments=segments, chunk_size=self.config.chunk_size,
            n_tokens=x.shape[1],
        )
        return self.out_proj(self.norm(y.flatten(-2), self.gate_proj(x))), {"S": S}
