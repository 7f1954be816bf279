"""One token of a cell, by plain matrix products: what the reference repeats and what decoding calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.rnn.shapes import State, Weights


def cell_step(cell: str, u: Tensor, weights: Weights, state: State) -> State:
    """The state after one token, from its share of the gates ``u`` (b gates*h) and the state before, each (b h)."""
    h = state["h"]
    recurrent = F.linear(h, weights.hh, weights.bias_hh)
    if cell == "gru":
        (r_u, z_u, n_u), (r_h, z_h, n_h) = u.chunk(3, -1), recurrent.chunk(3, -1)
        r, z = torch.sigmoid(r_u + r_h), torch.sigmoid(z_u + z_h)
        n = torch.tanh(n_u + r * n_h)
        return {"h": n + z * (h - n)}
    if cell == "lstm":
        i, f, g, o = (u + recurrent).chunk(4, -1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(g)
        return {"h": torch.sigmoid(o) * torch.tanh(c), "c": c}
    return {"h": torch.tanh(u + recurrent) if cell == "tanh" else torch.relu(u + recurrent)}


def input_share(x: Tensor, weights: Weights) -> Tensor:
    """The part of the gates that comes from the input: x W_ih^T + b_ih, or ``x`` itself where it is that already."""
    return x if weights.ih is None else F.linear(x, weights.ih, weights.bias_ih)


def rnn_step(
    cell: str, x: Tensor, weights: Weights, state: State, segments: Segments | None
) -> tuple[Tensor, State]:
    """The op for t = 1, arguments checked: ``x`` (b 1 d) in the state's dtype, and the state as ``start_cell`` gives it."""
    new = cell_step(cell, input_share(mask_pads(x, segments)[:, 0], weights), weights, state)
    if segments is None:
        return new["h"][:, None], new
    real = segments.real[:, :1]
    return mask_pads(new["h"][:, None], segments), {k: torch.where(real, new[k], old) for k, old in state.items()}
