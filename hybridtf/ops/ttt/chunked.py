"""``ttt_linear`` by matrix products, some for each mini-batch; memory linear in the length. README.md has the derivation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.mini_batches import places
from hybridtf.ops.passes_op import Call
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once
from hybridtf.ops.ttt.shapes import State, check, start_memory
from hybridtf.ops.ttt.spans import span
from hybridtf.ops.ttt.step import ttt_step


def ttt_linear_chunked(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, *, norm_weight: Tensor, norm_bias: Tensor, W0: Tensor, b0: Tensor,
    scale: Tensor, eps: float = 1e-6, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """The memory of :func:`ttt_linear_reference`, a mini-batch at a time; same arguments, results and errors.

    Everything inside is float32 at least. The backward recomputes what a span needs. Second derivatives raise
    :class:`KernelError`: the reference has them.
    """
    fixed = {"norm_weight": norm_weight, "norm_bias": norm_bias, "W0": W0, "b0": b0, "scale": scale}
    check(q, k, v, lr, fixed, initial_state, segments)
    dtype = state_dtype(q, k, v, lr, *fixed.values())
    state = start_memory(initial_state, k, dtype, segments)
    fixed = {name: x.to(dtype) for name, x in fixed.items()}
    with no_autocast(v.device):
        if v.shape[1] == 1:
            return _one(q, k, v, lr, fixed, eps, state, segments)
        place = places(v, len(scale), state["n"], segments)
        # Known without a look at the data: every row's mini-batches begin where those of all others do.
        aligned = initial_state is None and segments is None
        y, last = _op(
            (q, k, v, lr, fixed["scale"][place], place.to(dtype)), tuple(fixed.values()), (eps, aligned), segments,
            (state["W"], state["dW"]),
        )
        n = state["n"] + v.shape[1] if segments is None else segments.new_length(state["n"])
        return y, {"W": last[0], "dW": last[1], "n": n % len(scale)}


def _one(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, fixed: Mapping[str, Tensor], eps: float, state: State,
    segments: Segments | None,
) -> tuple[Tensor, State]:
    q_t, k_t, v_t, lr_t = (mask_pads(x, segments)[:, 0].to(state["W"].dtype) for x in (q, k, v, lr))
    y, new = ttt_step(q_t, k_t, v_t, lr_t, fixed, eps, state)
    if segments is not None:
        real = segments.real[:, 0]
        new = {name: torch.where(real.view(-1, *[1] * (x.ndim - 1)), x, state[name]) for name, x in new.items()}
    return mask_pads(y[:, None], segments).to(v.dtype), new


def _length(call: Call) -> int:
    """Tokens of a span."""
    (b, _, h, p), m = call["v"].shape, call["scale"].shape[0]
    length: int = m * chunks_at_once(b * h * p * torch.sym_max(m, p), call["v"].device)
    return length


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    return call["v"].shape, call["v"].dtype


_op = span_op(
    "ttt_linear_chunked", span, timed=("q", "k", "v", "lr", "rate", "place"),
    fixed=("norm_weight", "norm_bias", "W0", "b0", "scale"), options={"eps": float, "aligned": bool}, length=_length,
    like=_like,
)
