"""What all state leaves share: named tensors, a length per row, and the moves a caller needs.

Axes: b batch, s slots, t time.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Self

import torch
from torch import Tensor

from hybridtf.core.errors import RowsError, StateError
from hybridtf.core.segments import Segments

_debug = os.environ.get("HYBRIDTF_DEBUG", "") not in ("", "0")


@contextmanager
def debug_states(on: bool = True) -> Iterator[None]:
    """Inside, a consumed state raises :class:`StateError` when read, and buffers that only it held turn to NaN."""
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

    _own_buffers: bool = False
    """The data were made by this class and belong to no parameter or caller: debug mode may poison them."""

    def __init__(self, data: Mapping[str, Tensor], length: Tensor, *, max_len: int | None = None) -> None:
        self._data: dict[str, Tensor] | None = dict(data)
        self._length = length
        self._shared: int | Literal["unequal"] | None = None  # None: not read yet
        self.max_len = max_len
        """What ``init_state`` was given: the length declared for the documents, which every move keeps. None: none was."""

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

    def __repr__(self) -> str:
        if self._data is None:
            return f"{type(self).__name__}(consumed)"
        shapes = ", ".join(f"{name}={list(t.shape)}" for name, t in self._data.items())
        return f"{type(self).__name__}({shapes}, length={self._length.tolist()})"

    @property
    def batch_size(self) -> int:
        return self._length.size(0)

    def shared_length(self) -> int | None:
        """The length of all rows where it is one and may be asked for: never while a graph is made, which would keep it. What
        a call leaves knows it from what it was given, so that decoding reads no device. Who writes lengths in place says so
        (:meth:`was_written`)."""
        if torch.compiler.is_compiling() or not self.batch_size or (self._length.is_cuda and _captured()):
            return None
        if self._shared is None:
            self._shared = self._read_shared()
        return self._shared if isinstance(self._shared, int) else None

    def known_length(self) -> int | None:
        """:meth:`shared_length` where nothing has to be read for it, else None."""
        known = not torch.compiler.is_compiling() and (self.untouched or isinstance(self._shared, int))
        return self.shared_length() if known else None

    def _read_shared(self) -> int | Literal["unequal"]:
        if self.untouched:
            return 0
        if self.batch_size == 1:
            return int(self.length)
        first, last = torch.stack(torch.aminmax(self.length)).tolist()  # one wait for a device
        return int(first) if first == last else "unequal"

    def was_written(self) -> None:
        """Told by who wrote over its tensors in place: the leaf forgets what it knew of them."""
        self._shared = None
        if self.untouched:
            self.untouched = False

    def knowing(self, length: int | None) -> Self:
        """This leaf, told the length of all its rows by what made it; None: it is to be read."""
        self._shared = length
        return self

    def nbytes(self) -> int:
        """Bytes allocated by the data (lengths not counted)."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @abstractmethod
    def used_nbytes(self) -> int:
        """Bytes that hold something: tokens seen so far, rather than capacity."""

    def tensors(self) -> dict[str, Tensor]:
        """Every data tensor of the leaf by name, snapshots included, ``length`` excluded."""
        return self.data

    def every_tensor(self) -> list[Tensor]:
        """All that the leaf holds, lengths and counts included, in an order that leaves of one form share."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._rebuild(note)
        return found

    # -- moves -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same leaf with ``fn`` applied to every tensor, lengths included."""

    def reorder(self, index: Tensor) -> Self:
        """Rows ``index`` (n) in that order; a repeated index gives independent copies. The old leaf stays alive."""
        def rows(tensor: Tensor) -> Tensor:
            return in_memory_order(lambda parts: parts[0].index_select(0, index.to(tensor.device)), (tensor,))

        return self._rebuild(rows).knowing(self.known_length())

    def clone(self) -> Self:
        """An independent copy; gradients flow through it."""
        return self._rebuild(torch.clone).knowing(self.known_length())

    def snapshot(self) -> Self:
        """An independent, detached copy: what :meth:`restore` brings back however often."""
        return self._rebuild(lambda t: t.detach().clone()).knowing(self.known_length())

    restore = clone

    def detach(self) -> Self:
        """The same memory without its graph (truncated backpropagation); consumes this leaf."""
        new = self._rebuild(torch.Tensor.detach).knowing(self.known_length())
        self._die(*new.data.values())
        return new

    def to(self, device: torch.device | str) -> Self:
        """Moved to ``device``; dtypes stay."""
        return self._rebuild(lambda t: t.to(device)).knowing(self.known_length())

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """The same leaf over other tensors, in the order of :meth:`every_tensor`."""
        following = iter(tensors)
        return self._rebuild(lambda _: next(following))

    @abstractmethod
    def form_of(self, others: Sequence[Self]) -> Self:
        """This leaf in a form (slots, snapshots) that holds what the others hold, so that their rows go side by side.

        Raises :class:`StateError` where there is none.
        """

    @abstractmethod
    def crop_refusal(self, n: Tensor | int) -> str | None:
        """Why :meth:`crop` cannot take back ``n`` tokens; None if it can."""

    @abstractmethod
    def crop(self, n: Tensor | int) -> Self:
        """The state before the row's last ``n`` (int or (b)) real tokens; consumes this leaf, whose memory it may share.

        Raises :class:`StateError` where that was not kept, and then leaves the state whole.
        """

    # -- the end of a leaf -------------------------------------------------------------------------------------------

    def _die(self, *heirs: Tensor) -> None:
        """In debug mode: forget the data, and poison own buffers that no heir shares (where no graph needs them)."""
        if not _debug or self._data is None or torch.compiler.is_compiling():
            return
        if self._own_buffers and not torch.is_grad_enabled():
            alive = {t.untyped_storage().data_ptr() for t in heirs}
            for t in self._data.values():
                if t.is_floating_point() and not t.requires_grad and t.untyped_storage().data_ptr() not in alive:
                    t.fill_(float("nan"))
        self._data = None


def _captured() -> bool:
    """A CUDA graph is being recorded: what the host reads now would be read once and for all."""
    return torch.cuda.is_current_stream_capturing()


def refuse(reason: str | None) -> None:
    """Raise :class:`StateError` with a reason, if there is one."""
    if reason is not None:
        raise StateError(reason)


def per_row(n: Tensor | int, length: Tensor) -> Tensor:
    n = torch.full_like(length, n) if isinstance(n, int) else n.to(length)
    if bool((n < 0).any()):
        raise StateError("crop takes a number of tokens of at least 0")
    return n


def check_rows(length: Tensor, given: Mapping[str, Tensor]) -> None:
    """Raise :class:`RowsError` where a tensor ``given`` to a leaf of ``length`` (b) has other rows: one would be broadcast."""
    b = length.size(0)
    for name, value in given.items():
        if value.size(0) != b:
            raise RowsError(f"this state has {b} rows; it was given {value.size(0)} of {name!r}, and must be given {b}")


def advanced_length(length: Tensor, segments: Segments | None, n_tokens: int) -> Tensor:
    """(b) int64: the length after a call of ``n_tokens`` columns (all real, one document, where ``segments`` is None)."""
    return length + n_tokens if segments is None else segments.new_length(length)


def ring_positions(length: Tensor, capacity: int) -> Tensor:
    slots = torch.arange(capacity, device=length.device)
    last = length[:, None] - 1
    positions = last - torch.remainder(last - slots, capacity)
    return torch.where(length[:, None] > 0, positions, torch.full_like(positions, -1))


def like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (value.ndim - mask.ndim))


def gather_rows(value: Tensor, index: Tensor) -> Tensor:
    return value[torch.arange(len(index), device=index.device)[:, None], index]


def empty_slots(
    batch_size: int, slots: int, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """(b s ...) zeros; where a token has heads (h ...), each head's slots lie side by side in memory, so that a query reads
    its keys in one run: with 16 heads and 2048 tokens twice as fast as keys that are strewn among other heads'."""
    if len(shape) < 2:
        return torch.zeros(batch_size, slots, *shape, dtype=dtype, device=device)
    return torch.zeros(batch_size, shape[0], slots, *shape[1:], dtype=dtype, device=device).transpose(1, 2)


def in_memory_order(fn: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """``fn`` of tensors (b s ...), which works on rows alone, with what is side by side in memory kept so."""
    swapped = all(t.ndim > 3 and t.stride(2) > t.stride(1) for t in tensors)
    out = fn([t.transpose(1, 2) for t in tensors] if swapped else tensors)
    return out.transpose(1, 2) if swapped else out


def resize(value: Tensor, capacity: int) -> Tensor:
    b, slots, *shape = value.shape
    if slots >= capacity:
        return value[:, :capacity]
    wide = empty_slots(b, capacity, tuple(shape), dtype=value.dtype, device=value.device)
    return torch.slice_scatter(wide, value, 1, 0, slots)
