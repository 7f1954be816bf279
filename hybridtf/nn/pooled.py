"""Blocks of a document's tokens that are made into one entry as soon as they are complete: block i has ``size`` tokens from
position i * stride on.

Entries live in a sparse ``Growing``, one at the position of each block's last token.

Axes: b batch, t time, s slots of tokens, j blocks that end in a call, J blocks in reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core import Growing, Segments
from hybridtf.core.states.leaf import gather_rows
from hybridtf.ops.block_sparse_attention import Held, Places


class Ended(NamedTuple):
    """The blocks that end in a call, row by row in order. Beyond a row's ends j counts blocks that are none."""

    full: Tensor
    """(b t) bool: a block ends at this token."""
    columns: Tensor
    """(b j) the tokens at which they end."""
    slots: Tensor
    """(b j reach) where their tokens lie, in order, the last ``reach`` up to where they end."""
    done: Tensor
    """(b t) complete blocks of the token's document up to the token."""


class Pooled(NamedTuple):
    """All complete blocks in reach of a call."""

    data: dict[str, Tensor]
    """(b J ...) by name: what the state held, then the call's."""
    first: Tensor
    """(b t) where the blocks of the token's document begin."""
    leaf: Growing | None
    """The state after the call."""


def complete(position: Tensor, size: int, stride: int) -> Tensor:
    """Blocks that are complete once the token at ``position`` is there."""
    return (torch.div(position - size + 1, stride, rounding_mode="floor") + 1).clamp(min=0)


def ended(held: Held, size: int, stride: int, reach: int | None = None) -> Ended:
    """The blocks that end among the tokens of a call. ``reach``: tokens of which the slots are wanted, where that is not
    ``size``; those before the document's start have slots of no meaning."""
    places, s = held.places, next(iter(held.data.values())).shape[1]
    p = places.position
    past = p - (size - 1)
    full = (past >= 0) & (past % stride == 0) & (places.count > 0)
    most = (full.shape[1] + stride - 1) // stride
    columns = torch.argsort((~full).to(torch.int8), dim=1, stable=True)[:, :most]
    last = (places.first + p - places.start).gather(1, columns)
    slots = torch.remainder(last[..., None] - torch.arange((reach or size) - 1, -1, -1, device=p.device), max(s, 1))
    return Ended(full, columns, slots, complete(p, size, stride))


def tokens_of(x: Tensor, ends: Ended) -> Tensor:
    """(b s ...) to (b j reach ...): the tokens of each block."""
    b, j, size = ends.slots.shape
    if not x.shape[1]:  # a row of pads on an empty state
        return x.new_zeros(b, j, size, *x.shape[2:])
    rows: Tensor = gather_rows(x, ends.slots.flatten(1)).unflatten(1, (j, size))
    return rows


def pooled_with(leaf: Growing | None, new: Mapping[str, Tensor], ends: Ended, segments: Segments | None) -> Pooled:
    """The entries of ``leaf`` and ``new`` ones (b j ...) of the blocks that ended; the leaf is consumed."""
    if leaf is not None and ends.full.shape[1] == 1:  # the leaf after it holds all that the one token sees: nothing is copied
        after = leaf.append(new, segments, where=ends.full)
        return Pooled({name: after[name].to(x.dtype) for name, x in new.items()}, torch.zeros_like(ends.done), after)
    there = ends.full.gather(1, ends.columns)
    data = dict(new)
    if leaf is not None:
        order = torch.argsort((~torch.cat([leaf.valid(), there], 1)).to(torch.int8), dim=1, stable=True)
        data = {name: gather_rows(torch.cat([leaf[name].to(x.dtype), x], 1), order) for name, x in new.items()}
    first = torch.zeros_like(ends.done)
    if segments is not None:
        before = ends.full.to(torch.int64)
        earlier = before.cumsum(1) - before - (ends.done - before)  # of other documents, in this call
        first = earlier.clamp(min=0)
        if leaf is not None:
            carried = segments.ids == segments.carried[:, None]
            first = torch.where(carried, 0, (leaf.count[:, None] + earlier).clamp(min=0))
    if leaf is None:
        return Pooled(data, first, None)
    rank = (ends.full.to(torch.int64).cumsum(1) - 1).clamp(0, max(there.shape[1] - 1, 0))
    after = leaf.append({name: gather_rows(x, rank) for name, x in new.items()}, segments, where=ends.full)
    return Pooled(data, first, after)


def empty_pooled(
    batch_size: int, shapes: Mapping[str, tuple[int, ...]], stride: int, max_len: int | None, *, dtype: torch.dtype,
    device: torch.device | str,
) -> Growing:
    """No block yet; with ``max_len`` room for all that so many tokens have."""
    slots = None if max_len is None else -(-max_len // stride)
    return Growing.empty(batch_size, shapes, max_len=slots, sparse=True, dtype=dtype, device=device)


def entries_seen(first: Tensor, ends: Ended, places: Places, size: int, stride: int) -> Places:
    """Where each query finds the complete blocks of its document, as keys of an attention of their own."""
    total = complete(places.start + places.count - 1, size, stride)
    total = total.masked_fill((places.count == 0) | (ends.done == 0), 0)
    return Places(ends.done - 1, first, torch.zeros_like(first), total)
