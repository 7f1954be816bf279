"""How ``linear_scan_chunked`` cuts a call into spans of chunks, and the factors of a span.

Axes: b batch, t time, k chunks of a span, l places in a chunk, c channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.linear_scan.shapes import Parts, factor

# Elements of a span (b k l c): what a CPU's cache holds between two sweeps; enough to fill a GPU.
SPAN_BUDGET = 2**18
SPAN_BUDGET_GPU = 2**24
# Steps that are taken in the precision of the states before what was carried in float64 is read again.
CHUNK_TOKENS = 128
# Tokens of a span at least, however wide they are: a span of one chunk would be a loop over time.
SPAN_TOKENS = 512


class Call(NamedTuple):
    """What both passes read: the parts of the factor, and the masks (None without segments)."""

    decay: Parts  # (b t c), or (c)
    log: bool
    real: Tensor | None
    starts: Tensor | None

    @property
    def timeless(self) -> bool:
        """The factor is (c), the same at all times."""
        return self.decay[0].ndim == 1


class Span(NamedTuple):
    """Chunks of equal length that are computed side by side."""

    start: int
    n_chunks: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.n_chunks * self.length

    def cut(self, x: Tensor) -> Tensor:
        """This span of ``x`` (b t ...) as (b k l ...)."""
        return x[:, self.start : self.stop].reshape(x.shape[0], self.n_chunks, self.length, *x.shape[2:])


class Factors(NamedTuple):
    """The factors of a span."""

    a: Parts  # (b k l c): 1 at pads, 0 where a document starts
    total: Parts  # (b k c), float64: their product over each chunk; nothing in a span of one chunk


def spans_of(shape: torch.Size, device: torch.device) -> list[Span]:
    """Spans over the whole length of (b t c): as many tokens as the budget allows, then what is left.

    A chunk of a span of n tokens has about sqrt(2 n), so that there are about as many steps in a chunk as chunks to walk.
    """
    b, t, c = shape
    budget = SPAN_BUDGET if device.type == "cpu" else SPAN_BUDGET_GPU
    tokens = min(t, max(SPAN_TOKENS, budget // max(1, b * c)))
    length = min(CHUNK_TOKENS, max(1, math.isqrt(2 * tokens)))
    at_once = max(1, tokens // length)
    full = t // length
    spans = [Span(i * length, min(at_once, full - i), length) for i in range(0, full, at_once)]
    return [*spans, Span(full * length, 1, t % length)] if t % length else spans


def factors_of(call: Call, span: Span, shape: torch.Size, dtype: torch.dtype) -> Factors:
    """The factors of a span of a call of ``shape`` (b t c). Resets are zeros put in by a mask, never a log of 0."""
    wanted = (shape[0], span.n_chunks, span.length, shape[2])
    if call.timeless and call.real is None:
        raw = tuple(x.to(dtype) for x in call.decay)
        a = tuple(x.expand(wanted) for x in factor(raw, call.log))
        column = tuple(x.expand(1, 1, span.length, shape[2]) for x in raw)
        total = _totals(column, call.log) if span.n_chunks > 1 else ()
        return Factors(a, tuple(x.expand(shape[0], span.n_chunks, shape[2]) for x in total))
    raw = tuple((x.expand(wanted) if call.timeless else span.cut(x)).to(dtype) for x in call.decay)
    pads, starts = masks_of(call, span)
    if pads is not None:
        neutral = (0, 0) if call.log else (1, 0)
        raw = tuple(x.masked_fill(pads, value) for x, value in zip(raw, neutral, strict=False))
    a, total = factor(raw, call.log), () if span.n_chunks == 1 else _totals(raw, call.log)
    if starts is not None:
        a = tuple(x.masked_fill(starts, 0) for x in a)
        total = tuple(x.masked_fill(starts.any(2), 0) for x in total)
    return Factors(a, total)


def masks_of(call: Call, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """Pads and first tokens of documents in a span, (b k l 1). On a CPU, None for what the span does not have."""
    if call.real is None or call.starts is None:
        return None, None
    pads, starts = ~span.cut(call.real)[..., None], span.cut(call.starts)[..., None]
    if pads.device.type != "cpu":  # looking would make the host wait
        return pads, starts
    return pads if bool(pads.any()) else None, starts if bool(starts.any()) else None


def _totals(raw: Parts, log: bool) -> Parts:
    """The product of the factors over each chunk (b k c) in float64, from logarithms by their sum."""
    if log:
        return factor(tuple(x.sum(2, dtype=torch.float64) for x in raw), log)
    if len(raw) == 1:
        return (raw[0].prod(2, dtype=torch.float64),)
    whole = torch.complex(raw[0].double(), raw[1].double()).prod(2)
    return whole.real, whole.imag
