"""Quality: the task's measure on held-out data, with an interval over documents, beside what trivial models reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any

import numpy as np
from torch import nn

from hybridtf.bench.bootstrap import Floats, interval, interval_of_share
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.scoring import as_language_model
from hybridtf.bench.subject import Subject
from hybridtf.tasks import Task, Totals
from hybridtf.train import evaluate
from hybridtf.train.evaluate import HasDocuments

COLUMNS = tuple(field.name for field in fields(Totals))
"""What is summed over a document."""
RATIOS = {
    "loss": ("nats", "n_tokens", 1.0), "accuracy": ("n_correct", "n_tokens", 1.0),
    "row_accuracy": ("n_rows_correct", "n_rows", 1.0), "answer_accuracy": ("n_answers_correct", "n_answers", 1.0),
    "bits_per_byte": ("nats", "n_bytes", 1 / math.log(2)),
}
"""Metrics of :class:`Totals`: the sum that is divided, the one that it is divided by, and a factor."""
SHARES = ("accuracy", "row_accuracy", "answer_accuracy")
"""Those of them that are shares of what is right."""


def measure_quality(
    subject: Subject, model: nn.Module, task: Task, *, seq_len: int, stride: int | None = None, batch_size: int = 8,
    max_tokens: int | None = None, progress: Callable[[int], None] | None = None,
) -> Record:
    """A ``quality`` record of ``model``, which ``subject`` describes.

    Held-out documents are read in windows of ``seq_len`` tokens that move by ``stride`` (default: half a window),
    every token scored once. ``max_tokens``: only the first tokens of each document, as :func:`hybridtf.train.evaluate`
    cuts them; the baselines are of whole documents, and ``note`` then says so. The interval (95 %) is over documents
    (for a task without any: rows), drawn again with replacement but for shares. ``groups``: the same for each kind of row
    that the task tells apart, such as lengths. ``progress`` is told how many tokens are scored. """
    result = evaluate(
        as_language_model(model), task, seq_len=seq_len, stride=stride, batch_size=batch_size, max_tokens=max_tokens,
        on_batch=progress,
    )
    n = result.n_tokens
    first = "first of each document" if isinstance(task, HasDocuments) else "first rows of each kind"
    note = None if result.complete else f"only {n} held-out tokens, the {first}; baselines are of all"
    found = {
        "task": task.name, "seq_len": seq_len, "stride": stride or max(seq_len // 2, 1),
        "asked_stride": stride, "max_tokens": max_tokens,
        **quality_fields(task, result.totals, [score.totals for score in result.by_document]),
        "units": units_of([score.totals for score in result.by_document]),
        "groups": {name: _score(task, [score.totals for score in scores]) for name, scores in result.by_group.items()},
        "note": note,
    }
    return make_record("quality", subject.identity(model), found)


def units_of(per_document: Sequence[Totals]) -> dict[str, Any]:
    """The sums of each document by column, in the order of the evaluation: what paired differences between recipes are drawn
    from. A column that is the same for all is one number; nats are kept to a ten thousandth."""
    columns = dict(zip(COLUMNS, map(list, zip(*map(astuple, per_document), strict=True)), strict=True)) if per_document else {}
    columns = {name: [round(v, 4) for v in values] if name == "nats" else values for name, values in columns.items()}
    return {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}


def quality_fields(task: Task, total: Totals, per_document: Sequence[Totals]) -> dict[str, Any]:
    """The measure of ``total``, its interval over the documents, and the sizes it comes from."""
    return {
        "metric": task.metric, "value": task.metrics(total)[task.metric], "interval": _interval(task, per_document),
        "higher_is_better": task.higher_is_better, "baselines": task.baselines(), "n_bytes": total.n_bytes,
        "n_documents": len(per_document), "n_tokens": total.n_tokens,
    }


def _score(task: Task, per_document: Sequence[Totals]) -> dict[str, Any]:
    """The measure of some of the documents, with its interval."""
    total = sum(per_document, Totals())
    return {
        "value": task.metrics(total)[task.metric], "interval": _interval(task, per_document), "n_tokens": total.n_tokens,
    }


def _interval(task: Task, per_document: Sequence[Totals]) -> tuple[float, float] | None:
    """Over documents (or rows): of a share that of shares, else drawn; neither loss nor bits are below 0."""
    units = np.array([astuple(d) for d in per_document], dtype=np.float64).reshape(-1, len(COLUMNS))
    if task.metric in SHARES:
        right, scored = (units[:, COLUMNS.index(name)] for name in RATIOS[task.metric][:2])
        return interval_of_share(right, scored)

    def statistic(sums: Floats) -> Floats:
        draws = [Totals(float(nats), *(int(count) for count in counts)) for nats, *counts in sums]
        return np.array([task.metrics(draw)[task.metric] for draw in draws])

    return interval(units, statistic, least=0.0 if task.metric in RATIOS else -math.inf)
