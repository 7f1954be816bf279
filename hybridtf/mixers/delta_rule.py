"""The delta rule family: a memory that stores a value at a key by correcting what it reads there.

    q, k, v = conv(q_proj(x)), conv(k_proj(x)), conv(v_proj(x)), each through silu;  q, k scaled to length 1
    S' = Diag(a_t) S_{t-1};  S_t = S' + b_t k_t (v_t - S'^T k_t)^T;  y_t = S_t^T q_t / sqrt(k);  out = out_proj(norm(y))

- ``delta_net`` (https://arxiv.org/abs/2406.06484): no decay; b = sigmoid(b_proj(x)).
- ``gated_delta_net`` (https://arxiv.org/abs/2412.06464): a = exp(-exp(A_log) softplus(a_proj(x) + dt_bias)), one a value head.
- ``gated_delta_product`` (https://arxiv.org/abs/2502.10297): the same with several (k, v, b) a token, one after another.
- ``kda`` (https://arxiv.org/abs/2510.26692): a for each key channel, from a projection of low rank.

b lies between 0 and 1, or between 0 and 2 with ``allow_neg_eigval`` (https://arxiv.org/abs/2411.12537): I - b k k^T then has
an eigenvalue 1 - b between -1 and 1, and a memory can be turned round and not only erased.

Axes: b batch, t time, d d_model, n steps a token, g key heads, h value heads, k head_dim, p v_dim.

No outside layer was run for ``delta_net`` and ``gated_delta_product``: their recurrences are held to fla's, and what is around
them is spelled out in the tests. The others are held to the layers of transformers.
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
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    Bottleneck,
    GatedRMSNorm,
    MemoryConfig,
    MemoryMixer,
    PositiveRange,
    ShortConvs,
    SoftplusDecayConfig,
    ValueHeadsConfig,
    accumulation_dtype,
    idle_beside,
    l2_normalised,
    softplus_log_decay,
)

Decay = Literal["none", "head", "channel"]


class DeltaRuleConfig(MemoryConfig):
    """Options of the whole family."""

    n_heads: int = Field(gt=0)
    """Heads of queries and keys."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of a query or key head. None: d_model / n_heads."""
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a value head. None: ``head_dim``."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    """b up to 2 instead of 1."""

    key_share: ClassVar[float] = 1.0
    """The part of d_model that all key heads have together where ``head_dim`` is None."""
    v_expand: ClassVar[int] = 1
    """``v_dim`` is this many times ``head_dim`` where it is None."""

    @property
    def value_heads(self) -> int:
        """Heads of values, each with a memory."""
        return self.n_heads

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=4, v_dim=3, chunk_size=4)


class DeltaNetConfig(DeltaRuleConfig):
    """DeltaNet: the delta rule without decay; each value corrects what the memory says at its key."""

    type: Literal["delta_net"] = "delta_net"
    output_gate: bool = False
    """Multiplies the normalised output by silu(gate_proj(x))."""

    source: ClassVar[str] = "https://arxiv.org/abs/2406.06484"

    def build(self, ctx: BuildContext) -> DeltaNet:
        return DeltaNet(self, ctx)


class GatedDeltaRuleConfig(ValueHeadsConfig, SoftplusDecayConfig, DeltaRuleConfig):
    """Options of the members with a decay: more value heads than key heads, and where the decays start."""

    a_range: PositiveRange = (0.01, 16.0)
    """The decay rates exp(A_log) start evenly in this range. The papers begin at 0, whose logarithm is infinite."""
    dt_range: PositiveRange = (0.001, 0.1)
    """The steps softplus(dt_bias) start log-evenly in this range. Qwen3-Next: (1.3133, 1.3133), a bias of 1."""

    @classmethod
    def tiny(cls) -> Self:
        # What a head of fewer values reads is often nearly 0, and a norm over it then shows its rounding.
        return cls(n_heads=2, n_v_heads=4, head_dim=6, v_dim=4, chunk_size=4)


class GatedDeltaNetConfig(GatedDeltaRuleConfig):
    """Gated DeltaNet: the delta rule with one decay a value head (also Qwen3-Next, Qwen3.5, OLMo-Hybrid). ``head_dim`` None:
    0.75 d_model / n_heads; ``v_dim`` None: twice that."""

    type: Literal["gated_delta_net"] = "gated_delta_net"
    output_gate: bool = True
    """Multiplies the normalised output by act(gate_proj(x))."""
    gate_activation: Literal["silu", "sigmoid"] = "silu"

    source: ClassVar[str] = "https://arxiv.org/abs/2412.06464"
    key_share: ClassVar[float] = 0.75
    v_expand: ClassVar[int] = 2

    _without_gate = idle_beside({"output_gate": False}, "gate_activation")

    def build(self, ctx: BuildContext) -> GatedDeltaNet:
        return GatedDeltaNet(self, ctx)


class GatedDeltaProductConfig(GatedDeltaRuleConfig):
    """Gated DeltaProduct: the delta rule with ``n_householder`` corrections a token, decayed before the first and read after
    the last. Widths as in Gated DeltaNet; b up to 2 by default."""

    type: Literal["gated_delta_product"] = "gated_delta_product"
    n_householder: int = Field(default=2, gt=0)
    forget_gate: bool = True
    """False: DeltaProduct, without decay."""
    output_gate: bool = True
    """Multiplies the normalised output by silu(gate_proj(x))."""
    allow_neg_eigval: bool = True
    """b up to 2 instead of 1."""

    source: ClassVar[str] = "https://arxiv.org/abs/2502.10297"
    key_share: ClassVar[float] = 0.75
    v_expand: ClassVar[int] = 2

    _without_decay = idle_beside({"forget_gate": False}, "a_range", "dt_range", "dt_floor")

    def build(self, ctx: BuildContext) -> GatedDeltaProduct:
        return GatedDeltaProduct(self, ctx)


class KDAConfig(GatedDeltaRuleConfig):
    """Kimi Delta Attention: the delta rule with a decay for each key channel, and a sigmoid gate after the output norm."""

    type: Literal["kda"] = "kda"
    head_dim: int = Field(default=128, gt=0)
    """Width of a query or key head."""
    low_rank: bool = True
    """The decay and the gate come through ``v_dim`` channels (Kimi Linear). False: from a full matrix (Ling)."""
    gate_bias: bool = False
    """Of the gate's last projection: the paper's code has one, Kimi Linear has none."""
    decay_floor: float | None = Field(default=None, lt=0, examples=[-5.0])
    """The log decay of a token is this times sigmoid(exp(A_log) (decay(x) + dt_bias)), so never below it. None: the form of
    Gated DeltaNet, without bound."""
    a_range: PositiveRange = (1.0, 16.0)
    """The decay rates exp(A_log) start evenly in this range. With ``decay_floor`` the papers' code starts all at 1."""

    source: ClassVar[str] = "https://arxiv.org/abs/2510.26692"

    def build(self, ctx: BuildContext) -> KDA:
        return KDA(self, ctx)


class DeltaRuleMixer(MemoryMixer):
    """What the family shares. Its state: the convolutions' windows and a memory S (b h k p) of each value head."""

    op = "rule"

    def __init__(
        self, config: DeltaRuleConfig, ctx: BuildContext, *, gate: Literal["silu", "sigmoid"] | None = None,
        decay: Decay = "none", n_steps: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.n_steps, self.decay = config, n_steps, decay
        heads, self.value_heads = config.n_heads, config.value_heads
        share = config.key_share * ctx.d_model / heads
        if config.head_dim is None and share != round(share):
            part = "" if config.key_share == 1 else f"{config.key_share} * "
            raise ctx.error(f"{part}d_model / n_heads = {share:g} is no whole number; give head_dim")
        self.head_dim = config.head_dim or round(share)
        self.v_dim = config.v_dim or config.v_expand * self.head_dim
        self.d_inner = self.value_heads * self.v_dim
        widths = {"q": heads * self.head_dim, "k": n_steps * heads * self.head_dim, "v": n_steps * self.d_inner}
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(ctx.d_model, x, bias=False, **ctx.factory) for x in widths.values())
        self.conv = ShortConvs(ctx.child("conv"), widths, config.d_conv, bias=config.conv_bias, kernel=config.conv_kernel)
        self.b_proj = nn.Linear(ctx.d_model, n_steps * self.value_heads, bias=False, **ctx.factory)
        self.gate_proj = None if gate is None else self.output_gate(ctx)
        self.norm = GatedRMSNorm(
            ctx.child("norm", d_model=self.d_inner), n_groups=self.value_heads, eps=config.eps, norm_first=True,
            activation=gate or "silu", shared_weight=True,
        )
        self.out_proj = nn.Linear(self.d_inner, ctx.d_model, bias=False, **ctx.factory)
        sizes = {
            "n_heads": self.value_heads, "n_key_heads": heads, "key_dim": self.head_dim, "head_dim": self.v_dim,
            "n_steps": n_steps,
        }
        features = {"channel_decay"} if decay == "channel" else set()
        self.rule = ctx.bind_kernel("gated_delta_rule", config.kernel, sizes=sizes, features=features)

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}
        if self.decay != "none":
            assert isinstance(self.config, GatedDeltaRuleConfig)
            specs |= self.config.decay_specs()
        return specs

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.value_heads, self.head_dim, self.v_dim)}

    def log_decay(self, x: Tensor) -> Tensor | None:
        """x (b t d) to the logarithm of the decay, (b t h) or (b t h k); None: no decay."""
        return None

    def output_gate(self, ctx: BuildContext) -> nn.Module:
        """The projection from d_model to what gates the output."""
        return nn.Linear(ctx.d_model, self.d_inner, bias=False, **ctx.factory)

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        wide = accumulation_dtype(x.dtype)
        # Not rounded after the norm: with b near 2 a key longer than 1 lets the memory grow.
        q, k = (l2_normalised(given[name].to(wide).unflatten(-1, (-1, self.head_dim))) for name in ("q", "k"))
        v: Tensor = given["v"].unflatten(-1, (-1, self.v_dim))
        rates = self.b_proj(x).to(wide).sigmoid() * (2.0 if self.config.allow_neg_eigval else 1.0)
        if self.n_steps > 1:
            k, v, rates = (z.unflatten(2, (self.n_steps, -1)) for z in (k, v, rates))  # [b, t, n, ...]
        y, S = self.rule(
            q * self.head_dim**-0.5, k, v, rates, self.log_decay(x),
            initial_state=None if memory is None else memory["S"], segments=segments, chunk_size=self.config.chunk_size,
            n_tokens=x.shape[1],
        )
        return self.out_proj(self.norm(y.flatten(-2), None if self.gate_proj is None else self.gate_proj(x))), {"S": S}


class DeltaNet(DeltaRuleMixer):
    """See :class:`DeltaNetConfig`."""

    def __init__(self, config: DeltaNetConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, gate="silu" if config.output_gate else None)


class GatedDeltaNet(DeltaRuleMixer):
    """See :class:`GatedDeltaNetConfig`."""

    def __init__(self, config: GatedDeltaNetConfig | GatedDeltaProductConfig, ctx: BuildContext, **more: Any) -> None:
        activation = config.gate_activation if isinstance(config, GatedDeltaNetConfig) else "silu"
        super().__init__(config, ctx, gate=activation if config.output_gate else None, **{"decay": "head", **more})
        if self.decay == "head":
            self.a_proj = nn.Linear(ctx.d_model, self.value_heads, bias=False, **ctx.factory)
            self.A_log = nn.Parameter(torch.empty(self.value_heads, **ctx.factory))
            self.dt_bias = nn.Parameter(torch.empty(self.value_heads, **ctx.factory))

    def log_decay(self, x: Tensor) -> Tensor | None:
        if self.decay == "none":
            return None
        return softplus_log_decay(self.a_proj(x), self.A_log, self.dt_bias)


class GatedDeltaProduct(GatedDeltaNet):
    """See :class:`GatedDeltaProductConfig`. Projections of keys, values and rates hold one step after another."""

    def __init__(self, config: GatedDeltaProductConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, decay="head" if config.forget_gate else "none", n_steps=config.n_householder)


class KDA(DeltaRuleMixer):
    """See :class:`KDAConfig`."""

    def __init__(self, config: KDAConfig, ctx: BuildContext) -> None:
        self.options = config
        super().__init__(config, ctx, gate="sigmoid", decay="channel")
        channels = self.value_heads * self.head_dim
        self.decay_proj = self._projection(ctx, channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads, **ctx.factory))
        self.dt_bias = nn.Parameter(torch.empty(channels, **ctx.factory))

    def output_gate(self, ctx: BuildContext) -> nn.Module:
        return self._projection(ctx, self.d_inner, bias=self.options.gate_bias)

    def _projection(self, ctx: BuildContext, width: int, *, bias: bool) -> nn.Module:
        if not self.options.low_rank:
            return nn.Linear(ctx.d_model, width, bias=bias, **ctx.factory)
        return Bottleneck(ctx, self.v_dim, width, bias=bias)

    def log_decay(self, x: Tensor) -> Tensor | None:
        found, bias = (z.unflatten(-1, (-1, self.head_dim)) for z in (self.decay_proj(x), self.dt_bias))
        if self.options.decay_floor is None:
            return softplus_log_decay(found, self.A_log[:, None], bias)
        wide = accumulation_dtype(x.dtype)
        rate = self.A_log.to(wide).exp()[:, None]
        return self.options.decay_floor * torch.sigmoid(rate * (found.to(wide) + bias.to(wide)))
