"""``Growing``: the tokens of a document (keys and values, latents), or some of them (pooled blocks, global tokens)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor

from hybridtf.core.errors import LengthError, StateError
from hybridtf.core.segments import Segments
from hybridtf.core.states.leaf import (
    StateLeaf,
    advanced_length,
    check_rows,
    empty_slots,
    gather_rows,
    like,
    per_row,
    refuse,
    resize,
)


class Growing(StateLeaf):
    """The tokens of the row's document, compacted: slots ``0 .. count-1`` of each row are valid, the rest is unspecified.

    Without ``max_len`` the buffer grows with each call. With it the buffer has that many slots for good: under no_grad it
    is written in place (static shape and address), and an entry too many raises :class:`LengthError` (while compiling
    nothing can be checked: the caller sees to the room, as ``generate`` does).

    A ``sparse`` one holds only the tokens that ``append`` is told to keep, with their positions: one entry for each full
    block where blocks are pooled, or the global tokens of a document. Then ``count`` (b) is smaller than ``length`` (b).
    """

    def __init__(
        self, data: Mapping[str, Tensor], length: Tensor, *, static: bool = False, count: Tensor | None = None,
        max_len: int | None = None,
    ) -> None:
        super().__init__(data, length, max_len=max_len)
        self.static = static
        self._count = count
        self._own_buffers = True

    @classmethod
    def empty(
        cls, batch_size: int, shapes: Mapping[str, tuple[int, ...]], *, max_len: int | None = None, sparse: bool = False,
        dtype: torch.dtype, device: torch.device | str, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> Growing:
        """No tokens yet. ``shapes``: the shape of one token's tensor, by name; ``max_len``: slots of a static buffer;
        ``dtypes``: of those that are not held in ``dtype``."""
        slots = max_len or 0
        data = {
            k: empty_slots(batch_size, slots, shape, dtype=dtypes.get(k, dtype), device=device) for k, shape in shapes.items()
        }
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        if sparse:
            data["position"] = torch.zeros(batch_size, slots, dtype=torch.int64, device=device)
        count = length.clone() if sparse else None
        leaf = cls(data, length, static=max_len is not None, count=count, max_len=max_len)
        leaf.untouched = True
        return leaf

    @property
    def sparse(self) -> bool:
        """Only some tokens are held."""
        return self._count is not None

    @property
    def count(self) -> Tensor:
        """(b) int64: slots in use; the length, unless ``sparse``."""
        return self.length if self._count is None else self._count

    @property
    def capacity(self) -> int:
        return next(iter(self.data.values())).shape[1]

    def used_nbytes(self) -> int:
        entries = int(self.count.sum())
        return sum(entries * t.shape[2:].numel() * t.element_size() for t in self.data.values())

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        count = None if self._count is None else fn(self._count)
        data = {k: fn(v) for k, v in self.data.items()}
        return type(self)(data, fn(self.length), static=self.static, count=count, max_len=self.max_len)

    def with_capacity(self, slots: int, *, static: bool) -> Self:
        """A copy with at least that many slots; ``static``: for good, as with ``max_len``. The old leaf stays alive."""
        slots = max(slots, self.capacity)
        same = slots == self.capacity
        data = {name: old.clone() if same else resize(old, slots) for name, old in self.data.items()}
        count = None if self._count is None else self._count.clone()
        return type(self)(data, self.length.clone(), static=static, count=count, max_len=self.max_len)

    def form_of(self, others: Sequence[Self]) -> Self:
        slots = max(self.capacity, *(other.capacity for other in others))
        static = self.static and all(other.static for other in others)
        alike = slots == self.capacity and static == self.static
        return self if alike else self.with_capacity(slots, static=static)

    def crop_refusal(self, n: Tensor | int) -> str | None:
        n = per_row(n, self.length)
        short = n > self.length
        if not bool(short.any()):
            return None
        row = int(short.nonzero()[0])
        return f"row {row}: cannot crop {int(n[row])} tokens; its document has {int(self.length[row])} in the state"

    def crop(self, n: Tensor | int) -> Self:
        refuse(self.crop_refusal(n))
        n = per_row(n, self.length)
        length, data = self.length - n, self.data
        count = None if self._count is None else (self.valid() & (self.positions() < length[:, None])).sum(1)
        new = type(self)(data, length, static=self.static, count=count, max_len=self.max_len)
        self._die(*data.values())
        return new

    def valid(self) -> Tensor:
        """(b s) bool: slots that hold a token."""
        return torch.arange(self.capacity, device=self.length.device) < self.count[:, None]

    def positions(self) -> Tensor:
        """(b s) int64: the position of each slot's token in its document (only where :meth:`valid`)."""
        if self.sparse:
            return self["position"]
        return torch.arange(self.capacity, device=self.length.device).expand(self.batch_size, -1)

    def append(self, new: Mapping[str, Tensor], segments: Segments | None, *, where: Tensor | None = None) -> Growing:
        """Add the call's tokens (b t ...) of the row's last document, and forget the old document if it ended; consumes.

        ``where`` (b t, bool), for a sparse leaf: the tokens to hold.
        """
        self._check_names(new, where)
        check_rows(self.length, new)
        t = next(iter(new.values())).shape[1]
        length = advanced_length(self.length, segments, t)
        start = self.count
        chosen = where
        if segments is not None:
            start = torch.where(segments.keeps_state, start, torch.zeros_like(start))
            chosen = segments.in_last if where is None else segments.in_last & where
        stop = length if where is None or chosen is None else start + chosen.sum(1)
        if where is not None:
            steps = torch.arange(t, device=length.device) + self.length[:, None]
            new = {**new, "position": steps if segments is None else segments.positions(self.length)}
        begin = self.shared_length() if chosen is None else None
        capacity = self._capacity_for(stop, t, begin)
        in_place = self.static and not torch.is_grad_enabled() and not any(v.requires_grad for v in self.data.values())
        if in_place and begin is not None:
            data = self._write_side_by_side(new, begin)
        elif in_place and (t == 1 or chosen is None):
            data = self._write_tail(new, chosen, start)
        else:
            data = self._rewrite(new, chosen, start, stop, capacity)
            if in_place:
                data = {name: old.copy_(data[name]) for name, old in self.data.items()}
        out = Growing(data, length, static=self.static, count=None if where is None else stop, max_len=self.max_len)
        out.knowing(None if begin is None else begin + t)
        self._die(*data.values())
        return out

    def _check_names(self, new: Mapping[str, Tensor], where: Tensor | None) -> None:
        if (where is not None) != self.sparse:
            raise StateError("a sparse state needs to be told which tokens to hold (where=), and a dense one holds them all")
        expected = self.data.keys() - {"position"} if self.sparse else self.data.keys()
        if new.keys() != expected:
            raise StateError(f"this state holds {', '.join(sorted(expected))}; it was given {', '.join(sorted(new))}")

    def _capacity_for(self, stop: Tensor, t: int, begin: int | None) -> int:
        if torch.compiler.is_compiling() or not len(stop):
            return self.capacity if self.static else self.capacity + t
        most = int(stop.max()) if begin is None else begin + t
        if self.static and most > self.capacity:
            raise LengthError(f"the state was made for max_len={self.capacity} tokens; this call would reach {most}")
        return self.capacity if self.static else most

    def _write_side_by_side(self, new: Mapping[str, Tensor], begin: int) -> dict[str, Tensor]:
        """In place, tokens from slot ``begin`` on in every row: a copy of a slice, which a step of decoding can afford."""
        for name, old in self.data.items():
            value = new[name]
            old[:, begin : begin + value.shape[1]].copy_(value)
        return dict(self.data)

    def _write_tail(self, new: Mapping[str, Tensor], chosen: Tensor | None, start: Tensor) -> dict[str, Tensor]:
        """In place, tokens side by side from slot ``start`` on; one that is not ``chosen`` leaves what was there."""
        t = next(iter(new.values())).shape[1]
        slot = (start[:, None] + torch.arange(t, device=start.device)).clamp(max=self.capacity - 1)
        rows = torch.arange(len(start), device=start.device)[:, None].expand_as(slot)
        for name, old in self.data.items():
            value = new[name].to(old.dtype)
            if chosen is not None:
                value = torch.where(like(chosen, value), value, old[rows, slot])
            old.index_put_((rows, slot), value)
        return dict(self.data)

    def _rewrite(
        self, new: Mapping[str, Tensor], chosen: Tensor | None, start: Tensor, stop: Tensor, capacity: int
    ) -> dict[str, Tensor]:
        """New buffers: the old slots below ``start``, then the chosen tokens (all, where None) up to ``stop``."""
        t = next(iter(new.values())).shape[1]
        slots = torch.arange(capacity, device=stop.device).expand(len(stop), -1)
        source = torch.arange(t, device=stop.device).expand(len(stop), -1)
        if chosen is not None:
            # The chosen tokens first, in order; then anything: those slots lie beyond the new count.
            source = torch.argsort(~chosen, dim=1, stable=True)
        fresh = (slots >= start[:, None]) & (slots < stop[:, None])
        index = source.gather(1, (slots - start[:, None]).clamp(0, max(t - 1, 0))) if t else torch.zeros_like(slots)
        data = {}
        for name, old in self.data.items():
            value = gather_rows(new[name].to(old.dtype), index) if t else resize(old, capacity)
            data[name] = torch.where(like(fresh, value), value, resize(old, capacity))
        return data
