"""``titans`` by matrix products, some for each mini-batch; memory linear in the length. README.md has the derivation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, mask_pads, state_dtype
from hybridtf.ops.mini_batches import places
from hybridtf.ops.passes_op import Call
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once
from hybridtf.ops.titans.memory import layer_shapes
from hybridtf.ops.titans.shapes import MATRICES, State, check, start_state
from hybridtf.ops.titans.spans import span
from hybridtf.ops.titans.step import titans_step


def titans_chunked(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_eta: Tensor, log_a: Tensor, *, M0: Tensor, mini_batch: int,
    depth: int = 1, d_hidden: int = 0, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """The memory of :func:`titans_reference`, a mini-batch at a time; same arguments, results and errors.

    Everything inside is float32 at least. The backward recomputes what a span needs. Second derivatives raise
    :class:`KernelError`: the reference has them.
    """
    gates = {"theta": theta, "log_eta": log_eta, "log_a": log_a}
    check(q, k, v, gates, M0, initial_state, segments, mini_batch, depth, d_hidden)
    dtype = state_dtype(q, k, v, *gates.values(), M0)
    state, first = start_state(initial_state, k, M0, dtype, segments), M0.to(dtype)
    with no_autocast(v.device):
        if v.shape[1] == 1:
            token = [mask_pads(x, segments)[:, 0].to(dtype) for x in (q, k, v, *gates.values())]
            y, new = titans_step(token, first, layer_shapes(k.shape[3], v.shape[3], depth, d_hidden), mini_batch, state)
            return mask_pads(y[:, None], segments).to(v.dtype), _where_real(new, state, segments)
        place = places(v, mini_batch, state["n"], segments)
        # Known without a look at the data: every row's mini-batches begin where those of all others do.
        aligned = initial_state is None and segments is None
        eta, a = (log_steps(x, segments, dtype) for x in (log_eta, log_a))
        y, last = _op(
            (q, k, v, theta, eta, a, place.to(dtype)), (first,), (mini_batch, depth, d_hidden, aligned), segments,
            tuple(state[name] for name in MATRICES),
        )
        n = state["n"] + v.shape[1] if segments is None else segments.new_length(state["n"])
        new = {**dict(zip(MATRICES, last, strict=True)), "n": n % mini_batch}
        return y, _where_real(new, state, segments)


def _where_real(new: State, old: State, segments: Segments | None) -> State:
    """Rows of pads alone keep their state, to the last bit."""
    if segments is None:
        return new
    real = segments.real.any(1)
    return {name: torch.where(real.view(-1, *[1] * (x.ndim - 1)), x, old[name]) for name, x in new.items()}


def _length(call: Call) -> int:
    """Tokens of a span."""
    (b, _, h, p), m = call["k"].shape, call["mini_batch"]
    widest = torch.sym_max(m, torch.sym_max(p, call["v"].shape[3]))
    length: int = m * chunks_at_once(b * h * m * widest, call["v"].device)
    return length


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    return call["v"].shape, call["v"].dtype


_op = span_op(
    "titans_chunked", span, timed=("q", "k", "v", "theta", "log_eta", "log_a", "place"), fixed=("M0",),
    options={"mini_batch": int, "depth": int, "d_hidden": int, "aligned": bool}, length=_length, like=_like,
)
