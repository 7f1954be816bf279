"""``gla`` by matrix products over chunks, in time and memory linear in the length. README.md has the derivation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import memory_shape, start_state, state_dtype
from hybridtf.ops.gla.shapes import DecayOf, check
from hybridtf.ops.gla.spans import gla_span
from hybridtf.ops.gla.step import gla_step
from hybridtf.ops.passes_op import Call
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once


def gla_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, *, bonus: Tensor | None = None, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64, decay: DecayOf = "keys",
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`gla_reference`, in chunks of ``chunk_size`` tokens; same arguments, results and errors.

    All inside is float32, or float64 if an input is. The backward computes each span again. Second derivatives raise
    :class:`KernelError`: the reference has them.
    """
    check(
        k, v, log_a, q=q, bonus=bonus, initial_state=initial_state, segments=segments, chunk_size=chunk_size, decay=decay
    )
    state = start_state(initial_state, memory_shape(k, v), v, state_dtype(q, k, v, log_a, bonus), segments)
    if v.shape[1] == 1:
        with no_autocast(v.device):
            return gla_step(q, k, v, log_a, bonus, state, segments, decay)
    y, (last,) = _op((q, k, v, log_a), (bonus,), (chunk_size, decay == "values"), segments, (state,))
    return y, last


def _length(call: Call) -> int:
    """Tokens of a span."""
    (b, _, h, n), p, size = call["q"].shape, call["v"].shape[3], call["chunk_size"]
    length: int = size * chunks_at_once(b * h * size * torch.sym_max(n, p), call["q"].device)
    return length


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    return (*call["q"].shape[:3], call["v"].shape[3]), call["v"].dtype


_op = span_op(
    "gla_chunked", gla_span, timed=("q", "k", "v", "log_a"), fixed=("bonus?",),
    options={"chunk_size": int, "of_values": bool}, length=_length, like=_like,
)
