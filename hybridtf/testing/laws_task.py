"""Laws of tasks: rows that can be trained on, streams that resume, held-out data that stays what it is.

Axes: b batch, t time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from hybridtf.core import CheckpointError
from hybridtf.tasks import IGNORE, NO_EVIDENCE, Batch, Task, Totals
from hybridtf.testing.errors import ContractError
from hybridtf.testing.subject import Subject

ROWS, LENGTH, STEPS = 4, 32, 6


def _task(subject: Subject, seed: int = 0) -> Task:
    load: Any = subject.config.load  # type: ignore[attr-defined]
    task = load(seed)
    if not isinstance(task, Task):
        raise ContractError(f"load(seed) must return a Task, not {type(task).__name__}")
    return task


def _length(task: Task) -> int:
    return task.row_length or LENGTH


def _first(batches: Iterable[Batch], n: int = STEPS) -> list[Batch]:
    return list(itertools.islice(batches, n))


def _same(left: Batch, right: Batch) -> bool:
    ids = [None if b.segments is None else b.segments.ids for b in (left, right)]
    same_ids = ids[0] is None if ids[1] is None else ids[0] is not None and torch.equal(ids[0], ids[1])
    counts = (left.n_tokens, left.n_bytes, left.group) == (right.n_tokens, right.n_bytes, right.group)
    return torch.equal(left.inputs, right.inputs) and torch.equal(left.targets, right.targets) and same_ids and counts


def _scored(batches: Iterable[Batch]) -> Counter[bytes]:
    """Every row that is scored, and how often it comes."""
    rows: Counter[bytes] = Counter()
    for batch in batches:
        both = torch.stack([batch.inputs, batch.targets], dim=1).contiguous().numpy()
        counts = (batch.targets != IGNORE).any(1).tolist()
        rows.update(row.tobytes() for row, scored in zip(both, counts, strict=True) if scored)
    return rows


def check_rows(subject: Subject) -> None:
    """Batches are whole: int64 (b t), ids within the vocabulary, targets that are counted and belong to real tokens."""
    task = _task(subject)
    length = _length(task)
    train = _first(task.train_batches(ROWS, length))
    held_out = list(task.eval_batches(ROWS, length))
    if len(train) < STEPS or not held_out:
        raise ContractError("training batches must never end, and there must be held-out ones")
    for side, batches in (("training", train), ("held-out", held_out)):
        for batch in batches:
            _check_batch(task, batch, side)
    wrong = [batch for batch in train if len(batch.inputs) != ROWS or batch.inputs.shape[1] > length]
    if wrong:
        raise ContractError(f"a training batch of {ROWS} rows and seq_len {length} has shape {tuple(wrong[0].inputs.shape)}")


def _check_batch(task: Task, batch: Batch, side: str) -> None:
    inputs, targets = batch.inputs, batch.targets
    if inputs.ndim != 2 or inputs.dtype != torch.int64 or targets.dtype != torch.int64 or targets.shape != inputs.shape:
        raise ContractError(f"{side} inputs and targets must be int64 of one shape (b, t), got {inputs.shape}, {targets.shape}")
    scored = targets != IGNORE
    if batch.answers is not None and (batch.answers.shape != targets.shape or bool((batch.answers[scored] < 0).any())):
        raise ContractError(f"{side} answers must be of the targets' shape, and say of each scored token which answer it is of")
    if int(scored.sum()) != batch.n_tokens:
        raise ContractError(f"a {side} batch says n_tokens = {batch.n_tokens}, and {int(scored.sum())} targets are scored")
    for name, ids in (("inputs", inputs), ("targets", targets[scored])):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < task.vocab_size:
            raise ContractError(f"{side} {name} hold ids outside the vocabulary of {task.vocab_size}")
    if batch.segments is not None and bool((scored & ~batch.segments.real).any()):
        raise ContractError(f"a {side} batch scores padding")
    if batch.evidence is not None:
        _check_evidence(batch, batch.evidence, side)


def _check_evidence(batch: Batch, evidence: torch.Tensor, side: str) -> None:
    if evidence.shape != batch.targets.shape or evidence.dtype != torch.int64:
        raise ContractError(f"{side} evidence must be int64 of the shape of targets, got {evidence.dtype} {evidence.shape}")
    known = evidence != NO_EVIDENCE
    if bool((known & (batch.targets == IGNORE)).any()):
        raise ContractError(f"a {side} batch has evidence for targets that are not scored")
    if bool(((evidence < 0) | (evidence > torch.arange(evidence.shape[1])))[known].any()):
        raise ContractError(f"{side} evidence lies behind the question, or is no position")
    if not torch.equal(batch.inputs.gather(1, evidence.clamp(min=0))[known], batch.targets[known]):
        raise ContractError(f"{side} evidence is not where the row shows the token to be said")


def check_resume(subject: Subject) -> None:
    """A stream's state is JSON, and from it a new stream gives what the old one would have given; other data refuse it."""
    stream = _task(subject).train_batches(ROWS, _length(_task(subject)))
    for _ in range(STEPS):
        state = json.loads(json.dumps(stream.state_dict()))
        expected = _first(stream, 2)
        again = _task(subject).train_batches(ROWS, _length(_task(subject)))
        again.load_state_dict(state)
        if not all(_same(left, right) for left, right in zip(expected, _first(again, 2), strict=True)):
            raise ContractError("a stream that takes over another's state does not give the same batches")
    try:
        _task(subject).train_batches(ROWS, _length(_task(subject))).load_state_dict({"of": "another task"})
    except CheckpointError:
        return
    raise ContractError("a state of another task must be refused with CheckpointError")


def check_held_out(subject: Subject) -> None:
    """The held-out side is the same every time, whatever the seed, and no row of it is trained on."""
    task, other = _task(subject), _task(subject, seed=1)
    length = _length(task)
    first, second = (list(t.eval_batches(ROWS, length)) for t in (task, other))
    if len(first) != len(second) or not all(_same(a, b) for a, b in zip(first, second, strict=True)):
        raise ContractError("the held-out side changes with the seed, or from one reading to the next")
    held_out = _scored(first)
    trained = _scored(_first(task.train_batches(ROWS, length), 50))
    if not set(trained).isdisjoint(held_out):
        raise ContractError("a held-out row is trained on")


def check_ranks(subject: Subject) -> None:
    """Two ranks share the held-out rows, with as many batches each, and train on rows of their own."""
    task = _task(subject)
    length = _length(task)
    parts = [list(task.eval_batches(ROWS, length, rank=rank, world_size=2)) for rank in range(2)]
    if len(parts[0]) != len(parts[1]):
        raise ContractError(f"two ranks have {len(parts[0])} and {len(parts[1])} held-out batches; they must have as many")
    if _scored(parts[0]) + _scored(parts[1]) != _scored(task.eval_batches(ROWS, length)):
        raise ContractError("two ranks together do not score each held-out row once")
    mine, theirs = (_first(task.train_batches(ROWS, length, rank=rank, world_size=2)) for rank in range(2))
    if all(_same(a, b) for a, b in zip(mine, theirs, strict=True)):
        raise ContractError("two ranks train on the same rows")


def check_measures(subject: Subject) -> None:
    """``metric`` is one of the measures, better for a perfect model than for its baselines, which say something."""
    task = _task(subject)
    batches = list(task.eval_batches(ROWS, _length(task)))
    n_tokens, n_bytes = sum(b.n_tokens for b in batches), sum(b.n_bytes for b in batches)
    n_rows = sum(int((b.targets != IGNORE).any(1).sum()) for b in batches)
    n_answers = sum(len(b.owners[b.targets != IGNORE].unique()) for b in batches)
    perfect = task.metrics(Totals(0.0, n_tokens, n_tokens, n_bytes, n_rows, n_rows, n_answers, n_answers))
    if task.metric not in perfect:
        raise ContractError(f"metric = {task.metric!r} is not among the measures {sorted(perfect)}")
    baselines = task.baselines()
    if not baselines:
        raise ContractError("baselines() must say what a trivial model reaches")
    sign = 1 if task.higher_is_better else -1
    for name, value in {**perfect, **baselines}.items():
        if not math.isfinite(value):
            raise ContractError(f"{name} is {value}")
    worst = max(baselines, key=lambda name: sign * baselines[name])
    if sign * perfect[task.metric] <= sign * baselines[worst]:
        raise ContractError(f"a perfect model reaches {perfect[task.metric]}, no better than the baseline {worst!r}")
    if any(not split.name for split in task.splits()):
        raise ContractError("every split needs a name")
