"""Both passes of ``linear_scan_chunked`` over the spans of a call, outside autograd. README.md has the derivation.

Axes: b batch, t time, k chunks of a span, l places in a chunk, c channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.linear_scan.shapes import Parts, factor
from hybridtf.ops.linear_scan.spans import Decays, factors_of, masks_of, spans_for
from hybridtf.ops.passes_op import Call
from hybridtf.ops.spans import Span

Places = list[Parts]
"""Parts (b k c) for each place of a chunk, or (b c) for each chunk, in the order of a sweep."""


def forward(call: Call, state: list[Tensor], keep: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """All states, parts first (parts b t c), and the last ones, each (b c), in the dtype of the incoming ``state``; the
    backward needs no more."""
    u, decays = _parts(call), Decays.of(call)
    shape, dtype = u[0].shape, state[0].dtype
    h = state[0].new_empty(len(u), *shape)
    carry = tuple(x.double() for x in state)
    for span in spans_for(shape, h.device):
        a, total = factors_of(decays, span, shape, dtype)
        out = tuple(span.cut(x) for x in h)
        carry = _scan(_places(_load(u, decays, span, dtype)), [*_places(a)], carry, total, _places(out), turn=1)
    last = h[:, :, -1] if shape[1] else state
    return h, [x.clone(memory_format=torch.contiguous_format) for x in last], []


def backward(call: Call, kept: list[Tensor], dh: Tensor, dlast: list[Tensor]) -> list[Tensor]:
    """Gradients of the parts of u, of the factor (or its logarithm) and of the incoming state.

    ``kept``: all states (parts b t c), and the incoming ones; ``dh`` (parts b t c), ``dlast`` (b c) each: the gradients of all
    states and of the last ones, beside each other.
    """
    (h, *state), decays = kept, Decays.of(call)
    shape, dtype = h.shape[1:], h.dtype
    du = [torch.empty(shape, dtype=x.dtype, device=h.device) for x in _parts(call)]
    wide = torch.float64 if decays.timeless else None
    ddecay = [torch.zeros(x.shape, dtype=wide or x.dtype, device=h.device) for x in decays.decay]
    carry = tuple(x.double() for x in dlast)
    for span in reversed(spans_for(shape, h.device)):
        a, total = factors_of(decays, span, shape, dtype)
        same = all(x.dtype == dtype for x in du)
        gu = tuple(span.cut(x) if same else torch.empty_like(span.cut(h[0])) for x in du)
        given = tuple(span.cut(x) for x in dh.to(dtype))
        carry = _scan_back(given, a, carry, total, gu)
        found = _to_decay(gu, _before(h, tuple(state), span), a if decays.log and not decays.timeless else None)
        _store(decays, span, gu, found, du, ddecay)
    if decays.timeless:
        ddecay = _through_log(decays, ddecay)
    return [*du, *ddecay, *(x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in carry)]


def _parts(call: Call) -> Parts:
    return tuple(x for x in (call["u"], call["u_im"]) if x is not None)


def _load(x: Parts, decays: Decays, span: Span, dtype: torch.dtype) -> Parts:
    """A span in the dtype of the states, zero at pads."""
    parts = tuple(span.cut(y) for y in x)
    pads, _ = masks_of(decays, span)
    if pads is not None:
        parts = tuple(y.masked_fill(pads, 0) for y in parts)
    return tuple(y.to(dtype) for y in parts)


def _places(x: Parts, axis: int = 2) -> Places:
    return list(zip(*(y.unbind(axis) for y in x), strict=True))


def _step(u: Parts, a: Parts, h: Parts, out: Parts, turn: int) -> None:
    """out = u + a h, with the conjugate of a where ``turn`` is -1."""
    torch.addcmul(u[0], a[0], h[0], out=out[0])
    if len(u) == 2:
        out[0].addcmul_(a[1], h[1], value=-turn)
        torch.addcmul(u[1], a[0], h[1], out=out[1]).addcmul_(a[1], h[0], value=turn)


def _scan(u: Places, a: Places, carry: Parts, total: Parts, out: Places, turn: int) -> Parts:
    """Write the states of a span into ``out``; ``carry`` (b c, float64) enters its first chunk, what leaves is returned."""
    if not total:
        start = tuple(x[:, None].to(out[0][0].dtype) for x in carry)
        end = _sweep(u, a, start, out, turn)
        return tuple(x[:, 0].double() for x in end)
    start, carry = _walk(_sum_up(u, a, turn), total, carry, turn)
    _sweep(u, a, tuple(x.to(out[0][0].dtype) for x in start), out, turn)
    return carry


def _sweep(u: Places, a: Places, state: Parts, out: Places, turn: int) -> Parts:
    """One step after another, all that lies side by side at once."""
    for u_i, a_i, out_i in zip(u, a, out, strict=True):
        _step(u_i, a_i, state, out_i, turn)
        state = out_i
    return state


def _sum_up(u: Places, a: Places, turn: int) -> Parts:
    """What each chunk leaves (b k c) when it starts from zero. Two buffers: a pair needs both parts of the step before."""
    state = tuple(x.clone(memory_format=torch.contiguous_format) for x in u[0])
    other = tuple(torch.empty_like(x) for x in state)
    for u_i, a_i in zip(u[1:], a[1:], strict=True):
        _step(u_i, a_i, state, other, turn)
        state, other = other, state
    return state


def _walk(sums: Parts, total: Parts, carry: Parts, turn: int) -> tuple[Parts, Parts]:
    """What enters each chunk (b k c), and what leaves the last one; float64. Backwards in time where ``turn`` is -1."""
    b, n, c = sums[0].shape
    between = tuple(torch.empty(b, n + 1, c, dtype=x.dtype, device=x.device) for x in carry)
    borders = _places(between, 1)[::turn]
    for x, y in zip(borders[0], carry, strict=True):
        x.copy_(y)
    wide = tuple(x.double() for x in sums)
    _sweep(_places(wide, 1)[::turn], _places(total, 1)[::turn], borders[0], borders[1:], turn)
    entering = slice(0, n) if turn == 1 else slice(1, n + 1)
    return tuple(x[:, entering] for x in between), borders[-1]


def _scan_back(given: Parts, a: Parts, carry: Parts, total: Parts, out: Parts) -> Parts:
    """gu_t = g_t + conj(a_{t+1}) gu_{t+1} over a span, written into ``out``; what leaves is the gradient of the state before.

    What passes from chunk to chunk is e = conj(a) gu, so that a chunk needs no factor of the next: its last place adds e as
    it stands, its first place multiplies once more.
    """
    g, factors, gu = _places(given)[::-1], _places(a)[::-1], _places(out)[::-1]
    dtype = out[0].dtype
    if total:
        sums = _times(factors[-1], _sum_up(g, [(), *factors[:-1]], -1))
        start, carry = _walk(sums, total, carry, -1)
    else:
        start = tuple(x[:, None] for x in carry)
    for x, y, z in zip(g[0], start, gu[0], strict=True):
        torch.add(x, y.to(dtype), out=z)
    last = _sweep(g[1:], factors[:-1], gu[0], gu[1:], -1)
    return carry if total else tuple(x[:, 0].double() for x in _times(factors[-1], last))


def _times(a: Parts, g: Parts) -> Parts:
    """conj(a) g."""
    if len(a) == 1:
        return (a[0] * g[0],)
    return torch.addcmul(a[0] * g[0], a[1], g[1]), torch.addcmul(a[0] * g[1], a[1], g[0], value=-1)


def _before(h: Tensor, state: Parts, span: Span) -> Parts:
    """The state before each place of a span (b k l c)."""
    if span.start:
        return tuple(span._replace(start=span.start - 1).cut(x) for x in h)
    shifted = (torch.cat([y[:, None], x[:, : span.stop - 1]], 1) for x, y in zip(h, state, strict=True))
    return tuple(span.cut(x) for x in shifted)


def _to_decay(gu: Parts, before: Parts, a: Parts | None) -> Parts:
    """The gradient of a, gu conj(h_{t-1}); with ``a``, that of log a, which is conj(a) times it."""
    found = _times(before, gu)
    if a is None:
        return found
    return (found[0].mul_(a[0]),) if len(a) == 1 else _times(a, found)


def _store(decays: Decays, span: Span, gu: Parts, found: Parts, du: list[Tensor], ddecay: list[Tensor]) -> None:
    """Put the gradients of a span in their places; none at pads, and none of a factor where a document starts."""
    pads, starts = masks_of(decays, span)
    if pads is not None:
        gu, found = (tuple(x.masked_fill_(pads, 0) for x in part) for part in (gu, found))
    if starts is not None:
        found = tuple(x.masked_fill_(starts, 0) for x in found)
    for whole, part in zip(du, gu, strict=True):
        if whole.dtype != part.dtype:
            whole[:, span.start : span.stop] = part.flatten(1, 2)
    for whole, part in zip(ddecay, found, strict=True):
        if decays.timeless:
            whole += part.sum((0, 1, 2), dtype=torch.float64)
        else:
            whole[:, span.start : span.stop] = part.flatten(1, 2)


def _through_log(decays: Decays, ddecay: list[Tensor]) -> list[Tensor]:
    """The gradients of a factor (c) from float64 to its own dtype, by way of its logarithm where that was given."""
    found: Parts = tuple(ddecay)
    if decays.log:
        found = _times(factor(tuple(x.double() for x in decays.decay), True), found)
    return [x.to(y.dtype) for x, y in zip(found, decays.decay, strict=True)]
