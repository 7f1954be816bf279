"""Each law of tasks fails the fault that it is there for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import pytest
import torch

from hybridtf.core import TaskConfig
from hybridtf.tasks import IGNORE, MQARConfig, SyntheticTask
from hybridtf.tasks.synthetic import SyntheticStream
from hybridtf.testing import ContractError, Subject, check_task, laws_for, run_law


class BrokenTask(SyntheticTask):
    """mqar with one fault."""

    def __init__(self, config: MQARConfig, seed: int, fault: str) -> None:
        super().__init__(config, seed)
        self.fault = fault

    def _spoilt(self, batch):
        if self.fault == "count":
            return type(batch)(batch.inputs, batch.targets, None, batch.n_tokens + 1)
        if self.fault == "vocabulary":
            return type(batch)(batch.inputs + 8, batch.targets, None, batch.n_tokens)
        if self.fault == "dtype":
            return type(batch)(batch.inputs.int(), batch.targets, None, batch.n_tokens)
        evidence = {
            "evidence elsewhere": torch.where(batch.evidence >= 0, batch.evidence - 1, batch.evidence),
            "evidence to come": torch.where(batch.evidence >= 0, batch.inputs.shape[1] - 1, batch.evidence),
            "evidence of nothing": batch.evidence.clamp(min=0), "evidence dtype": batch.evidence.int(),
        }
        return replace(batch, evidence=evidence.get(self.fault, batch.evidence))

    def eval_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1):
        if self.fault == "leak":
            stream = super().train_batches(batch_size, seq_len)
            return (next(stream) for _ in range(3))
        if self.fault == "seeded":
            return (self.rows(self.config.test[0], (self.seed,), torch.arange(3).numpy()) for _ in range(2))
        if self.fault == "twice" and world_size > 1:
            rank, world_size = 0, 1
        return (self._spoilt(batch) for batch in super().eval_batches(batch_size, seq_len, rank=rank, world_size=world_size))

    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> Any:
        if self.fault == "same ranks":
            return super().train_batches(batch_size, seq_len)
        stream = super().train_batches(batch_size, seq_len, rank=rank, world_size=world_size)
        if self.fault == "forgets":
            stream.load_state_dict = lambda state: SyntheticStream.load_state_dict(stream, {**state, "step": 0})  # type: ignore[method-assign]
        if self.fault == "takes anything":
            stream.load_state_dict = lambda state: None if "of" in state else SyntheticStream.load_state_dict(stream, state)  # type: ignore
        return stream

    def metrics(self, totals):
        return {"loss": 1.0} if self.fault == "no metric" else super().metrics(totals)

    def baselines(self):
        return {"no baseline": {}, "unbeaten": {"chance": 1.0}}.get(self.fault, super().baselines())


class BrokenTaskConfig(TaskConfig):
    type: Literal["broken_task"] = "broken_task"
    fault: str

    @classmethod
    def tiny(cls) -> Self:
        return cls(fault="none")

    def load(self, seed: int = 0) -> BrokenTask:
        return BrokenTask(MQARConfig.tiny(), seed, self.fault)


@pytest.mark.parametrize(
    ("fault", "law", "message"),
    [
        ("count", "rows", "says n_tokens ="),
        ("vocabulary", "rows", "outside the vocabulary of 16"),
        ("dtype", "rows", "must be int64"),
        ("evidence elsewhere", "rows", "not where the row shows the token"),
        ("evidence to come", "rows", "lies behind the question"),
        ("evidence of nothing", "rows", "evidence for targets that are not scored"),
        ("evidence dtype", "rows", "evidence must be int64"),
        ("forgets", "resume", "does not give the same batches"),
        ("takes anything", "resume", "must be refused with CheckpointError"),
        ("seeded", "held_out", "changes with the seed"),
        ("leak", "held_out", "changes with the seed|is trained on"),
        ("twice", "ranks", "do not score each held-out row once"),
        ("same ranks", "ranks", "train on the same rows"),
        ("no metric", "measures", "metric = 'accuracy' is not among"),
        ("no baseline", "measures", "what a trivial model reaches"),
        ("unbeaten", "measures", "no better than the baseline 'chance'"),
    ],
)
def test_a_fault_is_found(fault: str, law: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        run_law(Subject("tasks", BrokenTaskConfig(fault=fault)), law)


def test_without_a_fault_all_laws_hold() -> None:
    config = BrokenTaskConfig.tiny()
    for law in set(laws_for("tasks")) - {"config"}:
        run_law(Subject("tasks", config), law)
    check_task(MQARConfig.tiny())


def test_what_is_not_scored_is_no_row() -> None:
    """Rows of pure filling, which ranks may have, do not count."""
    batch = next(iter(MQARConfig.tiny().load(0).eval_batches(3, 12)))
    assert (batch.targets != IGNORE).any(1).all()
