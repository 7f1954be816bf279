"""``Fixed``: tensors whose size does not depend on time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.core.states.leaf import StateLeaf, advanced_length, check_rows, per_row, refuse


class Fixed(StateLeaf):
    """Tensors whose size does not depend on time.

    ``past`` holds, oldest first, the same tensors as they were before each of the last ``keep`` columns (b keep ...), and
    ``past_length`` (b keep) the length then; -1 marks a snapshot of another document. ``constant`` tensors belong to the
    state and never change with time (what cross-attention projected once): they are moved and counted, not snapshotted.
    """

    def __init__(
        self, data: Mapping[str, Tensor], length: Tensor, past: Mapping[str, Tensor] | None = None,
        past_length: Tensor | None = None, *, constant: Mapping[str, Tensor] | None = None, max_len: int | None = None,
    ) -> None:
        super().__init__(data, length, max_len=max_len)
        self.past = dict(past or {})
        self.past_length = past_length
        self.constant = dict(constant or {})

    @classmethod
    def empty(
        cls, batch_size: int, shapes: Mapping[str, tuple[int, ...]], *, max_len: int | None = None, dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """No tokens yet, all zero. ``shapes``: the shape of one row's tensor, by name."""
        data = {k: torch.zeros(batch_size, *shape, dtype=dtype, device=device) for k, shape in shapes.items()}
        return cls(data, torch.zeros(batch_size, dtype=torch.int64, device=device), max_len=max_len).knowing(0)

    def __getitem__(self, name: str) -> Tensor:
        data = self.data
        return data[name] if name in data else self.constant[name]

    def tensors(self) -> dict[str, Tensor]:
        return {**self.data, **self.constant, **{f"past.{k}": v for k, v in self.past.items()}}

    def used_nbytes(self) -> int:
        return self.nbytes()

    def _rebuild(self, fn: Callable[[Tensor], Tensor]) -> Self:
        past_length = None if self.past_length is None else fn(self.past_length)
        data, past, constant = ({k: fn(v) for k, v in part.items()} for part in (self.data, self.past, self.constant))
        return type(self)(data, fn(self.length), past, past_length, constant=constant, max_len=self.max_len)

    def advance(
        self, data: Mapping[str, Tensor], segments: Segments | None, n_tokens: int, *,
        past: Mapping[str, Tensor] | None = None, past_length: Tensor | None = None,
    ) -> Self:
        """The leaf after a call of ``n_tokens`` columns that left ``data``; consumes this one.

        ``past`` and ``past_length``: snapshots, from an op that returns its states token by token; see the class.
        """
        check_rows(self.length, data)
        length = advanced_length(self.length, segments, n_tokens)
        new = type(self)(data, length, past, past_length, constant=self.constant, max_len=self.max_len)
        known = self.known_length() if segments is None else None
        new.knowing(None if known is None else known + n_tokens)
        self._die(*data.values(), *self.constant.values())
        return new

    def form_of(self, others: Sequence[Self]) -> Self:
        width = max(0 if leaf.past_length is None else leaf.past_length.shape[1] for leaf in (self, *others))
        held = 0 if self.past_length is None else self.past_length.shape[1]
        kept_by_some = any(leaf.past_length is not None for leaf in (self, *others))
        if not kept_by_some or (self.past_length is not None and held == width):
            return self
        b, spare = self.batch_size, width - held
        # Snapshots that are not there go in front, as the oldest, and are marked as of another document.
        none = self.length.new_full((b, spare), -1)
        length = none if self.past_length is None else torch.cat([none, self.past_length], dim=1)
        past = {}
        for name, now in self.data.items():
            empty = now.new_zeros(b, spare, *now.shape[1:])
            past[name] = torch.cat([empty, self.past[name]], dim=1) if name in self.past else empty
        return type(self)(self.data, self.length, past, length, constant=self.constant, max_len=self.max_len)

    def crop_refusal(self, n: Tensor | int) -> str | None:
        n = per_row(n, self.length)
        if self.past_length is None:
            kept = "a recurrent state cannot be cropped: the call that made it was not given keep"
            return kept if bool(n.any()) else None
        missing = (self._slots(n) < 0) & (n > 0)
        if not bool(missing.any()):
            return None
        row = int(missing.nonzero()[0])
        width = self.past_length.shape[1]
        return f"row {row}: cannot crop {int(n[row])} tokens; only the last {width} columns of this document were kept"

    def _slots(self, n: Tensor) -> Tensor:
        """(b) the newest snapshot from before the last ``n`` tokens, -1 where there is none."""
        kept, target = self.past_length, self.length - n
        if kept is None or not kept.shape[1]:
            return torch.full_like(n, -1)
        # Pads leave equal snapshots behind, and all of them are right.
        found = (kept == target[:, None]) & (target >= 0)[:, None]
        return torch.where(found, torch.arange(kept.shape[1], device=kept.device), -1).amax(1)

    def crop(self, n: Tensor | int) -> Self:
        refuse(self.crop_refusal(n))
        n = per_row(n, self.length)
        slot, rows = self._slots(n), torch.arange(len(n), device=n.device)
        kept = None if self.past_length is None or not self.past_length.shape[1] else self.past_length

        def pick(now: Tensor, past: Tensor) -> Tensor:
            keep_now = (n == 0).view(-1, *[1] * (now.ndim - 1))
            return torch.where(keep_now, now, past[rows, slot.clamp(min=0)])

        data = {k: v if kept is None else pick(v, self.past[k]) for k, v in self.data.items()}
        if kept is not None:
            slots = torch.arange(kept.shape[1], device=kept.device)
            kept = torch.where((n == 0)[:, None] | (slots < slot[:, None]), kept, -1)
        new = type(self)(data, self.length - n, self.past, kept, constant=self.constant, max_len=self.max_len)
        self._die(*data.values(), *self.past.values(), *self.constant.values())
        return new


class ConvWindow(Fixed):
    """The last inputs of a short convolution. A class of its own so that its bytes are told apart from a recurrence's."""
