"""Softmax attention (https://arxiv.org/abs/1706.03762), with grouped keys and values (https://arxiv.org/abs/2305.13245).

    y_t = out( sum_s softmax_s(scale q_t . k_s) v_s ),   s over the tokens of t's document that the mask allows

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BiasPosition,
    BuildContext,
    Component,
    ConfigError,
    Context,
    Growing,
    Law,
    NormConfig,
    ParamSpec,
    Position,
    PositionConfig,
    Preset,
    QueryKeyPosition,
    Ring,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    StateError,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import RopeConfig, token_positions, told
from hybridtf.ops.attention import AttentionMask


class AttentionConfig(SequenceMixerConfig):
    """Attention in all its plain forms.

    Presets: ``full_attention``, ``gqa``, ``mqa``, ``sliding_attention``, ``flash_attention``.
    """

    type: Literal["attention"] = "attention"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    time_exponent: ClassVar[float] = 2.0  # of the whole; with a window 1
    n_heads: int = Field(gt=0)
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Heads of keys and values, each read by n_heads / n_kv_heads query heads in a row. None: as many as ``n_heads``."""
    head_dim: int | None = Field(default=None, gt=0)
    """None: d_model / n_heads."""
    window: int | None = Field(default=None, gt=0)
    """Tokens that a token sees, itself included. None: all before it."""
    position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on queries and keys (``rope``, ``xpos``), on scores (``alibi``), or nowhere (``none``)."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys, before positions."""
    output_gate: bool = False
    """Multiplies the heads' output by sigmoid(gate_proj(x)) before ``out_proj`` (https://arxiv.org/abs/2505.06708)."""
    softcap: float | None = Field(default=None, gt=0)
    """Scores become softcap * tanh(score / softcap) (Gemma 2)."""
    sinks: bool = False
    """A learned logit per head that takes weight and gives nothing (gpt-oss)."""
    scale: float | None = Field(default=None, gt=0)
    """Of the scores. None: head_dim ** -0.5."""
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads = {self.n_heads} is not divisible by n_kv_heads = {self.n_kv_heads}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6)

    def build(self, ctx: BuildContext) -> Attention:
        return Attention(self, ctx)


class Attention(SequenceMixer):
    """See :class:`AttentionConfig`. Its state is a ``Growing`` of keys and values, or a ``Ring`` with a window."""

    causal_only = False
    takes: tuple[str, ...] = ("prefix_len",)

    def __init__(self, config: AttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.causal = config, ctx.causal
        if config.head_dim is None and ctx.d_model % config.n_heads:
            raise ctx.error(f"d_model = {ctx.d_model} is not divisible by n_heads = {config.n_heads}; give head_dim")
        self.head_dim = config.head_dim or ctx.d_model // config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        inner, kv = config.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(ctx.d_model, inner, bias=config.qkv_bias, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, kv, bias=config.qkv_bias, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, kv, bias=config.qkv_bias, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory) if config.output_gate else None
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=config.out_bias, **ctx.factory)
        head = ctx.child("position", d_model=self.head_dim)
        self._place(config.position.build_at(head, "qk", "bias"))
        self.q_norm = None if config.qk_norm is None else config.qk_norm.build(head)
        self.k_norm = None if config.qk_norm is None else config.qk_norm.build(head)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads, **ctx.factory)) if config.sinks else None
        if config.kernel == "flash":
            self.cannot["compile"] = "the flash kernel cuts documents out of a batch, and has to look where they are"
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self._sizes(), features=self._features())

    def _place(self, position: Position | None) -> None:
        """Take a position, with what it asks of its user."""
        self.position = position
        self.cannot: dict[Law, str] = {} if position is None else dict(position.cannot)
        if isinstance(position, QueryKeyPosition):
            self.causal_only, self.uses_max_len = position.causal_only, position.uses_max_len
            if position.causal_only:
                self.takes = ()  # a prefix is seen both ways

    def _sizes(self) -> dict[str, int]:
        return {
            "n_heads": self.config.n_heads, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim, "v_dim": self.head_dim,
        }

    def _features(self) -> set[str]:
        has = {
            "softcap": self.config.softcap is not None, "sinks": self.config.sinks, "window": self.config.window is not None,
            "dropout": self.config.dropout > 0, "non_causal": not self.causal,
            "slopes": isinstance(self.position, BiasPosition),
        }
        return {name for name, on in has.items() if on}

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}
        return {**specs, "sinks": ParamSpec("state", init.normal(0.02))} if self.sinks is not None else specs

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        if not self.causal:
            return ()
        shapes = dict.fromkeys(("k", "v"), (self.n_kv_heads, self.head_dim))
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        if self.config.window is not None:
            return Ring.empty(batch_size, shapes, window=self.config.window, max_len=max_len, **where)
        return Growing.empty(batch_size, shapes, max_len=max_len, **where)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        if not self.causal and state is not None:
            raise StateError("attention that looks both ways has no state: give it whole documents")
        leaf = state if isinstance(state, Growing | Ring) else None
        if segments is not None:
            # Weights are 0 at pads, but 0 times what lies there must be 0 too.
            x = x.masked_fill(~segments.real[..., None], 0)
            self._check_prefix(segments, leaf)
        positions = token_positions(x, segments, leaf)
        q, k = self._heads(self.q_proj(x), self.q_norm), self._heads(self.k_proj(x), self.k_norm)
        q, k = told(self.position, q, k, positions, segments, leaf)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        if leaf is None:
            y = self._attend(q, k, v, *_own_mask(segments), segments)
        elif isinstance(leaf, Growing):
            y, state = self._attend_growing(q, k, v, positions, segments, leaf)
        else:
            y, state = self._attend_ring(q, k, v, positions, segments, leaf, keep)
        y = y.flatten(-2)
        if self.gate_proj is not None:
            y = y * torch.sigmoid(self.gate_proj(x))
        return self.out_proj(y), state

    def _check_prefix(self, segments: Segments, leaf: Growing | Ring | None) -> None:
        if segments.prefix_len is not None and "prefix_len" not in self.takes:
            raise ConfigError("a prefix is seen both ways, and the position of this attention allows only earlier keys")
        if segments.prefix_len is None or leaf is None or leaf.untouched or torch.compiler.is_compiling():
            return
        seen = torch.where(segments.ids == segments.carried[:, None], leaf.length[:, None], 0)
        if bool(((seen > 0) & (segments.prefix_len > seen)).any()):
            raise StateError("a prefix that is seen both ways must lie within one call: its first tokens are computed already")

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))  # [b, t, h, k]
        return heads if norm is None else norm(heads)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, ids: tuple[Tensor, Tensor] | None, pos: tuple[Tensor, Tensor] | None,
        segments: Segments | None,
    ) -> Tensor:
        q_ids, k_ids = (None, None) if ids is None else ids
        q_pos, k_pos = (None, None) if pos is None else pos
        slopes = self.position(q.shape[2], q.device) if isinstance(self.position, BiasPosition) else None
        mask = AttentionMask(
            causal=self.causal, window=self.config.window, q_ids=q_ids, k_ids=k_ids, q_pos=q_pos, k_pos=k_pos,
            prefix_len=None if segments is None else segments.prefix_len, softcap=self.config.softcap, slopes=slopes,
            sinks=self.sinks,
        )
        if isinstance(self.position, QueryKeyPosition) and (span := self.position.span(q.dtype)) is not None:
            parts = [self._scored(*part) for part in _read_in_spans(self.position, q, k, v, mask, span)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self._scored(q, k, v, mask)

    def _scored(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        dropout = self.config.dropout if self.training else 0.0
        y: Tensor = self.attention(
            q, k.to(q.dtype), v.to(q.dtype), mask, scale=self.config.scale, dropout_p=dropout, n_tokens=q.shape[1]
        )
        return y

    def _attend_growing(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing
    ) -> tuple[Tensor, Growing]:
        t = q.shape[1]
        new = {"k": k, "v": v}
        if leaf.untouched:  # the first call: its own tokens are all there is
            y = self._attend(q, k, v, *_own_mask(segments), segments)
            return y, leaf.append(new, segments)
        if segments is None or (t == 1 and segments.prefix_len is None):
            seen = leaf.append(new, segments)
            length = seen.shared_length() if segments is None else None
            if length is not None:
                return self._attend(q, seen["k"][:, :length], seen["v"][:, :length], None, None, None), seen
            real = torch.ones_like(positions) if segments is None else segments.real.to(torch.int64)
            ids = (real, seen.valid().to(torch.int64))
            return self._attend(q, seen["k"], seen["v"], ids, (positions, seen.positions()), None), seen
        old = torch.where(leaf.valid(), segments.carried[:, None], torch.full_like(leaf.positions(), -1))
        ids = (segments.ids, torch.cat([old, segments.ids], dim=1))
        pos = (positions, torch.cat([leaf.positions(), positions], dim=1))
        keys, values = (torch.cat([leaf[name].to(z.dtype), z], dim=1) for name, z in new.items())
        y = self._attend(q, keys, values, ids, pos, segments)
        return y, leaf.append(new, segments)

    def _attend_ring(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, segments: Segments | None, leaf: Ring, keep: int
    ) -> tuple[Tensor, Ring]:
        new = {"k": k, "v": v}
        if leaf.untouched:
            y = self._attend(q, k, v, *_own_mask(segments), segments)
            return y, leaf.push(new, segments, keep=keep)
        if q.shape[1] == 1 and (segments is None or segments.prefix_len is None):
            return self._attend_last(q, positions, segments, leaf.push(new, segments, keep=keep))
        valid = leaf.valid()
        if segments is None:
            own = torch.ones_like(positions)
            old = valid.to(torch.int64)
        else:
            own = segments.ids
            old = torch.where(valid, segments.carried[:, None], torch.full_like(leaf.positions(), -1))
        ids = (own, torch.cat([old, own], dim=1))
        pos = (positions, torch.cat([leaf.positions(), positions], dim=1))
        keys, values = (torch.cat([leaf[name].to(z.dtype), z], dim=1) for name, z in new.items())
        y = self._attend(q, keys, values, ids, pos, segments)
        return y, leaf.push(new, segments, keep=keep)

    def _attend_last(
        self, q: Tensor, positions: Tensor, segments: Segments | None, seen: Ring
    ) -> tuple[Tensor, Ring]:
        """One token a row, which the ring holds already: nothing is copied."""
        plain = segments is None and not isinstance(self.position, BiasPosition)
        plain = plain and not (isinstance(self.position, QueryKeyPosition) and self.position.span(q.dtype) is not None)
        length = seen.shared_length() if plain and seen.capacity == seen.window else None
        if length is not None and length >= seen.window:  # all slots are in sight, and their order does not matter
            return self._attend(q, seen["k"], seen["v"], None, None, None), seen
        real = torch.ones_like(positions) if segments is None else segments.real.to(torch.int64)
        ids = (real, seen.valid().to(torch.int64))
        return self._attend(q, seen["k"], seen["v"], ids, (positions, seen.positions()), None), seen


def _own_mask(
    segments: Segments | None,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Ids and positions of a call that sees only its own tokens."""
    if segments is None:
        return None, None
    return (segments.ids, segments.ids), (segments.position, segments.position)


def _read_in_spans(
    position: QueryKeyPosition, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, span: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionMask]]:
    """Queries ``span`` at a time, with keys, values and mask, as scores are taken from them."""
    t, s = q.shape[1], k.shape[1]
    for start in range(0, max(t, 1), span):
        stop, seen, part = min(start + span, t), s, mask
        if mask.q_pos is None:
            seen = s - t + stop  # without positions the queries are the last of the keys
        elif t > span:
            q_ids = None if mask.q_ids is None else mask.q_ids[:, start:stop]
            part = replace(mask, q_ids=q_ids, q_pos=mask.q_pos[:, start:stop])
        told, keys = position.read(
            q[:, start:stop], k[:, :seen], q_pos=part.q_pos, k_pos=part.k_pos, q_ids=part.q_ids, k_ids=part.k_ids
        )
        yield told, keys, v[:, :seen], part


PRESETS = (
    Preset("full_attention", "attention"),
    Preset("gqa", "attention", requires=("n_kv_heads",)),
    Preset("mqa", "attention", {"n_kv_heads": 1}),
    Preset("sliding_attention", "attention", requires=("window",)),
    Preset("flash_attention", "attention", {"kernel": "flash"}),
)
