"""LightNet (https://arxiv.org/abs/2405.21022): each key channel averages the values so far with softmax weights.

    q = silu(q_proj(x));  z_t = log sum_{s<=t} exp(k_s), channel by channel
    S_t = Diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(k_t - z_t) v_t^T;   y_t = S_t^T q_t k^(-1/2)
    out = out_proj(norm(y) * silu(gate_up_proj(gate_down_proj(x))))

Row c of S_t is the softmax over time of channel c's keys, applied to the values: the decay comes from the keys and needs no
gate of its own. The norm is over all heads' channels together. (The paper's relative position encodings, for more than one
dimension of time, are not part of the layer.)

Axes: b batch, t time, d d_model, h heads, k key width of a head, v value width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Fixed,
    ParamSpec,
    Segments,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    GatedRMSNorm,
    MemoryConfig,
    MemoryMixer,
    accumulation_dtype,
    head_width,
    idle_beside,
    running_softmax,
    short_convs,
)


class LightNetConfig(MemoryConfig):
    """Linear attention with keys normalised over time."""

    source: ClassVar[str] = "https://arxiv.org/abs/2405.21022"

    type: Literal["lightnet"] = "lightnet"
    n_heads: int = Field(gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    """Width of a head's queries and keys. None: d_model / n_heads, which is always that of its values."""
    gate_rank: int = Field(default=128, gt=0)
    """Of the two matrices that make the output gate."""
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of short convolutions on queries, keys and values, a variant of the published code; 0: none."""
    conv_bias: bool = False

    _without_convolution = idle_beside({"d_conv": 0}, "conv_bias", "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=3, gate_rank=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> LightNet:
        return LightNet(self, ctx)


class LightNet(MemoryMixer):
    """See :class:`LightNetConfig`. Its state: S (b h k v), z (b h k), and the windows of convolutions, if any."""

    op = "gla"

    def __init__(self, config: LightNetConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, heads, width = config, config.n_heads, ctx.d_model
        self.v_dim = head_width(ctx, heads)
        self.key_dim = config.head_dim or self.v_dim
        self.q_proj = nn.Linear(width, heads * self.key_dim, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(width, heads * self.key_dim, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        self.gate_down_proj = nn.Linear(width, config.gate_rank, bias=False, **ctx.factory)
        self.gate_up_proj = nn.Linear(config.gate_rank, width, bias=False, **ctx.factory)
        self.norm = GatedRMSNorm(ctx.child("norm"), n_groups=1, eps=config.eps, norm_first=True)
        self.out_proj = nn.Linear(width, width, bias=False, **ctx.factory)
        self.conv = short_convs(
            ctx.child("conv"), {"q": heads * self.key_dim, "k": heads * self.key_dim, "v": width}, config.d_conv,
            bias=config.conv_bias, activation=None, kernel=config.conv_kernel,
        )
        sizes = {"n_heads": heads, "n_groups": heads, "head_dim": self.key_dim, "v_dim": self.v_dim}
        self.gla = ctx.bind_kernel("gla", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        heads = self.config.n_heads
        return {"S": (heads, self.key_dim, self.v_dim), "z": (heads, self.key_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        q, k, v = (given[name].unflatten(-1, (self.config.n_heads, -1)) for name in self.roles)
        wide = accumulation_dtype(x.dtype)
        before, length, S = (None, None, None) if memory is None else (memory["z"], memory.length, memory["S"])
        found = running_softmax(k.to(wide), before, length, segments)
        y, S = self.gla(
            F.silu(q) * self.key_dim**-0.5, found.weight, v, found.log_kept, initial_state=S, segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(self.norm(y.flatten(-2), self.gate_up_proj(self.gate_down_proj(x))))
        return out, {"S": S, "z": found.total.to(wide)}
