"""Extrapolation: what a run does beyond the length it was trained at, the state carried so that memory stays flat.

Three protocols. ``documents``: the loss of whole documents along their positions. ``windows``: the same documents in sliding
windows of every length. ``rows``: drawn rows as long as asked for (``long_rows.py``). Which documents count is decided once
for a record: those that are as long as the longest length which at least ``min_documents`` of them reach. Every length and
every position is then a mean over the same documents, so that a line that rises says that the model fails, not that long
documents are harder. """

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import nn

from hybridtf.bench.bootstrap import interval
from hybridtf.bench.long_rows import measure_rows
from hybridtf.bench.loss_by_position import (
    COLLAPSE_MARGIN,
    beyond,
    by_bucket,
    by_multiple,
    by_position,
    collapse,
    in_context_score,
    mean_bits,
    scored_to,
)
from hybridtf.bench.outcomes import Outcome
from hybridtf.bench.reading import Lengths, Stopped
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.scoring import Carried, score_carried, score_windows
from hybridtf.bench.subject import Subject, recipe_hash
from hybridtf.core import ConfigError, DataError
from hybridtf.cost import state_size
from hybridtf.cost.calls import has_state
from hybridtf.cost.foreign import adapted, has_known_state
from hybridtf.tasks import EvalDocument, Task

MULTIPLES = (1, 2, 4, 8, 16)
LONGEST_CHUNK = 512
"""Tokens a call where nothing else is asked for, or the trained length where that is less."""


class TooFewDocumentsError(DataError):
    """Held-out documents are too short, or too few, for the shortest length."""


@runtime_checkable
class HasLongDocuments(Protocol):
    """A task whose held-out side is whole documents, as :class:`hybridtf.tasks.TextTask`'s is."""

    def eval_documents(self, *, min_tokens: int = 1, max_documents: int | None = None) -> Iterator[EvalDocument]: ...


def measure_extrapolation(
    subject: Subject, model: nn.Module, task: Task, *, trained_length: int, multiples: Sequence[int] = MULTIPLES,
    lengths: Sequence[int] | None = None, chunk: int | None = None, batch_size: int = 8, timeout: float | None = None,
    max_documents: int | None = None, min_documents: int = 2, stride: int | None = None, max_rows: int = 128,
    too_few: Literal["raise", "record"] = "raise", progress: Callable[[], None] | None = None,
) -> Record:
    """An ``extrapolation`` record of ``model``, which ``subject`` describes, at ``multiples`` of ``trained_length`` or at
    ``lengths`` (tokens).

    A task with documents: ``bits_per_byte`` of a length is the mean over the positions from the length before it, and
    ``cumulative`` from the document's start. With ``stride`` the documents are read whole in windows as long as each length
    instead, which move by so many tokens. Other tasks draw ``max_rows`` rows of each length. ``chunk``: tokens a call
    (default: the trained length, at most 512). A length that cannot be measured is null, and ``result`` in ``by_length`` says
    which way: too few documents, memory, ``timeout`` (seconds a length), a model that can place no more, scores that are not
    finite. Raises :class:`ConfigError` for lengths that do not rise and for a task that has no such rows, and
    :class:`TooFewDocumentsError` where too few documents are even as long as the shortest length; with ``too_few = "record"``
    all lengths are ``not_run`` then, and ``note`` says why. """
    if trained_length < 1 or not multiples or list(multiples) != sorted(set(multiples)) or multiples[0] < 1:
        raise ConfigError(
            f"extrapolation: multiples must rise from at least 1, got {list(multiples)} of {trained_length} tokens"
        )
    ends = [trained_length * m for m in multiples] if lengths is None else list(lengths)
    if not ends or ends != sorted(set(ends)) or ends[0] < 1:
        raise ConfigError(f"extrapolation: lengths must rise from at least 1, got {ends}")
    asked = Lengths(
        trained_length, tuple(ends), chunk or min(trained_length, LONGEST_CHUNK), batch_size, timeout, progress
    )
    model = adapted(model)
    if not isinstance(task, HasLongDocuments):
        if stride is not None:
            raise ConfigError(f"extrapolation: stride is of windows over documents, and task {task.name!r} has none")
        fields = measure_rows(model, task, asked, max_rows)
    else:
        try:
            chosen = choose_documents(task, ends, min_documents, max_documents)
        except TooFewDocumentsError as error:
            if too_few == "raise":
                raise
            fields = _nothing(model, asked, stride, str(error))
        else:
            fields = _over(model, task, asked, stride, *chosen)
        fields["max_documents"] = max_documents
    fields = {**asked.fields(), "task": task.name, "model_hash": _model_hash(subject), **fields}
    return make_record("extrapolation", subject.identity(model), fields)


def _model_hash(subject: Subject) -> str | None:
    """The same for a model that is trained on several tasks: of its recipe's model but what the task asks of it. None for a
    foreign model."""
    model = (subject.recipe or {}).get("model")
    if model is None:
        return None
    return recipe_hash({"model": {name: value for name, value in model.items() if name not in ("vocab_size", "max_seq_len")}})


def choose_documents(
    task: HasLongDocuments, ends: Sequence[int], min_documents: int, max_documents: int | None
) -> tuple[list[EvalDocument], int, list[str]]:
    """The documents that count (see the module), the largest length they reach, and a note where that is not the
    last."""
    for end in sorted(ends, reverse=True):
        found = list(task.eval_documents(min_tokens=end, max_documents=max_documents))
        if len(found) >= min_documents:
            return found, end, [] if end == ends[-1] else [f"fewer than {min_documents} documents have more than {end} tokens"]
    name = getattr(task, "name", "text")
    most = "" if max_documents is None else f" of the {max_documents} that are read at most"
    raise TooFewDocumentsError(
        f"task {name!r}: fewer than {min_documents} held-out documents{most} have {min(ends)} tokens"
    )


def _over(
    model: nn.Module, task: Task, asked: Lengths, stride: int | None, documents: Sequence[EvalDocument], reached: int,
    notes: list[str],
) -> dict[str, Any]:
    """The fields of a record of ``documents``, in the protocol that ``stride`` asks for."""
    if stride is None:
        found = _along(model, task, documents, asked, reached, notes)
    else:
        found = _in_windows(model, documents, asked, stride, reached, notes)
    return {"n_documents": len(documents), **found}


def _nothing(model: nn.Module, asked: Lengths, stride: int | None, note: str) -> dict[str, Any]:
    """The fields of a record of documents in which no length was measured."""
    nulls: list[None] = [None] * len(asked.ends)
    entry = {"bits_per_byte": None, "interval": None, "n_documents": 0, "result": "not_run"}
    by_length = [{"length": end, "ratio": end / asked.trained, **entry} for end in asked.ends]
    if stride is not None:
        windows = [{**one, "n_tokens": 0} for one in by_length]
        return {"n_documents": 0, "protocol": "windows", "stride": stride, "by_length": windows, "note": note}
    return {
        "n_documents": 0, "protocol": "documents", "bits_per_byte": nulls, "interval": nulls, "change": nulls,
        "cumulative": nulls, "by_position": [], "by_bucket": [],
        "beyond": {"slope": None, "interval": None, "n_buckets": 0, "rise": None}, "in_context_score": None,
        "collapse": None, "collapse_margin": COLLAPSE_MARGIN, "uniform": None, "non_finite_at": None,
        "by_length": [{**one, "largest_state": None} for one in by_length], "state_bytes": _state_bytes(model, asked),
        "note": note,
    }


def _state_bytes(model: nn.Module, asked: Lengths) -> list[int | None]:
    """Bytes of state of a row after each length."""
    return [state_size(model, end)["used"] if has_known_state(model) else None for end in asked.ends]


# -- along documents ---------------------------------------------------------------------------------------------------


def _along(
    model: nn.Module, task: Task, documents: Sequence[EvalDocument], asked: Lengths, reached: int, notes: list[str]
) -> dict[str, Any]:
    """The fields of the protocol ``documents``."""
    scored = score_carried(
        model, documents, length=reached, chunk=asked.chunk, batch_size=asked.batch_size,
        ends=[end for end in asked.ends if end <= reached], timeout=asked.timeout, progress=asked.progress,
    )
    nats, trained = scored.nats, asked.trained
    notes = [*notes, *([str(scored.stopped)] if scored.stopped else [])]
    notes += [] if has_state(model) else ["the model carries no state: each document was read in one call"]
    bytes_per_token = sum(d.n_bytes for d in documents) / sum(len(d.targets) for d in documents)
    means = by_multiple(nats, asked.ends, bytes_per_token, trained)
    within = mean_bits(nats[:, :trained], bytes_per_token)[0] if scored_to(nats, trained) else None
    uniform = math.log2(task.vocab_size) / bytes_per_token
    results = [_result(scored, end, reached) for end in asked.ends]
    return {
        "protocol": "documents", **means, "by_position": by_position(nats, trained), "by_bucket": by_bucket(nats),
        "beyond": beyond(nats, trained, bytes_per_token), "in_context_score": in_context_score(nats),
        "collapse": collapse(means["bits_per_byte"], asked.ends, within, uniform, trained), "collapse_margin": COLLAPSE_MARGIN,
        "uniform": uniform, "non_finite_at": scored.stopped.at if "non_finite" in results and scored.stopped else None,
        "by_length": [
            {
                "length": end, "ratio": end / trained, "bits_per_byte": means["bits_per_byte"][i],
                "interval": means["interval"][i], "n_documents": len(documents), "result": results[i],
                "largest_state": _largest_state(scored, end) if results[i] == "ok" else None,
            }
            for i, end in enumerate(asked.ends)
        ],
        "state_bytes": _state_bytes(model, asked),
        "note": "; ".join(notes) or None,
    }


def _result(scored: Carried, end: int, reached: int) -> Outcome:
    """What became of the positions before ``end``; a length behind the one that ran out of time was never begun."""
    if scored_to(scored.nats, end):
        return "ok"
    if end > reached or scored.stopped is None:
        return "not_run"
    return scored.stopped.result


def _largest_state(scored: Carried, end: int) -> float | None:
    """After the first call that reached ``end``."""
    return next((size for position, size in scored.largest_state if position >= end), None)


# -- in windows --------------------------------------------------------------------------------------------------------


def _in_windows(
    model: nn.Module, documents: Sequence[EvalDocument], asked: Lengths, stride: int, reached: int, notes: list[str]
) -> dict[str, Any]:
    """The fields of the protocol ``windows``: every length is the window of a reading of its own over all documents."""
    if not 1 <= stride <= asked.ends[0]:
        raise ConfigError(f"extrapolation: stride must be from 1 to the shortest window, {asked.ends[0]}; got {stride}")
    n_bytes = np.array([d.n_bytes for d in documents], dtype=np.float64)
    by_length, notes = [], list(notes)
    for end in asked.ends:
        entry: dict[str, Any] = {"length": end, "ratio": end / asked.trained, "bits_per_byte": None, "interval": None}
        entry |= {"n_documents": len(documents), "n_tokens": sum(len(d.targets) for d in documents), "result": "not_run"}
        by_length.append(entry)
        if end > reached:
            continue
        try:
            nats = score_windows(
                model, documents, window=end, stride=stride, chunk=asked.chunk, batch_size=asked.batch_size,
                deadline=None if asked.timeout is None else time.monotonic() + asked.timeout, progress=asked.progress,
            )
        except Stopped as ended:
            entry["result"] = ended.result
            notes.append(f"windows of {end} tokens: {ended}")
            continue
        units = np.stack([nats / math.log(2), n_bytes], axis=1)
        entry["bits_per_byte"] = float(units[:, 0].sum() / n_bytes.sum())
        entry["interval"] = interval(units, lambda sums: np.asarray(sums[:, 0] / sums[:, 1]), least=0.0)
        entry["result"] = "ok"
    return {"protocol": "windows", "stride": stride, "by_length": by_length, "note": "; ".join(notes) or None}
