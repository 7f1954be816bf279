"""Documents of a batch laid side by side, longest first, so that a loop over time meets rectangles only.

The tokens are ordered by their place in their document, then by the document's rank. Between the ends of two documents
the number of those still running does not change: such a stretch is a rectangle (steps, documents) without pads. There are
as many rectangles as there are different lengths, at most sqrt(2 n) for n tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.segments import Segments


class Documents(NamedTuple):
    """n tokens of m documents, ranked by length."""

    tokens: Tensor
    """(n) int64: where in the flat batch (b t) each token lies, in the order of the rectangles."""
    rows: Tensor
    """(m) int64: the row of each document, by rank."""
    carried: Tensor
    """(m) bool: the document goes on from the incoming state, by rank."""
    last_ranks: Tensor
    """(r) int64: the rank of the last document of each row that has one."""
    last_rows: Tensor
    """(r) int64: those rows."""
    rectangles: list[tuple[int, int]]
    """(steps, documents) of each stretch. Read from the device: the one place where the host has to wait."""


def lay_out(segments: Segments) -> Documents:
    """The documents of a call; pads are in none."""
    t = segments.ids.shape[1]
    tokens = segments.real.flatten().nonzero()[:, 0]
    place = segments.position.flatten()[tokens]
    first = place == 0
    document = first.cumsum(0) - 1
    order = torch.argsort(torch.bincount(document), descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    running = torch.bincount(place)
    at = (running.cumsum(0) - running)[place] + rank[document]
    begin = tokens[first]
    rows = begin // max(t, 1)
    carried = segments.ids.flatten()[begin] == segments.carried[rows]
    last = rows != torch.cat([rows[1:], rows.new_full((1,), -1)])[: len(rows)]
    documents, steps = torch.unique_consecutive(running, return_counts=True)
    rectangles = [(s, m) for s, m in torch.stack([steps, documents], 1).tolist()]
    return Documents(
        torch.empty_like(tokens).scatter_(0, at, tokens), rows[order], carried[order], rank[last], rows[last], rectangles
    )
