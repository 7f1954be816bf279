"""One token of ``gated_delta_rule``: the decode step, with no chunk machinery."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import log_steps, mask_pads
from hybridtf.ops.gated_delta_rule.shapes import Sizes, sizes_of


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor | None, state: Tensor, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked, and the state (b h k p) as :func:`start_state` gives it: already forgotten where a
    document begins; its dtype is the precision. Returns y (b 1 h p) in v's dtype and the new state.
    """
    q_t, k_t, v_t, beta_t = (mask_pads(x, segments)[:, 0].to(state.dtype) for x in (q, k, v, beta))
    steps = None if log_a is None else log_steps(log_a, segments, state.dtype)
    y, new = delta_token(sizes_of(k, v), q_t, k_t, v_t, beta_t, None if steps is None else steps[:, 0], state)
    return mask_pads(y[:, None], segments).to(v.dtype), new


def delta_token(
    size: Sizes, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q (b g k), k (b [n] g k), v (b [n] h p), beta (b [n] h), step (b h) or (b h k), state (b h k p) to
    y (b h p) and the new state. Key heads are read by broadcasting, never repeated.
    """
    b, _, n, g, h, width, p = size
    r = size.r
    memory = state.reshape(b, g, r, width, p)
    if step is not None:
        memory = memory * step.exp().reshape(b, g, r, -1, 1)
    keys = k.reshape(b, n, g, 1, 1, width).unbind(1)
    values = v.reshape(b, n, g, r, 1, p).unbind(1)
    rates = beta.reshape(b, n, g, r, 1, 1).unbind(1)
    for key, value, rate in zip(keys, values, rates, strict=True):
        memory = memory + key.mT * (rate * (value - key @ memory))
    y = q.reshape(b, g, 1, 1, width) @ memory
    return y.reshape(b, h, p), memory.reshape(b, h, width, p)
