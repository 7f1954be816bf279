"""Forgetting attention (https://arxiv.org/abs/2503.02130): softmax attention whose heads forget, by gates of each token.

    f_t = sigmoid(f_proj(x_t)), one a head;   c_t = sum_{r <= t} log f_r over t's document
    y_t = out( sum_s softmax_s(q_t . k_s / sqrt(k) + c_t - c_s) v_s ),   s <= t in t's document

No positions are needed: the gates tell them. The Pro layer adds an output norm and gate, norms of queries and keys, and lets
keys and values take a share of the token before, a = sigmoid(shift_proj(x_t)) for each head:

    k_t = norm(a_t k'_{t-1} + (1 - a_t) k'_t);   v_t likewise, without a norm;   y_t = out( sigmoid(gate_proj(x_t)) norm(o_t) )

c_t is summed and held in float64, and the difference formed there: a long sum has no digits left for it in float32.

``f_proj`` starts as any projection, weights of variance 1 / d and bias 0: at first a gate lies around 1/2, and a head sees few
tokens back.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.

No outside layer was run (it needs a GPU): who sees whom how much is held to fla's plain form, and what is around it is spelled
out in the tests.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    Growing,
    PositionConfig,
    Preset,
    Segments,
    State,
    with_history,
)
from hybridtf.nn import (
    HeadRMSNorm,
    HeadsConfig,
    HeldHeads,
    NoPositionConfig,
    TokenShift,
    accumulation_dtype,
    forget_sums,
    idle_beside,
    told,
    wide_dtype,
)


class ForgettingAttentionConfig(HeadsConfig):
    """Attention whose scores fade by forget gates (FoX). Defaults are the paper's layer on LLaMA's plan; preset
    ``forgetting_attention_pro``: Pro.
    """

    type: Literal["forgetting_attention"] = "forgetting_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2503.02130"
    time_exponent: ClassVar[float] = 2.0

    position: Component[PositionConfig] = Field(default_factory=NoPositionConfig)
    qk_norm: bool = False
    """RMS norms of each head's queries and keys, with weights of its own."""
    output_norm: bool = False
    """An RMS norm of each head's output, with weights of its own."""
    output_gate: bool = False
    kv_shift: bool = False
    """Keys and values take a share of the token before."""
    conv_kernel: str = "auto"
    """Of that token's shift."""
    eps: float = Field(default=1e-6, gt=0)
    """Of the norms."""

    _without_norm = idle_beside({"qk_norm": False, "output_norm": False}, "eps")
    _without_shift = idle_beside({"kv_shift": False}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4)

    def build(self, ctx: BuildContext) -> ForgettingAttention:
        return ForgettingAttention(self, ctx)


class _Projected(NamedTuple):
    """Of a call's tokens: queries (b t h k), keys and values (b t g k)."""

    q: Tensor
    k: Tensor
    v: Tensor


class ForgettingAttention(HeldHeads):
    """See :class:`ForgettingAttentionConfig`. Its state is a dict: ``held`` keys, values and sums of log gates, and the shifts'
    last tokens."""

    def __init__(self, config: ForgettingAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.config, h, g = config, self.n_heads, self.n_kv_heads
        inner, kv = h * self.head_dim, g * self.head_dim
        self.f_proj = nn.Linear(ctx.d_model, h, bias=True, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory) if config.output_gate else None
        self.q_norm = HeadRMSNorm(ctx.child("q_norm", d_model=inner), h, config.eps) if config.qk_norm else None
        self.k_norm = HeadRMSNorm(ctx.child("k_norm", d_model=kv), g, config.eps) if config.qk_norm else None
        self.out_norm = HeadRMSNorm(ctx.child("out_norm", d_model=inner), h, config.eps) if config.output_norm else None
        if config.kv_shift:
            self.k_shift_proj, self.v_shift_proj = (nn.Linear(ctx.d_model, g, bias=False, **ctx.factory) for _ in range(2))
            self.k_shift, self.v_shift = (
                TokenShift(ctx.child(name, d_model=kv), config.conv_kernel) for name in ("k_shift", "v_shift")
            )
        head = ctx.child("position", d_model=self.head_dim)
        self.place(config.position.build_at(head, "qk"), looks_back=True)  # as gates and shifts do
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self.kernel_sizes(), features={"decay"})

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().held_shapes(), "decay": (self.n_heads,)}

    def held_dtypes(self) -> dict[str, torch.dtype]:
        return {"decay": wide_dtype(self.attention.device)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"held": super().init_state(batch_size, max_len), **self._carried(batch_size)}

    def _carried(self, batch_size: int) -> dict[str, State]:
        if not self.config.kv_shift:
            return {}
        return {"k_shift": self.k_shift.init_state(batch_size), "v_shift": self.v_shift.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        leaf: Growing | None = None if state is None else state["held"]
        x, positions = self.enter(x, segments, state, leaf)
        carried = None if state is None else {name: part for name, part in state.items() if name != "held"}
        (q, k, v), carried = with_history(self._project, x, segments, carried, keep, self._carried)
        q, k = told(self.position, q, k, positions, segments, leaf)
        decay = forget_sums(self.f_proj(x), segments, leaf)
        new = {"k": k, "v": v, "decay": decay}
        y, held = self.attend(q, new, positions, segments, leaf, keep, {"q_decay": decay})
        return self._leave(y, x), None if carried is None else {"held": held, **carried}

    def _project(
        self, x: Tensor, segments: Segments | None, carried: dict[str, State] | None
    ) -> tuple[_Projected, dict[str, State] | None]:
        """Queries, keys and values without their positions, and what is carried after the call."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.config.kv_shift:
            given = dict.fromkeys(("k_shift", "v_shift")) if carried is None else carried
            late_k, k_shift = self.k_shift(k, segments, given["k_shift"])
            late_v, v_shift = self.v_shift(v, segments, given["v_shift"])
            k, v = _mixed(k, late_k, self.k_shift_proj(x)), _mixed(v, late_v, self.v_shift_proj(x))
            carried = None if carried is None else {"k_shift": k_shift, "v_shift": v_shift}
        return _Projected(self.split(q, self.q_norm), self.split(k, self.k_norm), self.split(v)), carried

    def _leave(self, y: Tensor, x: Tensor) -> Tensor:
        """The heads' output (b t h k) to the mixer's (b t d)."""
        y = (y if self.out_norm is None else self.out_norm(y)).flatten(-2)
        out: Tensor = self.out_proj(y if self.gate_proj is None else y * torch.sigmoid(self.gate_proj(x)))
        return out


def _mixed(now: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """(b t g*k): of each head the ``share`` (b t g, before its sigmoid) of the token before, and the rest of its own."""
    wide = accumulation_dtype(now.dtype)
    a = torch.sigmoid(share.to(wide))[..., None]
    heads = [z.to(wide).unflatten(-1, (share.shape[-1], -1)) for z in (before, now)]
    out: Tensor = (a * heads[0] + (1 - a) * heads[1]).flatten(-2).to(now.dtype)
    return out


PRESETS = (
    Preset(
        "forgetting_attention_pro", "forgetting_attention",
        {"qk_norm": True, "output_norm": True, "output_gate": True, "kv_shift": True},
    ),
)
