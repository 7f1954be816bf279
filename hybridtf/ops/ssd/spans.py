"""How ``ssd_chunked`` cuts a call into spans of chunks, and the factors of a span that come from decays and documents.

Axes: b batch, t time, c chunks of a span, l places in a chunk, g groups, r heads a group, h = g r.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a span's pair tensor (b c h l l): few chunks at once on a CPU, enough to fill a GPU.
SPAN_BUDGET = 2**18
SPAN_BUDGET_GPU = 2**24


class Call(NamedTuple):
    """One call without its gradients: inputs, masks (None without segments), and the chunk size."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor
    real: Tensor | None
    ids: Tensor | None
    carried: Tensor | None
    chunk_size: int

    @property
    def groups(self) -> int:
        return self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of states and decays."""
        return self.log_a.dtype

    @property
    def product_dtype(self) -> torch.dtype:
        """bfloat16 where all of q, k and v are; float16 has too little range for sums over a chunk."""
        low = all(x.dtype == torch.bfloat16 for x in (self.q, self.k, self.v))
        return torch.bfloat16 if low else self.dtype


class Span(NamedTuple):
    """Chunks of equal length that are computed side by side."""

    start: int
    n_chunks: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.n_chunks * self.length

    def cut(self, x: Tensor) -> Tensor:
        """This span of ``x`` (b t ...) as (b c l ...)."""
        return x[:, self.start : self.stop].reshape(x.shape[0], self.n_chunks, self.length, *x.shape[2:])


class Decay(NamedTuple):
    """Factors between 0 and 1."""

    pair: Tensor  # (b c g r l l): from the place of the last axis to that of the one before, 0 above the diagonal
    into: Tensor  # (b c l h 1): from the chunk's incoming state to the place
    tail: Tensor  # (b c l h 1): from the place to the chunk's outgoing state
    whole: Tensor  # (b c g 1 r 1): from incoming to outgoing state


def chunks_at_once(call: Call) -> int:
    """Chunks of a span: as many as the budget allows. Sizes may be symbols of a compiler, so nothing is compared."""
    (b, _, h), size = call.log_a.shape, call.chunk_size
    budget = SPAN_BUDGET if call.log_a.device.type == "cpu" else SPAN_BUDGET_GPU
    at_once: int = torch.sym_max(1, budget // torch.sym_max(1, b * h * size * size))
    return at_once


def count_spans(call: Call) -> int:
    """How many spans :func:`spans_of` gives, as arithmetic that holds for symbols too."""
    t, size, at_once = call.log_a.shape[1], call.chunk_size, chunks_at_once(call)
    full = t // size
    return (full + at_once - 1) // at_once + (t + size - 1) // size - full


def spans_of(call: Call) -> list[Span]:
    """Spans over the whole length: full chunks, as many at once as the budget allows, then a short one."""
    t, size, at_once = call.log_a.shape[1], call.chunk_size, chunks_at_once(call)
    full = t // size
    spans = [Span(i * size, min(at_once, full - i), size) for i in range(0, full, at_once)]
    return [*spans, Span(full * size, 1, t % size)] if t % size else spans


def load(x: Tensor, call: Call, span: Span) -> Tensor:
    """A span of ``x`` (b t heads width) as (b c l heads width) in the precision of the state, zero at pads."""
    part = span.cut(x)
    if call.real is not None:
        part = part.masked_fill(~span.cut(call.real)[..., None, None], 0)
    return part.to(call.dtype)


def decay_of(call: Call, span: Span) -> Decay:
    """The factors of a span. Only exponents of at most 0 are raised: a masked pair is -inf, never a large number."""
    total = span.cut(call.log_a).double().cumsum(2)
    into, tail, whole = total.exp(), (total[:, :, -1:] - total).exp(), total[:, :, -1].exp()
    by_head = total.transpose(2, 3).contiguous()
    pair = (by_head[..., :, None] - by_head[..., None, :]).to(call.dtype)
    hidden = torch.ones(span.length, span.length, dtype=torch.bool, device=pair.device).triu(1)
    if call.ids is not None and call.carried is not None:
        ids = span.cut(call.ids)
        first = call.ids[:, span.start - 1] if span.start else call.carried
        before = torch.cat([first[:, None], ids[:, :-1, -1]], 1)
        hidden = (hidden | (ids[..., :, None] != ids[..., None, :]))[:, :, None]
        into = into.masked_fill((ids != before[..., None])[..., None], 0)
        tail = tail.masked_fill((ids != ids[:, :, -1:])[..., None], 0)
        whole = whole.masked_fill((ids[:, :, -1] != before)[..., None], 0)
    pair = pair.masked_fill_(hidden, -torch.inf).exp_()
    b, c, h = whole.shape
    heads = h // call.groups
    return Decay(
        pair.view(b, c, call.groups, heads, span.length, span.length),
        into.to(call.dtype)[..., None], tail.to(call.dtype)[..., None],
        whole.to(call.dtype).view(b, c, call.groups, 1, heads, 1),
    )
