"""``ssd_stabilised``: gates as exponentials of any size, and a normaliser, kept in range by a running maximum (mLSTM).

The maximum is a change of units, so the chunks of ``ssd`` compute it; README.md has the derivation.

Axes: b batch, t time, g groups, h heads, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads, start_states, state_dtype
from hybridtf.ops.ssd.chunked import ssd_chunked
from hybridtf.ops.ssd.normaliser import with_ones
from hybridtf.ops.ssd.shapes import check

State = dict[str, Tensor]


def stabilised_reference(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor, *, initial_state: Mapping[str, Tensor] | None = None,
    segments: Segments | None = None, eps: float = 1e-6, chunk_size: int = 64,
) -> tuple[Tensor, State]:
    """The matrix memory of the mLSTM, one step a token, with C_t = [C, n] the state of the values and of a one beside them:

        m_t = max(log_f_t + m_{t-1}, log_i_t)
        C_t = exp(log_f_t + m_{t-1} - m_t) C_{t-1} + exp(log_i_t - m_t) k_t [v_t, 1]^T
        [a_t, z_t] = C_t^T q_t;   y_t = a_t / (max(|z_t|, exp(-m_t)) + eps)

    ``q``, ``k`` (b t g n); ``v`` (b t h p); ``log_f`` (b t h), natural logarithm of what is kept, at most 0; ``log_i``
    (b t h), of what is written, any number. ``initial_state``: ``S`` (b h n p+1), which is C, and ``m`` (b h); zeros where
    None and where a document begins: the maximum starts at 0. ``chunk_size`` does not change the result and is not used here.
    Returns ``y`` (b t h p) in v's dtype, zero at pads, and the state of each row's last document in float32, or float64 for
    float64 inputs. Differentiable in all tensor arguments, the maximum included.

    Raises :class:`ConfigError` for shapes that do not fit. Source: https://arxiv.org/abs/2405.04517; start, eps: its code.
    """
    dtype, state = _start(q, k, v, log_f, log_i, initial_state, segments, chunk_size)
    heads = v.shape[2] // k.shape[2]
    q, k, v_wide, log_f, log_i = (mask_pads(x, segments).to(dtype) for x in (q, k, v, log_f, log_i))
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    memory, m, out = state["S"], state["m"], []
    timed = zip(*(x.unbind(1) for x in (q, k, with_ones(v_wide), log_f, log_i)), strict=True)
    for i, (q_t, k_t, v_t, f_t, i_t) in enumerate(timed):
        if segments is not None:
            starts = segments.starts[:, i, None]
            memory, m = memory.masked_fill(starts[..., None, None], 0), m.masked_fill(starts, 0)
        top = torch.maximum(f_t + m, i_t)
        written = (i_t - top).exp()[..., None, None] * k_t[..., :, None] * v_t[..., None, :]
        new = (f_t + m - top).exp()[..., None, None] * memory + written
        if segments is not None:
            pad = ~segments.real[:, i, None]
            new, top = torch.where(pad[..., None, None], memory, new), torch.where(pad, m, top)
        memory, m = new, top
        read = (q_t[..., :, None] * memory).sum(-2)
        out.append(read[..., :-1] / (torch.maximum(read[..., -1:].abs(), (-m).exp()[..., None]) + eps))
    y = torch.stack(out, 1) if out else torch.zeros_like(v_wide)
    return mask_pads(y, segments).to(v.dtype), {"S": memory, "m": m}


def stabilised_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor, *, initial_state: Mapping[str, Tensor] | None = None,
    segments: Segments | None = None, eps: float = 1e-6, chunk_size: int = 64,
) -> tuple[Tensor, State]:
    """:func:`stabilised_reference` by the chunks of ``ssd``; same arguments, results and errors.

    All exponentials are of numbers of at most 0, but for exp(-m) in the denominator, which may be infinite (y is 0 then).
    """
    dtype, state = _start(q, k, v, log_f, log_i, initial_state, segments, chunk_size)
    with no_autocast(v.device):
        units = _units(log_f, log_i, state["m"], segments, dtype)
        memory = state["S"] * (state["m"] - state["m"].detach()).exp()[..., None, None]
        values = with_ones(mask_pads(v, segments).to(dtype)) * units.weight[..., None]
        read, memory = ssd_chunked(
            q, k, values, units.log_a, initial_state=memory, segments=segments, chunk_size=chunk_size
        )
        memory = memory * units.leaving[..., None, None]
        weight = torch.maximum(read[..., -1].abs(), units.floor) + eps * units.one
        y = read[..., :-1] / weight[..., None]
        return mask_pads(y, segments).to(v.dtype), {"S": memory, "m": units.last}


class _Units(NamedTuple):
    """What the running maximum m makes of the gates. m itself is a constant here (``one`` and ``leaving`` say why)."""

    log_a: Tensor  # (b t h): log of what is kept, from the units of the token before to those of the token
    weight: Tensor  # (b t h): what is written
    floor: Tensor  # (b t h): exp(-m), a one of before the change of units
    one: Tensor  # (b t h): 1, with the gradient of exp(m): what else is in the units of y and not of the state
    leaving: Tensor  # (b h): 1, with the gradient of exp(-m): the state is handed on in units that depend on the gates
    last: Tensor  # (b h): m after the call


def _units(log_f: Tensor, log_i: Tensor, before: Tensor, segments: Segments | None, dtype: torch.dtype) -> _Units:
    """m_t is the largest of log_i_s + (log_f after s), and of where the document started from: in float64, as sums are."""
    kept = mask_pads(log_f, segments).double().clamp(min=-1e4)
    given = log_i.double()
    if segments is not None:
        given = given.masked_fill(~segments.real[..., None], -torch.inf)
    m = _running_maximum(kept, given, before.double(), segments)
    top = m.detach()
    earlier = torch.cat([before.detach().double()[:, None], top[:, :-1]], 1)[:, : top.shape[1]]
    if segments is not None:
        earlier = earlier.masked_fill(segments.starts[..., None], 0)
    final = m[:, -1] if m.shape[1] else before.double()
    last = final.to(dtype)
    return _Units(
        (kept + earlier - top).to(dtype), (given - top).exp().to(dtype), (-top).exp().to(dtype),
        (m - top).exp().to(dtype), (final.detach() - last.double()).exp().to(dtype), last,
    )


def _running_maximum(kept: Tensor, given: Tensor, before: Tensor, segments: Segments | None) -> Tensor:
    """m (b t h) of log gates (b t h): max(kept_t + m_{t-1}, given_t), from ``before`` (b h) or, where a document begins, 0.

    Counted from the start of the call, kept_1 + ... + kept_t = c_t, it is c_t and the maximum of given_s - c_s so far.
    """
    if not kept.shape[1]:
        return kept
    total = kept.cumsum(1)
    if segments is None:
        level = torch.cat([before[:, None], given - total], 1)
        return total + level.cummax(1).values[:, 1:]
    level = torch.maximum(given - total, (kept - total).masked_fill(~segments.starts[..., None], -torch.inf))
    level = torch.cat([before[:, None], level], 1)
    # Documents follow one another. Of their levels' ranks, each raised by its document's number, the largest so far lies in
    # the document itself: one running maximum of whole numbers serves them all.
    number = torch.cat([segments.starts.new_zeros(len(before), 1), segments.starts], 1).cumsum(1)
    rank = level.detach().argsort(1).argsort(1)
    best = (rank + number[..., None] * level.shape[1]).cummax(1).indices[:, 1:]
    return total + level.gather(1, best)


def _start(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor, initial_state: Mapping[str, Tensor] | None,
    segments: Segments | None, chunk_size: int,
) -> tuple[torch.dtype, State]:
    """The precision of the state, and the incoming state, after the checks."""
    check(k, v, log_f, q=q, segments=segments, chunk_size=chunk_size)
    (b, t, h, p), n = v.shape, k.shape[3]
    if log_i.shape != (b, t, h):
        raise ConfigError(f"ssd_stabilised: log_i must be (b t h) = {(b, t, h)}; got {tuple(log_i.shape)}")
    dtype = state_dtype(q, k, v, log_f, log_i)
    return dtype, start_states("ssd_stabilised", {"S": (b, h, n, p + 1), "m": (b, h)}, initial_state, v, dtype, segments)
