"""The base of softmax mixers with queries, keys and values in heads, grouped or not.

Axes: b batch, t time, s held tokens, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BiasPosition,
    BuildContext,
    Component,
    Growing,
    NormConfig,
    PositionConfig,
    Ring,
    Segments,
    Site,
)
from hybridtf.nn.head_projections import HeadCountsConfig, HeldHeads
from hybridtf.nn.norms import GroupNormConfig, LayerNormConfig
from hybridtf.nn.positions import RopeConfig, told
from hybridtf.nn.softmax_mixer import Projected, SoftmaxMixer

NormOver: TypeAlias = Literal["head", "heads", "each_head"]
"""What a norm of queries or keys is over: each head's channels with one weight for all heads, all heads' channels side by side,
or each head's with weights of its own."""


class HeadsConfig(HeadCountsConfig):
    """What all mixers of heads with positions are told."""

    position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on queries and keys (``rope``, ``xpos``), on scores (``alibi``), or nowhere (``none``)."""


class HeadsMixer(HeldHeads, SoftmaxMixer):
    """Projects queries, keys and values, holds keys and values, and ends in ``out_proj``.

    ``features``: what is asked of the kernel beside what this base knows. ``sites``: where positions may be told.
    ``qk_norm_after``: ``qk_norm`` comes after positions. ``qkv_clip``: the bound of queries, keys and values. ``widths``: as
    of :class:`HeadProjections`.
    """

    op = "attention"
    """The op that scores: called as ``attention`` is."""

    def __init__(
        self, config: HeadsConfig, ctx: BuildContext, *, qk_norm: NormConfig | None = None, features: set[str] | None = None,
        sites: tuple[Site, ...] = ("qk", "bias"), qk_norm_over: NormOver = "head", qk_norm_after: bool = False,
        qkv_clip: float | None = None, **widths: Any,
    ) -> None:
        super().__init__(config, ctx, **widths)
        head = ctx.child("position", d_model=self.head_dim)
        self.place(config.position.build_at(head, *sites))
        self.qk_norm_over, self.qk_norm_after, self.qkv_clip = qk_norm_over, qk_norm_after, qkv_clip
        self.q_norm, self.k_norm = (
            None if qk_norm is None else self._norm_of(qk_norm, ctx, n) for n in (self.n_heads, self.n_kv_heads)
        )
        self.attention = ctx.bind_kernel(
            self.op, config.kernel, sizes=self.kernel_sizes(), features=(features or set()) | self._features()
        )

    def _norm_of(self, config: NormConfig, ctx: BuildContext, n_heads: int) -> nn.Module:
        """The norm of ``n_heads`` heads of queries or keys."""
        where = ctx.child("qk_norm", d_model=self.head_dim * (1 if self.qk_norm_over == "head" else n_heads))
        if self.qk_norm_over != "each_head":
            return config.build(where)
        if not isinstance(config, LayerNormConfig):
            raise where.error(f"qk_norm_over = 'each_head' is for a layer_norm, not for {config.type_name()!r}")
        return GroupNormConfig(n_groups=n_heads, eps=config.eps, weight=config.weight, bias=config.bias).build(where)

    def _features(self) -> set[str]:
        has = {
            "window": self.window is not None, "softcap": self.softcap is not None, "dropout": self.dropout > 0,
            "non_causal": not self.causal, "slopes": isinstance(self.position, BiasPosition),
        }
        return {name for name, on in has.items() if on}

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        flat, gate = self.queries(x)
        q, (k, v) = self.split(flat), self.keys_and_values(x)
        if not self.qk_norm_after:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.qkv_clip is not None:
            q, k, v = (z.clamp(-self.qkv_clip, self.qkv_clip) for z in (q, k, v))
        q, k = told(self.position, q, k, positions, segments, leaf)
        if self.qk_norm_after:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        return Projected(q, {"k": k, "v": v}, gate)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b t d) to keys (b t g k) and values (b t g v), before norms and positions."""
        v: Tensor = self.v_proj(x)
        return self.split(self.k_proj(x)), v.view(*v.shape[:-1], *self.held_shapes()["v"])

    def _normed(self, heads: Tensor, norm: nn.Module | None) -> Tensor:
        """(b t h k), normed one by one or side by side."""
        if norm is None or self.qk_norm_over == "head":
            return heads if norm is None else norm(heads)
        return norm(heads.flatten(-2)).unflatten(-1, heads.shape[-2:])  # type: ignore[no-any-return]

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b t d) to the queries of all heads side by side, and their gates where there are any."""
        return self.q_proj(x), None

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        y = y.flatten(-2)
        out: Tensor = self.out_proj(y if gate is None else y * torch.sigmoid(gate))
        return out
