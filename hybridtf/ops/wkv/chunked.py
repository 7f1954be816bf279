"""``wkv`` without a loop over tokens, in time and memory linear in the length. README.md has the derivation."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.span_op import span_op
from hybridtf.ops.wkv.spans import span, span_length
from hybridtf.ops.wkv.step import wkv_step
from hybridtf.ops.wkv.sums import Sums, check, closed, opened

_OP = span_op(
    "wkv_chunked", span, timed=("k", "v"), fixed=("log_w", "u"), length=span_length,
    like=lambda call: (call["v"].shape, call["v"].dtype),
)


def wkv_chunked(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, *, initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    segments: Segments | None = None, chunk_size: int = 32,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The mean of :func:`wkv_reference`, in chunks; same arguments, results and errors.

    ``chunk_size`` is rounded down to a power of 2. Everything inside is float32 at least. The backward recomputes what a
    span needs. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(k, v, log_w, u, initial_state, segments, chunk_size)
    state = opened(initial_state, k, state_dtype(k, v, log_w, u), segments)
    if k.shape[1] == 1:
        with no_autocast(k.device):
            y, last = wkv_step(k, v, log_w, u, state, segments)
    else:
        y, found = _OP((k, v), (log_w, u), (chunk_size,), segments, tuple(state))
        last = Sums(*found)
    return y, closed(last)
