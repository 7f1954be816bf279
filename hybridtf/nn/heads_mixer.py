"""The base of softmax mixers with queries, keys and values in heads, grouped or not.

Axes: b batch, t time, s held tokens, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import Any, Literal

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
from hybridtf.nn.positions import RopeConfig, told
from hybridtf.nn.softmax_mixer import Projected, SoftmaxMixer


class HeadsConfig(HeadCountsConfig):
    """What all mixers of heads with positions are told."""

    position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on queries and keys (``rope``, ``xpos``), on scores (``alibi``), or nowhere (``none``)."""


class HeadsMixer(HeldHeads, SoftmaxMixer):
    """Projects queries, keys and values, holds keys and values, and ends in ``out_proj``.

    ``features``: what is asked of the kernel beside what this base knows. ``sites``: where positions may be told.
    ``qk_norm_over``: ``qk_norm`` is of each head's channels, or of all heads' side by side. ``widths``: as of
    :class:`HeadProjections`.
    """

    op = "attention"
    """The op that scores: called as ``attention`` is."""

    def __init__(
        self, config: HeadsConfig, ctx: BuildContext, *, qk_norm: NormConfig | None = None, features: set[str] | None = None,
        sites: tuple[Site, ...] = ("qk", "bias"), qk_norm_over: Literal["head", "heads"] = "head", **widths: Any,
    ) -> None:
        super().__init__(config, ctx, **widths)
        head = ctx.child("position", d_model=self.head_dim)
        self.place(config.position.build_at(head, *sites))
        self.qk_norm_over = qk_norm_over
        self.q_norm, self.k_norm = (
            None if qk_norm is None else qk_norm.build(head if qk_norm_over == "head" else ctx.child("qk_norm", d_model=width))
            for width in (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim)
        )
        self.attention = ctx.bind_kernel(
            self.op, config.kernel, sizes=self.kernel_sizes(), features=(features or set()) | self._features()
        )

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
        q, k = self._normed(flat, self.q_norm), self._normed(self.k_proj(x), self.k_norm)
        q, k = told(self.position, q, k, positions, segments, leaf)
        v = self.v_proj(x).unflatten(-1, self.held_shapes()["v"])
        return Projected(q, {"k": k, "v": v}, gate)

    def _normed(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """(b t h*k) to heads (b t h k), normed one by one or side by side."""
        if norm is not None and self.qk_norm_over == "heads":
            return self.split(norm(projected))
        return self.split(projected, norm)

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b t d) to the queries of all heads side by side, and their gates where there are any."""
        return self.q_proj(x), None

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        y = y.flatten(-2)
        out: Tensor = self.out_proj(y if gate is None else y * torch.sigmoid(gate))
        return out
