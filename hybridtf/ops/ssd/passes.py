"""Both passes of ``ssd_chunked`` over a span of chunks, outside autograd. README.md has the derivation.

Axes: b batch, t time, c chunks of a span, l places in a chunk, g groups, r heads a group, h = g r, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import SpanGradients
from hybridtf.ops.spans import Span
from hybridtf.ops.ssd.decay import Decay, decay_of


def forward_span(call: Call, states: States) -> tuple[Tensor, States]:
    """y (b t h p) of a span and the state after it; the one before is (b g n r p)."""
    (state,), place, groups, dtype, low = states, _place(call), call["k"].shape[2], states[0].dtype, _product_dtype(call)
    q, k, v = (_load(call, call[name], place) for name in ("q", "k", "v"))
    decay = decay_of(call["log_a"], call.masks, groups, place)
    q_m, k_m = _by_group(q, groups), _by_group(k, groups)
    writes = k_m.mT @ _by_group(v * decay.tail, groups)
    entered, state = _walk(state, writes, decay.whole, range(place.n_chunks))
    q_low = q_m.to(low)
    scores = (q_low @ k_m.to(low).mT)[:, :, :, None].to(dtype)
    near = (scores * decay.pair).to(low) @ _by_head(v, groups).to(low)
    far = q_low @ entered.to(low)
    y = torch.addcmul(_from_head(near).to(dtype), _from_group(far, v).to(dtype), decay.into)
    return y.flatten(1, 2), (state,)


def backward_span(call: Call, states: States, dy: Tensor, dstates: States) -> SpanGradients:
    """Gradients of q, k, v, log_a of a span, and of the state before it."""
    place, groups = _place(call), call["k"].shape[2]
    q, k, v = (_load(call, call[name], place) for name in ("q", "k", "v"))
    dy = place.cut(dy).to(v.dtype)
    decay = decay_of(call["log_a"], call.masks, groups, place)
    q_m, k_m = _by_group(q, groups), _by_group(k, groups)
    v_tail, dy_into = v * decay.tail, dy * decay.into
    v_tail_m, dy_into_m = _by_group(v_tail, groups), _by_group(dy_into, groups)
    entered, _ = _walk(states[0], k_m.mT @ v_tail_m, decay.whole, range(place.n_chunks))
    left, dstart = _walk(dstates[0], q_m.mT @ dy_into_m, decay.whole, reversed(range(place.n_chunks)))

    dq, dk, dv, dlog_a = _backward_pairs(call, q_m, k_m, v, dy, decay)
    dq = dq + dy_into_m @ entered.mT
    dk = dk + v_tail_m @ left.mT
    dtail = _from_group(k_m @ left, v)
    dv = torch.addcmul(dv, dtail, decay.tail)
    # A step decays what is read at and after it, what was written before it, and what the whole chunk hands on.
    read = (dy_into * _from_group(q_m @ entered, v)).sum(4)
    dlog_a = dlog_a + read.flip(2).cumsum(2).flip(2)
    # Shifted, since a running sum less its own last term would lose small terms beside a large one.
    dlog_a[:, :, 1:] += (v_tail * dtail).sum(4)[:, :, :-1].cumsum(2)
    kept = (entered * left).view(*entered.shape[:4], *dstart.shape[3:]).sum((3, 5)) * decay.whole[:, :, :, 0, :, 0]
    dlog_a += kept.flatten(2)[:, :, None]
    timed = (dq.transpose(2, 3), dk.transpose(2, 3), dv, dlog_a)
    return SpanGradients([x.flatten(1, 2) for x in timed], (), (dstart,))


def _place(call: Call) -> Span:
    """How a span lies in chunks."""
    size = min(call["chunk_size"], call.n_tokens)
    return Span(0, call.n_tokens // size, size)


def _product_dtype(call: Call) -> torch.dtype:
    """bfloat16 where all of q, k and v are; float16 has too little range for sums over a chunk."""
    low = all(call[name].dtype == torch.bfloat16 for name in ("q", "k", "v"))
    return torch.bfloat16 if low else call["log_a"].dtype


def _load(call: Call, x: Tensor, place: Span) -> Tensor:
    """A span's ``x`` (b t heads width) as (b c l heads width) in the precision of the state, zero at pads."""
    part = place.cut(x)
    if call.masks is not None:
        part = part.masked_fill(~place.cut(call.masks.real)[..., None, None], 0)
    return part.to(call["log_a"].dtype)


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


def _backward_pairs(call: Call, q_m: Tensor, k_m: Tensor, v: Tensor, dy: Tensor, decay: Decay) -> tuple[Tensor, ...]:
    """Gradients through the pairs inside each chunk: q and k (b c g l n), v (b c l h p), log_a (b c l h)."""
    dtype, low, groups = v.dtype, _product_dtype(call), k_m.shape[2]
    q_low, k_low, dy_low = q_m.to(low), k_m.to(low), _by_head(dy, groups).to(low)
    scores = (q_low @ k_low.mT)[:, :, :, None].to(dtype)
    dv = (scores * decay.pair).to(low).mT @ dy_low
    dscores = (dy_low @ _by_head(v, groups).to(low).mT).to(dtype).mul_(decay.pair)
    shared = dscores.sum(3).to(low)
    # From d loss / d log decay of each pair (i j) to that of each step t: the sum over j < t <= i, as it stands. The
    # shorter way, rows less columns and then a running sum, subtracts equal terms and loses strong steps among weak.
    earlier = torch.ones_like(scores[0, 0, 0, 0]).triu(1)
    dlog_a = (dscores.mul_(scores) @ earlier).mul_(1 - earlier).sum(-2)
    dq, dk = (shared @ k_low).to(dtype), (shared.mT @ q_low).to(dtype)
    return dq, dk, _from_head(dv).to(dtype), dlog_a.flatten(2, 3).transpose(2, 3)
