"""What a task is: batches to train on, batches to be judged by, and the names of its measures.

Axes: b batch, t time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Int
from torch import Tensor

from hybridtf.core import Scores, Segments
from hybridtf.core.errors import ConfigError, DataError

IGNORE = -100
"""The target of a token that is not scored; torch's own ``ignore_index``."""
NO_EVIDENCE = -1
"""In place of a position: the row does not show what is to be said, or nothing is scored."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of token ids. Targets are already shifted: ``targets[b, t]`` is to be said after ``inputs[b, :t + 1]``.

    ``inputs`` (b t, int64); ``targets`` (b t, int64; -100 where nothing is scored); ``segments``: which document each
    token belongs to, None when every row is one document without padding. ``n_tokens``: how many targets are scored.
    ``n_bytes``: UTF-8 bytes of the documents whose last token is scored here (0 for tasks that are not text). Summed
    over an evaluation, or over an epoch, it is the size of the text whatever the tokenizer. ``group``: what all its rows have
    in common, by which an evaluation tells scores apart (a length, a depth); "" where there is nothing to tell.
    ``evidence`` (b t, int64): at a scored target the position of the input that shows the token to be said, -1 elsewhere;
    None where the task does not know it. Measures by distance and depth come from it.
    ``answers`` (b t, int64): which of its row's answers each scored target is a part of, from 0 on; None: a row asks for
    one answer.
    """

    inputs: Int[Tensor, "b t"]
    targets: Int[Tensor, "b t"]
    segments: Segments | None
    n_tokens: int
    n_bytes: int = 0
    group: str = ""
    evidence: Int[Tensor, "b t"] | None = None
    answers: Int[Tensor, "b t"] | None = None

    @property
    def owners(self) -> Int[Tensor, "b t"]:
        """Which answer of the batch each token is a part of, as row * :attr:`per_row` + answer."""
        rows = torch.arange(len(self.targets))[:, None] * self.per_row
        answers = torch.zeros_like(self.targets) if self.answers is None else self.answers.clamp(min=0)
        return rows + answers

    @property
    def per_row(self) -> int:
        """Answers that a row has at the most."""
        return 1 if self.answers is None else max(int(self.answers.max()), 0) + 1

    def to(self, device: torch.device | str) -> Batch:
        """Moved to ``device``."""
        segments = None if self.segments is None else self.segments.to(device)
        evidence = None if self.evidence is None else self.evidence.to(device)
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        return replace(self, inputs=inputs, targets=targets, segments=segments, evidence=evidence)


@dataclass(frozen=True)
class Totals:
    """Sums over scored tokens. The counts are integers, so that no average of averages can creep in.

    ``nats``: summed negative log-likelihood (add it up in float64); ``n_correct``: targets that had the highest score;
    ``n_tokens`` and ``n_bytes`` as in :class:`Batch`; ``n_rows``: rows with scored tokens, ``n_rows_correct``: those of
    them with every scored token right; ``n_answers`` and ``n_answers_correct``: the same of each answer, where a row asks for
    several (all four 0 for documents). Add totals of batches, ranks or documents with ``+``.
    """

    nats: float = 0.0
    n_correct: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    n_rows: int = 0
    n_rows_correct: int = 0
    n_answers: int = 0
    n_answers_correct: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        """Nats a token. Like the other means, raises :class:`DataError` where nothing was scored."""
        return self.nats / _scored(self.n_tokens, "token")

    @property
    def accuracy(self) -> float:
        """Share of the scored tokens that had the highest score."""
        return self.n_correct / _scored(self.n_tokens, "token")

    @property
    def row_accuracy(self) -> float:
        """Share of the rows that are right as a whole."""
        return self.n_rows_correct / _scored(self.n_rows, "row")

    @property
    def answer_accuracy(self) -> float:
        """Share of the answers that are right as a whole; of rows, where each asks for one."""
        return self.n_answers_correct / _scored(self.n_answers, "answer")

    @property
    def bits_per_byte(self) -> float:
        """Bits a UTF-8 byte of text: comparable between tokenizers."""
        return self.nats / math.log(2) / _scored(self.n_bytes, "whole document")


def _scored(count: int, what: str) -> int:
    if count == 0:
        raise DataError(f"the mean of an empty evaluation was asked for: no {what} was scored")
    return count


@dataclass(frozen=True)
class TaskSplit:
    """One side of a task's data, for reports: how much of it there is, and where it came from."""

    name: str
    n_documents: int
    n_tokens: int
    n_bytes: int
    note: str = ""


class Stream(Iterator[Batch], ABC):
    """Training batches without end, exactly resumable.

    A batch depends on the stream's arguments and its place alone: nothing else that runs, and no number of kills and
    resumes, can change it. ``state_dict`` and ``load_state_dict`` follow torchdata's protocol; the state is plain data
    (JSON) and the same on every rank.
    """

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Batch: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: the next batch is the first one that a stream with this state gives."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at ``state``; raises ``CheckpointError`` when it belongs to other data."""


class Task(ABC):
    """Data with a measure. Loaded by a ``TaskConfig``."""

    name: str
    vocab_size: int
    """Ids are below this; a model's ``vocab_size`` must be at least as large."""
    row_length: int | None = None
    """Tokens of the longest training row, where the task has rows of its own lengths: ``train.seq_len`` must be this."""
    metric: ClassVar[str]
    """The measure that recipes are compared by, a key of :meth:`metrics`."""
    scores: ClassVar[Scores] = "next"
    """What the targets are: ``next``, tokens that follow; ``read``, tokens of the row itself, which only a head that reads them
    out of a summary can be asked for: any other has them before its eyes."""
    higher_is_better: ClassVar[bool]

    @abstractmethod
    def splits(self) -> tuple[TaskSplit, ...]:
        """How much data each side has."""

    @abstractmethod
    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Stream:
        """Batches of ``batch_size`` rows (a rank) of ``seq_len`` tokens."""

    @abstractmethod
    def eval_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """The evaluation set once, the same every time, as many batches on every rank."""

    def at_length(self, n_tokens: int, n_rows: int) -> Task:
        """The same task with ``n_rows`` held-out rows as long as ``n_tokens`` tokens allow, whatever it is trained on.

        Raises :class:`ConfigError` where it has no rows of that length; the default, for tasks that have none to lengthen.
        """
        raise ConfigError(f"task {self.name!r} has no rows that could be made {n_tokens} tokens long")

    def validation(self) -> Task:
        """The same task judged by its third side, which is neither trained on nor held out: options are chosen on it, so that
        the held-out side is met once. Raises :class:`ConfigError` where no such side is kept."""
        raise ConfigError(f"task {self.name!r} keeps no third side to choose options on")

    @abstractmethod
    def metrics(self, totals: Totals) -> dict[str, float]:
        """The measures by name, from sums over :meth:`eval_batches`."""

    @abstractmethod
    def baselines(self) -> dict[str, float]:
        """What trivial models reach, in the unit of ``metric``: a result means little until it beats them."""
