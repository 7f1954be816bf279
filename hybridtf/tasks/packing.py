"""Documents into rows: pieces of documents, which pieces share a row, and the batch that a set of rows is.

A document of n tokens is n questions: its first token after ``bos``, every other after the one before it. A piece is a
run of them, ``start:stop``, of which those from ``score`` on are scored. A piece is a document of its own for the
model: it begins with the token before it as input, and sees nothing else of its row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hybridtf.core import Segments
from hybridtf.tasks.base import IGNORE, Batch
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.draws import hashed

Longs: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parallel arrays, one entry a piece: the document's index, its tokens ``start:stop``, the first scored one."""

    document: Longs
    start: Longs
    stop: Longs
    score: Longs

    def __len__(self) -> int:
        return len(self.document)

    @property
    def length(self) -> Longs:
        return self.stop - self.start


def training_pieces(lengths: Longs, seq_len: int, key: tuple[int, ...]) -> Pieces:
    """Every token once: a document that fits is one piece; a longer one is cut, the first cut at a random place.

    The place is drawn anew with ``key`` (the epoch), so that over the epochs a token follows all lengths of context.
    """
    first = 1 + (hashed(key, len(lengths)) % np.uint64(seq_len)).astype(np.int64)
    first = np.where(lengths <= seq_len, lengths, first)
    count = 1 + -(-(lengths - first) // seq_len)
    document = np.repeat(np.arange(len(lengths)), count)
    k = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    stop = np.minimum(first[document] + k * seq_len, lengths[document])
    start = np.where(k == 0, 0, first[document] + (k - 1) * seq_len)
    return Pieces(document, start, stop, start)


def evaluation_pieces(lengths: Longs, seq_len: int, stride: int) -> Pieces:
    """Overlapping windows that score every token once, each after as much context as the stride leaves.

    A window moves by ``stride`` and scores what no earlier one has; the last one ends with its document, and is full.
    After a document's first window a token has at least ``seq_len - stride`` tokens of context in its window.
    """
    count = 1 + -(-np.maximum(lengths - seq_len, 0) // stride)
    document = np.repeat(np.arange(len(lengths)), count)
    k = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    total = lengths[document]
    stop = np.minimum(seq_len + k * stride, total)
    start = np.maximum(stop - seq_len, 0)
    score = np.where(k == 0, 0, seq_len + (k - 1) * stride)
    return Pieces(document, start, stop, score)


def pack(lengths: Longs, seq_len: int) -> list[list[int]]:
    """Which pieces share a row: best fit, longest first (pieces of equal length in their order), none is cut.

    ``lengths`` are at most ``seq_len``. Full pieces make rows of their own and cost no search.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # room sizes that some row has, ascending
    rows_with: dict[int, list[int]] = {}
    for piece in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[piece])
        at = bisect_left(rooms, need)
        if at == len(rooms):
            row, room = len(rows), seq_len
            rows.append([])
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms.pop(at)
        rows[row].append(piece)
        room -= need
        if room:
            if not rows_with.setdefault(room, []):
                insort(rooms, room)
            rows_with[room].append(row)
    return rows


def fill(documents: Documents, pieces: Pieces, rows: Sequence[Sequence[int]], seq_len: int, bos_id: int) -> Batch:
    """The batch of ``rows``, each a list of pieces, padded on the right to ``seq_len``. An empty row is all padding."""
    inputs = np.zeros((len(rows), seq_len), dtype=np.int64)
    targets = np.full((len(rows), seq_len), IGNORE, dtype=np.int64)
    ids = np.zeros((len(rows), seq_len), dtype=np.int64)
    n_tokens = n_bytes = 0
    columns = (pieces.document, pieces.start, pieces.stop, pieces.score)
    for r, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row, start=1):
            d, start, stop, score = (int(column[piece]) for column in columns)
            base, end = int(documents.offsets[d]), at + stop - start
            inputs[r, at] = bos_id if start == 0 else documents.tokens[base + start - 1]
            inputs[r, at + 1 : end] = documents.tokens[base + start : base + stop - 1]
            targets[r, at + score - start : end] = documents.tokens[base + score : base + stop]
            ids[r, at:end] = number
            at = end
            n_tokens += stop - score
            n_bytes += int(documents.n_bytes[d]) if base + stop == documents.offsets[d + 1] else 0
    segments = Segments(torch.from_numpy(ids), torch.zeros(len(rows), dtype=torch.bool))
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), segments, n_tokens, n_bytes)

