"""``mqar``: multi-query associative recall (Arora et al., *Zoology*, https://arxiv.org/abs/2312.04927).

A row begins with ``n_pairs`` pairs of a key and a value. Each key then comes once more, and there the model must say its
value. With ``vocab_size = 16``, ``length = 16`` and ``n_pairs = 2`` a row may be

    inputs    5 12  3  9  5  0  0  0  3  0  0  0  0  0  0  0
    targets   .  .  .  . 12  .  .  .  9  .  .  .  .  .  .  .      (. is not scored)

Procedure, per row: keys are ``n_pairs`` different ids of [1, V/2), values as many of [V/2, V), both drawn evenly. What
follows the pairs is (length - 2 n_pairs) / 2 slots of two tokens. A key comes at the first token of its slot; slots are
drawn without replacement, slot i = 1, 2, ... in proportion to i^(power - 1), so that most keys come early. All other tokens
are id 0, or with ``random_fill`` drawn evenly from the whole vocabulary.

The measure is accuracy over the asked keys. A model that has learnt which ids are values reaches 1 / (V - V/2) by chance,
and one that says one of the row's values 1 / n_pairs.

Sizes of the paper (figure 2): vocab_size 8192, (length, n_pairs) of (64, 4), (128, 8), (256, 16) or (512, 64), 100,000 rows
to train on and 3,000 to test, batches of 512, 512, 256 and 128 rows, 64 epochs, two layers without channel mixers. Presets:
``mqar_based``, the mixture of https://arxiv.org/abs/2402.18668 (train up to 64 pairs in 256 tokens, test up to 256 in 1024),
and ``mqar_small``, which a model of 60,000 parameters learns in minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from hybridtf.core import CheckpointError, ConfigError, Preset, TaskConfig
from hybridtf.core.config import ConfigTable
from hybridtf.tasks.base import IGNORE, Batch, Stream, Task, TaskSplit, Totals
from hybridtf.tasks.draws import Draws, Longs, shuffled
from hybridtf.tasks.stream import check_sizes

# What a draw is for; part of its key, so that no two draws share numbers.
_KEYS, _VALUES, _SLOTS, _FILL, _ORDER, _BATCHES = range(6)
_TRAIN, _TEST = 0, 1


class MQARRows(ConfigTable):
    """``n_rows`` rows of one size."""

    length: int = Field(gt=0)
    """Tokens of a row."""
    n_pairs: int = Field(gt=0)
    n_rows: int = Field(gt=0)

    @property
    def name(self) -> str:
        return f"{self.length} tokens, {self.n_pairs} pairs"

    @model_validator(mode="after")
    def _keys_have_slots(self) -> Self:
        if 4 * self.n_pairs > self.length:
            raise ValueError(f"{self.n_pairs} pairs and a slot for each need {4 * self.n_pairs} tokens; length = {self.length}")
        return self


class MQARConfig(TaskConfig):
    """Multi-query associative recall: say the value of each key again, as Zoology asks it.

    See the module for procedure, measure and sizes. ``train`` and ``test`` list the sizes of rows; a batch has rows of one
    size, and ``train.seq_len`` must be the longest trained one.
    """

    type: Literal["mqar"] = "mqar"
    vocab_size: int = Field(default=8192, ge=4)
    """Ids below half of it are keys, the others values."""
    train: tuple[MQARRows, ...] = Field(default=(MQARRows(length=64, n_pairs=4, n_rows=100_000),), min_length=1)
    test: tuple[MQARRows, ...] = Field(default=(MQARRows(length=64, n_pairs=4, n_rows=3_000),), min_length=1)
    power: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    """The smaller, the earlier the keys are asked."""
    random_fill: bool = False
    """Tokens that are no pair and no query are random ids, not 0."""
    fresh: bool = False
    """Draw new training rows in every epoch; else the same rows come again, as in the paper."""

    @model_validator(mode="after")
    def _enough_ids(self) -> Self:
        keys = self.vocab_size // 2 - 1
        for where in ("train", "test"):
            for i, rows in enumerate(getattr(self, where)):
                if rows.n_pairs > keys:
                    raise ValueError(
                        f"{where}[{i}].n_pairs = {rows.n_pairs}, and vocab_size = {self.vocab_size} has only {keys} keys"
                    )
            if len({rows.name for rows in getattr(self, where)}) < len(getattr(self, where)):
                raise ValueError(f"{where} lists one size twice")
        return self

    @classmethod
    def tiny(cls) -> Self:
        rows = MQARRows(length=12, n_pairs=2, n_rows=24)
        return cls(vocab_size=16, train=(rows,), test=(rows, MQARRows(length=16, n_pairs=4, n_rows=10)))

    def load(self, seed: int = 0) -> MQARTask:
        """``seed`` draws the training rows; the test rows are always the same."""
        return MQARTask(self, seed)


class MQARTask(Task):
    """See :class:`MQARConfig`."""

    name = "mqar"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: MQARConfig, seed: int) -> None:
        self.config, self.seed, self.vocab_size = config, seed, config.vocab_size
        self.row_length = max(size.length for size in config.train)

    def rows(self, size: MQARRows, key: tuple[int, ...], index: Longs) -> Batch:
        """The rows ``index`` (b) of a size; ``key`` names the set that they are of."""
        inputs, targets = _draw(self.config, size, key, index)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), None, inputs.shape[0] * size.n_pairs, group=size.name)

    def splits(self) -> tuple[TaskSplit, ...]:
        def split(name: str, sizes: tuple[MQARRows, ...], note: str) -> TaskSplit:
            n_tokens = sum(size.n_rows * size.n_pairs for size in sizes)
            said = "; ".join(size.name for size in sizes)
            return TaskSplit(name, sum(size.n_rows for size in sizes), n_tokens, 0, said + note)

        fresh = "; drawn anew in every epoch" if self.config.fresh else ""
        return (split("train", self.config.train, fresh), split("held_out", self.config.test, ""))

    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> MQARStream:
        """Raises :class:`ConfigError` where ``seq_len`` is not the length of the longest rows."""
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        if seq_len != self.row_length:
            raise ConfigError(
                f"train.seq_len = {seq_len}: the task 'mqar' trains on rows of up to {self.row_length} tokens; set it to "
                f"{self.row_length}"
            )
        return MQARStream(self, batch_size, rank, world_size)

    def eval_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """The test rows, size by size. They have their own lengths, whatever ``seq_len``."""
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        for size in self.config.test:
            for start in range(rank * batch_size, size.n_rows + rank * batch_size, batch_size * world_size):
                index = np.arange(start, start + batch_size)
                inside = index < size.n_rows
                if world_size == 1:
                    index, inside = index[inside], inside[inside]
                # Several ranks have as many full batches each: rows past the end are copies that are not scored.
                batch = self.rows(size, (_TEST,), index.clip(max=size.n_rows - 1))
                targets = batch.targets.masked_fill(~torch.from_numpy(inside)[:, None], IGNORE)
                yield Batch(batch.inputs, targets, None, int(inside.sum()) * size.n_pairs, group=size.name)

    def metrics(self, totals: Totals) -> dict[str, float]:
        """``accuracy`` over the asked keys, and ``loss`` (nats a key)."""
        return {"accuracy": totals.accuracy, "loss": totals.loss}

    def baselines(self) -> dict[str, float]:
        """``chance``: any value; ``own_value``: any value of the row, the mean over the keys that are asked."""
        asked = sum(size.n_rows * size.n_pairs for size in self.config.test)
        values = self.vocab_size - self.vocab_size // 2
        return {"chance": 1 / values, "own_value": sum(size.n_rows for size in self.config.test) / asked}


def _draw(config: MQARConfig, size: MQARRows, key: tuple[int, ...], index: Longs) -> tuple[Longs, Longs]:
    """Inputs and targets (b length) of the rows ``index`` of the set ``key``."""
    half, n = config.vocab_size // 2, size.n_pairs
    name = (*key, config.vocab_size, size.length, n)
    keys = 1 + Draws((*name, _KEYS), index).distinct(n, half - 1)
    values = half + Draws((*name, _VALUES), index).distinct(n, config.vocab_size - half)
    weights = np.arange(1, (size.length - 2 * n) // 2 + 1, dtype=np.float64) ** (config.power - 1)
    place = 2 * n + 2 * Draws((*name, _SLOTS), index).without_replacement(n, weights)
    inputs = np.zeros((len(index), size.length), dtype=np.int64)
    if config.random_fill:
        inputs = Draws((*name, _FILL), index).integers(size.length, config.vocab_size)
    inputs[:, 0 : 2 * n : 2], inputs[:, 1 : 2 * n : 2] = keys, values
    np.put_along_axis(inputs, place, keys, axis=1)
    targets = np.full_like(inputs, IGNORE)
    np.put_along_axis(targets, place, values, axis=1)
    return inputs, targets


class MQARStream(Stream):
    """Every training row once an epoch, batches of one size each, in an order that follows from (seed, epoch).

    The last batch of a size is filled up with its first rows. The state counts steps of all ranks.
    """

    def __init__(self, task: MQARTask, batch_size: int, rank: int, world_size: int) -> None:
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
        key = (_TRAIN, self._task.seed, self._epoch if config.fresh else 0)
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
        config = self._task.config.to_dict()
        data = {name: config[name] for name in ("vocab_size", "train", "power", "random_fill", "fresh")}
        return {"task": "mqar", "data": data, "seed": self._task.seed, "rows_per_step": self._everyone}


def _sizes(*sizes: tuple[int, int, int]) -> list[dict[str, int]]:
    return [dict(zip(("length", "n_pairs", "n_rows"), size, strict=True)) for size in sizes]


PRESETS = (
    Preset("mqar_small", "mqar", {
        "vocab_size": 256, "fresh": True, "train": _sizes((64, 8, 20_000)),
        "test": _sizes((64, 8, 512), (128, 16, 256), (256, 32, 128)),
    }),
    Preset("mqar_based", "mqar", {
        "vocab_size": 8192,
        "train": _sizes((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "test": _sizes(
            (64, 4, 1_000), (64, 8, 1_000), (64, 16, 1_000), (128, 32, 1_000), (256, 64, 1_000), (512, 128, 1_000),
            (1024, 256, 1_000),
        ),
    }),
)
