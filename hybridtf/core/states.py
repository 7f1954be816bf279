"""State leaves: everything that a component carries through time.

A state is a pytree (dicts, tuples, named tuples, nesting allowed) of three leaf classes, each batch first with an int64
tensor ``length`` (b): the number of real tokens of the row's current document. The state owns the position.

``Growing``  tokens of the document, compacted from slot 0 of each row (KV, latents)
``Ring``     the last tokens of the document; token ``p`` lies in slot ``p % capacity`` (windows)
``Fixed``    tensors of constant size (recurrent and convolution states), with snapshots of the last ``keep`` tokens

An update consumes its leaf: it may write into the buffer (no grad, capacity given by ``max_len``) or make a new one, and
either way the old leaf is dead. ``debug_states()`` makes a dead leaf raise and fills its private memory with NaN.

Axes: b batch, s slots, t time.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core.errors import LengthError, StateError
from hybridtf.core.segments import Segments

State: TypeAlias = Any
"""A pytree whose leaves are :class:`Growing`, :class:`Ring` or :class:`Fixed`."""

_debug = os.environ.get("HYBRIDTF_DEBUG", "") not in ("", "0")


@contextmanager
def debug_states(on: bool = True) -> Iterator[None]:
    """Inside, a consumed state raises :class:`StateError` when read, and its private memory turns to NaN."""
    global _debug
    before, _debug = _debug, on
    try:
        yield
    finally:
        _debug = before


class StateLeaf(ABC):
    """What all leaves share: named tensors ``data`` (b ...), ``length`` (b), and the moves a caller needs."""

    untouched: bool = False
    """True from ``empty`` until the first call: no row holds anything, which a mixer may know without reading lengths."""

    def __init__(self, data: Mapping[str, Tensor], length: Tensor) -> None:
        self._data: dict[str, Tensor] | None = dict(data)
        self._length = length

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> dict[str, Tensor]:
        """The named tensors; raises :class:`StateError` once the leaf was consumed in debug mode."""
        if self._data is None:
            raise StateError("this state was already consumed by a call; use the state which that call returned")
        return self._data

    @property
    def length(self) -> Tensor:
        """(b) int64: real tokens of the current document so far."""
        self.data  # noqa: B018 - a dead leaf has no length either
        return self._length

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]

    @property
    def batch_size(self) -> int:
        return self.length.shape[0]

    def shared_length(self) -> int | None:
        """The length of all rows where it is one and may be asked for (a host read: never while compiling)."""
        if torch.compiler.is_compiling() or not self.batch_size:
            return None
        first, last = torch.aminmax(self.length)
        return int(first) if int(first) == int(last) else None

    def nbytes(self) -> int:
        """Bytes allocated by the data (lengths not counted)."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @abstractmethod
    def used_nbytes(self) -> int:
        """Bytes that hold something: tokens seen so far, rather than capacity."""

    def tensors(self) -> dict[str, Tensor]:
        """Every data tensor of the leaf by name, snapshots included, ``length`` excluded."""
        return self.data

    # -- moves -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same leaf with ``fn`` applied to every tensor, lengths included."""

    def reorder(self, index: Tensor) -> Self:
        """Rows ``index`` (n) in that order; a repeated index gives independent copies. The old leaf stays alive."""
        return self._rebuild(lambda t: t.index_select(0, index.to(t.device)))

    def clone(self) -> Self:
        """An independent copy; gradients flow through it."""
        return self._rebuild(torch.clone)

    def snapshot(self) -> Self:
        """An independent, detached copy: what :meth:`restore` brings back however often."""
        return self._rebuild(lambda t: t.detach().clone())

    restore = clone

    def detach(self) -> Self:
        """The same memory without its graph (truncated backpropagation)."""
        return self._rebuild(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """Moved to ``device``; dtypes stay."""
        return self._rebuild(lambda t: t.to(device))

    @abstractmethod
    def crop(self, n: Tensor | int) -> Self:
        """The state before the row's last ``n`` (int or (b)) real tokens; :class:`StateError` where that was not kept."""

    # -- the end of a leaf -------------------------------------------------------------------------------------------

    def _die(self, *heirs: Tensor) -> None:
        """In debug mode: forget the data, and poison memory that no heir shares (only where no graph needs it)."""
        if not _debug or self._data is None:
            return
        alive = {t.untyped_storage().data_ptr() for t in heirs}
        if not torch.is_grad_enabled():
            for t in self._data.values():
                if t.is_floating_point() and t.untyped_storage().data_ptr() not in alive:
                    t.fill_(float("nan"))
        self._data = None


def _per_row(n: Tensor | int, length: Tensor) -> Tensor:
    n = torch.full_like(length, n) if isinstance(n, int) else n.to(length)
    if bool((n < 0).any()):
        raise StateError("crop takes a number of tokens of at least 0")
    return n


class Fixed(StateLeaf):
    """Tensors whose size does not depend on time.

    ``past`` holds, oldest first, the same tensors as they were before each of the last ``keep`` columns (b keep ...), and
    ``past_length`` (b keep) the length then; -1 marks a snapshot of another document.
    """

    def __init__(
        self, data: Mapping[str, Tensor], length: Tensor, past: Mapping[str, Tensor] | None = None,
        past_length: Tensor | None = None,
    ) -> None:
        super().__init__(data, length)
        self.past = dict(past or {})
        self.past_length = past_length

    def tensors(self) -> dict[str, Tensor]:
        return {**self.data, **{f"past.{k}": v for k, v in self.past.items()}}

    def used_nbytes(self) -> int:
        return self.nbytes()

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        past_length = None if self.past_length is None else fn(self.past_length)
        return type(self)(
            {k: fn(v) for k, v in self.data.items()}, fn(self.length), {k: fn(v) for k, v in self.past.items()}, past_length
        )

    def advance(self, data: Mapping[str, Tensor], segments: Segments | None, n_tokens: int) -> Fixed:
        """The leaf after a call of ``n_tokens`` columns that left ``data``; consumes this one."""
        length = advanced_length(self.length, segments, n_tokens)
        new = Fixed(data, length)
        self._die(*data.values(), length)
        return new

    def crop(self, n: Tensor | int) -> Self:
        n = _per_row(n, self.length)
        if not bool(n.any()):
            return self
        kept = self.past_length
        target = self.length - n
        if kept is None:
            raise StateError("a recurrent state cannot be cropped: the call that made it was not given keep")
        slots = torch.arange(kept.shape[1], device=kept.device)
        # The newest snapshot of that length: pads leave equal snapshots behind, and all of them are right.
        found = (kept == target[:, None]) & (target >= 0)[:, None]
        slot = torch.where(found, slots, torch.full_like(slots, -1)).amax(1)
        missing = (slot < 0) & (n > 0)
        if bool(missing.any()):
            row = int(missing.nonzero()[0])
            raise StateError(
                f"row {row}: cannot crop {int(n[row])} tokens; only the last {kept.shape[1]} columns of this document were kept"
            )
        rows = torch.arange(len(slot), device=slot.device)

        def pick(now: Tensor, past: Tensor) -> Tensor:
            keep_now = (n == 0).view(-1, *[1] * (now.ndim - 1))
            return torch.where(keep_now, now, past[rows, slot.clamp(min=0)])

        return type(self)({k: pick(v, self.past[k]) for k, v in self.data.items()}, target)


class Growing(StateLeaf):
    """The tokens of the row's document, compacted: slots ``0 .. length-1`` of each row are valid, the rest is unspecified.

    Without ``max_len`` the buffer grows with each call. With it the buffer has that many slots for good: under no_grad it
    is written in place (static shape and address), and a token too many raises :class:`LengthError`.
    """

    def __init__(self, data: Mapping[str, Tensor], length: Tensor, *, static: bool = False) -> None:
        super().__init__(data, length)
        self.static = static

    @classmethod
    def empty(
        cls, batch_size: int, shapes: Mapping[str, tuple[int, ...]], *, max_len: int | None = None,
        dtype: torch.dtype, device: torch.device | str,
    ) -> Growing:
        """No tokens yet. ``shapes``: the shape of one token's tensor, by name."""
        data = {k: torch.zeros(batch_size, max_len or 0, *shape, dtype=dtype, device=device) for k, shape in shapes.items()}
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        leaf = cls(data, length, static=max_len is not None)
        leaf.untouched = True
        return leaf

    @property
    def capacity(self) -> int:
        return next(iter(self.data.values())).shape[1]

    def used_nbytes(self) -> int:
        tokens = int(self.length.sum())
        return sum(tokens * t[0, :1].numel() * t.element_size() if t.shape[1] else 0 for t in self.data.values())

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self)({k: fn(v) for k, v in self.data.items()}, fn(self.length), static=self.static)

    def crop(self, n: Tensor | int) -> Self:
        n = _per_row(n, self.length)
        if bool((n > self.length).any()):
            row = int((n > self.length).nonzero()[0])
            raise StateError(f"row {row}: cannot crop {int(n[row])} tokens; its document has {int(self.length[row])} in the state")
        return type(self)(self.data, self.length - n, static=self.static)

    def valid(self) -> Tensor:
        """(b s) bool: slots that hold a token."""
        return torch.arange(self.capacity, device=self.length.device) < self.length[:, None]

    def positions(self) -> Tensor:
        """(b s) int64: the position of each slot's token in its document (only where :meth:`valid`)."""
        return torch.arange(self.capacity, device=self.length.device).expand(self.batch_size, -1)

    def append(self, new: Mapping[str, Tensor], segments: Segments | None) -> Growing:
        """Add the call's tokens (b t ...) of the row's last document, and forget the old document if it ended; consumes."""
        t = next(iter(new.values())).shape[1]
        length = advanced_length(self.length, segments, t)
        capacity = self._capacity_for(length, t)
        if self.static and not torch.is_grad_enabled() and (segments is None or t == 1):
            data = self._write_tail(new, segments)
        else:
            data = self._rewrite(new, segments, length, capacity)
        out = Growing(data, length, static=self.static)
        self._die(*data.values())
        return out

    def _capacity_for(self, length: Tensor, t: int) -> int:
        if not self.static:
            if torch.compiler.is_compiling():
                return self.capacity + t
            return int(length.max()) if len(length) else self.capacity
        if not torch.compiler.is_compiling() and len(length) and int(length.max()) > self.capacity:
            raise LengthError(f"the state was made for max_len={self.capacity} tokens; this call would reach {int(length.max())}")
        return self.capacity

    def _write_tail(self, new: Mapping[str, Tensor], segments: Segments | None) -> dict[str, Tensor]:
        t = next(iter(new.values())).shape[1]
        base = self.length
        real = None
        if segments is not None:
            base = torch.where(segments.keeps_state, self.length, torch.zeros_like(self.length))
            real = segments.real
        slot = (base[:, None] + torch.arange(t, device=base.device)).clamp(max=self.capacity - 1)
        rows = torch.arange(len(base), device=base.device)[:, None].expand_as(slot)
        for name, old in self.data.items():
            value = new[name].to(old.dtype)
            if real is not None:
                value = torch.where(real.view(*real.shape, *[1] * (old.ndim - 2)), value, old[rows, slot])
            old.index_put_((rows, slot), value)
        return dict(self.data)

    def _rewrite(
        self, new: Mapping[str, Tensor], segments: Segments | None, length: Tensor, capacity: int
    ) -> dict[str, Tensor]:
        t = next(iter(new.values())).shape[1]
        slots = torch.arange(capacity, device=length.device).expand(len(length), -1)
        source = torch.arange(t, device=length.device).expand(len(length), -1)
        start = self.length
        if segments is not None:
            # The last document's tokens first, in order; then anything: those slots lie beyond the new length.
            source = torch.argsort(~segments.in_last, dim=1, stable=True)
            start = torch.where(segments.keeps_state, self.length, torch.zeros_like(self.length))
        fresh = (slots >= start[:, None]) & (slots < length[:, None])
        index = source.gather(1, (slots - start[:, None]).clamp(0, max(t - 1, 0))) if t else torch.zeros_like(slots)
        data = {}
        for name, old in self.data.items():
            value = _gather_rows(new[name].to(old.dtype), index) if t else _resize(old, capacity)
            data[name] = torch.where(_like(fresh, value), value, _resize(old, capacity))
        if self.static and not torch.is_grad_enabled():
            return {name: old.copy_(data[name]) for name, old in self.data.items()}
        return data


class Ring(StateLeaf):
    """The last ``capacity`` tokens of the row's document, for a mixer that sees ``window`` tokens back (itself included).

    Token ``p`` of the document lies in slot ``p % capacity``; tokens from position ``oldest`` (b) on are held. A call made
    with ``keep`` leaves ``capacity >= window + keep`` slots, so that ``keep`` tokens can be cropped.
    """

    def __init__(self, data: Mapping[str, Tensor], length: Tensor, *, window: int, oldest: Tensor) -> None:
        super().__init__(data, length)
        self.window = window
        self.oldest = oldest

    @classmethod
    def empty(
        cls, batch_size: int, shapes: Mapping[str, tuple[int, ...]], *, window: int, keep: int = 0,
        dtype: torch.dtype, device: torch.device | str,
    ) -> Ring:
        """No tokens yet, with ``window + keep`` slots. ``shapes``: the shape of one token's tensor, by name."""
        data = {k: torch.zeros(batch_size, window + keep, *s, dtype=dtype, device=device) for k, s in shapes.items()}
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        leaf = cls(data, length, window=window, oldest=length.clone())
        leaf.untouched = True
        return leaf

    @property
    def capacity(self) -> int:
        return next(iter(self.data.values())).shape[1]

    def used_nbytes(self) -> int:
        tokens = int((self.length - self.oldest).sum())
        return sum(tokens * t[0, :1].numel() * t.element_size() for t in self.data.values() if t.shape[0])

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self)({k: fn(v) for k, v in self.data.items()}, fn(self.length), window=self.window, oldest=fn(self.oldest))

    def positions(self) -> Tensor:
        """(b s) int64: the position of the token in each slot; -1 where the slot holds none."""
        positions = _ring_positions(self.length, self.capacity)
        return torch.where(positions >= self.oldest[:, None], positions, torch.full_like(positions, -1))

    def valid(self) -> Tensor:
        """(b s) bool: slots that hold a token."""
        return self.positions() >= 0

    def crop(self, n: Tensor | int) -> Self:
        n = _per_row(n, self.length)
        left = self.length - n
        short = (n > 0) & ((left < 0) | ((left - self.window + 1).clamp(min=0) < self.oldest))
        if bool(short.any()):
            row = int(short.nonzero()[0])
            held = int(self.length[row] - self.oldest[row])
            raise StateError(
                f"row {row}: cannot crop {int(n[row])} tokens; a window of {self.window} with {held} tokens held allows "
                f"{max(held - self.window + 1, 0) if int(self.oldest[row]) else held}"
            )
        return type(self)(self.data, left, window=self.window, oldest=torch.minimum(self.oldest, left))

    def push(self, new: Mapping[str, Tensor], segments: Segments | None, *, keep: int = 0) -> Ring:
        """Add the call's tokens (b t ...) of the row's last document and keep the last ``window + keep``; consumes."""
        t = next(iter(new.values())).shape[1]
        length = advanced_length(self.length, segments, t)
        ring = self if self.capacity >= self.window + keep else self._widen(self.window + keep)
        source = torch.arange(t, device=length.device).expand(len(length), -1)
        start, oldest = ring.length, ring.oldest
        if segments is not None:
            source = torch.argsort(~segments.in_last, dim=1, stable=True)
            start = torch.where(segments.keeps_state, start, torch.zeros_like(start))
            oldest = torch.where(segments.keeps_state, oldest, torch.zeros_like(oldest))
        oldest = torch.maximum(oldest, length - ring.capacity)
        wanted = _ring_positions(length, ring.capacity)
        fresh = (wanted >= start[:, None]) & (wanted >= 0)
        data = ring.data
        if t:
            index = source.gather(1, (wanted - start[:, None]).clamp(0, t - 1))
            data = {k: torch.where(_like(fresh, old), _gather_rows(new[k].to(old.dtype), index), old) for k, old in data.items()}
            if not torch.is_grad_enabled():
                data = {k: old.copy_(data[k]) for k, old in ring.data.items()}
        out = Ring(data, length, window=self.window, oldest=oldest)
        self._die(*data.values())
        return out

    def _widen(self, capacity: int) -> Ring:
        wanted = _ring_positions(self.length, capacity)
        held = wanted >= self.oldest[:, None]
        index = wanted.clamp(min=0) % self.capacity
        data = {}
        for name, old in self.data.items():
            value = _gather_rows(old, index)
            data[name] = torch.where(_like(held, value), value, torch.zeros_like(value))
        return Ring(data, self.length, window=self.window, oldest=self.oldest)


def advanced_length(length: Tensor, segments: Segments | None, n_tokens: int) -> Tensor:
    """(b) int64: the length after a call of ``n_tokens`` columns (all real, one document, where ``segments`` is None)."""
    return length + n_tokens if segments is None else segments.new_length(length)


def _ring_positions(length: Tensor, capacity: int) -> Tensor:
    slots = torch.arange(capacity, device=length.device)
    last = length[:, None] - 1
    positions = last - torch.remainder(last - slots, capacity)
    return torch.where(length[:, None] > 0, positions, torch.full_like(positions, -1))


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (value.ndim - mask.ndim))


def _gather_rows(value: Tensor, index: Tensor) -> Tensor:
    return value[torch.arange(len(index), device=index.device)[:, None], index]


def _resize(value: Tensor, capacity: int) -> Tensor:
    if value.shape[1] >= capacity:
        return value[:, :capacity]
    pad = value.new_zeros(value.shape[0], capacity - value.shape[1], *value.shape[2:])
    return torch.cat([value, pad], dim=1)


# -- whole states ----------------------------------------------------------------------------------------------------


def _is_leaf(x: Any) -> bool:
    return isinstance(x, StateLeaf)


def leaves(state: State) -> list[StateLeaf]:
    """The leaves of a state, in order."""
    return [x for x in pytree.tree_leaves(state, is_leaf=_is_leaf) if isinstance(x, StateLeaf)]


def map_state(fn: Callable[[StateLeaf], StateLeaf], state: State) -> State:
    """``fn`` on every leaf; the nesting stays."""
    return pytree.tree_map(lambda x: fn(x) if isinstance(x, StateLeaf) else x, state, is_leaf=_is_leaf)


def reorder(state: State, index: Tensor) -> State:
    """Rows ``index`` of every leaf (beams, finished rows)."""
    return map_state(lambda leaf: leaf.reorder(index), state)


def crop(state: State, n: Tensor | int) -> State:
    """The state before each row's last ``n`` real tokens; raises :class:`StateError` where a leaf kept too little."""
    return map_state(lambda leaf: leaf.crop(n), state)


def snapshot(state: State) -> State:
    """An independent, detached copy of a state (prefix reuse)."""
    return map_state(lambda leaf: leaf.snapshot(), state)


def restore(state: State) -> State:
    """A usable copy of a snapshot, which stays whole."""
    return map_state(lambda leaf: leaf.restore(), state)


def detach(state: State) -> State:
    """The state without its graph."""
    return map_state(lambda leaf: leaf.detach(), state)


def state_bytes(state: State, *, used: bool = False) -> int:
    """Bytes of all leaves: allocated, or only what holds tokens (``used``)."""
    return sum(leaf.used_nbytes() if used else leaf.nbytes() for leaf in leaves(state))


def state_lengths(state: State) -> Tensor | None:
    """(b) int64: tokens of each row's document, which every leaf must agree on; None for a state without leaves."""
    found = leaves(state)
    for leaf in found[1:]:
        if not torch.equal(leaf.length, found[0].length):
            raise StateError(f"leaves of one state disagree on its length: {found[0].length.tolist()} and {leaf.length.tolist()}")
    return found[0].length if found else None
