"""How ``linear_scan_chunked`` cuts a call into spans of chunks, and the factors of a span.

Axes: b batch, t time, k chunks of a span, l places in a chunk, c channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.linear_scan.shapes import Parts, factor
from hybridtf.ops.passes_op import Call
from hybridtf.ops.spans import Span, span_budget, spans_of

# Steps that are taken in the precision of the states before what was carried in float64 is read again.
CHUNK_TOKENS = 128
# Tokens of a span at least, however wide they are: a span of one chunk would be a loop over time.
SPAN_TOKENS = 512


class Decays(NamedTuple):
    """What both passes read of a call: the parts of the factor, and the masks (None without segments)."""

    decay: Parts  # (b t c), or (c)
    log: bool
    real: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(cls, call: Call) -> Decays:
        decay = tuple(x for x in (call["decay"], call["decay_im"]) if x is not None)
        masks = call.masks
        return cls(decay, call["log"], *((None, None) if masks is None else (masks.real, masks.starts)))

    @property
    def timeless(self) -> bool:
        """The factor is (c), the same at all times."""
        return self.decay[0].ndim == 1


class Factors(NamedTuple):
    """The factors of a span."""

    a: Parts  # (b k l c): 1 at pads, 0 where a document starts
    total: Parts  # (b k c), float64: their product over each chunk; nothing in a span of one chunk


def spans_for(shape: torch.Size, device: torch.device) -> list[Span]:
    """Spans over the whole length of (b t c): as many tokens as the budget allows, then what is left.

    A chunk of a span of n tokens has about sqrt(2 n), so that there are about as many steps in a chunk as chunks to walk.
    """
    b, t, c = shape
    device = torch.device("cpu") if device.type == "meta" else device  # operations are counted as the CPU does them
    tokens = min(t, max(SPAN_TOKENS, span_budget(device) // max(1, b * c)))
    length = min(CHUNK_TOKENS, max(1, math.isqrt(2 * tokens)))
    return spans_of(t, length, max(1, tokens // length))


def factors_of(decays: Decays, span: Span, shape: torch.Size, dtype: torch.dtype) -> Factors:
    """The factors of a span of a call of ``shape`` (b t c). Resets are zeros put in by a mask, never a log of 0."""
    wanted = (shape[0], span.n_chunks, span.length, shape[2])
    if decays.timeless and decays.real is None:
        raw = tuple(x.to(dtype) for x in decays.decay)
        a = tuple(x.expand(wanted) for x in factor(raw, decays.log))
        column = tuple(x.expand(1, 1, span.length, shape[2]) for x in raw)
        total = _totals(column, decays.log) if span.n_chunks > 1 else ()
        return Factors(a, tuple(x.expand(shape[0], span.n_chunks, shape[2]) for x in total))
    raw = tuple((x.expand(wanted) if decays.timeless else span.cut(x)).to(dtype) for x in decays.decay)
    pads, starts = masks_of(decays, span)
    if pads is not None:
        neutral = (0, 0) if decays.log else (1, 0)
        raw = tuple(x.masked_fill(pads, value) for x, value in zip(raw, neutral, strict=False))
    a, total = factor(raw, decays.log), () if span.n_chunks == 1 else _totals(raw, decays.log)
    if starts is not None:
        a = tuple(x.masked_fill(starts, 0) for x in a)
        total = tuple(x.masked_fill(starts.any(2), 0) for x in total)
    return Factors(a, total)


def masks_of(decays: Decays, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """Pads and first tokens of documents in a span, (b k l 1). On a CPU, None for what the span does not have."""
    if decays.real is None or decays.starts is None:
        return None, None
    pads, starts = ~span.cut(decays.real)[..., None], span.cut(decays.starts)[..., None]
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
