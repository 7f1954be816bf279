"""The meaning of ``long_conv``: one sum over the past for each token.

Axes: b batch, t time, s past slots, c channels, w taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.long_conv.shapes import check, joined


def long_conv_reference(
    x: Tensor, weight: Tensor, past: Tensor | None = None, past_length: Tensor | None = None, *,
    segments: Segments | None = None,
) -> Tensor:
    """A causal convolution of each channel with a filter as long as the document: y_p = sum_k weight[:, k] x_{p-k}.

    ``x`` (b t c), ``weight`` (c w), tap k for the token k places earlier; there are no taps beyond w. Places count the real
    tokens of a document. ``past`` (b s c): inputs of the row's document from before this call, in order, of which the first
    ``past_length`` (b) count; the rest may hold anything. Returns y (b t c) in x's dtype, zero at pads; sums are float32
    at least. Differentiable in x, weight and past. Raises :class:`ConfigError` where shapes do not fit.
    """
    check(x, weight, past, past_length, segments)
    tokens, documents = joined(x, past, past_length, segments)
    dtype, (b, n, _) = state_dtype(x, weight), tokens.shape
    tokens, taps = tokens.to(dtype), weight.to(dtype)
    place, ids = torch.arange(n, device=x.device).expand(b, n), torch.ones(b, n, dtype=torch.int64, device=x.device)
    if documents is not None:
        place, ids = documents.position, documents.ids
    out = []
    for i in range(n - x.shape[1], n):
        ago = place[:, i : i + 1] - place[:, : i + 1]  # [b, j]
        seen = (ids[:, : i + 1] == ids[:, i : i + 1]) & (ids[:, i : i + 1] > 0) & (ago < taps.shape[1])
        reach = taps.T[ago.clamp(0, taps.shape[1] - 1)] * seen[..., None]  # [b, j, c]
        out.append((reach * tokens[:, : i + 1]).sum(1))
    y = torch.stack(out, 1) if out else torch.zeros_like(x)
    return (y if segments is None else y.masked_fill(~segments.real[..., None], 0)).to(x.dtype)
