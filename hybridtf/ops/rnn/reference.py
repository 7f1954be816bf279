"""The meaning of ``rnn``: one step a token. Axes: b batch, t time, d input width, h width of the state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.rnn.shapes import Cell, State, check, start_cell, widened
from hybridtf.ops.rnn.step import cell_step, input_share


def rnn_reference(
    x: Tensor, weight_hh: Tensor, *, cell: Cell, weight_ih: Tensor | None = None, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """A nonlinear recurrence, with u_t = W_ih x_t + b_ih and w_t = W_hh h_{t-1} + b_hh:

    - ``tanh``, ``relu``: h_t = tanh(u + w), or relu(u + w);
    - ``lstm``: i, f, g, o from u + w; c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g); h_t = sigmoid(o) tanh(c_t);
    - ``gru``: r, z = sigmoid(u + w); n = tanh(u_n + r w_n); h_t = (1 - z) n + z h_{t-1}.

    ``x`` (b t d); ``weight_ih`` (gates*h, d) and ``weight_hh`` (gates*h, h) with their gates in the order of ``torch.nn``
    (:data:`~hybridtf.ops.rnn.GATES`); biases (gates*h), zero where None. Without ``weight_ih``, ``x`` (b t gates*h) is u.
    ``initial_state``: ``{"h": (b h)}``, and ``"c"`` for ``lstm``; zeros where None.

    Returns the h of every token (b t h) in x's dtype, zero at pads, and the state of each row's last document, in float32,
    or float64 where an input is float64. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` for an unknown cell or shapes that do not fit. Sources: Elman 1990; Hochreiter and
    Schmidhuber 1997 with the forget gate of Gers et al. 2000; Cho et al. 2014 in the form of ``torch.nn.GRU``.
    """
    check(
        x, weight_hh, cell=cell, weight_ih=weight_ih, bias_ih=bias_ih, bias_hh=bias_hh, segments=segments,
    )
    dtype = state_dtype(x, weight_hh, weight_ih)
    weights = widened(weight_hh, weight_ih, bias_ih, bias_hh, dtype)
    out = []
    with no_autocast(x.device):
        state = start_cell(initial_state, cell, x, weights.width, dtype, segments)
        real = starts = None
        if segments is not None:
            real, starts = segments.real.unbind(1), segments.starts.unbind(1)
        for i, u in enumerate(input_share(mask_pads(x, segments).to(dtype), weights).unbind(1)):
            old = state
            if starts is not None:
                old = {k: v.masked_fill(starts[i][:, None], 0) for k, v in state.items()}
            new = cell_step(cell, u, weights, old)
            state = new if real is None else {k: torch.where(real[i][:, None], new[k], v) for k, v in state.items()}
            out.append(new["h"])
    y = torch.stack(out, 1) if out else x.new_zeros(x.shape[0], 0, weights.width)
    return mask_pads(y, segments).to(x.dtype), state
