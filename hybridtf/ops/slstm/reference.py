"""The meaning of ``slstm``: one step a token. Axes: b batch, t time, p channels of a head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.slstm.cell import cell
from hybridtf.ops.slstm.shapes import STATES, masked, start


def slstm_reference(
    x: Tensor, weight_hh: Tensor, *, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sLSTM, each head by itself, with the gates' logarithms and the rest as i, f, z, o = x_t + h_{t-1} weight_hh:

        m_t = max(log sigmoid(f) + m_{t-1}, i), and i at a document's first token
        c_t = exp(log sigmoid(f) + m_{t-1} - m_t) c_{t-1} + exp(i - m_t) tanh(z)
        n_t = exp(log sigmoid(f) + m_{t-1} - m_t) n_{t-1} + exp(i - m_t);   h_t = sigmoid(o) c_t / n_t

    ``x`` (b t heads 4p), the input's share with its bias; ``weight_hh`` (heads p 4p): both with i, f, z, o side by side.
    ``initial_state``: ``h``, ``c``, ``n`` and ``m``, each (b heads p), zeros where None; n = 0 says that nothing was written.
    ``chunk_size`` does not change the result and is not used here. Returns the h of every token (b t heads p) in x's dtype,
    zero at pads, and the state of each row's last document, in float32, or float64 where an input is. Differentiable in all
    tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2405.04517, the start of m from the
    published code (https://github.com/NX-AI/xlstm).
    """
    state = start(x, weight_hh, initial_state, segments, chunk_size)
    dtype = state[0].dtype
    weight, out = weight_hh.to(dtype), []
    with no_autocast(x.device):
        for i, x_t in enumerate(masked(x, segments, dtype).unbind(1)):
            old = state
            if segments is not None:
                old = tuple(s.masked_fill(segments.starts[:, i, None, None], 0) for s in state)
            new = cell(x_t.transpose(0, 1), weight, *(s.transpose(0, 1) for s in old))
            after = tuple(s.transpose(0, 1) for s in new)
            out.append(after[0])
            if segments is not None:
                after = tuple(torch.where(segments.real[:, i, None, None], s, z) for s, z in zip(after, state, strict=True))
            state = after
    y = torch.stack(out, 1) if out else x.new_zeros(*x.shape[:3], x.shape[3] // 4)
    return mask_pads(y, segments).to(x.dtype), dict(zip(STATES, state, strict=True))
