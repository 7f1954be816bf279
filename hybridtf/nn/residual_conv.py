"""Short convolutions with a residual, as Inkling's and Inkling 2's (transformers ``inkling``, ``inkling2``).

    plain      y_t = x_t + sum_j w_j x_{t-j}
    scaled     the same, divided by sqrt(n + 1) with n taps: terms of one size keep that size
    dynamic    y_t = (x_t + sum_j (w_j + p_tj) x_{t-j}) / sqrt(2 n + 1),   p_t = taps_proj(source_t): n taps of each head

Axes: b batch, t time, c channels, h heads, n taps.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConvWindow, Segments, State, with_history
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.short_conv import ShortConv

ConvForm: TypeAlias = Literal["plain", "scaled", "dynamic"]


class ResidualConv(ShortConv):
    """A token and its convolution, over ``ctx.d_model`` channels; the last tap is the token's own."""

    def __init__(self, ctx: BuildContext, d_conv: int, *, scaled: bool = False, kernel: str = "auto") -> None:
        super().__init__(ctx, d_conv, bias=False, activation=None, kernel=kernel)
        self.scale = (d_conv + 1) ** -0.5 if scaled else 1.0

    def forward(
        self, x: Tensor, segments: Segments | None, state: ConvWindow | None, source: Tensor | None = None
    ) -> tuple[Tensor, ConvWindow | None]:
        """x (b t c) to y (b t c), and the state after it (None without one). ``source`` is for :class:`DynamicConv`."""
        added, after = super().forward(x, segments, state)
        y = x + added
        return (y if self.scale == 1.0 else y * self.scale), after

    def remembered(self, x: Tensor, segments: Segments | None, state: State | None, keep: int) -> tuple[Tensor, State | None]:
        """The same, where the call's last ``keep`` tokens can be cropped afterwards."""
        y, after = with_history(self.forward, x, segments, state, keep, self.init_state)
        return y, after


class DynamicConv(ResidualConv):
    """Taps that are a sum of learned ones of each channel, and of ones that each token makes for each head.

    ``d_source``: width of what taps are made of. ``taps_proj`` gives the taps of one head after the other, its own last.
    """

    def __init__(self, ctx: BuildContext, d_conv: int, n_heads: int, d_source: int, *, kernel: str = "auto") -> None:
        super().__init__(ctx, d_conv, kernel=kernel)
        self.n_heads, self.scale = n_heads, (2 * d_conv + 1) ** -0.5
        self.taps_proj = nn.Linear(d_source, n_heads * d_conv, bias=False, **ctx.factory)

    def forward(
        self, x: Tensor, segments: Segments | None, state: ConvWindow | None, source: Tensor | None = None
    ) -> tuple[Tensor, ConvWindow | None]:
        """As :class:`ResidualConv`'s, with taps made of ``source`` (b t d), which is needed."""
        assert source is not None, "taps are made of something"
        wide = accumulation_dtype(x.dtype)
        taps = self.taps_proj(source).to(wide).unflatten(-1, (self.n_heads, self.d_conv))
        window = None if state is None else state["window"].to(x.dtype)
        y = x.to(wide).unflatten(-1, (self.n_heads, -1))
        for j in range(self.d_conv):
            one = torch.zeros_like(self.weight, dtype=x.dtype)
            one[:, j] = 1
            delayed, _ = self.short_conv(
                x, one, None, initial_state=window, segments=segments, activation=None, n_tokens=x.shape[1]
            )
            y = y + delayed.unflatten(-1, (self.n_heads, -1)) * taps[..., j, None]
        plain, after = ShortConv.forward(self, x, segments, state)  # last: it consumes the state
        return ((y.flatten(-2) + plain) * self.scale).to(x.dtype), after


def residual_conv(
    ctx: BuildContext, form: ConvForm, d_conv: int, n_heads: int, d_source: int, *, kernel: str = "auto"
) -> ResidualConv:
    """The convolution of a form, over ``ctx.d_model`` channels of ``n_heads`` heads."""
    if form == "dynamic":
        return DynamicConv(ctx, d_conv, n_heads, d_source, kernel=kernel)
    return ResidualConv(ctx, d_conv, scaled=form == "scaled", kernel=kernel)
