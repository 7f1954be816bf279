"""Both passes of ``ssd_chunked`` over the spans of a call, outside autograd. README.md has the derivation.

Axes: b batch, t time, c chunks of a span, l places in a chunk, g groups, r heads a group, h = g r, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridtf.ops.ssd.spans import Call, Decay, Span, count_spans, decay_of, load, spans_of


def forward(call: Call, state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y (b t h p), the final state (b g n r p), and the state before each span, stacked (none unless ``keep``).

    ``state`` (b g n r p) is the incoming one. Results are contiguous and share no memory with an input.
    """
    y = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    starts = state.new_empty(count_spans(call) if keep else 0, *state.shape)
    first = state
    for i, span in enumerate(spans_of(call)):
        if keep:
            starts[i] = state
        part, state = _forward_span(call, span, state)
        y[:, span.start : span.stop] = part.flatten(1, 2)
    if call.real is not None:
        y = y.masked_fill_(~call.real[:, :, None, None], 0)
    return y, _own(state, first), starts


def backward(call: Call, starts: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_a and of the incoming state, given those of y and of the final state."""
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v, call.log_a)]
    last = dstate
    for span, start in reversed(list(zip(spans_of(call), starts, strict=True))):
        *parts, dstate = _backward_span(call, span, start, dy, dstate)
        for grad, part in zip(grads, parts, strict=True):
            grad[:, span.start : span.stop] = part.flatten(1, 2)
    return *grads, _own(dstate, last)


def _own(state: Tensor, given: Tensor) -> Tensor:
    """``state`` contiguous, and a copy where there was no span to make it from the one that was given."""
    return state.clone(memory_format=torch.contiguous_format) if state is given else state.contiguous()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(b c l heads width) as matrices (b c g l heads/g*width)."""
    b, c, length, heads, width = x.shape
    return x.reshape(b, c, length, groups, heads // groups * width).transpose(2, 3)


def _from_group(x: Tensor, like: Tensor) -> Tensor:
    """(b c g l heads/g*width) back as (b c l heads width)."""
    return x.transpose(2, 3).reshape(like.shape)


def _by_head(x: Tensor, groups: int) -> Tensor:
    """(b c l h p) as matrices (b c g r l p)."""
    b, c, length, heads, width = x.shape
    return x.reshape(b, c, length, groups, heads // groups, width).permute(0, 1, 3, 4, 2, 5)


def _from_head(x: Tensor) -> Tensor:
    """(b c g r l p) back as (b c l h p)."""
    return x.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _walk(start: Tensor, writes: Tensor, whole: Tensor, order: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Carry ``start`` (b g n r p) through chunks: the value entering each (b c g n r*p), and the last one."""
    writes = writes.view(*writes.shape[:2], *start.shape[1:])
    entered: dict[int, Tensor] = {}
    for i in order:
        entered[i] = start
        start = torch.addcmul(writes[:, i], start, whole[:, i])
    return torch.stack([entered[i] for i in range(len(entered))], 1).flatten(4), start


def _forward_span(call: Call, span: Span, state: Tensor) -> tuple[Tensor, Tensor]:
    """y (b c l h p) of a span and the state after it (b g n r p)."""
    groups, dtype, low = call.groups, call.dtype, call.product_dtype
    q, k, v = (load(x, call, span) for x in (call.q, call.k, call.v))
    decay = decay_of(call, span)
    q_m, k_m = _by_group(q, groups), _by_group(k, groups)
    writes = k_m.mT @ _by_group(v * decay.tail, groups)
    states, state = _walk(state, writes, decay.whole, range(span.n_chunks))
    q_low = q_m.to(low)
    scores = (q_low @ k_m.to(low).mT)[:, :, :, None].to(dtype)
    near = (scores * decay.pair).to(low) @ _by_head(v, groups).to(low)
    far = q_low @ states.to(low)
    return torch.addcmul(_from_head(near).to(dtype), _from_group(far, v).to(dtype), decay.into), state


def _backward_span(call: Call, span: Span, start: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_a as (b c l ...), and of the state before the span (``dstate``: of that after)."""
    groups = call.groups
    q, k, v, dy = (load(x, call, span) for x in (call.q, call.k, call.v, dy))
    decay = decay_of(call, span)
    q_m, k_m = _by_group(q, groups), _by_group(k, groups)
    v_tail, dy_into = v * decay.tail, dy * decay.into
    v_tail_m, dy_into_m = _by_group(v_tail, groups), _by_group(dy_into, groups)
    states, _ = _walk(start, k_m.mT @ v_tail_m, decay.whole, range(span.n_chunks))
    dstates, dstart = _walk(dstate, q_m.mT @ dy_into_m, decay.whole, reversed(range(span.n_chunks)))

    dq, dk, dv, dlog_a = _backward_pairs(call, q_m, k_m, v, dy, decay)
    dq = dq + dy_into_m @ states.mT
    dk = dk + v_tail_m @ dstates.mT
    dtail = _from_group(k_m @ dstates, v)
    dv = torch.addcmul(dv, dtail, decay.tail)
    # A step decays what is read at and after it, what was written before it, and what the whole chunk hands on.
    read = (dy_into * _from_group(q_m @ states, v)).sum(4)
    dlog_a = dlog_a + read.flip(2).cumsum(2).flip(2)
    # Shifted, since a running sum less its own last term would lose small terms beside a large one.
    dlog_a[:, :, 1:] += (v_tail * dtail).sum(4)[:, :, :-1].cumsum(2)
    kept = (states * dstates).view(*states.shape[:4], *start.shape[3:]).sum((3, 5)) * decay.whole[:, :, :, 0, :, 0]
    dlog_a += kept.flatten(2)[:, :, None]
    return dq.transpose(2, 3), dk.transpose(2, 3), dv, dlog_a, dstart


def _backward_pairs(call: Call, q_m: Tensor, k_m: Tensor, v: Tensor, dy: Tensor, decay: Decay) -> tuple[Tensor, ...]:
    """Gradients through the pairs inside each chunk: q and k (b c g l n), v (b c l h p), log_a (b c l h)."""
    dtype, low = call.dtype, call.product_dtype
    q_low, k_low, dy_low = q_m.to(low), k_m.to(low), _by_head(dy, call.groups).to(low)
    scores = (q_low @ k_low.mT)[:, :, :, None].to(dtype)
    dv = (scores * decay.pair).to(low).mT @ dy_low
    dscores = (dy_low @ _by_head(v, call.groups).to(low).mT).to(dtype).mul_(decay.pair)
    shared = dscores.sum(3).to(low)
    # From d loss / d log decay of each pair (i j) to that of each step t: the sum over j < t <= i, as it stands. The
    # shorter way, rows less columns and then a running sum, subtracts equal terms and loses strong steps among weak.
    earlier = torch.ones_like(scores[0, 0, 0, 0]).triu(1)
    dlog_a = (dscores.mul_(scores) @ earlier).tril().sum(-2)
    dq, dk = (shared @ k_low).to(dtype), (shared.mT @ q_low).to(dtype)
    return dq, dk, _from_head(dv).to(dtype), dlog_a.flatten(2, 3).transpose(2, 3)
