"""``rnn`` by torch's loops over time, in eager mode and under autograd as torch gives it."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.rnn.documents import Documents, lay_out
from hybridtf.ops.rnn.shapes import State, Weights


def run(cell: str, x: Tensor, weights: Weights, state: State, segments: Segments | None) -> tuple[Tensor, State]:
    """The op for any length: ``x`` (b t d) in the state's dtype, and the state as ``start_cell`` gives it."""
    b, t = x.shape[:2]
    documents = None if segments is None or not b * t else lay_out(segments)
    if not b * t or (documents is not None and not documents.rectangles):
        # torch refuses to run over nothing.
        return x.new_zeros(b, t, weights.width), state
    params = _params(weights)
    if documents is None:
        y, state = _loop(cell, x.transpose(0, 1), params, weights, state)
        return y.transpose(0, 1), state
    own = {k: v[documents.rows].masked_fill(~documents.carried[:, None], 0) for k, v in state.items()}
    y, own = _walk(cell, x.flatten(0, 1)[documents.tokens], params, weights, own, documents)
    out = y.new_zeros(b * t, weights.width).index_copy(0, documents.tokens, y)
    last = {k: v.index_copy(0, documents.last_rows, own[k][documents.last_ranks]) for k, v in state.items()}
    return out.unflatten(0, (b, t)), last


def _walk(
    cell: str, x: Tensor, params: list[Tensor], weights: Weights, state: State, documents: Documents
) -> tuple[Tensor, State]:
    """Rectangle by rectangle over ``x`` (n d); the outputs (n h) and the last state of each document (m h), by rank."""
    shapes = documents.rectangles
    out, ended = [], []
    for i, part in enumerate(x.split([steps * m for steps, m in shapes])):
        steps, m = shapes[i]
        y, state = _loop(cell, part.unflatten(0, (steps, m)), params, weights, state)
        out.append(y.flatten(0, 1))
        left = shapes[i + 1][1] if i + 1 < len(shapes) else 0
        halves = {k: v.split([left, m - left]) for k, v in state.items()}
        state = {k: half[0] for k, half in halves.items()}
        ended.append({k: half[1] for k, half in halves.items()})
    return torch.cat(out), {k: torch.cat([end[k] for end in reversed(ended)]) for k in state}


def _params(weights: Weights) -> list[Tensor]:
    """The weights as torch's loops take them: W_ih, W_hh and, where there are any, both biases."""
    # Gates that are given are passed through unit weights: torch has no loop that takes them as they are.
    ih = torch.eye(len(weights.hh), dtype=weights.hh.dtype, device=weights.hh.device) if weights.ih is None else weights.ih
    params = [ih, weights.hh]
    if weights.bias_ih is not None or weights.bias_hh is not None:
        zero = weights.hh.new_zeros(len(weights.hh))
        params += [zero if bias is None else bias for bias in (weights.bias_ih, weights.bias_hh)]
    if weights.hh.device.type == "cuda":
        # cuDNN wants one piece of memory, and copies (with a warning) what is not.
        flat = torch.cat([p.flatten() for p in params])
        params = [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]
    return params


def _loop(
    cell: str, x: Tensor, params: list[Tensor], weights: Weights, state: State
) -> tuple[Tensor, State]:
    """One of torch's loops over ``x`` (t b d), t and b at least 1."""
    # Layers, dropout, whether a backward may follow, both directions, batch first.
    rest = (len(params) > 2, 1, 0.0, torch.is_grad_enabled(), False, False)
    h = state["h"][None].contiguous()
    if cell == "lstm":
        y, h, c = torch.lstm(x, (h, state["c"][None].contiguous()), params, *rest)
        return y, {"h": h[0], "c": c[0]}
    loops = {"gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}
    y, h = loops[cell](x, h, params, *rest)
    return y, {"h": h[0]}
