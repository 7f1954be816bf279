"""``log_linear`` by matrix products over chunks: time T log T, memory linear in T. README.md has the derivation.

Axes: b batch, i, j places of a chunk, g groups, r heads a group, l levels, m levels but the first, n key width, p value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, mask_pads, state_dtype
from hybridtf.ops.exponential import exp
from hybridtf.ops.log_linear.levels import level, levels_after
from hybridtf.ops.log_linear.shapes import LogLinearState, check, counts, start_levels
from hybridtf.ops.log_linear.step import log_linear_step
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import span_op


def log_linear_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, level_scales: Tensor, *, initial_state: LogLinearState | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, LogLinearState]:
    """The recurrence of :func:`log_linear_reference`, in chunks of ``chunk_size`` tokens; same arguments, results and errors.

    Everything is float32 at least, sums of ``log_a`` float64. Second derivatives raise :class:`KernelError`: the reference
    has them.
    """
    check(q, k, v, log_a, level_scales, initial_state, segments, chunk_size)
    dtype, t = state_dtype(q, k, v, log_a, level_scales), v.shape[1]
    S, start = start_levels(initial_state, k, v, level_scales, dtype, segments)
    with no_autocast(v.device):
        if t == 1:
            return log_linear_step(q, k, v, log_a, level_scales, (S, start), segments)
        count = counts(start, t, segments)
        # The op's tensors are of floating point; whole numbers of float64 are exact.
        places = count.to(torch.float64)
        y, (S, _) = _chunked(
            (*(mask_pads(x, segments) for x in (q, k, v)), log_steps(log_a, segments, dtype),
             mask_pads(level_scales, segments), places),
            (), (chunk_size,), segments, (S, start.to(torch.float64)),
        )
    return y, (S, count[:, -1] if t else start)


def _span(call: Call, state: States) -> tuple[Tensor, States]:
    """One chunk: pairs within it, what its tokens read of the levels before it, and the levels after it."""
    S, count = state
    v, n_levels = call["v"], call["level_scales"].shape[-1]
    q, k, values, scales = (call[name].to(S.dtype) for name in ("q", "k", "v", "level_scales"))
    scales = scales.transpose(1, 2)  # [b, h, i, l]
    index, before = call["count"].to(torch.int64), count.to(torch.int64)
    steps = call["log_a"].to(torch.float64).cumsum(1).transpose(1, 2)  # [b, h, i]
    y = _within(call, q, k, values, scales, steps, index) + _from_before(call, q, S, scales, steps, index, before)
    keep, mine = torch.ones_like(before, dtype=torch.bool), torch.ones_like(index, dtype=torch.bool)
    if call.masks is not None:
        last = call.masks.ids[:, -1]
        keep, mine = last == call.masks.before, (call.masks.ids == last[:, None]) & call.masks.real
    total, now = steps[..., -1], index[:, -1]
    # What was there moves to the level where it is seen from here, and what is new is written to its own.
    moved = levels_after(before, now, n_levels)[..., None, :] == torch.arange(1, n_levels, device=v.device)[:, None]
    weight = moved & keep[:, None, None]  # [b, m to, m from]
    old = torch.einsum("bxy,byhnp->bxhnp", weight.to(S.dtype), S) * total.exp().to(S.dtype)[:, None, :, None, None]
    decay = (total[..., None] - steps).clamp(max=0).exp().to(S.dtype)
    after = old + _written(k, values, decay, mine, index, now, n_levels)
    return y.to(v.dtype), (after, call["count"][:, -1].clone())


def _within(call: Call, q: Tensor, k: Tensor, v: Tensor, scales: Tensor, steps: Tensor, index: Tensor) -> Tensor:
    """(b i h p): every pair of the chunk, weighed by decay and by its level."""
    (b, t, g, _), h = k.shape, v.shape[2]
    pairs = torch.ones(t, t, dtype=torch.bool, device=v.device).tril().expand(b, t, t)
    if call.masks is not None:
        pairs = pairs & (call.masks.ids[:, :, None] == call.masks.ids[:, None, :])
    levels = level(index[:, :, None] - 1, index[:, None, :] - 1, scales.shape[-1])
    decay = exp((steps[..., :, None] - steps[..., None, :]).masked_fill(~pairs[:, None], -torch.inf).to(v.dtype))
    weights = decay * scales.gather(-1, levels[:, None].expand(b, h, t, t))
    scores = torch.einsum("bign,bjgn->bgij", q, k)[:, :, None]
    pair = (weights.unflatten(1, (g, h // g)) * scores).flatten(1, 2)
    return torch.einsum("bhij,bjhp->bihp", pair, v)


def _from_before(
    call: Call, q: Tensor, S: Tensor, scales: Tensor, steps: Tensor, index: Tensor, before: Tensor
) -> Tensor:
    """(b i h p): what the levels S (b m h n p) give to each token, each on the level where that token sees it."""
    (b, m, h, n, p), (_, t, g, _) = S.shape, q.shape
    # A token's own count includes itself; the blocks are those of the tokens before it.
    seen = levels_after(before[:, None], index - 1, m + 1)[:, None].expand(b, h, t, m)
    weights = scales.gather(-1, seen) * steps.exp().to(S.dtype)[..., None]
    if call.masks is not None:
        weights = weights.masked_fill((call.masks.ids != call.masks.before[:, None])[:, None, :, None], 0)
    grouped = S.view(b, m, g, h // g, n, p).permute(0, 2, 4, 3, 1, 5).reshape(b, g, n, h // g * m * p)
    read = (q.transpose(1, 2) @ grouped).view(b, g, t, h // g, m, p)
    return (read * weights.view(b, g, h // g, t, m).transpose(2, 3)[..., None]).sum(-2).transpose(1, 2).reshape(b, t, h, p)


def _written(
    k: Tensor, v: Tensor, decay: Tensor, mine: Tensor, index: Tensor, now: Tensor, n_levels: int
) -> Tensor:
    """(b m h n p): the chunk's tokens of the last document, each on the level where the next token sees it."""
    (b, t, g, n), (h, p), m = k.shape, v.shape[2:], n_levels - 1
    on = level(now[:, None], index - 1, n_levels)[..., None] == torch.arange(1, n_levels, device=v.device)
    weights = (on & mine[..., None]).to(v.dtype)[:, :, None] * decay.transpose(1, 2)[..., None]  # [b, j, h, m]
    values = (weights[..., None] * v[:, :, :, None]).view(b, t, g, h // g * m * p).transpose(1, 2)  # [b, g, j, (r m p)]
    found = k.permute(0, 2, 3, 1) @ values
    return found.view(b, g, n, h // g, m, p).permute(0, 4, 1, 3, 2, 5).reshape(b, m, h, n, p)


def _length(call: Call) -> int:
    size: int = call["chunk_size"]
    return size


_chunked = span_op(
    "log_linear_chunked", _span, timed=("q", "k", "v", "log_a", "level_scales", "count"), length=_length,
    like=lambda call: (call["v"].shape, call["v"].dtype),
)
