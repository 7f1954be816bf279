"""Snapshots of the last tokens of a call, for recurrent states that would otherwise not know the past."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.core.states import Fixed, State, leaves, map_state

Step = Callable[[Any, Segments | None, State | None], tuple[Any, ...]]


class _Cut(NamedTuple):
    """A leaf as it was before one column."""

    data: dict[str, Tensor]
    length: Tensor


def with_history(
    step: Step, x: Any, segments: Segments | None, state: State | None, keep: int, init_state: Callable[[int], State]
) -> tuple[Any, ...]:
    """Run ``step`` so that every :class:`Fixed` leaf of the result can be cropped by up to ``keep`` real tokens.

    ``x``: a tensor (b t ...), or a pytree of such (a mixer that reads edges). ``step(x, segments, state)`` returns the
    output, the state, and, where the mixer has them, ``Extras``, which are put together. ``init_state(batch_size)`` gives
    the state at the start of a document. Without a state or a ``keep`` it is one call of ``step``.

    The tokens are moved to the right of their rows (so that the last columns are each row's last real tokens), the call is
    cut before each of the last ``keep`` columns, and the state at each cut is kept. By the cut law the output is that of
    one call. ``keep`` is small (a draft to verify), hence the loop; an op that returns its states token by token hands
    them to :meth:`Fixed.advance` instead.
    """
    if state is None or keep == 0:  # before the walk below, which a decoded token would feel
        return step(x, segments, state)
    first: Tensor = pytree.tree_leaves(x)[0]
    b, t = first.shape[:2]
    keep = min(keep, t)
    if keep == 0:
        return step(x, segments, state)
    order = None
    if segments is not None:
        order = torch.argsort(segments.real.to(torch.int8), dim=1, stable=True)
        x = pytree.tree_map(lambda v: v.gather(1, _index(order, v)), x)
        segments = _reordered(segments, order)
    empty = _fixed(init_state(b))
    results: list[tuple[Any, ...]] = []
    past: list[list[_Cut]] = []
    cuts = [0, *range(t - keep, t)] if t > keep else list(range(t))
    for start, stop in zip(cuts, [*cuts[1:], t], strict=True):
        part = None if segments is None else segments.narrow(start, stop)
        if start >= t - keep:
            past.append([_before(leaf, fresh, part) for leaf, fresh in zip(_fixed(state), empty, strict=True)])
        results.append(step(_columns(x, start, stop), part, state))
        state = results[-1][1]
    y, *extras = _joined(results, order)
    return (y, _attached(state, past), *extras)


def _before(leaf: Fixed, fresh: Fixed, part: Segments | None) -> _Cut:
    """The leaf before a column; the empty state in the rows where that column starts a document."""
    if part is None:
        return _Cut({name: value.clone() for name, value in leaf.data.items()}, leaf.length.clone())
    starts = part.starts[:, 0]

    def pick(now: Tensor, new: Tensor) -> Tensor:
        return torch.where(starts.view(-1, *[1] * (now.ndim - 1)), new, now)

    return _Cut({k: pick(v, fresh.data[k]) for k, v in leaf.data.items()}, pick(leaf.length, fresh.length))


def _attached(state: State, past: list[list[_Cut]]) -> State:
    found = iter(range(len(past[0])))

    def attach(leaf: Fixed) -> Fixed:
        i = next(found)
        data = {name: torch.stack([cut[i].data[name] for cut in past], dim=1) for name in leaf.data}
        lengths = torch.stack([cut[i].length for cut in past], dim=1)
        lengths = _same_document(lengths, leaf.length)
        return type(leaf)(leaf.data, leaf.length, data, lengths, constant=leaf.constant, max_len=leaf.max_len)

    return map_state(lambda leaf: attach(leaf) if isinstance(leaf, Fixed) else leaf, state)


def _joined(results: list[tuple[Any, ...]], order: Tensor | None) -> list[Any]:
    """Outputs and edges side by side and back in their places; losses summed."""

    def together(*parts: Tensor) -> Tensor:
        whole = torch.cat(parts, dim=1)
        return whole if order is None else torch.zeros_like(whole).scatter(1, _index(order, whole), whole)

    y = pytree.tree_map(together, *[result[0] for result in results])
    if len(results[0]) == 2:
        return [y]
    extras = [result[2] for result in results]
    edges = {name: together(*[e.edges[name] for e in extras]) for name in extras[0].edges}
    losses = {
        name: tuple(torch.stack(parts).sum(0) for parts in zip(*[e.losses[name] for e in extras], strict=True))
        for name in extras[0].losses
    }
    return [y, type(extras[0])(edges, losses)]


def _fixed(state: State) -> list[Fixed]:
    return [leaf for leaf in leaves(state) if isinstance(leaf, Fixed)]


def _columns(x: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda v: v[:, start:stop], x)


def _index(order: Tensor, like: Tensor) -> Tensor:
    return order.view(*order.shape, *[1] * (like.ndim - 2)).expand_as(like)


def _reordered(segments: Segments, order: Tensor) -> Segments:
    return Segments(
        segments.ids.gather(1, order), segments.continues,
        None if segments.prefix_len is None else segments.prefix_len.gather(1, order),
        None if segments.global_tokens is None else segments.global_tokens.gather(1, order),
        {name: axis.gather(1, order) for name, axis in segments.axes.items()},
    )


def _same_document(lengths: Tensor, final: Tensor) -> Tensor:
    """Mark with -1 the snapshots (b keep) of before the final document: there the length did not step by 0 or 1."""
    following = torch.cat([lengths[:, 1:], final[:, None]], dim=1)
    joined = (following == lengths) | (following == lengths + 1)
    # A snapshot counts only if every later step joined too.
    kept = joined.flip(1).cummin(1).values.flip(1) if lengths.shape[1] else joined
    return torch.where(kept, lengths, torch.full_like(lengths, -1))
