"""The base of softmax mixers with queries, keys and values in heads, grouped or not.

Axes: b batch, t time, s held tokens, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BiasPosition,
    BuildContext,
    Component,
    Growing,
    NormConfig,
    ParamSpec,
    PositionConfig,
    Ring,
    Segments,
    SequenceMixerConfig,
    Site,
)
from hybridtf.core.init import fan_in
from hybridtf.nn.positions import RopeConfig, told
from hybridtf.nn.softmax_mixer import Held, Projected, SoftmaxMixer
from hybridtf.ops.attention import AttentionMask


class HeadCountsConfig(SequenceMixerConfig):
    """How many heads there are, and how wide."""

    n_heads: int = Field(gt=0)
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Heads of keys and values, each read by n_heads / n_kv_heads query heads in a row. None: as many as ``n_heads``."""
    head_dim: int | None = Field(default=None, gt=0)
    """None: d_model / n_heads."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads = {self.n_heads} is not divisible by n_kv_heads = {self.n_kv_heads}")
        return self

    def width_in(self, ctx: BuildContext, multiple: int = 1) -> int:
        """``head_dim``, given or of the model's width over ``multiple`` times the heads.

        Raises :class:`ConfigError` where that does not divide.
        """
        heads, times = self.n_heads * multiple, "" if multiple == 1 else f"{multiple} x "
        if self.head_dim is None and ctx.d_model % heads:
            raise ctx.error(f"d_model = {ctx.d_model} is not divisible by {times}n_heads = {heads}; give head_dim")
        return self.head_dim or ctx.d_model // heads


class HeadsConfig(HeadCountsConfig):
    """What all mixers of heads with positions are told."""

    position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on queries and keys (``rope``, ``xpos``), on scores (``alibi``), or nowhere (``none``)."""


class HeadsMixer(SoftmaxMixer):
    """Projects queries, keys and values, holds keys and values, and ends in ``out_proj``.

    ``q_width``: output width of ``q_proj``, where it has more than the queries. ``features``: what is asked of the kernel
    beside what this base knows. ``sites``: where positions may be told. ``multiple``: query heads of width ``head_dim`` for
    each of the config's, and key heads likewise.
    """

    op = "attention"
    """The op that scores: called as ``attention`` is."""

    def __init__(
        self, config: HeadsConfig, ctx: BuildContext, *, q_width: int | None = None, qkv_bias: bool = False,
        out_bias: bool = False, qk_norm: NormConfig | None = None, features: set[str] | None = None,
        sites: tuple[Site, ...] = ("qk", "bias"), multiple: int = 1,
    ) -> None:
        super().__init__()
        self.causal, self.head_dim = ctx.causal, config.width_in(ctx, multiple)
        self.n_heads, self.n_kv_heads = config.n_heads * multiple, (config.n_kv_heads or config.n_heads) * multiple
        inner, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(ctx.d_model, q_width or inner, bias=qkv_bias, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, kv, bias=qkv_bias, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, kv, bias=qkv_bias, **ctx.factory)
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=out_bias, **ctx.factory)
        head = ctx.child("position", d_model=self.head_dim)
        self.place(config.position.build_at(head, *sites))
        self.q_norm = None if qk_norm is None else qk_norm.build(head)
        self.k_norm = None if qk_norm is None else qk_norm.build(head)
        self.attention = ctx.bind_kernel(
            self.op, config.kernel, sizes=self.kernel_sizes(), features=(features or set()) | self._features()
        )

    def kernel_sizes(self) -> dict[str, int]:
        """Sizes of a call of the op."""
        return {
            "n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim, "v_dim": self.head_dim,
        }

    def _features(self) -> set[str]:
        has = {
            "window": self.window is not None, "softcap": self.softcap is not None, "dropout": self.dropout > 0,
            "non_causal": not self.causal, "slopes": isinstance(self.position, BiasPosition),
        }
        return {name for name, on in has.items() if on}

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (self.n_kv_heads, self.head_dim))

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        flat, gate = self.queries(x)
        q, k = self.normed(flat, self.q_norm), self.normed(self.k_proj(x), self.k_norm)
        q, k = told(self.position, q, k, positions, segments, leaf)
        v = self.v_proj(x).unflatten(-1, self.held_shapes()["v"])
        return Projected(q, {"k": k, "v": v}, gate)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b t d) to the queries of all heads side by side, and their gates where there are any."""
        return self.q_proj(x), None

    def normed(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """(b t h k): cut into heads, and normalised where there is a norm."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads if norm is None else norm(heads)

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        return self.score(q, held["k"], held["v"], mask)

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        y = y.flatten(-2)
        out: Tensor = self.out_proj(y if gate is None else y * torch.sigmoid(gate))
        return out
