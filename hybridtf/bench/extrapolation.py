"""Extrapolation: loss by position beyond the trained length, the state carried so that memory stays flat.

Which documents count is decided once for a record: those that are as long as the longest multiple which at least
``min_documents`` of them reach. Every multiple and every position is then a mean over the same documents, so that a
line that rises says that the model fails, not that long documents are harder. """

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hybridtf.bench.bootstrap import Floats, interval
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.scoring import Carried, score_carried
from hybridtf.bench.subject import Subject
from hybridtf.core import ConfigError, DataError
from hybridtf.cost import state_size
from hybridtf.cost.calls import has_state
from hybridtf.cost.foreign import adapted, has_known_state
from hybridtf.tasks import EvalDocument, Task

MULTIPLES = (1, 2, 4, 8, 16)
BUCKETS_PER_LENGTH = 8
"""Position buckets within each trained length."""


def measure_extrapolation(
    subject: Subject, model: nn.Module, task: Task, *, trained_length: int, multiples: Sequence[int] = MULTIPLES,
    chunk: int | None = None, batch_size: int = 8, max_documents: int | None = None, min_documents: int = 2,
    progress: Callable[[], None] | None = None,
) -> Record:
    """An ``extrapolation`` record of ``model``, which ``subject`` describes.

    ``bits_per_byte`` of multiple m: the mean over the positions from the multiple before it to m times
    ``trained_length``; ``cumulative``: from the document's start. A multiple that no ``min_documents`` documents
    reach, or the model cannot, is null and ``note`` says why. ``chunk``: tokens a call (default: the trained length,
    at most 512). Raises :class:`DataError` where too few documents are even as long as the trained length. """
    if trained_length < 1 or list(multiples) != sorted(set(multiples)) or not multiples or multiples[0] < 1:
        raise ConfigError(
            f"extrapolation: multiples must rise from at least 1, got {list(multiples)} of {trained_length} tokens"
        )
    model = adapted(model)
    documents, reached, notes = choose_documents(task, trained_length, multiples, min_documents, max_documents)
    scored = score_carried(
        model, documents, length=trained_length * reached, chunk=chunk or min(trained_length, 512),
        batch_size=batch_size, progress=progress,
    )
    notes += [scored.stopped] if scored.stopped else []
    notes += [] if has_state(model) else ["the model carries no state: each document was read in one call"]
    bytes_per_token = sum(d.n_bytes for d in documents) / sum(len(d.targets) for d in documents)
    ends = [trained_length * m for m in multiples]
    sizes = [state_size(model, end)["used"] if has_known_state(model) else None for end in ends]
    fields = {
        "trained_length": trained_length, "multiples": list(multiples), "max_documents": max_documents, "task": task.name,
        "n_documents": len(documents), **by_multiple(scored, ends, bytes_per_token),
        "by_position": by_position(scored, trained_length),
        "state_bytes": sizes, "note": "; ".join(notes) or None,
    }
    return make_record("extrapolation", subject.identity(model), fields)


@runtime_checkable
class HasLongDocuments(Protocol):
    """A task whose held-out side is whole documents, as :class:`hybridtf.tasks.TextTask`'s is."""

    def eval_documents(self, *, min_tokens: int = 1, max_documents: int | None = None) -> Iterator[EvalDocument]: ...


def choose_documents(
    task: Task, trained_length: int, multiples: Sequence[int], min_documents: int, max_documents: int | None
) -> tuple[list[EvalDocument], int, list[str]]:
    """The documents that count (see the module), the largest multiple they reach, and a note where that is not the
    last."""
    if not isinstance(task, HasLongDocuments):
        raise DataError(f"task {task.name!r} has no documents to read at length")
    for multiple in sorted(multiples, reverse=True):
        found = list(task.eval_documents(min_tokens=trained_length * multiple, max_documents=max_documents))
        if len(found) >= min_documents:
            notes = []
            if multiple != multiples[-1]:
                notes.append(f"fewer than {min_documents} documents have more than {trained_length * multiple} tokens")
            return found, multiple, notes
    raise DataError(
        f"task {task.name!r}: fewer than {min_documents} held-out documents have {trained_length * multiples[0]} tokens"
    )


def by_multiple(scored: Carried, ends: Sequence[int], bytes_per_token: float) -> dict[str, list[Any]]:
    """``bits_per_byte``, ``interval`` and ``cumulative`` at each end; None where not all positions before it were
    scored.

    The bytes of a range are its tokens times ``bytes_per_token`` (exact for bytes; for other tokenizers one factor for
    all ranges, so that lines compare). """
    out: dict[str, list[Any]] = {"bits_per_byte": [], "interval": [], "cumulative": []}
    start = 0
    for end in ends:
        nats = scored.nats[:, start:end]
        if scored.nats.shape[1] < end or np.isnan(nats).any():
            values: tuple[Any, ...] = (None, None, None)
        else:
            values = (*_mean_bits(nats, bytes_per_token), _mean_bits(scored.nats[:, :end], bytes_per_token)[0])
        for name, value in zip(out, values, strict=True):
            out[name].append(value)
        start = end
    return out


def _mean_bits(nats: NDArray[Any], bytes_per_token: float) -> tuple[float, tuple[float, float] | None]:
    units = np.stack([nats.sum(1), np.full(len(nats), nats.shape[1])], axis=1)

    def statistic(sums: Floats) -> Floats:
        return np.asarray(sums[:, 0] / sums[:, 1] / math.log(2) / bytes_per_token)

    return float(statistic(units.sum(0, keepdims=True))[0]), interval(units, statistic)


def by_position(scored: Carried, trained_length: int) -> list[list[float]]:
    """``[first position, mean nats a token, scored tokens]`` of buckets an eighth of the trained length wide."""
    width = max(trained_length // BUCKETS_PER_LENGTH, 1)
    buckets = []
    for start in range(0, scored.nats.shape[1], width):
        part = scored.nats[:, start : start + width]
        part = part[~np.isnan(part)]
        if len(part):
            buckets.append([start, float(part.mean()), len(part)])
    return buckets
