"""``short_conv`` over explicit windows: every token's last w tokens side by side, then one einsum.

Simple, exact, and w times the memory of the input. Axes: b batch, t time, c channels, w width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import Kernel, KernelRequest, Segments

MAX_WIDTH = 16


def short_conv_windows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """The op of ``hybridtf.ops.short_conv``: the same arguments and results, gradients included."""
    (b, t, c), width = x.shape, weight.shape[1]
    state = x.new_zeros(b, width - 1, c) if initial_state is None else initial_state.to(x.dtype)
    if t == 0:
        return x, state
    if segments is None:
        tokens = torch.cat([state, x], 1)
        return _taps(tokens.unfold(1, width, 1), weight, bias, activation, x.dtype), tokens[:, t:]
    # Real tokens to the front of their rows, so that a window holds the tokens before it and no pads.
    real = segments.real
    order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
    x = x.masked_fill(~real[..., None], 0)
    tokens = torch.cat([state, x.gather(1, order[..., None].expand_as(x))], 1)
    ids = torch.cat([segments.carried[:, None].expand(b, width - 1), segments.ids.gather(1, order)], 1)
    seen = ids.unfold(1, width, 1)
    windows = tokens.unfold(1, width, 1).masked_fill((seen != seen[..., -1:])[:, :, None], 0)
    y = _taps(windows, weight, bias, activation, x.dtype)
    y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y).masked_fill(~real[..., None], 0)
    last = real.sum(1, keepdim=True) + torch.arange(width - 1, device=x.device)
    wanted = torch.where(segments.last_id > 0, segments.last_id, segments.carried)
    kept = tokens.gather(1, last[..., None].expand(-1, -1, c))
    return y, kept.masked_fill((ids.gather(1, last) != wanted[:, None])[..., None], 0)


def _taps(
    windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype
) -> Tensor:
    wide = torch.float64 if torch.float64 in (windows.dtype, weight.dtype) else torch.float32
    y = torch.einsum("btcw,cw->btc", windows.to(wide), weight.to(wide))
    y = y if bias is None else y + bias.to(wide)
    return (F.silu(y) if activation == "silu" else y).to(dtype)


def _why_not(request: KernelRequest) -> str | None:
    width = request.sizes.get("width", 1)
    return f"width {width} is above {MAX_WIDTH}: the windows would fill the memory" if width > MAX_WIDTH else None


def _load() -> Callable[..., Any]:
    return short_conv_windows


KERNEL = Kernel("short_conv", "windows", 5, _why_not, _load)
"""Below the built-in form (10), which is faster, and above the reference (0)."""
