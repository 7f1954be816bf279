"""Rows that an evaluation reads: filled from documents, cut into windows and pieces. Axes: b rows, t time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridtf.core import Segments
from hybridtf.tasks import IGNORE, EvalDocument


class EvalRows:
    """A call's tensors (b t), filled from the left; what is left over is padding."""

    def __init__(self, batch_size: int, width: int) -> None:
        self.inputs = torch.zeros(batch_size, width, dtype=torch.int64)
        self.targets = torch.full((batch_size, width), IGNORE, dtype=torch.int64)
        self.owners = torch.zeros(batch_size, width, dtype=torch.int64)
        self.ids = torch.zeros(batch_size, width, dtype=torch.int64)
        self.continues = torch.zeros(batch_size, dtype=torch.bool)
        self.used = [0] * batch_size

    def put(self, row: int, owner: int, document: EvalDocument, start: int, stop: int, score: int) -> None:
        """Tokens ``start:stop`` of a document, as a segment of its own, scored from ``score`` on."""
        at = self.used[row]
        end = self.used[row] = at + stop - start
        self.inputs[row, at:end] = document.inputs[start:stop]
        self.targets[row, at + score - start : end] = document.targets[score:stop]
        self.owners[row, at:end] = owner
        self.ids[row, at:end] = self.ids[row, at - 1] + 1 if at else 1

    def segments(self) -> Segments:
        """Each piece a document of its own."""
        return Segments(self.ids, self.continues)


def windows_of(total: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows ``start, stop`` over ``total`` tokens, scored from ``score`` on; only a short document's is not full."""
    score = 0
    while score < total:
        stop = min(score + (stride if score else seq_len), total)
        yield max(stop - seq_len, 0), stop, score
        score = stop


def only_documents(segments: Segments | None) -> bool:
    """Whether nothing but documents is marked, so that :func:`cut_segments` keeps all that is said."""
    return segments is None or (segments.prefix_len is None and segments.global_tokens is None and not segments.axes)


def cut_segments(segments: Segments, start: int, stop: int) -> Segments:
    """Documents of the tokens ``start:stop``: a row goes on where its first real token is of the last one's document."""
    ids = segments.ids[:, start:stop]
    before = segments.ids[:, :start].amax(1) if start else torch.zeros_like(segments.ids[:, 0])  # ids never decrease
    first = torch.gather(ids, 1, (ids > 0).int().argmax(1, keepdim=True))[:, 0]
    return Segments(ids, torch.where(before > 0, (first == before) | (first == 0), segments.continues))
