"""``repeat``: a random word said again and again; from its second time on, a model that remembers is always right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field

from hybridtf.core import CheckpointError, TaskConfig
from hybridtf.tasks import IGNORE, Batch, Stream, Task, TaskSplit, Totals

EVAL_ROWS = 256


class RepeatConfig(TaskConfig):
    """Words of ``period`` symbols out of ``vocab_size``, each repeated to the end of its row."""

    type: Literal["repeat"] = "repeat"
    vocab_size: int = Field(default=16, gt=1)
    period: int = Field(default=8, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls(vocab_size=11, period=7)

    def load(self, seed: int = 0) -> RepeatTask:
        return RepeatTask(self, seed)


class RepeatTask(Task):
    """See :class:`RepeatConfig`; scored by accuracy on all symbols but those of the word's first time."""

    name = "repeat"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, config: RepeatConfig, seed: int) -> None:
        self.config, self.seed, self.vocab_size = config, seed, config.vocab_size

    def rows(self, key: str, n: int, seq_len: int) -> Batch:
        """``n`` rows of ``seq_len`` tokens; the same for the same ``key``."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        words = torch.randint(self.vocab_size, (n, self.config.period), generator=generator)
        tokens = words.repeat(1, seq_len // self.config.period + 2)[:, : seq_len + 1]
        targets = tokens[:, 1:].clone()
        targets[:, : self.config.period - 1] = IGNORE
        return Batch(tokens[:, :-1], targets, None, int((targets != IGNORE).sum()))

    def splits(self) -> tuple[TaskSplit, ...]:
        # Training rows are drawn without end, so only the evaluation has a size.
        return (TaskSplit("held_out", EVAL_ROWS, 0, 0, "training rows are drawn without end"),)

    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> RepeatStream:
        return RepeatStream(self, batch_size, seq_len, rank)

    def eval_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        # The seed of the training rows plays no part here.
        every = self.rows("held out", EVAL_ROWS, seq_len)
        for start in range(rank * batch_size, EVAL_ROWS + rank * batch_size, batch_size * world_size):
            index = torch.arange(start, start + batch_size)
            # Every rank has as many full batches: rows past the end are copies that are not scored.
            over, index = index >= EVAL_ROWS, index.clamp(max=EVAL_ROWS - 1)
            targets = every.targets[index].masked_fill(over[:, None], IGNORE)
            yield Batch(every.inputs[index], targets, None, int((targets != IGNORE).sum()))

    def metrics(self, totals: Totals) -> dict[str, float]:
        return {"accuracy": totals.accuracy, "loss": totals.loss}

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.vocab_size}


class RepeatStream(Stream):
    """Batch after batch; its place is a number, and a batch follows from (seed, place, rank) alone."""

    def __init__(self, task: RepeatTask, batch_size: int, seq_len: int, rank: int) -> None:
        self.task, self.batch_size, self.seq_len = task, batch_size, seq_len
        self.rank, self.place = rank, 0

    def __next__(self) -> Batch:
        key = f"train {self.task.seed} {self.place} {self.rank}"
        self.place += 1
        return self.task.rows(key, self.batch_size, self.seq_len)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.task.seed, "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("seed") != self.task.seed or not isinstance(state.get("place"), int):
            raise CheckpointError(f"repeat: {dict(state)} is no place in the stream of seed {self.task.seed}")
        self.place = state["place"]
