"""Softmax attention (https://arxiv.org/abs/1706.03762), with grouped keys and values (https://arxiv.org/abs/2305.13245).

    y_t = out( sum_s softmax_s(scale q_t . k_s) v_s ),   s over the tokens of t's document that the mask allows

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.

Layers may share keys and values (``kv_group``: Gemma 3n and 4, after https://arxiv.org/abs/2405.12981): one of them holds them,
and hands on what it looks at in each call; the others, which have queries alone, look at the same. Their state is of the
giver's kind and holds lengths alone, and is cut, packed, reordered and cropped as the giver's. A reader that stands in no stack
is given the call's keys and values, and holds a copy.

No outside reference was run of ``value_residual``: it is held to the same attention over values mixed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    ConfigError,
    ConfigTable,
    Edges,
    EdgeSpec,
    Growing,
    NormConfig,
    ParamSpec,
    Preset,
    Ring,
    Segments,
    State,
    StateError,
    init,
)
from hybridtf.nn import FactorConfig, HeadsConfig, HeadsMixer, Held, NormOver, Projected, accumulation_dtype, idle_beside

VALUES = "attention_values"
"""The edge by which the first layer's values reach later ones."""


class QueryGrowth(ConfigTable):
    """The query at place n of its document, counted from 1, is multiplied by 1 + alpha ln(1 + n // every): Llama 4's layers
    without positions, after https://arxiv.org/abs/2501.19399."""

    every: int = Field(default=8192, gt=0)
    alpha: float = Field(default=0.1, gt=0)

    def factor(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Of each token, for ``positions`` counted from 0."""
        steps = (positions + 1).div(self.every, rounding_mode="floor").to(dtype)
        return 1.0 + self.alpha * torch.log1p(steps)


class AttentionConfig(HeadsConfig):
    """Softmax attention in its plain forms: grouped heads, windows, sinks, soft caps, gates, any position.

    Presets: ``full_attention``, ``gqa``, ``mqa``, ``sliding_attention``, ``flash_attention``.
    """

    type: Literal["attention"] = "attention"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    time_exponent: ClassVar[float] = 2.0  # of the whole; with a window 1

    window: int | None = Field(default=None, gt=0)
    """Tokens that a token sees, itself included. None: all before it."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of queries and keys."""
    qk_norm_over: NormOver = "head"
    """What ``qk_norm`` is over: each head by itself, all heads side by side (OLMo 2, OLMo Hybrid), or each head by itself with
    weights of its own (``each_head``, for a layer norm: Cohere, StableLM)."""
    qk_norm_after: bool = False
    """``qk_norm`` comes after positions, not before (Hunyuan)."""
    qkv_clip: float | None = Field(default=None, gt=0)
    """Queries, keys and values are bounded by -c and c, after a norm before positions (OLMo, MPT)."""
    output_gate: bool = False
    """Multiplies the heads' output by sigmoid(gate_proj(x)) before ``out_proj`` (https://arxiv.org/abs/2505.06708)."""
    output_gate_per: Literal["channel", "head"] = "channel"
    """A gate for each channel, or one for each head."""
    output_gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    """What the gate goes through (softplus: Laguna)."""
    gate_factor: FactorConfig | None = Field(default=None, examples=[{"start": 1.5}])
    """The gate is multiplied by its square first (Dory)."""
    out_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of all heads' output side by side, gated, before ``out_proj`` (Dory)."""
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a head's values (MiMo-V2). None: ``head_dim``."""
    value_scale: float = Field(default=1.0, gt=0)
    """Multiplies values (MiMo-V2)."""
    softcap: float | None = Field(default=None, gt=0)
    """Scores become softcap * tanh(score / softcap) (Gemma 2)."""
    sinks: bool = False
    """A learned logit per head that takes weight and gives nothing (gpt-oss)."""
    scale: float | None = Field(default=None, gt=0)
    """Of the scores. None: head_dim ** -0.5."""
    query_factor: FactorConfig | None = Field(default=None, examples=[{"start": 1.5}])
    """Queries, told their positions, are multiplied by its square: nGPT's keys have the same factor."""
    query_growth: QueryGrowth | None = Field(default=None, examples=[{"every": 8, "alpha": 0.1}])
    """Sharpens the softmax along the document."""
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""
    value_residual: Literal["none", "auto", "first", "later"] = "none"
    """Later layers mix the first layer's values into theirs, v = m_0 v_first + m_1 v, with two learned numbers that start at
    0.5 (https://arxiv.org/abs/2410.17897). ``auto``: the first such layer of the stack is the first, and the others are later
    ones; ``first``, ``later``: by name."""

    v_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm", "weight": False}])
    """A norm of each head's values (Gemma 3n, Gemma 4)."""
    values_from: Literal["own", "keys"] = "own"
    """``keys``: values are the projected keys, before their norm and positions, and there is no ``v_proj`` (Gemma 4)."""
    kv_group: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$", examples=["far"])
    """Layers of this name share keys and values, positions told: one gives and holds them, later ones have no projections for
    them and hold nothing. A layer that reads sees no further than the window of the one that gives."""
    kv_role: Literal["auto", "gives", "reads"] = "auto"
    """Within ``kv_group``. ``auto``: the first layer of the stack with this name gives, and the others read; else by name, and
    what is read is of the last that gave."""

    _without_group = idle_beside({"kv_group": None}, "kv_role")
    _without_qk_norm = idle_beside({"qk_norm": None}, "qk_norm_over", "qk_norm_after")
    _without_gate = idle_beside({"output_gate": False}, "output_gate_per", "output_gate_activation", "gate_factor")

    @model_validator(mode="after")
    def _values_can_be(self) -> Self:
        if self.values_from == "keys" and self.v_dim not in (None, self.head_dim):
            raise ValueError(f"values_from = 'keys' makes values as wide as keys: v_dim = {self.v_dim} cannot be")
        if self.kv_role == "reads" and (self.v_norm is not None or self.values_from != "own"):
            raise ValueError("v_norm and values_from are of a layer with keys and values of its own, and kv_role = 'reads'")
        if self.kv_group is not None and self.value_residual != "none":
            raise ValueError("value_residual mixes values of a layer's own, and kv_group shares them: give one")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6)

    def build(self, ctx: BuildContext) -> Attention:
        return Attention(self, ctx)


class Attention(HeadsMixer):
    """See :class:`AttentionConfig`. Its state is a ``Growing`` of keys and values, or a ``Ring`` with a window."""

    def __init__(self, config: AttentionConfig, ctx: BuildContext) -> None:
        self.window, self.softcap, self.scale, self.dropout = config.window, config.softcap, config.scale, config.dropout
        group = config.kv_group
        self.edges: tuple[str, ...] = () if group is None else (f"{group}_keys", f"{group}_values")
        gives = config.kv_role == "gives" or (config.kv_role == "auto" and not ctx.edges.issuperset(self.edges))
        self.has_own = gives or not self.edges
        super().__init__(
            config, ctx, own_keys=not self.has_own, own_values=not self.has_own or config.values_from == "keys",
            qkv_bias=config.qkv_bias, out_bias=config.out_bias, qk_norm=config.qk_norm, qk_norm_over=config.qk_norm_over,
            qk_norm_after=config.qk_norm_after, qkv_clip=config.qkv_clip, features={"sinks"} if config.sinks else set(),
            v_dim=config.v_dim,
        )
        self.config, self.where = config, ctx.where
        self.in_stack, self.of_window = False, config.window
        self.v_norm = None
        if not self.has_own:
            self.k_norm = None
        elif config.v_norm is not None:
            self.v_norm = config.v_norm.build(ctx.child("v_norm", d_model=self.v_dim))
        inner = config.n_heads * (self.v_dim if config.output_gate_per == "channel" else 1)
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory) if config.output_gate else None
        self.gate_factor = None if config.gate_factor is None else config.gate_factor.build(ctx, inner)
        wide = config.n_heads * self.head_dim
        self.query_factor = None if config.query_factor is None else config.query_factor.build(ctx, wide)
        outer = ctx.child("out_norm", d_model=config.n_heads * self.v_dim)
        self.out_norm = None if config.out_norm is None else config.out_norm.build(outer)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads, **ctx.factory)) if config.sinks else None
        role = config.value_residual
        if role == "auto":
            role = "later" if VALUES in ctx.edges else "first"
        self.value_mix = nn.Parameter(torch.empty(2, **ctx.factory)) if role == "later" else None
        self.writes = (VALUES,) if role == "first" else self.edges if gives else ()
        self.reads = (VALUES,) if role == "later" else () if gives else self.edges
        if config.kernel == "flash":
            self.cannot["compile"] = "the flash kernel cuts documents out of a batch, and has to look where they are"

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = super().param_specs()
        if self.value_mix is not None:
            specs["value_mix"] = ParamSpec("state", init.constant(0.5))
        return {**specs, "sinks": ParamSpec("state", init.normal(0.02))} if self.sinks is not None else specs

    def edge_specs(self) -> dict[str, EdgeSpec]:
        reach = (self.window or math.inf) if self.edges and self.in_stack else None
        k, v = (EdgeSpec(shape, reach=reach) for shape in self.held_shapes().values())
        if self.edges:
            return dict(zip(self.edges, (k, v), strict=True))
        return {VALUES: v} if self.reads or self.writes else {}

    def stands(self, given: Mapping[str, EdgeSpec]) -> None:
        """Raises :class:`ConfigError` for a reader that sees further than the layer holds that gives."""
        own_way = type(self).attend is not Attention.attend and type(self).attend_over is Attention.attend_over
        if own_way:  # it can attend to copies alone
            return
        if self.has_own:
            self.in_stack = True
            return
        spec = given.get(self.edges[0])
        if spec is None or spec.reach is None:
            return
        window = None if math.isinf(spec.reach) else int(spec.reach)
        if self.causal and window is not None and (self.window is None or self.window > window):
            sees = "all tokens" if self.window is None else f"{self.window} tokens"
            raise ConfigError(
                f"{self.where}: kv_group {self.config.kv_group!r}: a layer that reads sees {sees}, and the one before it that "
                f"gives holds {window}; it must hold as many"
            )
        if self.in_stack and window != self.of_window:
            group = self.config.kv_group
            raise ConfigError(f"{self.where}: kv_group {group!r}: a shared block reads from layers of two windows")
        self.in_stack, self.of_window = True, window

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        if self.has_own or not (self.in_stack and self.causal):
            return super().init_state(batch_size, max_len)
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device, "max_len": max_len}
        nothing = {"k": (0, self.head_dim), "v": (0, self.v_dim)}
        if self.of_window is None:
            return Growing.empty(batch_size, nothing, **where)
        return Ring.empty(batch_size, nothing, window=self.of_window, **where)

    def looks_together(self) -> bool:
        return bool(self.edges) and self.in_stack

    def shared(self, edges: Edges) -> Held | None:
        return None if self.has_own else {name: edges[edge] for name, edge in zip(("k", "v"), self.edges, strict=True)}

    def hands_on(self, seen: Held) -> Edges:
        return {edge: seen[name] for name, edge in zip(("k", "v"), self.edges, strict=True)} if self.has_own else {}

    def exchange(self, held: Held, edges: Edges, segments: Segments | None) -> tuple[Held, Edges]:
        if self.edges:
            return (held, {}) if self.in_stack else self._copied(held, edges, segments)
        if self.value_mix is None:
            return held, {VALUES: held["v"]} if self.writes else {}
        first, v = edges[VALUES], held["v"]
        if first.shape != v.shape:
            raise ConfigError(
                f"value_residual: the first layer's values have (heads, width) {tuple(first.shape[2:])}, "
                f"this layer's {tuple(v.shape[2:])}: they must agree"
            )
        if segments is not None:
            first = first.masked_fill(~segments.real[..., None, None], 0)
        m = self.value_mix.to(v.dtype)
        return {**held, "v": m[0] * first.to(v.dtype) + m[1] * v}, {}

    def _copied(self, held: Held, edges: Edges, segments: Segments | None) -> tuple[Held, Edges]:
        """Keys (b t g k) and values (b t g v) of the call's tokens, given or read."""
        if self.has_own:
            return held, dict(zip(self.edges, (held["k"], held["v"]), strict=True))
        read = {name: edges[edge] for name, edge in zip(("k", "v"), self.edges, strict=True)}
        t, given = held["k"].shape[1], read["k"].shape[1]
        if given != t:
            raise StateError(
                f"{self.where}: kv_group {self.config.kv_group!r}: keys of {given} tokens are given in a call of {t}; a layer "
                "that no stack has told where it stands reads those of the call alone"
            )
        if segments is None:
            return read, {}
        return {name: z.masked_fill(~segments.real[..., None, None], 0) for name, z in read.items()}, {}

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_own:  # what other layers give comes with its positions told
            return x.new_empty(*x.shape[:2], 0, self.head_dim), x.new_empty(*x.shape[:2], 0, self.v_dim)
        if self.config.values_from == "own":
            k, v = super().keys_and_values(x)
        else:
            k = v = self.split(self.k_proj(x))
        return k, v if self.v_norm is None else self.v_norm(v)

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        made = super().project(x, positions, segments, leaf)
        if self.query_factor is not None:
            factor = self.query_factor.value(made.q.dtype).square()
            made = made._replace(q=made.q * factor.view(self.n_heads, -1))
        if self.config.query_growth is None:
            return made
        growth = self.config.query_growth.factor(positions, accumulation_dtype(made.q.dtype))[..., None, None]
        return made._replace(q=(made.q.to(growth.dtype) * growth).to(made.q.dtype))

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gate_proj is None:
            return self.q_proj(x), None
        gate: Tensor = self.gate_proj(x)
        return self.q_proj(x), gate if self.gate_factor is None else gate * self.gate_factor.value(gate.dtype).square()

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        config = self.config
        y = y if config.value_scale == 1.0 else y * config.value_scale
        if gate is not None:
            opened = torch.sigmoid(gate) if config.output_gate_activation == "sigmoid" else F.softplus(gate)
            y = y * opened.unflatten(-1, (self.n_heads, -1))
        if self.out_norm is not None:
            y = self.out_norm(y.flatten(-2)).view(y.shape)
        return super().leave(y, None)


PRESETS = (
    Preset("full_attention", "attention"),
    Preset("gqa", "attention", requires=("n_kv_heads",)),
    Preset("mqa", "attention", {"n_kv_heads": 1}),
    Preset("sliding_attention", "attention", requires=("window",)),
    Preset("flash_attention", "attention", {"kernel": "flash"}),
)
