"""``dplr`` by matrix products over chunks, in time and memory linear in the length. README.md has the derivation."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import memory_shape, start_state, state_dtype
from hybridtf.ops.dplr.shapes import check
from hybridtf.ops.dplr.spans import NAMES, span, span_length
from hybridtf.ops.dplr.step import dplr_step
from hybridtf.ops.span_op import span_op

_OP = span_op(
    "dplr_chunked", span, timed=NAMES, length=span_length, like=lambda call: (call["v"].shape, call["v"].dtype),
)


def dplr_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 32,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`dplr_reference`, in chunks; same arguments, results and errors.

    ``chunk_size`` is rounded down to a power of 2. Everything inside is float32 at least. The backward recomputes what a
    span needs. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(k, v, log_w, u, r, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    state = start_state(initial_state, memory_shape(k, v), v, state_dtype(q, k, v, log_w, u, r), segments)
    if v.shape[1] == 1:
        with no_autocast(v.device):
            return dplr_step(q, k, v, log_w, u, r, state, segments)
    y, (last,) = _OP((q, k, v, log_w, u, r), (), (chunk_size,), segments, (state,))
    return y, last
