"""Which document each token belongs to: the only way padding and packing are said in hybridtf.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar, overload

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError

T = TypeVar("T")


class derived(Generic[T]):
    """A property that is computed once an object. Unlike ``functools.cached_property`` it takes no lock on Python 3.11,
    which ``torch.compile`` cannot trace.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> T | Self:
        if owner is None:
            return self
        value = self.make(owner)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # A tensor made here could never be saved for a backward: not kept, so that the object stays of use.
            return value
        object.__setattr__(owner, self.name, value)
        return value


@dataclass(frozen=True, eq=False)
class Segments:
    """Documents of a batch of rows, for one call.

    ``ids`` (b t, int64): 0 is padding; real ids do not decrease along a row. An equal id on both sides of a pad is the
    same document. Ids mean nothing across calls.
    ``continues`` (b, bool): the first real token of the row belongs to the document that the incoming state holds; the
    constructors' default, as for a call without segments. Where it is False, the row forgets that state. Without an
    incoming state it has no effect.
    ``prefix_len`` (b t, int64): how many leading tokens of this token's document see each other both ways (prefix LM).
    ``global_tokens`` (b t, bool): tokens that every token of their document sees (Longformer).
    ``axes``: extra integer position axes by name, each (b t) (M-RoPE).

    A row of pads alone leaves its state untouched. Everything below ``ids`` and ``continues`` is derived once and shared
    by all layers of a model.
    """

    ids: Tensor
    continues: Tensor
    prefix_len: Tensor | None = None
    global_tokens: Tensor | None = None
    axes: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.dtype != torch.int64:
            raise ConfigError(f"segments.ids must be int64 of shape (b, t); got {self.ids.dtype} {tuple(self.ids.shape)}")
        if self.continues.shape != self.ids.shape[:1] or self.continues.dtype != torch.bool:
            raise ConfigError(
                f"segments.continues must be bool of shape ({self.ids.shape[0]},); "
                f"got {self.continues.dtype} {tuple(self.continues.shape)}"
            )
        extra = {"prefix_len": self.prefix_len, "global_tokens": self.global_tokens, **self.axes}
        for name, value in extra.items():
            if value is not None and value.shape != self.ids.shape:
                shape = tuple(self.ids.shape)
                raise ConfigError(f"segments.{name} must have the shape of ids {shape}; got {tuple(value.shape)}")

    # -- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def from_ids(cls, ids: Tensor, *, continues: Tensor | bool = True, **more: Tensor) -> Segments:
        """From document ids (b t), 0 for padding; checks that real ids never decrease along a row."""
        ids = ids.to(torch.int64)
        seen = torch.where(ids > 0, ids, torch.zeros_like(ids)).cummax(1).values
        if bool(((ids > 0) & (ids < seen)).any()) or bool((ids < 0).any()):
            raise ConfigError("segments: ids must be 0 (padding) or positive, and must not decrease along a row")
        return cls(ids, _continues(continues, ids), **more)  # type: ignore[arg-type]

    @classmethod
    def from_mask(cls, mask: Tensor, *, continues: Tensor | bool = True) -> Segments:
        """One document per row from a padding mask (b t), nonzero where a token is real. Pads may be anywhere."""
        ids = (mask != 0).to(torch.int64)
        return cls(ids, _continues(continues, ids))

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], *, width: int | None = None, continues: Tensor | bool = True,
        device: torch.device | str | None = None,
    ) -> Segments:
        """Documents packed from the left of each row, by length; the rest of the row is padding. Length 0 is allowed."""
        width = max((sum(row) for row in lengths if min(row, default=0) >= 0), default=0) if width is None else width
        ids = torch.zeros(len(lengths), width, dtype=torch.int64, device=device)
        for i, row in enumerate(lengths):
            at = 0
            for j, n in enumerate(row):
                if n < 0 or at + n > width:
                    raise ConfigError(f"segments: lengths {list(row)} of row {i} do not fit in {width} tokens")
                ids[i, at : at + n] = j + 1
                at += n
        return cls(ids, _continues(continues, ids))

    @classmethod
    def from_positions(cls, positions: Tensor) -> Segments:
        """Documents from position ids (b t) that restart at 0 wherever a document starts (no padding).

        A row that does not start at 0 continues the incoming state's document.
        """
        starts = (positions == 0).to(torch.int64)
        starts[:, :1] = 1
        continues = (positions[:, :1] != 0).any(1) if positions.shape[1] else _continues(True, positions)
        return cls(starts.cumsum(1), continues)

    # -- derived -----------------------------------------------------------------------------------------------------

    @derived
    def real(self) -> Tensor:
        """(b t) bool: not padding."""
        return self.ids > 0

    @derived
    def effective(self) -> Tensor:
        """(b t) int64: ``ids`` with each pad given the id of the last real token before it, or ``carried`` before any."""
        seen = torch.where(self.real, self.ids, torch.zeros_like(self.ids)).cummax(1).values if self.ids.shape[1] else self.ids
        return torch.where(seen > 0, seen, self.carried[:, None])

    @derived
    def first_id(self) -> Tensor:
        """(b) int64: id of the row's first real token, 0 for a row of pads alone."""
        if self.ids.shape[1] == 0:
            return torch.zeros_like(self.continues, dtype=torch.int64)
        big = torch.iinfo(torch.int64).max
        first = torch.where(self.real, self.ids, torch.full_like(self.ids, big)).amin(1)
        return torch.where(first == big, torch.zeros_like(first), first)

    @derived
    def last_id(self) -> Tensor:
        """(b) int64: id of the row's last real token, 0 for a row of pads alone."""
        if self.ids.shape[1] == 0:
            return torch.zeros_like(self.continues, dtype=torch.int64)
        return self.ids.amax(1)

    @derived
    def carried(self) -> Tensor:
        """(b) int64: the id under which the incoming state's document runs in this call; -1 if it has no token here."""
        return torch.where(self.continues & (self.first_id > 0), self.first_id, torch.full_like(self.first_id, -1))

    @derived
    def keeps_state(self) -> Tensor:
        """(b) bool: the outgoing state's document is the incoming one (continued to the end, or the row is all pads)."""
        return (self.last_id == 0) | (self.last_id == self.carried)

    @derived
    def starts(self) -> Tensor:
        """(b t) bool: a real token that begins a document which the incoming state does not hold."""
        before = self.effective.roll(1, dims=1)
        if before.shape[1]:
            before = torch.cat([self.carried[:, None], before[:, 1:]], dim=1)
        return self.real & (self.ids != before)

    @derived
    def position(self) -> Tensor:
        """(b t) int64: how many real tokens of the same document come earlier in this call (at a pad: unspecified)."""
        count = self.real.to(torch.int64).cumsum(1) - self.real.to(torch.int64)
        new = self.real & (self.ids != torch.cat([torch.zeros_like(self.ids[:, :1]), self.effective[:, :-1]], dim=1))
        base = torch.where(new, count, torch.zeros_like(count)).cummax(1).values if count.shape[1] else count
        return count - base

    @derived
    def in_last(self) -> Tensor:
        """(b t) bool: real tokens of the row's last document, the one the outgoing state belongs to."""
        return self.real & (self.ids == self.last_id[:, None])

    def positions(self, length: Tensor | None = None) -> Tensor:
        """(b t) int64: position of each token in its document, counting ``length`` (b) earlier tokens of the carried one."""
        if length is None:
            return self.position
        return self.position + torch.where(self.ids == self.carried[:, None], length[:, None], torch.zeros_like(self.ids))

    def new_length(self, length: Tensor) -> Tensor:
        """(b) int64: tokens of the outgoing state's document, given the incoming ``length`` (b)."""
        return torch.where(self.keeps_state, length, torch.zeros_like(length)) + self.in_last.sum(1)

    def document_length(self, length: Tensor | None = None) -> Tensor:
        """(b t) int64: tokens that the token's document has at the end of the call, counting ``length`` (b) earlier ones of
        the carried one (at a pad: unspecified)."""
        t = self.ids.shape[1]
        if not t:
            return self.ids
        # A document's last real token has its largest position: each token looks up the next real token of another id.
        steps = torch.arange(t, device=self.ids.device)
        big = torch.full_like(self.ids, torch.iinfo(torch.int64).max)
        after = torch.where(self.real, self.ids, big).flip(1).cummin(1).values.flip(1)
        after = torch.cat([after[:, 1:], big[:, :1]], dim=1)
        ends = torch.where(self.real & (after != self.ids), steps, t - 1)
        end = ends.flip(1).cummin(1).values.flip(1)
        return self.positions(length).gather(1, end) + 1

    # -- views -------------------------------------------------------------------------------------------------------

    def narrow(self, start: int, stop: int) -> Segments:
        """The same documents for columns ``start:stop``, as the call that follows the columns before ``start``."""
        part = slice(start, stop)
        before = self.effective[:, start - 1] if start else self.carried
        ids = self.ids[:, part]
        continues = self.continues
        if start:
            cut = replace(self, ids=ids, prefix_len=None, global_tokens=None, axes={})
            continues = (cut.first_id == before) & (before > 0)
        return Segments(
            ids, continues,
            None if self.prefix_len is None else self.prefix_len[:, part],
            None if self.global_tokens is None else self.global_tokens[:, part],
            {name: axis[:, part] for name, axis in self.axes.items()},
        )

    def rows(self, index: Tensor) -> Segments:
        """The same for the rows of ``index``, in its order."""
        return Segments(
            self.ids[index], self.continues[index],
            None if self.prefix_len is None else self.prefix_len[index],
            None if self.global_tokens is None else self.global_tokens[index],
            {name: axis[index] for name, axis in self.axes.items()},
        )

    def to(self, device: torch.device | str) -> Segments:
        """Moved to ``device``."""
        return Segments(
            self.ids.to(device), self.continues.to(device),
            None if self.prefix_len is None else self.prefix_len.to(device),
            None if self.global_tokens is None else self.global_tokens.to(device),
            {name: axis.to(device) for name, axis in self.axes.items()},
        )


def _continues(value: Tensor | bool, ids: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((ids.shape[0],), value, dtype=torch.bool, device=ids.device)
