"""The short convolution as a part: its weights, its op and its state; several side by side; one that mixes the channels of a
head; and the shift by one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConvWindow, ParamSpec, Segments, State, init


class ShortConv(nn.Module):
    """Causal depthwise convolution of ``d_conv`` taps, ``dilation`` tokens apart, over ``ctx.d_model`` channels; see the op
    ``short_conv``."""

    def __init__(
        self, ctx: BuildContext, d_conv: int, *, bias: bool, activation: str | None, kernel: str = "auto", dilation: int = 1
    ) -> None:
        super().__init__()
        self.d_conv, self.activation, self.dilation = d_conv, activation, dilation
        self.reach = (d_conv - 1) * dilation + 1
        self.weight = nn.Parameter(torch.empty(ctx.d_model, d_conv, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory)) if bias else None
        self.short_conv = ctx.bind_kernel("short_conv", kernel, sizes={"channels": ctx.d_model, "width": self.reach})

    def param_specs(self) -> dict[str, ParamSpec]:
        bound = self.d_conv**-0.5
        specs = {"weight": ParamSpec("conv", init.uniform(-bound, bound))}
        return specs if self.bias is None else {**specs, "bias": ParamSpec("bias", init.uniform(-bound, bound))}

    def init_state(self, batch_size: int) -> ConvWindow:
        """The last ``reach - 1`` inputs of each row's document, zeros before its start."""
        conv = self.short_conv
        shapes = {"window": (self.reach - 1, self.weight.shape[0])}
        return ConvWindow.empty(batch_size, shapes, dtype=conv.compute_dtype, device=conv.device)

    def forward(self, x: Tensor, segments: Segments | None, state: ConvWindow | None) -> tuple[Tensor, ConvWindow | None]:
        """x (b t c) to y (b t c), and the state after it (None without one)."""
        window = None if state is None else state["window"].to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y, last = self.short_conv(
            x, self._taps().to(x.dtype), bias, initial_state=window, segments=segments, activation=self.activation,
            n_tokens=x.shape[1],
        )
        if state is None:
            return y, None
        return y, state.advance({"window": last.to(state["window"].dtype)}, segments, x.shape[1])

    def _taps(self) -> Tensor:
        """(c reach): the weight, with zeros where a dilated convolution passes tokens over."""
        if self.dilation == 1:
            return self.weight
        apart = F.pad(self.weight[..., None], (0, self.dilation - 1)).flatten(1)
        return apart[:, : self.reach]


class ShortConvs(nn.Module):
    """Short convolutions side by side, one for each name (queries, keys, values of the delta rule and its kin).

    ``widths``: channels by name. Each is a :class:`ShortConv` and a child of that name.
    """

    def __init__(
        self, ctx: BuildContext, widths: Mapping[str, int], d_conv: int, *, bias: bool = False,
        activation: str | None = "silu", kernel: str = "auto",
    ) -> None:
        super().__init__()
        for name, width in widths.items():
            part = ctx.child(name, d_model=width)
            self.add_module(name, ShortConv(part, d_conv, bias=bias, activation=activation, kernel=kernel))

    def init_state(self, batch_size: int) -> dict[str, State]:
        """A window for each name."""
        return {name: conv.init_state(batch_size) for name, conv in self._convs()}

    def forward(
        self, given: Mapping[str, Tensor], segments: Segments | None, state: Mapping[str, State] | None
    ) -> tuple[dict[str, Tensor], dict[str, State] | None]:
        """x (b t c) by name to y (b t c) by name, and the states after it (None without any)."""
        out: dict[str, Tensor] = {}
        after: dict[str, State] = {}
        for name, conv in self._convs():
            out[name], after[name] = conv(given[name], segments, None if state is None else state[name])
        return out, None if state is None else after

    def _convs(self) -> list[tuple[str, ShortConv]]:
        return [(name, conv) for name, conv in self.named_children() if isinstance(conv, ShortConv)]


def short_convs(ctx: BuildContext, widths: Mapping[str, int], d_conv: int, **options: Any) -> ShortConvs | None:
    """:class:`ShortConvs` with these options; None where ``d_conv`` is 0."""
    return ShortConvs(ctx, widths, d_conv, **options) if d_conv else None


class HeadConv(nn.Module):
    """Causal convolution of ``d_conv`` taps that mixes the channels of each head: y_th = bias + sum_w weight_hw x_{t-w,h}.

    Over ``ctx.d_model`` channels in ``n_heads`` equal heads. ``weight`` (c, c / n_heads, d_conv) as of a grouped ``nn.Conv1d``:
    the last tap is of the token itself. Before a document's start there is zero.
    """

    def __init__(self, ctx: BuildContext, n_heads: int, d_conv: int, *, kernel: str = "auto") -> None:
        super().__init__()
        self.n_heads, self.d_conv, width = n_heads, d_conv, ctx.d_model
        self.weight = nn.Parameter(torch.empty(width, width // n_heads, d_conv, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(width, **ctx.factory))
        self.short_conv = ctx.bind_kernel("short_conv", kernel, sizes={"channels": width, "width": d_conv})

    def param_specs(self) -> dict[str, ParamSpec]:
        bound = self.weight[0].numel() ** -0.5
        drawn = init.uniform(-bound, bound)
        return {"weight": ParamSpec("conv", drawn), "bias": ParamSpec("bias", drawn)}

    def init_state(self, batch_size: int) -> ConvWindow:
        """The last ``d_conv - 1`` inputs of each row's document, zeros before its start."""
        conv = self.short_conv
        shapes = {"window": (self.d_conv - 1, self.weight.shape[0])}
        return ConvWindow.empty(batch_size, shapes, dtype=conv.compute_dtype, device=conv.device)

    def forward(
        self, x: Tensor, segments: Segments | None, state: ConvWindow | None, *, offset: Tensor | None = None
    ) -> tuple[Tensor, ConvWindow | None]:
        """x (b t c) to y (b t c), and the state after it (None without one). ``offset`` (c) is added to every input, to the
        zeros before a document's start too."""
        window = None if state is None else state["window"].to(x.dtype)
        weight = self.weight.to(x.dtype).unflatten(0, (self.n_heads, -1))  # [h, o, i, w]
        y = self.bias.to(x.dtype)
        if offset is not None:
            y = y + torch.einsum("hoiw,hi->ho", weight, offset.to(x.dtype).view(self.n_heads, -1)).flatten()
        last = x
        for w in range(self.d_conv):
            tap = x.new_zeros(x.shape[2], self.d_conv)
            tap[:, w] = 1
            delayed, last = self.short_conv(
                x, tap, None, initial_state=window, segments=segments, activation=None, n_tokens=x.shape[1]
            )
            heads = delayed.unflatten(-1, (self.n_heads, -1))
            y = y + torch.einsum("bthi,hoi->btho", heads, weight[..., w]).flatten(2)
        return y, None if state is None else state.advance({"window": last.to(state["window"].dtype)}, segments, x.shape[1])


class TokenShift(nn.Module):
    """The token before, of the same document: y_t = x_{t-1}, zero at a document's first token (RWKV).

    Its state is that token, (b 1 d) of width ``ctx.d_model``. Pads are stepped over.
    """

    def __init__(self, ctx: BuildContext, kernel: str = "auto") -> None:
        super().__init__()
        self.short_conv = ctx.bind_kernel("short_conv", kernel, sizes={"channels": ctx.d_model, "width": 2})
        self.width = ctx.d_model

    def init_state(self, batch_size: int) -> ConvWindow:
        """No token yet."""
        conv = self.short_conv
        return ConvWindow.empty(batch_size, {"last": (1, self.width)}, dtype=conv.compute_dtype, device=conv.device)

    def forward(self, x: Tensor, segments: Segments | None, state: ConvWindow | None) -> tuple[Tensor, ConvWindow | None]:
        """x (b t d) to y (b t d), zero at pads, and the state after it (None without one)."""
        if state is not None and x.shape[1] == 1 and segments is None and not torch.is_grad_enabled():
            # A step of decoding: a convolution that only hands on costs more there than all else that is done with it.
            return state["last"].to(x.dtype), state.advance({"last": x.to(state["last"].dtype)}, None, 1)
        taps = torch.stack([x.new_ones(self.width), x.new_zeros(self.width)], dim=-1)
        last = None if state is None else state["last"].to(x.dtype)
        y, after = self.short_conv(x, taps, None, initial_state=last, segments=segments, activation=None, n_tokens=x.shape[1])
        if state is None:
            return y, None
        return y, state.advance({"last": after.to(state["last"].dtype)}, segments, x.shape[1])
