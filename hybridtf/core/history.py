"""Snapshots of the last tokens of a call, for recurrent states that would otherwise not know the past."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.core.states import Fixed, State, leaves, map_state

Step = Callable[[Tensor, Segments | None, State], tuple[Tensor, State]]


def with_history(step: Step, x: Tensor, segments: Segments | None, state: State, keep: int) -> tuple[Tensor, State]:
    """Run ``step`` so that every :class:`Fixed` leaf of the result can be cropped by up to ``keep`` real tokens.

    The tokens are moved to the right of their rows (so that the last columns are each row's last real tokens), the call is
    cut before each of the last ``keep`` columns, and the state at each cut is kept. By the cut law the output is that of
    one call. ``keep`` is small (a draft to verify), hence the loop.
    """
    t = x.shape[1]
    keep = min(keep, t)
    if keep == 0:
        return step(x, segments, state)
    order = None
    if segments is not None:
        order = torch.argsort(segments.real.to(torch.int8), dim=1, stable=True)
        x = x.gather(1, order[..., None].expand_as(x))
        segments = _reordered(segments, order)
    outputs, past = [], []
    cuts = [0, *range(t - keep, t)] if t > keep else list(range(t))
    for start, stop in zip(cuts, [*cuts[1:], t], strict=True):
        part = None if segments is None else segments.narrow(start, stop)
        if start >= t - keep:
            past.append([({k: v.clone() for k, v in leaf.data.items()}, leaf.length) for leaf in _fixed(state)])
        y, state = step(x[:, start:stop], part, state)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    if order is not None:
        y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
    snapshots = iter(range(len(_fixed(state))))

    def attach(leaf: Fixed) -> Fixed:
        i = next(snapshots)
        data = {name: torch.stack([cut[i][0][name] for cut in past], dim=1) for name in leaf.data}
        lengths = torch.stack([cut[i][1] for cut in past], dim=1)
        return Fixed(leaf.data, leaf.length, data, _same_document(lengths, leaf.length))

    return y, map_state(lambda leaf: attach(leaf) if isinstance(leaf, Fixed) else leaf, state)


def _fixed(state: State) -> list[Fixed]:
    return [leaf for leaf in leaves(state) if isinstance(leaf, Fixed)]


def _reordered(segments: Segments, order: Tensor) -> Segments:
    return Segments(
        segments.ids.gather(1, order), segments.continues,
        None if segments.prefix_len is None else segments.prefix_len.gather(1, order),
        None if segments.global_tokens is None else segments.global_tokens.gather(1, order),
        {name: axis.gather(1, order) for name, axis in segments.axes.items()},
    )


def _same_document(lengths: Tensor, final: Tensor) -> Tensor:
    """Mark with -1 the snapshots (b keep) taken before the final document began: there the length did not step by 0 or 1."""
    following = torch.cat([lengths[:, 1:], final[:, None]], dim=1)
    joined = (following == lengths) | (following == lengths + 1)
    # A snapshot counts only if every later step joined too.
    kept = joined.flip(1).cummin(1).values.flip(1) if lengths.shape[1] else joined
    return torch.where(kept, lengths, torch.full_like(lengths, -1))
