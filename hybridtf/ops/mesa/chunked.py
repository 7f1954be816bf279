"""``mesa`` by matrix products over chunks and conjugate gradients. README.md has the derivation.

Axes: b batch, t time, c chunks of a span, h heads, l places in a chunk, k key width, v value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, start_state, state_dtype
from hybridtf.ops.mesa.shapes import check, state_shape
from hybridtf.ops.mesa.solve import solve
from hybridtf.ops.mesa.step import mesa_step
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import span_op
from hybridtf.ops.spans import Span, chunks_at_once
from hybridtf.ops.ssd.decay import decay_of


def mesa_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, *, ridge: Tensor, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64, n_steps: int = 30,
) -> tuple[Tensor, Tensor]:
    """The read-out of :func:`mesa_reference` by ``n_steps`` of conjugate gradients, in chunks of ``chunk_size`` tokens; same
    arguments, results and errors.

    All inside is float32, or float64 if an input is. Gradients are those of the exact solution. The backward computes each
    span again. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(q, k, v, beta, log_a, ridge, initial_state, segments, chunk_size, n_steps)
    dtype = state_dtype(q, k, v, beta, log_a, ridge)
    state = start_state(initial_state, state_shape(k, v), v, dtype, segments)
    with no_autocast(v.device):
        if v.shape[1] == 1:
            return mesa_step(q, k, v, beta, log_a, ridge, state, segments, n_steps)
        y, (last,) = _op(
            (q, k, v, beta, log_steps(log_a, segments, dtype)), (ridge,), (chunk_size, n_steps), segments, (state,)
        )
    return y, last


def _span(call: Call, state: States) -> tuple[Tensor, States]:
    """Whole chunks side by side, or one that is shorter."""
    (S,), length = state, min(call["chunk_size"], call.n_tokens)
    n, dtype, place = call["k"].shape[3], S.dtype, Span(0, call.n_tokens // length, length)

    def load(name: str) -> Tensor:
        x = place.cut(call[name])
        if call.masks is not None:
            x = x.masked_fill(~place.cut(call.masks.real).view(*x.shape[:3], *[1] * (x.ndim - 3)), 0)
        return x.to(dtype).transpose(2, 3)  # [b, c, h, l, ...]

    q, k, v, beta = (load(name) for name in ("q", "k", "v", "beta"))
    decay = decay_of(call["log_a"], call.masks, q.shape[2], place)
    tail, whole = decay.tail.transpose(2, 3), decay.whole.flatten(2)[..., None, None]
    writes = (beta[..., None] * tail * k).mT @ torch.cat([k, v], -1)
    entered = []
    for i in range(place.n_chunks):
        entered.append(S)
        S = torch.addcmul(writes[:, i], S, whole[:, i])
    pair = decay.pair.flatten(2, 3) * beta[..., None, :]
    ridge = call["ridge"].to(dtype)[:, None].expand(*q.shape[:3], 1, n)
    y = _read(q, k, v, pair, decay.into.transpose(2, 3), torch.stack(entered, 1), ridge, call["n_steps"])
    return y.transpose(2, 3).flatten(1, 2).to(call["v"].dtype), (S,)


def _read(
    q: Tensor, k: Tensor, v: Tensor, pair: Tensor, into: Tensor, before: Tensor, ridge: Tensor, n_steps: int
) -> Tensor:
    """y (b c h l v) from q, k (b c h l k), v (b c h l v), the weight ``pair`` (b c h l l) of each token's write to each, the
    weight ``into`` (b c h l 1) of the chunk's incoming state, and that state, ``before`` (b c h k k+v)."""
    shape = v.shape
    q, k, v, pair, into, before, ridge = (x.flatten(0, 2) for x in (q, k, v, pair, into, before, ridge))
    n = k.shape[-1]
    keys, first = k.mT, before[..., :n].mT

    def product(x: Tensor) -> Tensor:
        """(K_t + Diag(ridge)) x at each token."""
        near = torch.baddbmm(ridge * x, torch.bmm(x, keys) * pair, k)
        return torch.baddbmm(near, into * x, first)

    best = solve(product, q, n_steps)
    y = torch.baddbmm(torch.bmm(torch.bmm(best, keys) * pair, v), into * best, before[..., n:])
    return y.view(shape)


def _length(call: Call) -> int:
    """Tokens of a span."""
    (b, _, h, n), p, size = call["k"].shape, call["v"].shape[3], call["chunk_size"]
    widest = torch.sym_max(size * size, n * (n + p))
    length: int = size * chunks_at_once(b * h * widest, call["v"].device)
    return length


def _like(call: Call) -> tuple[Sequence[int], torch.dtype]:
    return call["v"].shape, call["v"].dtype


_op = span_op(
    "mesa_chunked", _span, timed=("q", "k", "v", "beta", "log_a"), fixed=("ridge",),
    options={"chunk_size": int, "n_steps": int}, length=_length, chunk=lambda call: call["chunk_size"], like=_like,
)
