"""Keys of a call and of a state in one row of slots, each document's side by side.

Axes: b batch, t time, s slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.core.states import Growing, Ring
from hybridtf.core.states.leaf import gather_rows
from hybridtf.ops.block_sparse_attention.rule import Places


class Held(NamedTuple):
    """Tensors (b s ...) by name, where each query finds its document in them, and the state after the call."""

    data: dict[str, Tensor]
    places: Places
    leaf: Growing | Ring | None


def hold(
    leaf: Growing | Ring | None, new: Mapping[str, Tensor], segments: Segments | None, *, keep: int = 0
) -> Held:
    """All that queries of a call may look at: what ``leaf`` holds and the call's own tokens ``new`` (b t ...), which are added
    to the leaf. The leaf is consumed."""
    first = next(iter(new.values()))
    b, t = first.shape[:2]
    if leaf is None or leaf.untouched:
        data, places = (dict(new), _own(b, t, first.device)) if segments is None else _packed(new, segments)
        return Held(data, places, None if leaf is None else _after(leaf, new, segments, keep))
    if t == 1 or (isinstance(leaf, Growing) and segments is None):
        return _added(leaf, new, segments, keep)
    data, places = _joined(leaf, new, segments)
    return Held(data, places, _after(leaf, new, segments, keep))


def _added(leaf: Growing | Ring, new: Mapping[str, Tensor], segments: Segments | None, keep: int) -> Held:
    """The leaf with the call's tokens is all there is to look at: nothing is copied."""
    x = next(iter(new.values()))
    position = leaf.length[:, None] + torch.arange(x.shape[1], device=x.device)
    if segments is not None:
        position = segments.positions(leaf.length)
    seen = _after(leaf, new, segments, keep)
    start = (seen.oldest if isinstance(seen, Ring) else torch.zeros_like(seen.length))[:, None].expand_as(position)
    count = seen.length[:, None] - start
    if segments is not None:
        count = count.masked_fill(~segments.real, 0)
    first = start % seen.capacity if isinstance(seen, Ring) else start
    return Held({name: seen[name].to(z.dtype) for name, z in new.items()}, Places(position, first, start, count), seen)


def _after(leaf: Growing | Ring, new: Mapping[str, Tensor], segments: Segments | None, keep: int) -> Growing | Ring:
    return leaf.append(new, segments) if isinstance(leaf, Growing) else leaf.push(new, segments, keep=keep)


def _own(b: int, t: int, device: torch.device) -> Places:
    return Places.default(b, t, t, device)


def _packed(new: Mapping[str, Tensor], segments: Segments) -> tuple[dict[str, Tensor], Places]:
    """The call's real tokens, moved to the front of their rows."""
    order = torch.argsort((~segments.real).to(torch.int8), dim=1, stable=True)
    data = {name: gather_rows(x, order) for name, x in new.items()}
    rank = segments.real.to(torch.int64).cumsum(1) - 1
    position = segments.position
    count = segments.document_length().masked_fill(~segments.real, 0)
    first = (rank - position).clamp(min=0)
    return data, Places(position, first, torch.zeros_like(first), count)


def _joined(leaf: Growing | Ring, new: Mapping[str, Tensor], segments: Segments | None) -> tuple[dict[str, Tensor], Places]:
    """The leaf's tokens in order, then the call's real ones."""
    x = next(iter(new.values()))
    b, t = x.shape[:2]
    steps = torch.arange(t, device=x.device).expand(b, t)
    real = torch.ones_like(steps, dtype=torch.bool) if segments is None else segments.real
    last = torch.iinfo(torch.int64).max
    old = torch.where(leaf.valid(), leaf.positions(), last)
    order = torch.argsort(torch.cat([old, torch.where(real, steps + 2**48, last)], 1), dim=1, stable=True)
    data = {name: gather_rows(torch.cat([leaf[name].to(z.dtype), z], 1), order) for name, z in new.items()}
    n_old = leaf.valid().sum(1, keepdim=True)
    carried = torch.ones_like(real) if segments is None else segments.ids == segments.carried[:, None]
    within = steps if segments is None else segments.position
    rank = n_old + real.to(torch.int64).cumsum(1) - 1
    count = torch.full_like(within, t) if segments is None else segments.document_length()
    oldest = leaf.oldest[:, None] if isinstance(leaf, Ring) else torch.zeros_like(n_old)
    return data, Places(
        within + torch.where(carried, leaf.length[:, None], 0),
        torch.where(carried, 0, (rank - within).clamp(min=0)),
        torch.where(carried, oldest, 0),
        (count + torch.where(carried, n_old, 0)).masked_fill(~real, 0),
    )
