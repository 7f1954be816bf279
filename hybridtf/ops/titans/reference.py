"""The meaning of ``titans``: one step a token.

Axes: b batch, t time, h heads, k key width, v value width, n numbers of a memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.titans.memory import layer_shapes
from hybridtf.ops.titans.shapes import State, check, start_state
from hybridtf.ops.titans.step import titans_step


def titans_reference(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_eta: Tensor, log_a: Tensor, *, M0: Tensor, mini_batch: int,
    depth: int = 1, d_hidden: int = 0, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """A memory M that learns the tokens as they come by gradient descent with momentum and weight decay:

        S_t = exp(log_eta_t) S_{t-1} - theta_t (the gradient of |M(k_t) - v_t|^2 in the weights, at those of M_b)
        M_t = exp(log_a_t) M_{t-1} + S_t;   y_t = M_t(q_t)

    b is the last token of the mini-batch before; a mini-batch has ``mini_batch`` tokens, 1 being the undelayed rule. A document
    starts at M0, with S = 0 and a mini-batch of its own. M is ``depth`` matrices with gelu between them, ``d_hidden`` wide
    inside (not used with depth 1): M(x) = gelu(x M_1) M_2.

    ``q``, ``k`` (b t h k); ``v`` (b t h v); ``theta``, ``log_eta``, ``log_a`` (b t h), the last two at most 0: momentum that is
    kept, and 1 - alpha, alpha being the paper's forgetting. ``M0`` (h n), the matrices (in out) flattened, one after the other.
    ``initial_state``: ``M`` (b h n), what the memory has beyond M0; ``S`` (b h n); ``base`` (b h n), as M, of M_b, which is M
    where a mini-batch begins; ``n`` (b, int64), how many tokens the open mini-batch has, below ``mini_batch``. Zeros where
    None. Returns ``y`` (b t h v) in v's dtype, zero at pads, and the state of each row's last document in float32, or float64
    for float64 inputs. Differentiable in all tensor arguments of floating point.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2501.00663.
    """
    gates = {"theta": theta, "log_eta": log_eta, "log_a": log_a}
    check(q, k, v, gates, M0, initial_state, segments, mini_batch, depth, d_hidden)
    dtype = state_dtype(q, k, v, *gates.values(), M0)
    state, first = start_state(initial_state, k, M0, dtype, segments), M0.to(dtype)
    shapes = layer_shapes(k.shape[3], v.shape[3], depth, d_hidden)
    out = []
    tokens = zip(*(mask_pads(x, segments).to(dtype).unbind(1) for x in (q, k, v, *gates.values())), strict=True)
    for i, token in enumerate(tokens):
        old = state
        if segments is not None:
            old = {name: x.masked_fill(_rows(segments.starts[:, i], x), 0) for name, x in state.items()}
        y, new = titans_step(token, first, shapes, mini_batch, old)
        if segments is not None:
            new = {name: torch.where(_rows(segments.real[:, i], x), x, state[name]) for name, x in new.items()}
        state = new
        out.append(y)
    y = torch.stack(out, 1) if out else torch.zeros_like(v)
    return mask_pads(y, segments).to(v.dtype), state


def _rows(where: Tensor, like: Tensor) -> Tensor:
    """(b) bool, to be broadcast over (b ...)."""
    return where.view(-1, *[1] * (like.ndim - 1))
