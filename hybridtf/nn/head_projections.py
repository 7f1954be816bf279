"""Queries, keys and values in heads, grouped or not: how many there are, their projections, and the way out.

Axes: b batch, t time, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, SequenceMixer, SequenceMixerConfig
from hybridtf.core.init import fan_in
from hybridtf.nn.softmax_mixer import Held, HeldAttention
from hybridtf.ops.attention import AttentionMask


class GroupedHeadsConfig(SequenceMixerConfig):
    """How many heads there are."""

    n_heads: int = Field(gt=0)
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Heads of keys and values (and of states and their gates), each read by n_heads / n_kv_heads query heads in a row.
    None: as many as ``n_heads``."""

    @property
    def kv_heads(self) -> int:
        """``n_kv_heads``, given or not."""
        return self.n_kv_heads or self.n_heads

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads = {self.n_heads} is not divisible by n_kv_heads = {self.n_kv_heads}")
        return self


class ValueHeadsConfig(SequenceMixerConfig):
    """How many heads there are where values have more than keys."""

    n_heads: int = Field(gt=0)
    """Heads of queries and keys."""
    n_v_heads: int | None = Field(default=None, gt=0)
    """Heads of values and of states, a multiple of ``n_heads``: each key head serves some in a row. None: ``n_heads``."""

    @property
    def value_heads(self) -> int:
        """``n_v_heads``, given or not."""
        return self.n_v_heads or self.n_heads

    @model_validator(mode="after")
    def _value_heads_divide(self) -> Self:
        if self.value_heads % self.n_heads:
            raise ValueError(f"n_v_heads = {self.n_v_heads} is not a multiple of n_heads = {self.n_heads}")
        return self


class HeadCountsConfig(GroupedHeadsConfig):
    """How many heads there are, and how wide."""

    head_dim: int | None = Field(default=None, gt=0)
    """None: d_model / n_heads."""
    kernel: str = "auto"

    def width_in(self, ctx: BuildContext, multiple: int = 1) -> int:
        """``head_dim``, given or of the model's width over ``multiple`` times the heads.

        Raises :class:`ConfigError` where that does not divide.
        """
        heads, times = self.n_heads * multiple, "" if multiple == 1 else f"{multiple} x "
        if self.head_dim is None and ctx.d_model % heads:
            raise ctx.error(f"d_model = {ctx.d_model} is not divisible by {times}n_heads = {heads}; give head_dim")
        return self.head_dim or ctx.d_model // heads


class HeadProjections(SequenceMixer):
    """Has ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``, and knows ``n_heads``, ``n_kv_heads`` and ``head_dim``.

    ``q_width``: output width of ``q_proj``, where it has more than the queries. ``own_values``: the mixer makes its values
    itself, and there is no ``v_proj``; ``own_keys``: likewise of keys. ``multiple``: query heads of width ``head_dim`` for each
    of the config's, and key heads likewise. ``v_dim``: width of a head's values, where it is not ``head_dim``.
    """

    def __init__(
        self, config: HeadCountsConfig, ctx: BuildContext, *, q_width: int | None = None, own_keys: bool = False,
        own_values: bool = False, qkv_bias: bool = False, out_bias: bool = False, multiple: int = 1, v_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.head_dim = ctx.causal, config.width_in(ctx, multiple)
        self.n_heads, self.n_kv_heads = config.n_heads * multiple, config.kv_heads * multiple
        self.v_dim = v_dim or self.head_dim
        inner, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(ctx.d_model, q_width or inner, bias=qkv_bias, **ctx.factory)
        if not own_keys:
            self.k_proj = nn.Linear(ctx.d_model, kv, bias=qkv_bias, **ctx.factory)
        if not own_values:
            self.v_proj = nn.Linear(ctx.d_model, self.n_kv_heads * self.v_dim, bias=qkv_bias, **ctx.factory)
        self.out_proj = nn.Linear(self.n_heads * self.v_dim, ctx.d_out or ctx.d_model, bias=out_bias, **ctx.factory)

    def kernel_sizes(self) -> dict[str, int]:
        """Sizes of a call of the op."""
        return {
            "n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim, "v_dim": self.v_dim,
        }

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of one token: shapes by name."""
        return {"k": (self.n_kv_heads, self.head_dim), "v": (self.n_kv_heads, self.v_dim)}

    def split(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """(b t h*k) to (b t h k), normalised where there is a norm."""
        # Not unflatten, whose names of axes cost a step of decoding as much as a norm.
        heads = projected.view(*projected.shape[:-1], projected.shape[-1] // self.head_dim, self.head_dim)
        return heads if norm is None else norm(heads)


class HeldHeads(HeadProjections, HeldAttention):
    """Projections to heads whose keys and values are held and attended to."""

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        return self.score(q, held["k"], held["v"], mask)
