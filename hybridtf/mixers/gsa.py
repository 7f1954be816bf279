"""Gated Slot Attention (https://arxiv.org/abs/2409.07146): softmax attention to a fixed number of slots that forget.

    a_t = sigmoid(f_proj(x))^(1 / gate_normaliser), one a slot;   q, k, v = silu of their projections
    K_t = K_{t-1} Diag(a_t) + k_t (1 - a_t)^T;   V_t = Diag(a_t) V_{t-1} + (1 - a_t) v_t^T
    y_t = V_t^T softmax(K_t^T q_t);   out = out_proj(norm(silu(y)))

Two passes of the op ``gla`` with a softmax over slots between them. The norm is over all heads' channels together.

Axes: b batch, t time, d d_model, h heads, g kv heads, k key width of a head, m slots, v value width of a head.

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
    Fixed,
    ParamSpec,
    Segments,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    GroupedHeadsConfig,
    MemoryConfig,
    MemoryMixer,
    RMSNorm,
    accumulation_dtype,
    head_width,
    idle_beside,
    short_convs,
)


class GSAConfig(GroupedHeadsConfig, MemoryConfig):
    """Gated Slot Attention: softmax attention to a fixed number of slots that forget."""

    source: ClassVar[str] = "https://arxiv.org/abs/2409.07146"

    type: Literal["gsa"] = "gsa"
    n_heads: int = Field(default=4, gt=0)
    expand_k: float = Field(default=1.0, gt=0)
    """Width of all heads' queries, in d_model."""
    expand_v: float = Field(default=1.0, gt=0)
    """Width of all heads' outputs, in d_model."""
    n_slots: int = Field(default=64, gt=0)
    """Of each kv head."""
    gate_normaliser: float = Field(default=8.0, gt=0)
    """The root that is taken of the gate: 8 lets a slot live for long."""
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of short convolutions (with silu) on queries, keys and values, a variant of the published code; 0: none."""

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, n_slots=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> GSA:
        return GSA(self, ctx)


class GSA(MemoryMixer):
    """See :class:`GSAConfig`. Its state: K (b g k m) and V (b g m v), and the convolutions' windows where there are some."""

    op = "read"

    def __init__(self, config: GSAConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        heads, states, slots = config.n_heads, config.kv_heads, config.n_slots
        self.key_dim = head_width(ctx, heads, expand_k=config.expand_k)
        self.v_dim = head_width(ctx, heads, expand_v=config.expand_v)
        self.q_proj = nn.Linear(ctx.d_model, heads * self.key_dim, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, states * self.key_dim, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, states * self.v_dim, bias=False, **ctx.factory)
        self.f_proj = nn.Linear(ctx.d_model, states * slots, bias=False, **ctx.factory)
        self.norm = RMSNorm(ctx.child("norm", d_model=heads * self.v_dim), config.eps)
        self.out_proj = nn.Linear(heads * self.v_dim, ctx.d_model, bias=False, **ctx.factory)
        channels = {"q": heads * self.key_dim, "k": states * self.key_dim, "v": states * self.v_dim}
        self.conv = short_convs(ctx.child("conv"), channels, config.d_conv, kernel=config.conv_kernel)
        shared = {"n_heads": heads, "n_groups": states}
        self.write = ctx.bind_kernel("gla", config.kernel, sizes={**shared, "head_dim": self.key_dim, "v_dim": slots})
        self.read = ctx.bind_kernel("gla", config.kernel, sizes={**shared, "head_dim": slots, "v_dim": self.v_dim})

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        states, slots = self.config.kv_heads, self.config.n_slots
        return {"K": (states, self.key_dim, slots), "V": (states, slots, self.v_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        config = self.config
        q = F.silu(given["q"]).unflatten(-1, (config.n_heads, -1))
        k, v = (F.silu(given[name]).unflatten(-1, (config.kv_heads, -1)) for name in ("k", "v"))
        f = self.f_proj(x).unflatten(-1, (config.kv_heads, -1))
        log_a = F.logsigmoid(f.to(accumulation_dtype(f.dtype))) / config.gate_normaliser  # [b, t, g, m]
        y, after = self._attend(q, k, v, log_a, segments, memory)
        return self.out_proj(self.norm(F.silu(y.flatten(-2)))), after

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, segments: Segments | None, memory: Fixed | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """y (b t h v), and K and V after it."""
        slots = -torch.expm1(log_a)
        first, second = (None, None) if memory is None else (memory["K"], memory["V"])
        more = {"segments": segments, "chunk_size": self.config.chunk_size, "n_tokens": q.shape[1]}
        # Slots and scores stay in the precision of the decays: the softmax is of them.
        scores, K = self.write(q, k, slots, log_a, initial_state=first, decay="values", **more)
        y, V = self.read(scores.softmax(-1), slots, v, log_a, initial_state=second, **more)
        return y, {"K": K, "V": V}
