"""Linear attention (https://arxiv.org/abs/2006.16236): attention whose weights are products of features, and so a recurrence.

    S_t = a S_{t-1} + phi(k_t) [v_t, 1]^T;   [y_t, z_t] = S_t^T phi(q_t);   out = out_proj(y_t / z_t)

Axes: b batch, t time, d d_model, h heads, g kv heads, k head_dim, n features, p v_dim.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Edges,
    Fixed,
    NormConfig,
    ParamSpec,
    PositionConfig,
    QueryKeyPosition,
    RecurrentMixer,
    Segments,
    State,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    FEATURE_MAPS,
    FeatureMap,
    GroupedHeadsConfig,
    NoPositionConfig,
    accumulation_dtype,
    retention_log_decay,
    token_positions,
    told,
)
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.ssd import normalised, with_ones


class LinearAttentionConfig(GroupedHeadsConfig):
    """Linear attention with a feature map, a normaliser and a decay that does not depend on the input."""

    type: Literal["linear_attention"] = "linear_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2006.16236"
    head_dim: int | None = Field(default=None, gt=0)
    """Width of a head's queries and keys, before the map. None: d_model / n_heads."""
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a head's values. None: ``head_dim``."""
    feature_map: FeatureMap = "elu1"
    """``elu1``: elu(x) + 1. ``relu``. ``identity``: the map of RetNet. ``taylor``: weights 1 + s + s^2 / 2 with
    s = scale q.k (https://arxiv.org/abs/2402.18668)."""
    normaliser: bool = True
    """Divide by the sum of the weights; a token whose weights are all 0 gives 0. Not with ``identity``, whose weights may
    be negative: their sum can be anything, 0 included."""
    eps: float = Field(default=0.0, ge=0)
    """Added to the normaliser."""
    decay: Literal["none", "retnet"] | tuple[float, ...] = Field(default="none", examples=[(0.5, 1.0), "retnet"])
    """How much of its state each kv head keeps at a token: all; 1 - 2^(-5-i) for kv head i
    (https://arxiv.org/abs/2307.08621); or one number for each kv head, above 0 and at most 1."""
    scale: float | None = Field(default=None, gt=0)
    """Of the products of queries and keys (of their features, which a normaliser cancels; ``taylor``: before the map).
    None: head_dim ** -0.5."""
    position: Component[PositionConfig] = Field(default_factory=NoPositionConfig)
    """On queries and keys, before the map."""
    output_norm: Component[NormConfig] | None = None
    """A norm of each head's output, of width ``v_dim``."""
    output_gate: bool = False
    """Multiplies the heads' output by silu(gate_proj(x)) before ``out_proj`` (RetNet)."""
    qkv_bias: bool = False
    out_bias: bool = False
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.normaliser and self.feature_map == "identity":
            raise ValueError(
                "normaliser = true needs weights that are not negative, and feature_map 'identity' gives any: "
                "set normaliser = false, or take elu1, relu or taylor"
            )
        if self.eps and not self.normaliser:
            raise ValueError(f"eps = {self.eps} is added to the normaliser, and normaliser is false")
        if not isinstance(self.decay, str):
            if len(self.decay) != self.kv_heads:
                raise ValueError(f"decay has {len(self.decay)} numbers for {self.kv_heads} kv heads")
            if not all(0 < a <= 1 for a in self.decay):
                raise ValueError(f"decay = {list(self.decay)} must be numbers above 0 and at most 1")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4, v_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> LinearAttention:
        return LinearAttention(self, ctx)


class LinearAttention(RecurrentMixer):
    """See :class:`LinearAttentionConfig`. Its state is one matrix S (b g n p) a kv head; with a normaliser, p is
    ``v_dim + 1`` and the last column holds the sum of the keys' features.
    """

    def __init__(self, config: LinearAttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        if config.head_dim is None and ctx.d_model % config.n_heads:
            raise ctx.error(f"d_model = {ctx.d_model} is not divisible by n_heads = {config.n_heads}; give head_dim")
        self.head_dim = config.head_dim or ctx.d_model // config.n_heads
        self.v_dim = config.v_dim or self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        heads, states = config.n_heads, config.kv_heads
        self.q_proj = nn.Linear(ctx.d_model, heads * self.head_dim, bias=config.qkv_bias, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, states * self.head_dim, bias=config.qkv_bias, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, states * self.v_dim, bias=config.qkv_bias, **ctx.factory)
        self.gate_proj = (
            nn.Linear(ctx.d_model, heads * self.v_dim, bias=False, **ctx.factory) if config.output_gate else None
        )
        self.out_proj = nn.Linear(heads * self.v_dim, ctx.d_model, bias=config.out_bias, **ctx.factory)
        place = ctx.child("position", d_model=self.head_dim)
        self.position = config.position.build_at(place, "qk")
        self.cannot = {} if self.position is None else dict(self.position.cannot)
        if isinstance(self.position, QueryKeyPosition):
            self.uses_max_len = self.position.uses_max_len
            if self.position.span(torch.float32) is not None:
                raise place.error(f"{config.position.type_name()!r} weighs scores, and linear attention takes none")
        norm = config.output_norm
        self.output_norm = None if norm is None else norm.build(ctx.child("output_norm", d_model=self.v_dim))
        self.n_features = FEATURE_MAPS[config.feature_map](torch.zeros(1, self.head_dim)).shape[-1]
        self.read_dim = self.v_dim + 1 if config.normaliser else self.v_dim
        sizes = {"n_heads": states, "head_dim": self.read_dim, "d_state": self.n_features, "n_groups": states}
        self.ssd = ctx.bind_kernel("ssd", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = {"S": (self.config.kv_heads, self.n_features, self.read_dim)}
        return Fixed.empty(
            batch_size, shapes, max_len=max_len, dtype=accumulation_dtype(self.ssd.dtype), device=self.ssd.device
        )

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        q, k = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj))
        if self.position is not None:
            q, k = told(self.position, q, k, token_positions(x, segments, state), segments, state)
        q, k = self._features(q, is_query=True), self._features(k, is_query=False)
        projected = self.v_proj(x)
        v = projected.unflatten(-1, (self.config.kv_heads, self.v_dim)).to(q.dtype)  # [b, t, g, p]
        y, S = self._recur(q, k, with_ones(v) if self.config.normaliser else v, segments, state)
        if self.config.normaliser:
            y = normalised(y, self.config.eps)
        if self.output_norm is not None:
            y = self.output_norm(y)
        y = y.flatten(-2).to(projected.dtype)
        if self.gate_proj is not None:
            y = y * F.silu(self.gate_proj(x))
        out = self.out_proj(y)
        return out, None if state is None else state.advance({"S": S}, segments, x.shape[1])

    def _features(self, heads: Tensor, *, is_query: bool) -> Tensor:
        """(b t heads k) to features (b t heads n), in float32 at least: their sums outgrow a half precision."""
        heads = heads.to(accumulation_dtype(heads.dtype))
        if self.config.feature_map == "taylor":
            # Half of the scale on either side: the features of both stay small.
            return FEATURE_MAPS["taylor"](heads * self.scale**0.5)
        features = FEATURE_MAPS[self.config.feature_map](heads)
        return features * self.scale if is_query else features

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, state: State | None
    ) -> tuple[Tensor, Tensor]:
        """Read-outs (b t h p) of the states (b g n p) that ``k`` and ``v`` (b t g ...) write; ``q`` (b t h n)."""
        b, t = q.shape[:2]
        log_a = self._log_decay(q).expand(b, t, -1)
        given = {"initial_state": None if state is None else state["S"], "chunk_size": self.config.chunk_size, "n_tokens": t}
        shared = self.config.n_heads // self.config.kv_heads
        if shared == 1:
            y, S = self.ssd(q, k, v, log_a, segments=segments, **given)
            return y, S
        q = q.unflatten(2, (-1, shared))  # [b, t, g, r, n]
        if t == 1:
            _, S = self.ssd(q[:, :, :, 0], k, v, log_a, segments=segments, **given)
            with no_autocast(q.device):
                y = (q[:, 0] @ S).flatten(1, 2)[:, None]
            return y if segments is None else y.masked_fill(~segments.real[..., None, None], 0), S
        # The op reads a state once a token. Query heads that share one take turns: each token becomes as many, of which
        # the first decays and writes. The state stays one a kv head; a copy for each query head would cost as much time.
        k, v = (F.pad(z[:, :, None], (0, 0, 0, 0, 0, shared - 1)).flatten(1, 2) for z in (k, v))
        log_a = F.pad(log_a[:, :, None], (0, 0, 0, shared - 1)).flatten(1, 2)
        turns = None
        if segments is not None:
            turns = Segments(segments.ids.repeat_interleave(shared, 1), segments.continues)
        y, S = self.ssd(q.transpose(2, 3).flatten(1, 2), k, v, log_a, segments=turns, **given)
        return y.unflatten(1, (t, shared)).transpose(2, 3).flatten(2, 3), S

    def _log_decay(self, like: Tensor) -> Tensor:
        """(g) natural logarithm of what each state keeps. Formed anew, so that casting a model cannot spoil it."""
        decay, states = self.config.decay, self.config.kv_heads
        if decay == "none":
            return like.new_zeros(states)
        if decay == "retnet":
            return retention_log_decay(states, like)
        return torch.cat([like.new_full((1,), math.log(a)) for a in decay])
