"""The meaning of ``ttt_linear``: one step a token. Axes: b batch, t time, h heads, p channels of a head, m a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.ttt.shapes import State, check, start_memory
from hybridtf.ops.ttt.step import ttt_step


def ttt_linear_reference(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, *, norm_weight: Tensor, norm_bias: Tensor, W0: Tensor, b0: Tensor,
    scale: Tensor, eps: float = 1e-6, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """A linear model f(x) = x + norm(x W + b), trained on the tokens as they come, one step of gradient descent for each
    mini-batch of ``m`` of them:

        g_s = the gradient of |norm(k_s W + b) - (v_s - k_s)|^2 / 2 in k_s W + b, at the W and b of the mini-batch's start
        W_t = W - scale_i sum_s lr_s k_s^T g_s;   b_t = b - scale_i sum_s lr_s g_s;   y_t = q_t + norm(q_t W_t + b_t)

    over the tokens s of the mini-batch up to t, its ``i``-th. The last token's W_t and b_t are those of the next
    mini-batch's start. A document starts at W0 and b0, and with a mini-batch of its own. The norm is layer norm over p.

    ``q``, ``k``, ``v`` (b t h p); ``lr`` (b t h); ``norm_weight``, ``norm_bias``, ``b0`` (h p); ``W0`` (h p p); ``scale``
    (m). ``initial_state``: ``W`` (b h p+1 p), what the memory has beyond W0 and, in the last row, b0 at the mini-batch's
    start; ``dW`` alike, the sums so far over the open mini-batch; ``n`` (b, int64), how many tokens it has, below m. Zeros
    where None. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the state of each row's last document in float32, or
    float64 for float64 inputs. Differentiable in all tensor arguments of floating point.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2407.04620.
    """
    fixed = {"norm_weight": norm_weight, "norm_bias": norm_bias, "W0": W0, "b0": b0, "scale": scale}
    check(q, k, v, lr, fixed, initial_state, segments)
    dtype = state_dtype(q, k, v, lr, *fixed.values())
    state = start_memory(initial_state, k, dtype, segments)
    fixed = {name: x.to(dtype) for name, x in fixed.items()}
    tokens = list(zip(*(mask_pads(x, segments).to(dtype).unbind(1) for x in (q, k, v, lr)), strict=True))
    out = []
    for i, (q_t, k_t, v_t, lr_t) in enumerate(tokens):
        old = state
        if segments is not None:
            old = {name: x.masked_fill(_rows(segments.starts[:, i], x), 0) for name, x in state.items()}
        y, new = ttt_step(q_t, k_t, v_t, lr_t, fixed, eps, old)
        if segments is not None:
            new = {name: torch.where(_rows(segments.real[:, i], x), x, state[name]) for name, x in new.items()}
        state = new
        out.append(y)
    y = torch.stack(out, 1) if out else torch.zeros_like(v)
    return mask_pads(y, segments).to(v.dtype), state


def _rows(where: Tensor, like: Tensor) -> Tensor:
    """(b) bool, to be broadcast over (b ...)."""
    return where.view(-1, *[1] * (like.ndim - 1))
