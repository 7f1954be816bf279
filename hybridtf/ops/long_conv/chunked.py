"""``long_conv`` by FFT over blocks, in memory linear in the length. README.md has the derivation.

Axes: b batch, t time, c channels, w taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.long_conv.blocks import convolve, documents
from hybridtf.ops.long_conv.shapes import check, joined
from hybridtf.ops.long_conv.step import long_conv_step
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import span_op


def long_conv_chunked(
    x: Tensor, weight: Tensor, past: Tensor | None = None, past_length: Tensor | None = None, *,
    segments: Segments | None = None,
) -> Tensor:
    """The convolution of :func:`long_conv_reference` in time n log² n; same arguments, results and errors.

    One token with a past costs one product for each earlier token. Second derivatives raise :class:`KernelError`.
    """
    check(x, weight, past, past_length, segments)
    with no_autocast(x.device):
        if x.shape[1] == 1 and past is not None and past_length is not None:
            return long_conv_step(x, weight, past, past_length, segments)
        tokens, whose = joined(x, past, past_length, segments)
        if not x.shape[1]:
            return x.clone()
        # No state passes from span to span, there being one span: an empty one tells device and precision.
        nothing = torch.zeros(x.shape[0], 0, dtype=state_dtype(x, weight), device=x.device)
        y, _ = _OP((tokens,), (weight,), (), whose, (nothing,))
        return y[:, tokens.shape[1] - x.shape[1] :]


def _span(call: Call, state: States) -> tuple[Tensor, States]:
    """The whole call: each document by itself, those of like length together."""
    dtype, masks = state[0].dtype, call.masks
    x, weight = call["x"].to(dtype), call["weight"].to(dtype)
    if masks is None or x.device.type == "meta":
        return convolve(x, weight), state
    flat = x.flatten(0, 1)
    y = torch.zeros_like(flat)
    for place, held in documents(masks.real, masks.ids):
        part = convolve(flat[place].masked_fill(~held[..., None], 0), weight)
        y = y.index_put((place[held],), part[held])
    return y.view_as(x), state


def _like(call: Call) -> tuple[Any, torch.dtype]:
    return call["x"].shape, call["x"].dtype


_OP = span_op("long_conv", _span, timed=("x",), fixed=("weight",), options={}, length=lambda call: call.n_tokens, like=_like)
