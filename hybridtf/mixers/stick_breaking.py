"""Stick-breaking attention (https://arxiv.org/abs/2410.17980): shares of a stick in place of a softmax, and no positions.

    z_ts = q_t . k_s / sqrt(k);   A_ts = sigmoid(z_ts) prod_{s < r < t} (1 - sigmoid(z_tr))
    y_t = out( sum_s A_ts v_s ),   s < t in t's document: a token does not see itself

What is left of the stick, 1 - sum_s A_ts, is dropped, as in the paper, or goes to the token's own value or to a learned vector
of the head, as in its authors' later models.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Context, Growing, ParamSpec, Segments, State, init
from hybridtf.nn import HeadCountsConfig, Held, HeldHeads, accumulation_dtype
from hybridtf.ops.attention import AttentionMask


class StickBreakingConfig(HeadCountsConfig):
    """Stick-breaking attention: each key takes its share of what nearer keys have left of a stick."""

    type: Literal["stick_breaking"] = "stick_breaking"
    source: ClassVar[str] = "https://arxiv.org/abs/2410.17980"
    time_exponent: ClassVar[float] = 2.0

    remainder: Literal["drop", "value", "bias"] = "drop"
    """Where what is left of a stick goes: nowhere, to the token's own value, or to a learned vector of each head."""
    attend_current: bool = False
    """A token breaks its stick at itself first."""
    qkv_bias: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4)

    def build(self, ctx: BuildContext) -> StickBreaking:
        return StickBreaking(self, ctx)


class StickBreaking(HeldHeads):
    """See :class:`StickBreakingConfig`. Its state is a ``Growing`` of keys and values."""

    def __init__(self, config: StickBreakingConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, qkv_bias=config.qkv_bias)
        self.config = config
        self.left_bias = None
        if config.remainder == "bias":
            self.left_bias = nn.Parameter(torch.empty(self.n_heads, self.head_dim, **ctx.factory))
        self.place(None, looks_back=True)
        self.attention = ctx.bind_kernel("stick_breaking", config.kernel, sizes=self.kernel_sizes())

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = super().param_specs()
        return specs if self.left_bias is None else {**specs, "left_bias": ParamSpec("bias", init.constant(0.0))}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        leaf = state if isinstance(state, Growing) else None
        x, positions = self.enter(x, segments, state, leaf)
        q, k, v = (self.split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y, after = self.attend(q, {"k": k, "v": v}, positions, segments, leaf, keep)
        return self.out_proj(self._with_rest(y, v).flatten(-2)), after

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        """(b t h k+1): what was read, and what is left of the sticks, in float32 at least."""
        y, left = self.attention(
            q, held["k"], held["v"], mask, attend_current=self.config.attend_current, n_tokens=q.shape[1]
        )
        return torch.cat([y.to(left.dtype), left[..., None]], dim=-1)

    def _with_rest(self, y: Tensor, v: Tensor) -> Tensor:
        """What was read (b t h k+1) with what is left of the sticks where it goes: (b t h k), in the dtype of ``v``."""
        y, left = y.split([self.head_dim, 1], dim=-1)
        if self.config.remainder == "drop":
            return y.to(v.dtype)
        own = v.repeat_interleave(self.n_heads // self.n_kv_heads, 2) if self.left_bias is None else self.left_bias
        out: Tensor = (y + left * own.to(accumulation_dtype(own.dtype))).to(v.dtype)
        return out
