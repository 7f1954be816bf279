"""The meaning of ``short_conv``: one token at a time over a window. Axes: b batch, t time, c channels, w width."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, start_state
from hybridtf.ops.short_conv.shapes import check, sum_dtype


def short_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel by itself: y_t = bias + sum_j weight[:, j] x_{t-(w-1)+j}, last tap on x_t.

    ``x`` (b t c), ``weight`` (c w), ``bias`` (c) or None. ``initial_state`` (b w-1 c): the last ``w-1`` tokens of the
    row's document before this call, oldest first, zeros where there were fewer; None is all zeros. A token's
    predecessors are the earlier real tokens of its own document: pads are skipped. Returns ``y`` (b t c), after the
    activation and zero at pads, and the final state (b w-1 c) of each row's last document, both in x's dtype; sums are
    float32 at least. Differentiable in every tensor argument.

    Raises :class:`ConfigError` where shapes do not fit or the activation is unknown.
    """
    check(x, weight, bias, initial_state, segments, activation)
    dtype, width = sum_dtype(x, weight), weight.shape[1]
    taps = weight.to(dtype).unbind(1)
    window = start_state(initial_state, (x.shape[0], width - 1, x.shape[2]), x, x.dtype, segments)
    out = []
    for i, x_t in enumerate(mask_pads(x, segments).unbind(1)):
        old = window
        if segments is not None:
            old = torch.where(segments.starts[:, i, None, None], torch.zeros_like(window), window)
        tokens = torch.cat([old, x_t[:, None]], 1)
        parts = [tap * token for tap, token in zip(taps, tokens.to(dtype).unbind(1), strict=True)]
        out.append(sum(parts[1:], parts[0]))
        window = tokens[:, 1:]
        if segments is not None:
            window = torch.where(segments.real[:, i, None, None], window, old)
    y = torch.stack(out, 1) if out else x.to(dtype)
    y = y if bias is None else y + bias.to(dtype)
    y = F.silu(y) if activation == "silu" else y
    return mask_pads(y, segments).to(x.dtype), window
