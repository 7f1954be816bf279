"""The short convolution as a part: its weights, its op and its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Fixed, ParamSpec, Segments, init


class ShortConv(nn.Module):
    """Causal depthwise convolution of ``d_conv`` taps over ``ctx.d_model`` channels; see the op ``short_conv``."""

    def __init__(self, ctx: BuildContext, d_conv: int, *, bias: bool, activation: str | None, kernel: str = "auto") -> None:
        super().__init__()
        self.d_conv, self.activation = d_conv, activation
        self.weight = nn.Parameter(torch.empty(ctx.d_model, d_conv, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory)) if bias else None
        self.short_conv = ctx.bind_kernel("short_conv", kernel, sizes={"channels": ctx.d_model, "width": d_conv})

    def param_specs(self) -> dict[str, ParamSpec]:
        bound = self.d_conv**-0.5
        specs = {"weight": ParamSpec("conv", init.uniform(-bound, bound))}
        return specs if self.bias is None else {**specs, "bias": ParamSpec("bias", init.uniform(-bound, bound))}

    def init_state(self, batch_size: int) -> Fixed:
        """The last ``d_conv - 1`` inputs of each row's document, zeros before its start."""
        conv = self.short_conv
        shapes = {"window": (self.d_conv - 1, self.weight.shape[0])}
        return Fixed.empty(batch_size, shapes, dtype=conv.compute_dtype, device=conv.device)

    def forward(self, x: Tensor, segments: Segments | None, state: Fixed | None) -> tuple[Tensor, Fixed | None]:
        """x (b t c) to y (b t c), and the state after it (None without one)."""
        window = None if state is None else state["window"].to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y, last = self.short_conv(
            x, self.weight.to(x.dtype), bias, initial_state=window, segments=segments, activation=self.activation,
            n_tokens=x.shape[1],
        )
        if state is None:
            return y, None
        return y, state.advance({"window": last.to(state["window"].dtype)}, segments, x.shape[1])
