"""``ssd`` by matrix products over chunks, in time and memory linear in the length. README.md has the derivation.

The gradients of a span are written by hand: with autograd's a training step takes a quarter longer (b 2, h 8, t 512 to 4096).

Axes: b batch, t time, g groups, r heads a group, h = g r, n keys, p values.
"""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, memory_shape, start_state, state_dtype
from hybridtf.ops.passes_op import Call
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once
from hybridtf.ops.ssd.flops import backward_flops, forward_flops
from hybridtf.ops.ssd.passes import backward_span, forward_span
from hybridtf.ops.ssd.shapes import check
from hybridtf.ops.ssd.step import ssd_step


def ssd_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`ssd_reference`, in chunks of ``chunk_size`` tokens; same arguments, results and errors.

    Decays and states are float32 at least, sums of ``log_a`` float64; matrix products of bfloat16 inputs inside a chunk
    run in bfloat16. The backward recomputes what a chunk needs. Second derivatives raise :class:`KernelError`: the
    reference has them.
    """
    check(k, v, log_a, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(q, k, v, log_a)
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    with no_autocast(v.device):
        if v.shape[1] == 1:
            return ssd_step(q, k, v, log_a, state, segments)
        (b, h, n, p), g = state.shape, k.shape[2]
        # Heads of a group side by side, so that one matrix product serves them all: (b g n r p).
        grouped = state.reshape(b, g, h // g, n, p).transpose(2, 3)
        steps = log_steps(log_a, segments, dtype)
        y, (last,) = _OP((q, k, v, steps), (), (chunk_size,), segments, (grouped,))
        return y, last.transpose(2, 3).reshape(b, h, n, p)


def _length(call: Call) -> int:
    """Tokens of a span: as many chunks as its pair tensor (b c h l l) may have."""
    (b, _, h), size = call["log_a"].shape, call["chunk_size"]
    length: int = size * chunks_at_once(b * h * size * size, call["log_a"].device)
    return length


_OP = span_op(
    "ssd_chunked", forward_span, backward=backward_span, timed=("q", "k", "v", "log_a"), length=_length,
    chunk=lambda call: call["chunk_size"], like=lambda call: (call["v"].shape, call["v"].dtype),
    flops=(forward_flops, backward_flops),
)
