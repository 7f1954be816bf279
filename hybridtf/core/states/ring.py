"""``Ring``: the last tokens of a document, for windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from hybridtf.core.errors import StateError
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
    ring_positions,
)


class Ring(StateLeaf):
    """The last ``capacity`` tokens of the row's document, for a mixer that sees ``window`` tokens back (itself included).

    Token ``p`` of the document lies in slot ``p % capacity``; tokens from position ``oldest`` (b) on are held. A call made
    with ``keep`` leaves ``capacity >= window + keep`` slots, so that ``keep`` tokens can be cropped.
    """

    def __init__(
        self, data: Mapping[str, Tensor], length: Tensor, *, window: int, oldest: Tensor, max_len: int | None = None
    ) -> None:
        super().__init__(data, length, max_len=max_len)
        self.window = window
        self.oldest = oldest
        self._own_buffers = True

    @classmethod
    def empty(
        cls, batch_size: int, shapes: Mapping[str, tuple[int, ...]], *, window: int, keep: int = 0,
        max_len: int | None = None, dtype: torch.dtype, device: torch.device | str,
    ) -> Ring:
        """No tokens yet, with ``window + keep`` slots, whatever ``max_len``. ``shapes``: of one token's tensor, by name."""
        data = {k: empty_slots(batch_size, window + keep, s, dtype=dtype, device=device) for k, s in shapes.items()}
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        leaf = cls(data, length, window=window, oldest=length.clone(), max_len=max_len)
        leaf.untouched = True
        return leaf

    @property
    def capacity(self) -> int:
        return next(iter(self.data.values())).shape[1]

    def used_nbytes(self) -> int:
        tokens = int((self.length - self.oldest).sum())
        return sum(tokens * t.shape[2:].numel() * t.element_size() for t in self.data.values())

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        data = {k: fn(v) for k, v in self.data.items()}
        return type(self)(data, fn(self.length), window=self.window, oldest=fn(self.oldest), max_len=self.max_len)

    def positions(self) -> Tensor:
        """(b s) int64: the position of the token in each slot; -1 where the slot holds none."""
        positions = ring_positions(self.length, self.capacity)
        return torch.where(positions >= self.oldest[:, None], positions, torch.full_like(positions, -1))

    def valid(self) -> Tensor:
        """(b s) bool: slots that hold a token."""
        return self.positions() >= 0

    def form_of(self, others: Sequence[Self]) -> Self:
        windows = sorted({self.window, *(other.window for other in others)})
        if len(windows) > 1:
            raise StateError(f"rings of windows {windows} have no common form")
        slots = max(self.capacity, *(other.capacity for other in others))
        return self if slots == self.capacity else self._widen(slots)

    def crop_refusal(self, n: Tensor | int) -> str | None:
        n = per_row(n, self.length)
        left = self.length - n
        short = (n > 0) & ((left < 0) | ((left - self.window + 1).clamp(min=0) < self.oldest))
        if not bool(short.any()):
            return None
        row = int(short.nonzero()[0])
        held = int(self.length[row] - self.oldest[row])
        allowed = max(held - self.window + 1, 0) if int(self.oldest[row]) else held
        return (
            f"row {row}: cannot crop {int(n[row])} tokens; a window of {self.window} with {held} tokens held allows {allowed}"
        )

    def crop(self, n: Tensor | int) -> Self:
        refuse(self.crop_refusal(n))
        left = self.length - per_row(n, self.length)
        data = self.data
        oldest = torch.minimum(self.oldest, left)
        new = type(self)(data, left, window=self.window, oldest=oldest, max_len=self.max_len)
        self._die(*data.values())
        return new

    def push(self, new: Mapping[str, Tensor], segments: Segments | None, *, keep: int = 0) -> Ring:
        """Add the call's tokens (b t ...) of the row's last document and keep the last ``window + keep``; consumes."""
        if new.keys() != self.data.keys():
            raise StateError(f"this state holds {', '.join(sorted(self.data))}; it was given {', '.join(sorted(new))}")
        check_rows(self.length, new)
        t = next(iter(new.values())).shape[1]
        length = advanced_length(self.length, segments, t)
        ring = self if self.capacity >= self.window + keep else self._widen(self.window + keep)
        start, oldest = ring.length, ring.oldest
        if segments is not None:
            start = torch.where(segments.keeps_state, start, torch.zeros_like(start))
            oldest = torch.where(segments.keeps_state, oldest, torch.zeros_like(oldest))
        oldest = torch.maximum(oldest, length - ring.capacity)
        in_place = not torch.is_grad_enabled() and not any(old.requires_grad for old in ring.data.values())
        begin = None  # worth a read for one token alone
        if segments is None:
            begin = self.shared_length() if t == 1 and in_place else self.known_length()
        data = ring.data
        if t == 1 and in_place:
            data = ring._write_one(new, start, begin, segments)
        elif t:
            wanted = ring_positions(length, ring.capacity)
            fresh = (wanted >= start[:, None]) & (wanted >= 0)
            source = torch.arange(t, device=length.device).expand(len(length), -1)
            if segments is not None:
                source = torch.argsort(~segments.in_last, dim=1, stable=True)
            index = source.gather(1, (wanted - start[:, None]).clamp(0, t - 1))
            data = {k: torch.where(like(fresh, old), gather_rows(new[k].to(old.dtype), index), old) for k, old in data.items()}
            if in_place:
                data = {k: old.copy_(data[k]) for k, old in ring.data.items()}
        out = Ring(data, length, window=self.window, oldest=oldest, max_len=self.max_len)
        out.knowing(None if begin is None else begin + t)
        self._die(*data.values())
        return out

    def _write_one(
        self, new: Mapping[str, Tensor], start: Tensor, begin: int | None, segments: Segments | None
    ) -> dict[str, Tensor]:
        """In place, one token a row into its slot; a pad leaves what was there. Decoding must not copy the whole window."""
        if begin is not None:
            for name, old in self.data.items():
                old[:, begin % self.capacity].copy_(new[name][:, 0])
            return dict(self.data)
        rows, slot = torch.arange(len(start), device=start.device), start % self.capacity
        for name, old in self.data.items():
            value = new[name][:, 0].to(old.dtype)
            if segments is not None:
                value = torch.where(like(segments.real[:, 0], value), value, old[rows, slot])
            old.index_put_((rows, slot), value)
        return dict(self.data)

    def _widen(self, capacity: int) -> Self:
        wanted = ring_positions(self.length, capacity)
        held = wanted >= self.oldest[:, None]
        index = wanted.clamp(min=0) % self.capacity
        data = {}
        for name, old in self.data.items():
            value = gather_rows(old, index)
            wide = empty_slots(len(value), capacity, tuple(value.shape[2:]), dtype=value.dtype, device=value.device)
            data[name] = torch.slice_scatter(wide, torch.where(like(held, value), value, torch.zeros_like(value)), 1)
        return type(self)(data, self.length, window=self.window, oldest=self.oldest, max_len=self.max_len)
