"""The training stream of text: every token once an epoch, rows in a new order each time, exactly resumable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from hybridtf.core.errors import CheckpointError, ConfigError
from hybridtf.tasks.base import Batch, Stream
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.draws import shuffled
from hybridtf.tasks.packing import Pieces, fill, pack, training_pieces

Packing: TypeAlias = Literal["packed", "whole"]

# What a word drawn from a key is for; part of the key, so that no two draws are the same.
_CUTS, _PIECES, _ROWS = 0, 1, 2


class TextStream(Stream):
    """Batches of ``batch_size`` rows of ``seq_len`` tokens for this rank.

    The rows of an epoch follow from (documents, ``seq_len``, ``packing``, ``seed``, epoch). All ranks walk the one
    list: a step takes the next ``batch_size * world_size`` rows, rank r the r-th ``batch_size`` of them, and the next
    epoch's list follows without a gap. The state counts rows of all ranks, so a run may resume on another number of
    ranks or with another batch size.
    """

    def __init__(
        self, documents: Documents, bos_id: int, *, batch_size: int, seq_len: int, packing: Packing = "packed",
        seed: int = 0, rank: int = 0, world_size: int = 1,
    ) -> None:
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        self._documents = documents
        self._bos_id = bos_id
        self._batch_size, self._seq_len, self._packing, self._seed = batch_size, seq_len, packing, seed
        self._rank, self._world_size = rank, world_size
        self._epoch = 0
        self._row = 0
        self._plan = self._epoch_plan(0)

    @property
    def epoch(self) -> int:
        """Epochs begun before this one."""
        return self._epoch

    @property
    def rows_in_epoch(self) -> int:
        """Rows that this epoch has, over all ranks; cuts differ, so it may change a little between epochs."""
        return len(self._plan[1])

    def __next__(self) -> Batch:
        everyone = self._batch_size * self._world_size
        mine = range(self._rank * self._batch_size, (self._rank + 1) * self._batch_size)
        parts: list[tuple[Pieces, list[list[int]]]] = []
        taken = 0
        while taken < everyone:
            pieces, rows = self._plan
            if self._row == len(rows):
                self._epoch, self._row = self._epoch + 1, 0
                self._plan = pieces, rows = self._epoch_plan(self._epoch)
            n = min(everyone - taken, len(rows) - self._row)
            parts.append((pieces, [rows[self._row + i] for i in range(n) if taken + i in mine]))
            taken += n
            self._row += n
        pieces, row_lists = _merge(parts)
        return fill(self._documents, pieces, row_lists, self._seq_len, self._bos_id)

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self._epoch, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, mine in self._identity().items():
            if key not in state:
                raise CheckpointError(f"data stream: the state has no {key!r}; it is not the state of a text stream")
            if state[key] != mine:
                raise CheckpointError(f"data stream: the state is of {key} = {state[key]!r}, this stream has {mine!r}")
        epoch, row = state.get("epoch"), state.get("row")
        if not isinstance(epoch, int) or not isinstance(row, int) or epoch < 0:
            raise CheckpointError(f"data stream: epoch = {epoch!r}, row = {row!r} is not a place in it")
        plan = self._plan if epoch == self._epoch else self._epoch_plan(epoch)
        if not 0 <= row <= len(plan[1]):
            raise CheckpointError(f"data stream: epoch {epoch} has {len(plan[1])} rows, the state is at row {row}")
        self._epoch, self._row, self._plan = epoch, row, plan

    def _identity(self) -> dict[str, Any]:
        return {
            "documents": self._documents.fingerprint, "seq_len": self._seq_len, "packing": self._packing,
            "seed": self._seed,
        }

    def _epoch_plan(self, epoch: int) -> tuple[Pieces, list[list[int]]]:
        pieces = training_pieces(self._documents.lengths, self._seq_len, (self._seed, epoch, _CUTS))
        order = shuffled((self._seed, epoch, _PIECES), len(pieces))
        pieces = Pieces(pieces.document[order], pieces.start[order], pieces.stop[order], pieces.score[order])
        rows = pack(pieces.length, self._seq_len) if self._packing == "packed" else [[i] for i in range(len(pieces))]
        return pieces, [rows[i] for i in shuffled((self._seed, epoch, _ROWS), len(rows))]


def _merge(parts: list[tuple[Pieces, list[list[int]]]]) -> tuple[Pieces, list[list[int]]]:
    """Rows of several plans (the end of one epoch and the start of the next) as rows of one."""
    parts = [part for part in parts if part[1]]
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(pieces) for pieces, _ in parts[:-1])]).tolist()
    columns = ("document", "start", "stop", "score")
    merged = Pieces(*(np.concatenate([getattr(pieces, c) for pieces, _ in parts]) for c in columns))
    rows = [[i + shift for i in row] for shift, (_, part) in zip(shifts, parts, strict=True) for row in part]
    return merged, rows


def check_sizes(*, batch_size: int, seq_len: int, rank: int, world_size: int) -> None:
    """Raise :class:`ConfigError` for sizes that make no batch."""
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be from 0 to {world_size - 1}, got {rank}")
