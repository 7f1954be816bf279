"""Tasks whose rows are drawn: sizes to train on, sizes to be judged by, and one function that draws rows of a size.

A row follows from (task, seed, split, its place) alone, whatever the batch, the rank or the order in which it is made. No
held-out row is ever trained on: where a size has so few different rows that both sides could draw the same one, the content of
a row decides which side it is of, and each side draws again until it has rows of its own. With ``validation`` there is a third
side under the same law. Axes: b rows, t time.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from hybridtf.core import CheckpointError, ConfigError, RecipeError, Segments, TaskConfig
from hybridtf.core.config import ConfigTable
from hybridtf.tasks.base import IGNORE, Batch, Stream, Task, TaskSplit, Totals
from hybridtf.tasks.draws import Longs, hashed, shuffled
from hybridtf.tasks.stream import check_sizes

# What a draw is for; part of its key, so that no two draws share numbers. Tasks number their own from 0 behind the split.
TRAIN, TEST, VALIDATION = 0, 1, 2
_ORDER, _BATCHES = 4, 5
MANY_BITS = 60.0
"""A size with 2^60 different rows or more need not be looked at: a million rows a side share one once in a million times."""
_HELD_OUT_SHARE = 4
"""Of the contents of small sizes, one in so many is held out, and another one where there is a third side."""
_SIDES = {TRAIN: "to train on", TEST: "that are held out", VALIDATION: "to choose options on"}
_SAMPLE = 256
"""Rows that are counted where a mean is asked for."""
_TRIES = 400
"""A side that has not found a row after as many draws has none."""


class RowsOf(ConfigTable):
    """``n_rows`` rows of one size. Tasks add what else makes a size (pairs, digits, depth); ``name`` tells sizes apart."""

    length: int = Field(gt=0)
    """Tokens of a row, the longest where they differ; of another unit where the task says so."""
    n_rows: int = Field(gt=0)

    @property
    def name(self) -> str:
        """What reports call the size."""
        return f"{self.length} tokens"


class VaryingRows(RowsOf):
    """``n_rows`` rows of ``min_length`` to ``length`` tokens."""

    min_length: int | None = Field(default=None, gt=0)
    """None: all rows have ``length`` tokens."""

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row."""
        return self.length if self.min_length is None else self.min_length

    @property
    def name(self) -> str:
        return super().name if self.min_length is None else f"{self.min_length} to {self.length} tokens"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.shortest > self.length:
            raise ValueError(f"min_length = {self.min_length} is above length = {self.length}")
        return self


@dataclass(frozen=True)
class Rows:
    """Drawn rows: ``inputs`` and ``targets`` (b t); ``lengths`` (b) where rows differ, the rest being padding; ``evidence``
    (b t) where the token to be said stands in the row, as :class:`~hybridtf.tasks.Batch` says it; ``answers`` (b t): which
    answer of its row a scored token is of, where rows ask for several."""

    inputs: Longs
    targets: Longs
    # By name alone: all are whole numbers, and one in another's place would not be seen.
    lengths: Longs | None = field(default=None, kw_only=True)
    evidence: Longs | None = field(default=None, kw_only=True)
    answers: Longs | None = field(default=None, kw_only=True)


class SyntheticConfig(TaskConfig):
    """Base of tasks of drawn rows: declare ``train`` and ``test`` (sizes), ``draw`` and ``baselines``.

    A batch has rows of one size, and ``train.seq_len`` must be the longest trained one. The measure is the share of scored
    tokens that the model says right, or, where ``load`` gives a :class:`WholeRowTask`, of rows that are right as a whole.
    """

    length_step: ClassVar[int] = 1
    """``length`` of every size is a multiple of it."""
    fresh: bool = True
    """Draw new training rows in every epoch; else the same rows come again, as with a fixed data set."""
    validation: bool | None = None
    """Keep a third side, of the sizes of ``test``, apart from both others: :meth:`SyntheticTask.validation`."""
    train: tuple[RowsOf, ...]
    test: tuple[RowsOf, ...]

    @abstractmethod
    def draw(self, size: Any, key: tuple[int, ...], index: Longs) -> Rows:
        """The rows ``index`` (b) of ``size`` (one of ``train`` or ``test``). ``key`` names the set they are of: begin the key
        of each ``Draws`` with it, end it with what the draw is for."""

    @property
    @abstractmethod
    def n_ids(self) -> int:
        """Ids of the task are below this."""

    @abstractmethod
    def baselines(self) -> dict[str, float]:
        """What trivial models reach over the test rows, in the task's measure; ``chance`` among them."""

    def n_tokens(self, size: Any) -> int:
        """Tokens of the longest row of ``size``."""
        return int(size.length)

    def at_length(self, n_tokens: int, n_rows: int) -> Self:
        """The same task with one test size: the longest trained one with ``length`` grown (or cut) until its rows have
        ``n_tokens`` tokens, or as many below as its unit allows, all of them alike. What else makes the size (pairs, needles,
        hops) stays: where ``length`` counts tokens what lies between grows; where it counts letters or entries, what is to be
        kept grows too.

        Raises :class:`ConfigError` where the task has no such rows, with its reason.
        """
        longest = max(self.train, key=self.n_tokens)
        low, high = 0, n_tokens // self.length_step  # a unit of any task has a token at least
        while low < high:
            middle = (low + high + 1) // 2
            grown = longest.model_copy(update={"length": middle * self.length_step})
            low, high = (middle, high) if self.n_tokens(grown) <= n_tokens else (low, middle - 1)
        table = {name: value for name, value in longest.to_dict().items() if name != "min_length"}
        try:
            size = type(longest)(**{**table, "length": low * self.length_step, "n_rows": n_rows})
            return type(self)(**{**self.to_dict(), "train": self.train, "test": (size,)})
        except RecipeError as error:
            raise ConfigError(f"task {self.type_name()!r} has no rows of {n_tokens} tokens: {error}") from None

    def scored(self, size: Any, split: int = TEST) -> float:
        """Scored tokens of a row of ``size``: exact where all rows have as many, else the mean of the split's first rows."""
        key = (TEST,) if split == TEST else (TRAIN, 0, 0)
        rows = self.draw(size, key, np.arange(min(size.n_rows, _SAMPLE)))
        return float((rows.targets != IGNORE).sum(1).mean())

    def bits(self, size: Any) -> float:
        """Base-2 logarithm of how many different rows ``size`` has, at least; it decides whether sides must be kept apart."""
        return MANY_BITS

    def most_frequent(self) -> float:
        """What a model reaches that always says the commonest answer, over the first test rows of each size."""
        shares = []
        for size in self.test:
            targets = self.draw(size, (TEST,), np.arange(min(size.n_rows, _SAMPLE))).targets
            counts = np.bincount(targets[targets != IGNORE])
            shares.append(float(counts.max() / counts.sum()))
        return self.mean_over_test(shares)

    def guessed_rows(self, odds: float, sure: int = 0) -> float:
        """The share of test rows that are right as a whole where each scored token is with the probability ``odds``, but for
        ``sure`` tokens a row that always are; over the first rows of each size."""
        total = 0.0
        for size in self.test:
            targets = self.draw(size, (TEST,), np.arange(min(size.n_rows, _SAMPLE))).targets
            total += size.n_rows * float((odds ** ((targets != IGNORE).sum(1) - sure)).mean())
        return total / sum(size.n_rows for size in self.test)

    def mean_over_test(self, values: Sequence[float]) -> float:
        """The mean of a value a test size, each weighted by its scored tokens."""
        weights = [size.n_rows * self.scored(size) for size in self.test]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    @model_validator(mode="after")
    def _sizes_differ(self) -> Self:
        for where in ("train", "test"):
            sizes = getattr(self, where)
            if not sizes:
                raise ValueError(f"{where} lists no size")
            if len({rows.name for rows in sizes}) < len(sizes):
                raise ValueError(f"{where} lists one size twice")
        return self

    def load(self, seed: int = 0) -> SyntheticTask:
        """``seed`` draws the training rows; the test rows are always the same."""
        return SyntheticTask(self, seed)


class SyntheticTask(Task):
    """See :class:`SyntheticConfig`."""

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: SyntheticConfig, seed: int) -> None:
        self.name = config.type_name()
        self.config, self.seed, self.vocab_size = config, seed, config.n_ids
        self.row_length = max(config.n_tokens(size) for size in config.train)
        self._judged = TEST

    def validation(self) -> SyntheticTask:
        if not self.config.validation:
            raise ConfigError(f"task {self.name!r} keeps no third side to choose options on; set task.validation = true")
        other = copy.copy(self)
        other._judged = VALIDATION
        return other

    def rows(self, size: RowsOf, key: tuple[int, ...], index: Longs) -> Batch:
        """The rows ``index`` (b) of a size; ``key`` begins with the split, and names the set that they are of.

        Raises :class:`ConfigError` where the size has too few different rows for two sides.
        """
        drawn = self.config.draw(size, key, index)
        if self.config.bits(size) < MANY_BITS:
            drawn = self._of_one_side(size, key, index, drawn)
        inputs, targets = torch.from_numpy(drawn.inputs), torch.from_numpy(drawn.targets)
        segments = None
        if drawn.lengths is not None:
            segments = Segments.from_mask(torch.arange(inputs.shape[1]) < torch.from_numpy(drawn.lengths)[:, None])
        evidence = None if drawn.evidence is None else torch.from_numpy(drawn.evidence)
        answers = None if drawn.answers is None else torch.from_numpy(drawn.answers)
        n = int((targets != IGNORE).sum())
        return Batch(inputs, targets, segments, n, group=size.name, evidence=evidence, answers=answers)

    def at_length(self, n_tokens: int, n_rows: int) -> SyntheticTask:
        """See :meth:`SyntheticConfig.at_length`."""
        return self.config.at_length(n_tokens, n_rows).load(self.seed)

    def _of_one_side(self, size: RowsOf, key: tuple[int, ...], index: Longs, drawn: Rows) -> Rows:
        """``drawn``, where rows that belong to the other side are drawn again."""
        columns = {f.name: value.copy() for f in fields(drawn) if (value := getattr(drawn, f.name)) is not None}
        side = key[0] if key[0] in (TEST, VALIDATION) else TRAIN
        wrong = np.flatnonzero(self._side(drawn) != side)
        for again in range(1, _TRIES + 1):
            if not len(wrong):
                return Rows(**columns)
            more = self.config.draw(size, (*key, again), index[wrong])
            for name, mine in columns.items():
                mine[wrong] = getattr(more, name)
            wrong = wrong[self._side(more) != side]
        raise ConfigError(
            f"task {self.name!r}: {size.name} have too few different rows for rows {_SIDES[side]} apart from the others; "
            "use longer rows"
        )

    def _side(self, rows: Rows) -> Longs:
        """(b) the side that each row belongs to by its content."""
        place = _content(rows)
        rest = np.where(place == 1, VALIDATION, TRAIN) if self.config.validation else TRAIN
        return np.where(place == 0, TEST, rest)

    def splits(self) -> tuple[TaskSplit, ...]:
        def split(name: str, sizes: Sequence[RowsOf], note: str) -> TaskSplit:
            side = TRAIN if name == "train" else TEST
            n_tokens = round(sum(size.n_rows * self.config.scored(size, side) for size in sizes))
            said = "; ".join(size.name for size in sizes)
            return TaskSplit(name, sum(size.n_rows for size in sizes), n_tokens, 0, said + note)

        fresh = "; drawn anew in every epoch" if self.config.fresh else ""
        return (split("train", self.config.train, fresh), split("held_out", self.config.test, ""))

    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> SyntheticStream:
        """Raises :class:`ConfigError` where ``seq_len`` is not the length of the longest rows."""
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        if seq_len != self.row_length:
            raise ConfigError(
                f"train.seq_len = {seq_len}: the task {self.name!r} trains on rows of up to {self.row_length} tokens; "
                f"set it to {self.row_length}"
            )
        return SyntheticStream(self, batch_size, rank, world_size)

    def eval_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """The test rows (of :meth:`validation` its own), size by size. They have their own lengths, whatever ``seq_len``."""
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        for size in self.config.test:
            for start in range(rank * batch_size, size.n_rows + rank * batch_size, batch_size * world_size):
                index = np.arange(start, start + batch_size)
                inside = index < size.n_rows
                if world_size == 1:
                    index, inside = index[inside], inside[inside]
                # Several ranks have as many full batches each: rows past the end are copies that are not scored.
                batch = self.rows(size, (self._judged,), index.clip(max=size.n_rows - 1))
                targets = batch.targets.masked_fill(~torch.from_numpy(inside)[:, None], IGNORE)
                yield replace(batch, targets=targets, n_tokens=int((targets != IGNORE).sum()))

    def metrics(self, totals: Totals) -> dict[str, float]:
        """``accuracy`` over the scored tokens, ``row_accuracy`` (all of a row's right), ``loss`` (nats a scored token)."""
        return {"accuracy": totals.accuracy, "row_accuracy": totals.row_accuracy, "loss": totals.loss}

    def baselines(self) -> dict[str, float]:
        return self.config.baselines()


class WholeRowTask(SyntheticTask):
    """Compared by the share of rows of which every scored token is right, each said after the right ones before it."""

    metric: ClassVar[str] = "row_accuracy"


def _content(rows: Rows) -> Longs:
    """(b) where the content of a row puts it, from 0 to :data:`_HELD_OUT_SHARE` - 1: a hash of its tokens and its length."""
    width = rows.inputs.shape[1]
    words = hashed((), width + 1)  # not of the width: a short row is of one side whatever size it is drawn for
    lengths = np.full(len(rows.inputs), width) if rows.lengths is None else rows.lengths
    tokens = np.where(np.arange(width) < lengths[:, None], rows.inputs + 1, 0).astype(np.uint64)
    total = (tokens * (words[1:] | np.uint64(1))).sum(1, dtype=np.uint64) + lengths.astype(np.uint64) * words[0]
    # The low bits of a sum of odd multiples are poor.
    total = (total ^ (total >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((total >> np.uint64(40)) % np.uint64(_HELD_OUT_SHARE), dtype=np.int64)


class SyntheticStream(Stream):
    """Every training row once an epoch, batches of one size each, in an order that follows from (seed, epoch).

    The last batch of a size is filled up with its first rows. The state counts steps of all ranks.
    """

    def __init__(self, task: SyntheticTask, batch_size: int, rank: int, world_size: int) -> None:
        self._task, self._batch_size, self._rank, self._world_size = task, batch_size, rank, world_size
        self._everyone = batch_size * world_size
        self._steps = [-(-size.n_rows // self._everyone) for size in task.config.train]
        self._epoch = self._step = 0
        self._plan = self._epoch_plan()

    @property
    def rows_in_epoch(self) -> int:
        """Rows that an epoch has, over all ranks."""
        return sum(self._steps) * self._everyone

    def _epoch_plan(self) -> tuple[list[tuple[int, int]], list[Longs]]:
        """(size, batch of it) of each step, and the order of each size's rows."""
        key = (self._task.seed, self._epoch)
        batches = [(i, j) for i, n in enumerate(self._steps) for j in range(n)]
        order = shuffled((*key, _BATCHES), len(batches))
        rows = [shuffled((*key, _ORDER, i), size.n_rows) for i, size in enumerate(self._task.config.train)]
        return [batches[k] for k in order], rows

    def __next__(self) -> Batch:
        if self._step == len(self._plan[0]):
            self._epoch, self._step = self._epoch + 1, 0
            self._plan = self._epoch_plan()
        batches, rows = self._plan
        i, j = batches[self._step]
        self._step += 1
        start = j * self._everyone + self._rank * self._batch_size
        places = np.arange(start, start + self._batch_size) % len(rows[i])
        config = self._task.config
        key = (TRAIN, self._task.seed, self._epoch if config.fresh else 0)
        return self._task.rows(config.train[i], key, rows[i][places])

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise CheckpointError(f"data stream: the state is of {name} = {state.get(name)!r}, this stream has {mine!r}")
        epoch, step = state.get("epoch"), state.get("step")
        if type(epoch) is not int or type(step) is not int or epoch < 0 or not 0 <= step <= sum(self._steps):
            raise CheckpointError(f"data stream: epoch = {epoch!r}, step = {step!r} is not a place in it")
        self._epoch, self._step = epoch, step
        self._plan = self._epoch_plan()

    def _identity(self) -> dict[str, Any]:
        data = {name: value for name, value in self._task.config.to_dict().items() if name not in ("type", "test")}
        return {"task": self._task.name, "data": data, "seed": self._task.seed, "rows_per_step": self._everyone}


def next_tokens(inputs: Longs) -> Longs:
    """Targets (b t) of training on every next token; the last has none."""
    return np.concatenate([inputs[:, 1:], np.full_like(inputs[:, :1], IGNORE)], axis=1)


def sizes(names: Sequence[str], *rows: tuple[int, ...]) -> list[dict[str, int]]:
    """Sizes for a preset: the fields' ``names``, then a tuple of their values each."""
    return [dict(zip(names, size, strict=True)) for size in rows]
