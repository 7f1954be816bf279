"""``selective_scan`` over chunks, in time and memory linear in the length. README.md has the derivation.

The gradients of a chunk are written by hand: the halving works in place, where autograd cannot follow.

Axes: b batch, t time, c channels, g groups, n states a channel, r rows (b g).
"""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import start_state, state_dtype
from hybridtf.ops.selective_scan.blocks import by_row
from hybridtf.ops.selective_scan.flops import backward_flops, forward_flops
from hybridtf.ops.selective_scan.passes import backward_span, forward_span
from hybridtf.ops.selective_scan.shapes import by_group, check
from hybridtf.ops.selective_scan.step import selective_scan_step
from hybridtf.ops.span_op import span_op


def selective_scan_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`selective_scan_reference`, in chunks of ``chunk_size`` tokens; same arguments, results, errors.

    Everything is computed in float32 at least, and rounded once. One state a chunk is kept for the backward, which computes
    the others again. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(x, dt, A, B, C=C, D=D, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(x, dt, A, B, C)
    state = start_state(initial_state, (x.shape[0], *A.shape), x, dtype, segments)
    B, C = by_group(B), by_group(C)
    with no_autocast(x.device):
        if x.shape[1] == 1:
            return selective_scan_step(x, dt, A, B, C, D, state, segments)
        (b, c, n), g = state.shape, B.shape[2]
        rows = state.reshape(b * g, c // g, n).transpose(1, 2)
        A, D = by_row(A, b, g, dtype), None if D is None else by_row(D, b, g, dtype)
        y, (last,) = _OP((x, dt, B, C), (A, D), (chunk_size,), segments, (rows,))
        return y, last.transpose(1, 2).reshape(b, c, n).contiguous()


_OP = span_op(
    "selective_scan_chunked", forward_span, backward=backward_span, timed=("x", "dt", "B", "C"), fixed=("A", "D?"),
    length=lambda call: call["chunk_size"], like=lambda call: (call["x"].shape, call["x"].dtype),
    useful=(forward_flops, backward_flops),
)
