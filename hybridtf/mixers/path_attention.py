"""PaTH attention (https://arxiv.org/abs/2505.16381): positions are reflections that the tokens between key and query make.

    H_t = I - beta_t w_t w_t^T,   beta_t = 2 sigmoid(beta_proj(x_t)),   w_t = silu(conv(w_proj(x)))_t with length 1
    y_t = out( sum_s softmax_s(q_t^T H_t ... H_{s+1} k_s / sqrt(k)) v_s ),   s <= t in t's document

With forget gates (PaTH-FoX) the score gains sum_{s < r <= t} log sigmoid(f_proj(x_r)), unscaled as in the paper; fla's code
multiplies it by 1 / sqrt(k) too.

``beta_proj`` and ``f_proj`` start as any projection, weights of variance 1 / d and bias 0: at first beta lies around 1, where
H_t takes out all that lies along w_t, and a forget gate around 1/2.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.

No outside layer was run (it needs a GPU): scores and softmax are held to fla's plain form, and what is around them is spelled
out in the tests.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    Growing,
    NormConfig,
    Segments,
    State,
    with_history,
)
from hybridtf.nn import (
    Bottleneck,
    HeadCountsConfig,
    Held,
    HeldHeads,
    ShortConv,
    accumulation_dtype,
    forget_sums,
    idle_beside,
    l2_normalised,
    wide_dtype,
)
from hybridtf.ops.attention import AttentionMask


class PathAttentionConfig(HeadCountsConfig):
    """Attention along a path of reflections. Defaults are fla's layer."""

    type: Literal["path_attention"] = "path_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2505.16381"
    time_exponent: ClassVar[float] = 2.0

    forget_gate: bool = False
    """Heads forget as well (PaTH-FoX)."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys."""
    w_rank: int = Field(default=32, ge=0)
    """Channels between the two matrices of ``w_proj``; 0: one whole matrix."""
    d_conv: int = Field(default=3, ge=0)
    """Taps of a short convolution with silu on w; 0: none."""
    conv_kernel: str = "auto"

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4, w_rank=3)

    def build(self, ctx: BuildContext) -> PathAttention:
        return PathAttention(self, ctx)


class PathAttention(HeldHeads):
    """See :class:`PathAttentionConfig`. Its state is a dict: ``held`` keys, values, w, beta and sums of log gates, and the
    convolution's window."""

    def __init__(self, config: PathAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.config, h, g = config, self.n_heads, self.n_kv_heads
        kv = g * self.head_dim
        self.w_proj: nn.Module = nn.Linear(ctx.d_model, kv, bias=False, **ctx.factory)
        if config.w_rank:
            self.w_proj = Bottleneck(ctx.child("w_proj"), config.w_rank, kv, bias=False)
        self.beta_proj = nn.Linear(ctx.d_model, g, bias=True, **ctx.factory)
        self.f_proj = nn.Linear(ctx.d_model, h, bias=True, **ctx.factory) if config.forget_gate else None
        head, norm = ctx.child("qk_norm", d_model=self.head_dim), config.qk_norm
        self.q_norm, self.k_norm = (None if norm is None else norm.build(head) for _ in range(2))
        self.conv = None
        if config.d_conv:
            self.conv = ShortConv(
                ctx.child("conv", d_model=kv), config.d_conv, bias=False, activation="silu", kernel=config.conv_kernel
            )
        self.place(None, looks_back=True)
        features = {"decay"} if config.forget_gate else set()
        self.attention = ctx.bind_kernel("path_attention", config.kernel, sizes=self.kernel_sizes(), features=features)

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {**super().held_shapes(), "w": (self.n_kv_heads, self.head_dim), "beta": (self.n_kv_heads,)}
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
        q, k = (self.split(p(x), norm) for p, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)))
        logits = self.beta_proj(x)
        beta = 2 * torch.sigmoid(logits.to(accumulation_dtype(logits.dtype)))
        new, added = {"k": k, "v": self.split(self.v_proj(x)), "w": w, "beta": beta}, {}
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
        if conv is not None:
            w, window = with_history(conv, w, segments, None if state is None else state["conv"], keep, conv.init_state)
        return l2_normalised(self.split(w)), window

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        y: Tensor = self.attention(q, held["k"], held["v"], held["w"], held["beta"], mask, n_tokens=q.shape[1])
        return y
