"""Compressed convolutional attention (https://arxiv.org/abs/2510.04476; layer as in transformers ``zaya``).

Queries, keys and values live in a space narrower than the model, and the whole attention runs there.

    q, k  = q_proj(x), k_proj(x)                               latents; r repeats each key head for its query heads
    m^q   = (q + r(k)) / 2,    m^k = mean of m^q over the query heads of a key head
    q', k' = conv_b(conv_a([q, k])) + [m^q, m^k]               conv_a: each channel alone; conv_b: the channels of a head
    q_t, k_t = sqrt(k) q' / |q'|,  temp_g sqrt(k) k' / |k'|    then rotary positions on half of each head
    v_t   = [v_proj_current(x_t), v_proj_delayed(x_{t-1})]     half of the channels are a token late
    y_t   = out( sum_s softmax_s(q_t . k_s / sqrt(k)) v_s ),   s <= t in t's document

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim, c = (h + g) k channels of both convolutions.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    ParamSpec,
    PositionConfig,
    Segments,
    State,
    init,
    with_history,
)
from hybridtf.nn import (
    HeadConv,
    HeadsConfig,
    HeldHeads,
    RopeConfig,
    ShortConv,
    TokenShift,
    accumulation_dtype,
    told,
)


class CCAConfig(HeadsConfig):
    """Compressed convolutional attention: softmax attention within a latent that convolutions mix. ``n_heads`` * ``head_dim``
    is the width of the queries' latent.

    Defaults are ZAYA1's, but ``temp`` starts at 1: from 0, as published code leaves it, all keys weigh the same.
    """

    type: Literal["cca"] = "cca"
    source: ClassVar[str] = "https://arxiv.org/abs/2510.04476"
    time_exponent: ClassVar[float] = 2.0

    position: Component[PositionConfig] = Field(default_factory=lambda: RopeConfig(fraction=0.5))
    window: int | None = Field(default=None, gt=0)
    """Tokens that a token sees, itself included. None: all before it."""
    d_conv: int = Field(default=2, gt=0)
    """Taps of the convolution of each channel."""
    d_conv_head: int = Field(default=2, gt=0)
    """Taps of the convolution that mixes a head's channels."""
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4)

    def build(self, ctx: BuildContext) -> CCA:
        return CCA(self, ctx)


class _Latents(NamedTuple):
    """The latents of a call's tokens, each (b t ...)."""

    q: Tensor
    k: Tensor
    v: Tensor


class CCA(HeldHeads):
    """See :class:`CCAConfig`. Its state is a dict: ``held`` keys and values, and what the convolutions and the shift carry."""

    def __init__(self, config: CCAConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, own_values=True)
        self.config, self.window, h, g = config, config.window, self.n_heads, self.n_kv_heads
        inner, kv = h * self.head_dim, g * self.head_dim
        if kv % 2:
            raise ctx.error(f"half of the values' channels are delayed: n_kv_heads x head_dim = {kv} must be even")
        self.v_proj_current, self.v_proj_delayed = (
            nn.Linear(ctx.d_model, kv // 2, bias=False, **ctx.factory) for _ in range(2)
        )
        both = ctx.child("conv", d_model=inner + kv)
        self.conv = ShortConv(both, config.d_conv, bias=False, activation=None, kernel=config.conv_kernel)
        self.conv_bias = nn.Parameter(torch.empty(inner + kv, **ctx.factory))
        self.conv_head = HeadConv(both, h + g, config.d_conv_head, kernel=config.conv_kernel)
        self.shift = TokenShift(ctx.child("shift", d_model=kv // 2), config.conv_kernel)
        self.temp = nn.Parameter(torch.empty(g, **ctx.factory))
        head = ctx.child("position", d_model=self.head_dim)
        self.place(config.position.build_at(head, "qk"), looks_back=True)  # as the convolutions and the shift do
        features = {"window"} if config.window is not None else set()
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self.kernel_sizes(), features=features)

    def param_specs(self) -> dict[str, ParamSpec]:
        bound = self.config.d_conv**-0.5
        return {
            **super().param_specs(),
            "conv_bias": ParamSpec("bias", init.uniform(-bound, bound)), "temp": ParamSpec("state", init.constant(1.0)),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"held": super().init_state(batch_size, max_len), **self._carried(batch_size)}

    def _carried(self, batch_size: int) -> dict[str, State]:
        return {
            "conv": self.conv.init_state(batch_size), "conv_head": self.conv_head.init_state(batch_size),
            "shift": self.shift.init_state(batch_size),
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        leaf = None if state is None else state["held"]
        x, positions = self.enter(x, segments, state, leaf)
        carried = None if state is None else {name: part for name, part in state.items() if name != "held"}
        latents, carried = with_history(self._latents, x, segments, carried, keep, self._carried)
        q, k = told(self.position, latents.q, latents.k, positions, segments, leaf)
        y, held = self.attend(q, {"k": k, "v": latents.v}, positions, segments, leaf, keep)
        return self.out_proj(y.flatten(-2)), None if carried is None else {"held": held, **carried}

    def _latents(
        self, x: Tensor, segments: Segments | None, carried: dict[str, State] | None
    ) -> tuple[_Latents, dict[str, State] | None]:
        """Normed queries and keys without their positions, and values; and what is carried after the call."""
        given = dict.fromkeys(("conv", "conv_head", "shift")) if carried is None else carried
        q, k = self.q_proj(x), self.k_proj(x)
        mean_q, mean_k = self._means(q, k)
        both, conv = self.conv(torch.cat([q, k], dim=-1), segments, given["conv"])
        both, conv_head = self.conv_head(both, segments, given["conv_head"], offset=self.conv_bias)
        q, k = self.split(both).split([self.n_heads, self.n_kv_heads], dim=2)
        late, shift = self.shift(self.v_proj_delayed(x), segments, given["shift"])
        v = self.split(torch.cat([self.v_proj_current(x), late], dim=-1))
        temp = self.temp.to(accumulation_dtype(x.dtype))[:, None]
        latents = _Latents(self._scaled(q + mean_q), self._scaled(k + mean_k, temp), v)
        return latents, None if carried is None else {"conv": conv, "conv_head": conv_head, "shift": shift}

    def _means(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (b t .) to what goes around the convolutions, (b t h k) and (b t g k)."""
        grouped: Tensor = q.unflatten(-1, (self.n_kv_heads, -1, self.head_dim))
        mean = (grouped + k.unflatten(-1, (self.n_kv_heads, 1, self.head_dim))) * 0.5
        return mean.flatten(2, 3), mean.mean(3)

    def _scaled(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """x (b t h k) at length sqrt(k), times a factor (h 1)."""
        wide = x.to(accumulation_dtype(x.dtype))
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).eps)
        wide = wide * (math.sqrt(self.head_dim) / length)
        return (wide if factor is None else wide * factor).to(x.dtype)
