"""Drawn rows beyond the trained length: accuracy by length, by distance from the evidence and by depth.

A row's ``distance`` is counted from the input that shows what is to be said to where it is said; its ``depth`` is the place of
that input as a share of what was read before (0: first, 1: last). Axes: b rows, t time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hybridtf.bench.bootstrap import interval_of_share
from hybridtf.bench.outcomes import Outcome
from hybridtf.bench.reading import Lengths, Stopped, read, rows_that_fit
from hybridtf.core import ConfigError
from hybridtf.cost import state_size
from hybridtf.cost.foreign import has_known_state
from hybridtf.models.generation.model import evaluating
from hybridtf.tasks import IGNORE, NO_EVIDENCE, Batch, Task

DEPTHS = 10
"""Bins of depth."""
TOKENS_AT_ONCE = 1 << 20
"""Fewer rows a batch where they are longer, so that the rows themselves stay small."""
FIELDS = {
    "accuracy": ("accuracy", "interval", "chance"), "row_accuracy": ("row_accuracy", "row_interval", "row_chance"),
    "answer_accuracy": ("answer_accuracy", "answer_interval", "answer_chance"),
}
"""The measures of a length by the task's own metric: share, interval over rows, and what chance reaches in it."""


@dataclass
class Answers:
    """Every scored token of the finished rows of a length: ``row`` counts them, ``right``, ``distance`` and ``depth`` (NaN
    where the row does not show the token), ``place``, the position of the input that it is said after, and ``answer``, which
    of its row's answers it is of; (n) each."""

    result: Outcome = "not_run"
    note: str | None = None
    chance: float | None = None
    stopped_at: int | None = None
    largest_state: float | None = None
    n_rows: int = 0
    _parts: list[tuple[NDArray[Any], ...]] = field(default_factory=list)

    def add(self, batch: Batch, at: NDArray[Any], right: NDArray[Any]) -> None:
        """The scored places ``at`` (2 n: row and column) of a batch, and which of them are ``right`` (n)."""
        row, column = at
        distance = np.full(len(row), np.nan)
        depth = distance.copy()
        if batch.evidence is not None:
            evidence = batch.evidence.numpy()[row, column]
            known = evidence != NO_EVIDENCE
            distance[known] = column[known] + 1 - evidence[known]
            depth[known] = evidence[known] / np.maximum(column[known], 1)
        answer = np.zeros(len(row), dtype=np.int64) if batch.answers is None else batch.answers.numpy()[row, column].clip(min=0)
        self._parts.append((row + self.n_rows, right, distance, depth, column, answer))
        self.n_rows += len(batch.inputs)

    def columns(self) -> tuple[NDArray[Any], ...]:
        """``row``, ``right``, ``distance``, ``depth``, ``place`` and ``answer`` of all of them."""
        whole = np.empty(0, dtype=np.int64)
        empty = (whole, np.empty(0, dtype=np.bool_), np.empty(0), np.empty(0), whole, whole)
        parts = self._parts or [empty]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def measure_rows(model: nn.Module, task: Task, asked: Lengths, max_rows: int) -> dict[str, Any]:
    """The fields of the protocol ``rows``: ``max_rows`` rows of every length. Raises :class:`ConfigError` for a task that
    has no rows of the shortest length; of a longer one, that it has none is a result."""
    task.at_length(asked.ends[0], max_rows)
    found = [_answer(model, task, end, asked, max_rows) for end in asked.ends]
    by_length = [
        {"length": end, "ratio": end / asked.trained, **_scores(task, one), **_state(model, end, one)}
        for end, one in zip(asked.ends, found, strict=True)
    ]
    notes = [f"{end} tokens: {one.note}" for end, one in zip(asked.ends, found, strict=True) if one.note]
    failed, more = _collapse(by_length, task.metric, asked.trained)
    columns = [one.columns() for one in found]
    return {
        "protocol": "rows", "max_rows": max_rows, "metric": task.metric, "by_length": by_length,
        "grid": _grid(asked.ends, columns), "by_distance": _by_doubling(columns, 2),
        "by_place": _by_doubling(columns, 4), "collapse": failed,
        "note": "; ".join([*notes, *more]) or None,
    }


def _answer(model: nn.Module, task: Task, length: int, asked: Lengths, max_rows: int) -> Answers:
    """The rows of one length. Those that were finished before time ran out count: which they are does not depend on what is in
    them."""
    answers = Answers()
    deadline = None if asked.timeout is None else time.monotonic() + asked.timeout
    try:
        longer = task.at_length(length, max_rows)
    except ConfigError as error:
        answers.note = str(error)
        return answers
    few = min(max(1, TOKENS_AT_ONCE // length), max_rows)
    try:
        answers.chance = task.at_length(length, few).baselines().get("chance")
        at_once = rows_that_fit(model, length, min(few, asked.batch_size))
        with evaluating(model), torch.no_grad():
            for batch in longer.eval_batches(at_once, length):
                _read_batch(model, batch, answers, asked.chunk, deadline)
                if asked.progress is not None:
                    asked.progress()
        answers.result = "ok"
    except MemoryError:  # of the rows themselves
        answers.result, answers.note = "out_of_memory", "the rows do not fit into memory"
    except Stopped as ended:
        partial = answers.n_rows and ended.result == "timed_out"
        answers.result = "ok" if partial else ended.result
        answers.stopped_at = None if partial else ended.at
        answers.note = f"out of time after {answers.n_rows} of {max_rows} rows" if partial else str(ended)
    return answers


def _read_batch(model: nn.Module, batch: Batch, answers: Answers, chunk: int, deadline: float | None) -> None:
    places, right = [], []
    largest: float | None = None
    for piece in read(model, batch.inputs, batch.targets, batch.segments, chunk=chunk, deadline=deadline):
        scored = (batch.targets[:, piece.start : piece.stop] != IGNORE).numpy()
        row, column = np.nonzero(scored)
        places.append(np.stack([row, column + piece.start]))
        right.append(piece.right.numpy()[scored])
        if piece.stop == batch.inputs.shape[1]:
            largest = piece.largest_state
    answers.add(batch, np.concatenate(places, axis=1), np.concatenate(right))
    if largest is not None:
        answers.largest_state = max(largest, answers.largest_state or 0.0)


def _scores(task: Task, answers: Answers) -> dict[str, Any]:
    """Of one length: shares of tokens, of whole rows and of whole answers, their intervals over rows, and what chance reaches
    in the task's measure, beside that measure (see :data:`FIELDS`)."""
    row, right, *_, answer = answers.columns()
    out: dict[str, Any] = {"n_rows": answers.n_rows, "result": answers.result}
    out |= dict.fromkeys((name for names in FIELDS.values() for name in names), None)
    if task.metric in FIELDS:
        out[FIELDS[task.metric][2]] = answers.chance
    out["non_finite_at"] = answers.stopped_at if answers.result == "non_finite" else None
    if answers.result == "ok" and len(row):
        n = int(answer.max()) + 1
        owner, said = _whole(row * n + answer, right)
        for (value, spread, _), (of, hits) in zip(
            FIELDS.values(), ((row, right), _whole(row, right), (owner // n, said)), strict=True
        ):
            out |= _share(of, hits, value, spread)
    return out


def _whole(owner: NDArray[Any], right: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The owners that tokens (n) have, each once, and whether all of an owner's tokens are right."""
    owners, which = np.unique(owner, return_inverse=True)
    return owners, np.bincount(which, weights=~right) == 0


def _share(row: NDArray[Any], right: NDArray[Any], value: str, spread: str) -> dict[str, Any]:
    """The share of what is ``right`` (n), and its interval over the rows that they are of."""
    n_scored, n_right = np.bincount(row), np.bincount(row, weights=right)
    n_scored, n_right = n_scored[n_scored > 0], n_right[n_scored > 0]
    return {value: float(n_right.sum() / n_scored.sum()), spread: interval_of_share(n_right, n_scored)}


def _state(model: nn.Module, length: int, answers: Answers) -> dict[str, Any]:
    """Bytes of state of a row, and the largest number in the recurrent ones, after a row of ``length`` tokens."""
    used = state_size(model, length)["used"] if has_known_state(model) else None
    return {"state_bytes": used, "largest_state": answers.largest_state if answers.result == "ok" else None}


def _grid(ends: Sequence[int], columns: Sequence[tuple[NDArray[Any], ...]]) -> dict[str, Any] | None:
    """Accuracy by length (rows) and depth (columns, by the depth that a bin begins at); None where no depth is known."""
    accuracy: list[list[float | None]] = []
    counts: list[list[int]] = []
    for _, right, _, depth, *_ in columns:
        known = ~np.isnan(depth)
        bins = np.minimum((depth[known] * DEPTHS).astype(np.int64), DEPTHS - 1)
        n = np.bincount(bins, minlength=DEPTHS)
        hits = np.bincount(bins, weights=right[known], minlength=DEPTHS)
        accuracy.append([float(h / c) if c else None for h, c in zip(hits, n, strict=True)])
        counts.append(n.tolist())
    if not any(map(any, counts)):
        return None
    return {"lengths": list(ends), "depths": [i / DEPTHS for i in range(DEPTHS)], "accuracy": accuracy, "n": counts}


def _by_doubling(columns: Sequence[tuple[NDArray[Any], ...]], which: int) -> list[list[float]]:
    """``[least value, accuracy, scored tokens]`` over all lengths, in bins that double, of the column ``which``; the first
    place is in the bin of the second."""
    right = np.concatenate([c[1] for c in columns])
    value = np.concatenate([c[which] for c in columns])
    known = ~np.isnan(value)
    bins = np.log2(np.maximum(value[known], 1)).astype(np.int64)
    n = np.bincount(bins)
    hits = np.bincount(bins, weights=right[known])
    return [[2**i, float(hits[i] / n[i]), int(n[i])] for i in range(len(n)) if n[i]]


def _collapse(
    by_length: Sequence[dict[str, Any]], metric: str, trained: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The first length beyond the trained one at which answers are no better than chance in the task's own measure, and notes.
    A model that is no better within the trained length has not learnt the task, and cannot collapse; of one that was not
    measured there nothing is known."""
    if metric not in FIELDS:
        return None, [f"no collapse is told of the measure {metric!r}"]
    value, spread, chance = FIELDS[metric]

    def at_chance(one: dict[str, Any]) -> bool:
        return one[chance] is not None and (one[spread] or [one[value]])[0] <= one[chance]

    scored = [one for one in by_length if one[value] is not None]
    within = [one for one in scored if one["length"] <= trained]
    if not within:
        return None, [f"no length up to the trained {trained} tokens was measured: whether the task was learnt is not known"]
    if all(map(at_chance, within)):
        return None, ["no better than chance at the trained length: the task was not learnt"]
    for one in scored:
        if one["length"] > trained and at_chance(one):
            said = f"{value.replace('_', ' ')} {one[value]:.3f} over {one['n_rows']} rows"
            why = f"{said} is no better than chance ({one[chance]:.3f})"
            return {"length": one["length"], "ratio": one["ratio"], "why": why}, []
    return None, []
