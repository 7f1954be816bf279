"""``gated_delta_rule`` by matrix products over chunks, in time and memory linear in the length. README.md has the derivation.

Axes: c chunks, b batch, l tokens of a chunk, n sub-steps, L = l n rows, g key heads, r value heads a key head, h = g r,
k key width, p value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import memory_shape, start_state, state_dtype
from hybridtf.ops.gated_delta_rule.layout import in_chunks, with_documents
from hybridtf.ops.gated_delta_rule.scores import Scores, channel_scores, plain_scores, rows_of
from hybridtf.ops.gated_delta_rule.shapes import Sizes, check, sizes_of
from hybridtf.ops.gated_delta_rule.step import gated_delta_rule_step
from hybridtf.ops.gated_delta_rule.walk import Parts, walk
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import chunks_at_once


def gated_delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor | None = None, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`gated_delta_rule_reference`; same arguments, results and errors.

    ``chunk_size`` counts corrections: with n sub-steps a chunk is ``chunk_size // n`` tokens (at least 1). Everything is
    computed in float32 at least. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(k, v, beta, log_a, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    state = start_state(initial_state, memory_shape(k, v), v, state_dtype(q, k, v, beta, log_a), segments)
    if v.shape[1] == 1:
        with no_autocast(v.device):
            return gated_delta_rule_step(q, k, v, beta, log_a, state, segments)
    y, (last,) = _OP((q, k, v, beta, log_a), (), (chunk_size,), segments, (state,))
    return y, last


def _span(call: Call, states: States) -> tuple[Tensor, States]:
    """Some chunks: what does not depend on the state side by side, then the state from chunk to chunk."""
    state = states[0]
    size = sizes_of(call["k"], call["v"])
    length = min(_chunk(call), size.t)
    q, k, v, beta = (in_chunks(call, name, length, state.dtype) for name in ("q", "k", "v", "beta"))
    scores = _scores(call, q, k, length, state.dtype)
    earlier = k.new_ones(k.shape[-2], k.shape[-2]).tril(-1)
    before, after = (None if x is None else rows_of(x, size.n, -2) for x in (scores.before, scores.after))
    parts = (
        scores.among_keys * beta * earlier, scores.of_queries, _scaled(k * -beta, before), _scaled(q, scores.before), v * beta,
        _scaled(k, after), scores.total,
    )
    y, last = walk(Parts(*(_by_head(x, size) for x in parts)), state.flatten(0, 1))
    y = y.unflatten(1, (size.b, size.h)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : size.t]
    return y, (last.view(state.shape),)


def _scores(call: Call, q: Tensor, k: Tensor, length: int, dtype: torch.dtype) -> Scores:
    log_a, n = call["log_a"], k.shape[-2] // length
    if log_a is not None:
        log_a = in_chunks(call, "log_a", length, dtype).clamp(min=-1000.0)  # no -inf in a sum: exp(-1000) is 0 in float64 too
    of_heads = log_a is None or call["log_a"].ndim == 3
    scores = plain_scores(q, k, log_a, n) if of_heads else channel_scores(q, k, log_a, n)
    return scores if call.masks is None else with_documents(scores, call.masks, length, n)


def _by_head(x: Tensor, size: Sizes) -> Tensor:
    """x (c b g r ...), with 1 for what is shared, as (c, b h, ...)."""
    return x.expand(-1, size.b, size.g, size.r, -1, -1).flatten(1, 3)


def _chunk(call: Call) -> int:
    """Tokens of a chunk."""
    n = call["k"].shape[2] if call["k"].ndim == 5 else 1
    chunk: int = max(1, call["chunk_size"] // n)
    return chunk


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _length(call: Call) -> int:
    """Tokens of a span: as many chunks as keep the largest tensor within a budget."""
    size, chunk = sizes_of(call["k"], call["v"]), _chunk(call)
    rows = chunk * size.n
    at_once: int = chunks_at_once(size.b * size.h * rows * max(rows, size.k), call["v"].device)
    return at_once * chunk


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    b, t, _, _, h, _, p = sizes_of(call["k"], call["v"])
    return (b, t, h, p), call["v"].dtype


_OP = span_op("gated_delta_rule_chunked", _span, timed=("q", "k", "v", "beta", "log_a?"), length=_length, like=_like)
