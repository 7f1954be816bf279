"""``ssd_trapezoid``: each token writes its own pair and once more that of the token before it (Mamba-3).

Axes: b batch, t time, g groups, h heads, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, mask_pads, start_states, state_dtype
from hybridtf.ops.ssd.chunked import ssd_chunked
from hybridtf.ops.ssd.shapes import check

State = dict[str, Tensor]


def trapezoid_reference(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, gamma: Tensor, *,
    initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, State]:
    """``ssd`` with an input of two terms, one step a token:

        S_t = exp(log_a_t) S_{t-1} + beta_t k_{t-1} v_{t-1}^T + gamma_t k_t v_t^T;   y_t = S_t^T q_t

    ``q``, ``k`` (b t g n); ``v`` (b t h p); ``log_a`` (b t h), at most 0; ``beta``, ``gamma`` (b t h). The token before is
    the real one before it of the same document; a document's first token has none. ``initial_state``: ``S`` (b h n p), and
    ``k`` (b g n), ``v`` (b h p) of the last token; zeros where None. ``chunk_size`` does not change the result and is not
    used here. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the state of each row's last document in float32, or
    float64 for float64 inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2603.15569 (Mamba-3).
    """
    dtype, state = _start(q, k, v, log_a, beta, gamma, initial_state, segments, chunk_size)
    heads = v.shape[2] // k.shape[2]
    timed = [mask_pads(x, segments).to(dtype) for x in (q, k, v, log_a, beta, gamma)]
    out = []
    for i, (q_t, k_t, v_t, a_t, b_t, g_t) in enumerate(zip(*(x.unbind(1) for x in timed), strict=True)):
        old = state
        if segments is not None:
            old = {name: x.masked_fill(_rows(segments.starts[:, i], x), 0) for name, x in state.items()}
        before, now = (
            pair[0].repeat_interleave(heads, 1)[..., :, None] * pair[1][..., None, :]
            for pair in ((old["k"], old["v"]), (k_t, v_t))
        )
        new = a_t.exp()[..., None, None] * old["S"] + b_t[..., None, None] * before + g_t[..., None, None] * now
        after = {"S": new, "k": k_t, "v": v_t}
        if segments is not None:
            pad = ~segments.real[:, i]
            after = {name: torch.where(_rows(pad, x), state[name], x) for name, x in after.items()}
        state = after
        out.append((q_t.repeat_interleave(heads, 1)[..., :, None] * state["S"]).sum(-2))
    y = torch.stack(out, 1) if out else torch.zeros_like(timed[2])
    return mask_pads(y, segments).to(v.dtype), state


def trapezoid_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, gamma: Tensor, *,
    initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, State]:
    """:func:`trapezoid_reference` by one call of ``ssd``; same arguments, results and errors.

    What a token reads of others, U_t = S_t - gamma_t k_t v_t^T, is the ``ssd`` of keys and values one token late; what it
    reads of itself is added.
    """
    dtype, state = _start(q, k, v, log_a, beta, gamma, initial_state, segments, chunk_size)
    with no_autocast(v.device):
        decay = log_steps(log_a, segments, dtype)
        beta, gamma, values = (mask_pads(x, segments).to(dtype) for x in (beta, gamma, v))
        keys = mask_pads(k, segments).to(dtype)
        # The state holds what its last token wrote of itself already: of that token, gamma is 0 here.
        before = (state["k"], state["v"], torch.zeros_like(state["v"][..., 0]))
        (k_late, v_late, gamma_late), last = _one_late((keys, values, gamma), before, segments)
        share = decay.exp() * gamma_late + beta
        y, memory = ssd_chunked(
            q, k_late.to(k.dtype), (v_late * share[..., None]).to(v.dtype), decay, initial_state=state["S"],
            segments=segments, chunk_size=chunk_size,
        )
        heads = v.shape[2] // k.shape[2]
        own = (mask_pads(q, segments).to(dtype) * keys).sum(-1).repeat_interleave(heads, 2) * gamma
        y = y.to(dtype) + own[..., None] * values
        last_k, last_v, last_gamma = last
        pair = last_k.repeat_interleave(heads, 1)[..., :, None] * (last_v * last_gamma[..., None])[..., None, :]
        return mask_pads(y, segments).to(v.dtype), {"S": memory + pair, "k": last_k, "v": last_v}


def _one_late(
    x: tuple[Tensor, ...], before: tuple[Tensor, ...], segments: Segments | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Each of ``x`` (b t ...) as the token before had it, by the documents, and as the last token had it (b ...)."""
    whole = [torch.cat([first[:, None], z], 1) for first, z in zip(before, x, strict=True)]
    if segments is None or not x[0].shape[1]:
        return [z[:, :-1] for z in whole], [z[:, -1].clone() for z in whole]
    # In ``whole`` a token lies one place later: 0 is the token before the call.
    places = torch.arange(1, x[0].shape[1] + 1, device=x[0].device)
    latest = F.pad(torch.where(segments.real, places, 0), (1, 0)).cummax(1).values
    found = [z.gather(1, _rows(latest, z).expand(-1, -1, *z.shape[2:])) for z in whole]
    starts = segments.starts
    return [z[:, :-1].masked_fill(_rows(starts, z), 0) for z in found], [z[:, -1].clone() for z in found]


def _rows(where: Tensor, like: Tensor) -> Tensor:
    """(b) or (b t), to be broadcast over ``like``, which has more axes."""
    return where.view(*where.shape, *[1] * (like.ndim - where.ndim))


def _start(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, gamma: Tensor,
    initial_state: Mapping[str, Tensor] | None, segments: Segments | None, chunk_size: int,
) -> tuple[torch.dtype, State]:
    """The precision of the state, and the incoming state, after the checks."""
    check(k, v, log_a, q=q, segments=segments, chunk_size=chunk_size)
    (b, t, g, n), (h, p) = k.shape, v.shape[2:]
    for name, x in (("beta", beta), ("gamma", gamma)):
        if x.shape != (b, t, h):
            raise ConfigError(f"ssd_trapezoid: {name} must be (b t h) = {(b, t, h)}; got {tuple(x.shape)}")
    shapes = {"S": (b, h, n, p), "k": (b, g, n), "v": (b, h, p)}
    dtype = state_dtype(q, k, v, log_a, beta, gamma)
    return dtype, start_states("ssd_trapezoid", shapes, initial_state, v, dtype, segments)
