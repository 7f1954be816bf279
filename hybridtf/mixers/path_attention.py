"""PaTH attention (https://arxiv.org/abs/2505.16381): positions are reflections that the tokens between key and query make.

    H_t = I - beta_t w_t w_t^T,   beta_t = 2 sigmoid(beta_proj(x_t)),   w_t = silu(conv(w_proj(x)))_t with length 1
    y_t = out( sum_s softmax_s(q_t^T H_t ... H_{s+1} k_s / sqrt(k)) v_s ),   s <= t in t's document

With forget gates (PaTH-FoX) the score gains sum_{s < r <= t} log sigmoid(f_proj(x_r)), unscaled as in the paper; fla's code
multiplies it by 1 / sqrt(k) too.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Context, Growing, ParamSpec, Segments, State, with_history
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    HeadCountsConfig,
    Held,
    HeldAttention,
    RMSNorm,
    ShortConv,
    accumulation_dtype,
    forget_sums,
    l2_normalised,
)
from hybridtf.nn.bottleneck import Bottleneck
from hybridtf.nn.positions.angles import wide_dtype
from hybridtf.ops.attention import AttentionMask


class PathAttentionConfig(HeadCountsConfig):
    """Attention along a path of reflections. Defaults are fla's layer."""

    type: Literal["path_attention"] = "path_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2505.16381"
    time_exponent: ClassVar[float] = 2.0

    forget_gate: bool = False
    """Heads forget as well (PaTH-FoX)."""
    qk_norm: bool = False
    """RMS norms of each head's queries and keys."""
    low_rank: bool = True
    """``w_proj`` is two matrices with ``rank`` channels between them; else one."""
    rank: int = Field(default=32, gt=0)
    w_conv: bool = True
    """A short convolution with silu on w."""
    d_conv: int = Field(default=3, gt=0)
    """Its taps."""
    eps: float = Field(default=1e-6, gt=0)
    """Of the norms."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4, rank=3)

    def build(self, ctx: BuildContext) -> PathAttention:
        return PathAttention(self, ctx)


class PathAttention(HeldAttention):
    """See :class:`PathAttentionConfig`. Its state is a dict: ``held`` keys, values, w, beta and sums of log gates, and the
    convolution's window."""

    def __init__(self, config: PathAttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.causal, self.head_dim = config, ctx.causal, config.width_in(ctx)
        h, g = config.n_heads, config.n_kv_heads or config.n_heads
        self.n_heads, self.n_kv_heads = h, g
        inner, kv = h * self.head_dim, g * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(ctx.d_model, width, bias=False, **ctx.factory) for width in (inner, kv, kv)
        )
        self.w_proj: nn.Module = nn.Linear(ctx.d_model, kv, bias=False, **ctx.factory)
        if config.low_rank:
            self.w_proj = Bottleneck(ctx.child("w_proj"), config.rank, kv, bias=False)
        self.beta_proj = nn.Linear(ctx.d_model, g, bias=True, **ctx.factory)
        self.f_proj = nn.Linear(ctx.d_model, h, bias=True, **ctx.factory) if config.forget_gate else None
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=False, **ctx.factory)
        head = ctx.child("norm", d_model=self.head_dim)
        self.q_norm, self.k_norm = (RMSNorm(head, config.eps) if config.qk_norm else None for _ in range(2))
        self.conv = None
        if config.w_conv:
            self.conv = ShortConv(ctx.child("conv", d_model=kv), config.d_conv, bias=False, activation="silu")
        self.place(None)
        self.causal_only, self.takes = True, ()
        sizes = {"n_heads": h, "n_kv_heads": g, "head_dim": self.head_dim, "v_dim": self.head_dim}
        features = {"decay"} if config.forget_gate else set()
        self.attention = ctx.bind_kernel("path_attention", config.kernel, sizes=sizes, features=features)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("k", "v", "w"), (self.n_kv_heads, self.head_dim))
        shapes["beta"] = (self.n_kv_heads,)
        return {**shapes, "decay": (self.n_heads,)} if self.config.forget_gate else shapes

    def held_dtypes(self) -> dict[str, torch.dtype]:
        return {"beta": accumulation_dtype(self.attention.dtype), "decay": wide_dtype(self.attention.device)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        held = {"held": super().init_state(batch_size, max_len)}
        return held if self.conv is None else {**held, "conv": self.conv.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        leaf: Growing | None = None if state is None else state["held"]
        x, positions = self.enter(x, segments, state, leaf)
        w, window = self._axes(x, segments, state, keep)
        q, k = (self._heads(p(x), norm) for p, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)))
        logits = self.beta_proj(x)
        beta = 2 * torch.sigmoid(logits.to(accumulation_dtype(logits.dtype)))
        new, added = {"k": k, "v": self._heads(self.v_proj(x), None), "w": w, "beta": beta}, {}
        if self.f_proj is not None:
            new["decay"] = added["q_decay"] = forget_sums(self.f_proj(x), segments, leaf)
        y, held = self.attend(q, new, positions, segments, leaf, keep, added)
        after = None if state is None else {"held": held} if window is None else {"held": held, "conv": window}
        return self.out_proj(y.flatten(-2)), after

    def _axes(
        self, x: Tensor, segments: Segments | None, state: State | None, keep: int
    ) -> tuple[Tensor, State | None]:
        """w (b t g k) of a call's tokens, and the convolution's window after it."""
        w, window, conv = self.w_proj(x), None, self.conv
        if conv is not None and state is not None and keep:
            w, window = with_history(conv, w, segments, state["conv"], keep, conv.init_state)
        elif conv is not None:
            w, window = conv(w, segments, None if state is None else state["conv"])
        return l2_normalised(self._heads(w, None)), window

    def _heads(self, flat: Tensor, norm: nn.Module | None) -> Tensor:
        heads: Tensor = flat.unflatten(-1, (-1, self.head_dim))
        return heads if norm is None else norm(heads)

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        y: Tensor = self.attention(q, held["k"], held["v"], held["w"], held["beta"], mask, n_tokens=q.shape[1])
        return y
