"""Held-out loss: every token scored once, document by document, in memory that does not grow with the corpus.

Axes: b rows, t time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import ConfigError, NonFiniteError, Scores, Segments, State
from hybridtf.models import LanguageModel
from hybridtf.models.generation.model import evaluating, refusal, require
from hybridtf.tasks import IGNORE, Batch, EvalDocument, Task, Totals
from hybridtf.train.config import EvalContext, Precision
from hybridtf.train.eval_rows import EvalRows, cut_segments, only_documents, windows_of
from hybridtf.train.precision import autocast

LONG_ROW = 2048
"""Rows of more tokens (and of more than ``seq_len``) are read in pieces, so that activations do not grow with them."""


@runtime_checkable
class HasDocuments(Protocol):
    """A task whose held-out side is whole documents."""

    def eval_documents(self) -> Iterator[EvalDocument]: ...


def check_scores(task: Task, model: nn.Module) -> None:
    """Raise :class:`ConfigError` where the head of ``model`` does not say what ``task`` asks for: it would see the answers."""
    found: Scores = getattr(getattr(model, "head", None), "scores", "next")
    asked: Scores = getattr(task, "scores", "next")
    if found != asked:
        said = {"next": "the token that follows, as 'lm_head' does", "read": "what was read, as 'position_decoder' does"}
        raise ConfigError(
            f"model.head: the task {task.name!r} needs a head that says {said[asked]}; this one says {said[found]}"
        )


@dataclass(frozen=True)
class DocumentScore:
    """What one held-out document added: the unit over which an interval is drawn. Tasks without documents give rows.

    ``group``: of the batch that the row came in; see :class:`hybridtf.tasks.Batch`.
    """

    name: str
    totals: Totals
    group: str = ""


@dataclass(frozen=True)
class EvalResult:
    """``totals`` over all scored tokens, the task's ``metrics`` of them, and the same sums by document.

    ``complete``: the whole held-out side was scored, not only the first tokens of each document.
    """

    totals: Totals
    metrics: Mapping[str, float]
    by_document: tuple[DocumentScore, ...]
    complete: bool

    @property
    def by_group(self) -> dict[str, tuple[DocumentScore, ...]]:
        """The scores of each group, in the order of the evaluation; empty where the task tells no groups apart."""
        names = dict.fromkeys(score.group for score in self.by_document if score.group)
        return {name: tuple(score for score in self.by_document if score.group == name) for name in names}

    @property
    def nats(self) -> float:
        return self.totals.nats

    @property
    def n_tokens(self) -> int:
        return self.totals.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.totals.n_bytes

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.totals.loss

    @property
    def bits_per_byte(self) -> float:
        """Raises :class:`DataError` for a task that is not text."""
        return self.totals.bits_per_byte


def check_context(task: Task, context: EvalContext) -> None:
    """Raise :class:`ConfigError` where tokens of ``task`` cannot be predicted from ``context``."""
    if context == "document" and not isinstance(task, HasDocuments):
        raise ConfigError(f"eval_context = 'document': the task {task.name!r} has no documents; use 'window'")


def evaluate(
    model: LanguageModel, task: Task, *, seq_len: int = 256, batch_size: int = 8, max_tokens: int | None = None,
    context: EvalContext = "window", stride: int | None = None, precision: Precision = "fp32",
    on_batch: Callable[[int], None] | None = None, first_group: bool = False,
) -> EvalResult:
    """Score the held-out side of ``task``, dropout off, without gradients.

    ``context = "window"``: a token sees at most ``seq_len`` tokens of its document, in windows that move by ``stride``
    (half a window unless given). ``"document"``: the state is carried from the document's start, ``seq_len`` tokens a
    call, so that memory grows only where a mixer's state does. ``max_tokens``: every document gives its first n tokens,
    n the same for all, so that there are at most that many; bytes of a cut document count in proportion. A task of rows
    gives its first batches, or, where it tells groups apart, the same share of each group; its rows are read whole, and
    those of more than ``seq_len`` and 2,048 tokens in pieces with the state carried, where the model can be cut.
    ``first_group``: of a task of rows only those before the second group. ``on_batch`` is told how many tokens are scored
    so far. Raises :class:`NonFiniteError` for a loss that is not finite, and
    :class:`ConfigError` for wrong sizes and for a state that is to be carried by a model that cannot be cut in time.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    stride = max(seq_len // 2, 1) if stride is None else stride
    if seq_len < 1 or batch_size < 1 or not 1 <= stride <= seq_len:
        raise ConfigError(
            "evaluation needs seq_len and batch_size of at least 1 and a stride from 1 to seq_len; "
            f"got {seq_len}, {batch_size} and {stride}"
        )
    scorer = _Scorer(model, precision, on_batch)
    check_context(task, context)
    check_scores(task, model)
    with evaluating(model), torch.no_grad():
        if not isinstance(task, HasDocuments):
            return _score_rows(scorer, task, batch_size, seq_len, max_tokens, first_group)
        documents = list(task.eval_documents())
        cut = _cut([len(document.targets) for document in documents], max_tokens)
        scorer.sums.open(len(documents))
        if context == "document":
            require_carry(model)
            _carry(scorer, documents, cut, batch_size, seq_len)
        else:
            _windows(scorer, documents, cut, batch_size, seq_len, stride)
    return _by_document(scorer, task, documents, cut)


def require_carry(model: LanguageModel) -> None:
    """Raise :class:`ConfigError` for a model that cannot be scored with ``context = "document"``."""
    require(model, "cut", "evaluation with context = 'document', which carries the state,")


def group_metrics(task: Task, result: EvalResult) -> dict[str, dict[str, float]]:
    """The task's measures of each group of rows that it tells apart."""
    return {
        name: task.metrics(sum((score.totals for score in scores), Totals())) for name, scores in result.by_group.items()
    }


def _cut(lengths: Sequence[int], max_tokens: int | None) -> list[int]:
    """How many tokens of each document are scored."""
    if max_tokens is None or sum(lengths) <= max_tokens:
        return list(lengths)
    low, high = 0, max(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(n, middle) for n in lengths) <= max_tokens else (low, middle - 1)
    if low == 0:  # fewer tokens than documents: one token of the first ones
        return [1 if i < max_tokens else 0 for i in range(len(lengths))]
    return [min(n, low) for n in lengths]


def _by_document(scorer: _Scorer, task: Task, documents: Sequence[EvalDocument], cut: Sequence[int]) -> EvalResult:
    scores = []
    sums = scorer.sums
    for i, (document, n) in enumerate(zip(documents, cut, strict=True)):
        if n:
            n_bytes = round(document.n_bytes * n / len(document.targets))
            scores.append(DocumentScore(document.name, sums.totals(i, n_bytes)))
    complete = list(cut) == [len(document.targets) for document in documents]
    return _result(task, scores, complete)


def _result(task: Task, scores: Sequence[DocumentScore], complete: bool, n_bytes: int = 0) -> EvalResult:
    totals = sum((score.totals for score in scores), Totals(n_bytes=n_bytes))
    for score in scores:
        if not math.isfinite(score.totals.nats):
            raise NonFiniteError(f"evaluation: the loss of {score.name} is not finite ({score.totals.nats})")
    return EvalResult(totals, task.metrics(totals), tuple(scores), complete)


# -- scoring -----------------------------------------------------------------------------------------------------------


class _Sums:
    """Sums of each document, in float64 on the CPU."""

    def __init__(self) -> None:
        self.open(0)

    def open(self, n: int) -> None:
        self.nats = torch.zeros(n, dtype=torch.float64)
        self.correct = torch.zeros(n, dtype=torch.int64)
        self.tokens = torch.zeros(n, dtype=torch.int64)

    def add(self, owners: Tensor, nats: Tensor, correct: Tensor) -> None:
        self.nats.index_add_(0, owners, nats.double())
        self.correct.index_add_(0, owners, correct.long())
        self.tokens.index_add_(0, owners, torch.ones_like(owners))

    def totals(self, i: int, n_bytes: int) -> Totals:
        return Totals(float(self.nats[i]), int(self.correct[i]), int(self.tokens[i]), n_bytes)

    def row_totals(self, row: int, per_row: int) -> Totals:
        """Of a row with ``per_row`` answers: each is right where all its scored tokens are, the row where all answers are."""
        answers = [self.totals(i, 0) for i in range(row * per_row, (row + 1) * per_row)]
        asked = sum(answer.n_tokens > 0 for answer in answers)
        right = sum(0 < answer.n_tokens == answer.n_correct for answer in answers)
        rows = {"n_rows": int(asked > 0), "n_rows_correct": int(0 < asked == right)}
        return replace(sum(answers, Totals()), n_answers=asked, n_answers_correct=right, **rows)


class _Scorer:
    def __init__(self, model: LanguageModel, precision: Precision, on_batch: Callable[[int], None] | None) -> None:
        self.model, self.precision, self.on_batch = model, precision, on_batch
        self.sums = _Sums()
        self.done = 0

    def score(
        self, inputs: Tensor, targets: Tensor, owners: Tensor, segments: Segments | None, state: State | None = None
    ) -> State | None:
        """Score (b t) ``targets``; ``owners`` (b t) says which document each belongs to. Returns the state after it."""
        device = self.model.device
        with autocast(self.precision, device):
            out = self.model(
                inputs.to(device), segments=None if segments is None else segments.to(device), state=state
            )
        logits = out.logits if out.logits.dtype == torch.float64 else out.logits.float()
        wanted = targets.to(device)
        nats = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORE).cpu()
        correct = (logits.argmax(-1) == wanted).flatten().cpu()
        scored = targets.flatten() != IGNORE
        self.sums.add(owners.flatten()[scored], nats[scored], correct[scored])
        self.done += int(scored.sum())
        if self.on_batch is not None:
            self.on_batch(self.done)
        new_state: State | None = out.state
        return new_state


def _score_rows(
    scorer: _Scorer, task: Task, batch_size: int, seq_len: int, max_tokens: int | None, first_group: bool
) -> EvalResult:
    scores: list[DocumentScore] = []
    n_bytes, complete = 0, True
    fits = _Share(task, max_tokens)
    for number, batch in enumerate(task.eval_batches(batch_size, seq_len)):
        if first_group and scores and batch.group != scores[0].group:
            complete = False
            break
        # The cap of a group alone is not shared with others.
        if not fits(replace(batch, group="") if first_group else batch):
            complete = False
            if first_group or not batch.group:
                break
            continue
        _score_batch(scorer, batch, max(seq_len, LONG_ROW))
        n_bytes += batch.n_bytes
        found = [scorer.sums.row_totals(row, batch.per_row) for row in range(len(batch.targets))]
        scores += [DocumentScore(f"batch {number}, row {row}", t, batch.group) for row, t in enumerate(found) if t.n_tokens]
    return _result(task, scores, complete, n_bytes)


def _score_batch(scorer: _Scorer, batch: Batch, longest: int) -> None:
    """Score the rows of a batch, each of their answers an owner of its own.

    Rows of more than ``longest`` tokens are read in pieces of that many with the state carried, where the model can be cut
    in time and nothing but documents is marked in the rows; else in one call.
    """
    n, width = batch.targets.shape
    owners = batch.owners
    scorer.sums.open(n * batch.per_row)
    marks = batch.segments
    if width <= longest or not only_documents(marks) or refusal(scorer.model, "cut") is not None:
        scorer.score(batch.inputs, batch.targets, owners, marks)
        return
    state: State | None = scorer.model.init_state(n)
    for start in range(0, width, longest):
        part = slice(start, start + longest)
        cut = None if marks is None else cut_segments(marks, start, start + longest)
        state = scorer.score(batch.inputs[:, part], batch.targets[:, part], owners[:, part], cut, state)


class _Share:
    """Which batches of rows ``max_tokens`` leaves: the first ones; of groups the same share each, and a batch at least.

    Groups may come one after the other, the hardest last: the first rows of all would be another measure.
    """

    def __init__(self, task: Task, max_tokens: int | None) -> None:
        self.task, self.max_tokens = task, max_tokens
        self.seen: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()

    def __call__(self, batch: Batch) -> bool:
        group, n = batch.group, batch.n_tokens
        self.seen[group] += n
        if self.max_tokens is not None and self.taken[group]:
            room: float = self.max_tokens
            if group:
                held_out = sum(split.n_tokens or 0 for split in self.task.splits() if split.name == "held_out")
                room = self.max_tokens * self.seen[group] / max(held_out, 1)
            if self.taken[group] + n > room:
                return False
        self.taken[group] += n
        return True


# -- documents --------------------------------------------------------------------------------------------------------------


def _windows(
    scorer: _Scorer, documents: Sequence[EvalDocument], cut: Sequence[int], batch_size: int, seq_len: int, stride: int
) -> None:
    """Windows of ``seq_len`` packed into rows, next fit: a row is closed by the first window that has no room in it."""
    rows, row = EvalRows(batch_size, seq_len), 0
    for i, (document, total) in enumerate(zip(documents, cut, strict=True)):
        for start, stop, score in windows_of(total, seq_len, stride):
            if rows.used[row] + stop - start > seq_len:
                row += 1
            if row == batch_size:
                scorer.score(rows.inputs, rows.targets, rows.owners, rows.segments())
                rows, row = EvalRows(batch_size, seq_len), 0
            rows.put(row, i, document, start, stop, score)
    if any(rows.used):
        scorer.score(rows.inputs, rows.targets, rows.owners, rows.segments())


def _carry(
    scorer: _Scorer, documents: Sequence[EvalDocument], cut: Sequence[int], batch_size: int, seq_len: int
) -> None:
    """Every row reads one document after the other, ``seq_len`` tokens a call; the longest come first, so that the
    rows end together."""
    order = iter(sorted((i for i, n in enumerate(cut) if n), key=lambda i: (-cut[i], i)))
    current: list[tuple[int, int] | None] = [None] * batch_size
    state = scorer.model.init_state(batch_size)
    while True:
        rows = EvalRows(batch_size, seq_len)
        for row in range(batch_size):
            rows.continues[row] = current[row] is not None
            while rows.used[row] < seq_len:
                place = current[row]
                if place is None:
                    following = next(order, None)
                    if following is None:
                        break
                    place = (following, 0)
                i, at = place
                stop = min(at + seq_len - rows.used[row], cut[i])
                rows.put(row, i, documents[i], at, stop, at)
                current[row] = None if stop == cut[i] else (i, stop)
        if not any(rows.used):
            return
        state = scorer.score(rows.inputs, rows.targets, rows.owners, rows.segments(), state)
