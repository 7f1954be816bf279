"""What all tasks of drawn rows share: sides that never meet, rows of unequal length, streams that resume."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field

from hybridtf.core import ConfigError
from hybridtf.tasks import IGNORE, Rows, RowsOf, SyntheticConfig, SyntheticTask
from hybridtf.tasks.draws import Draws


class Bits(SyntheticConfig):
    """Random bits, of which the last is scored: 2^length rows in all."""

    type: Literal["bits"] = "bits"
    train: tuple[RowsOf, ...] = Field(default=(RowsOf(length=6, n_rows=500),))
    test: tuple[RowsOf, ...] = Field(default=(RowsOf(length=6, n_rows=300), RowsOf(length=5, n_rows=7)))
    cut: bool = False

    @property
    def n_ids(self) -> int:
        return 2

    def bits(self, size: RowsOf) -> float:
        return float(size.length)

    def draw(self, size, key, index) -> Rows:
        inputs = Draws((*key, 0), index).integers(size.length, 2)
        lengths = 1 + Draws((*key, 1), index).integers(1, size.length)[:, 0] if self.cut else np.full(len(index), size.length)
        inputs = np.where(np.arange(size.length) < lengths[:, None], inputs, 0)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, lengths[:, None] - 1, 1, axis=1)
        return Rows(inputs, targets, lengths=lengths if self.cut else None)

    def baselines(self) -> dict[str, float]:
        return {"chance": self.mean_over_test([0.5 for _ in self.test])}

    @classmethod
    def tiny(cls) -> Bits:
        return cls()


def contents(batches, n: int) -> set[tuple[int, ...]]:
    found = set()
    for batch, _ in zip(batches, range(n), strict=False):
        real = torch.ones_like(batch.inputs, dtype=torch.bool) if batch.segments is None else batch.segments.real
        found |= {tuple(row[mask].tolist()) for row, mask in zip(batch.inputs, real, strict=True)}
    return found


@pytest.mark.parametrize("cut", [False, True])
def test_a_space_of_64_rows_is_shared_out_and_covered(cut: bool) -> None:
    task = Bits(cut=cut).load()
    trained = contents(task.train_batches(20, 6), 200)
    held_out = contents(task.eval_batches(20, 6), 100)
    assert trained
    assert held_out
    assert trained.isdisjoint(held_out)
    if not cut:
        whole = {row for row in trained | held_out if len(row) == 6}
        assert len(whole) == 64  # both sides together leave nothing out
        assert 8 <= len({row for row in held_out if len(row) == 6}) <= 24


def test_what_is_drawn_again_depends_on_nothing_else() -> None:
    task = Bits().load()
    size = task.config.train[0]
    alone = [task.rows(size, (0, 3, 0), np.array([i])).inputs for i in range(50)]
    assert torch.equal(torch.cat(alone), task.rows(size, (0, 3, 0), np.arange(50)).inputs)


def test_a_size_without_rows_for_both_sides_is_refused() -> None:
    class Same(Bits):
        """One row, whatever is drawn: it can be on one side only."""

        def draw(self, size, key, index) -> Rows:
            return Rows(np.zeros((len(index), size.length), dtype=np.int64), np.ones((len(index), size.length), dtype=np.int64))

    task = Same().load()
    batches = itertools.chain(task.eval_batches(4, 6), task.train_batches(4, 6))
    with pytest.raises(ConfigError, match=r"[56] tokens have too few different rows .*use longer rows"):
        list(itertools.islice(batches, 400))


def test_unequal_rows_are_padded_and_say_so() -> None:
    batch = next(Bits(cut=True).load().train_batches(64, 6))
    assert batch.segments is not None
    lengths = batch.segments.real.sum(1)
    assert len(set(lengths.tolist())) > 2
    assert torch.equal((batch.targets != IGNORE).int().argmax(1), lengths - 1)
    assert batch.n_tokens == 64


def test_the_task_is_named_by_its_config_and_says_its_sizes() -> None:
    task = Bits().load()
    assert isinstance(task, SyntheticTask)
    assert task.name == "bits"
    assert [(split.name, split.n_documents, split.n_tokens) for split in task.splits()] == [
        ("train", 500, 500), ("held_out", 307, 307),
    ]
    with pytest.raises(ValueError, match="train lists no size"):
        Bits(train=())


@pytest.mark.parametrize("cut", [False, True])
def test_three_sides_never_meet_and_leave_nothing_out(cut: bool) -> None:
    task = Bits(cut=cut, validation=True).load()
    trained = contents(task.train_batches(20, 6), 200)
    held_out, third = contents(task.eval_batches(20, 6), 100), contents(task.validation().eval_batches(20, 6), 100)
    assert trained.isdisjoint(held_out)
    assert trained.isdisjoint(third)
    assert third.isdisjoint(held_out)
    assert len(third) > 7
    if not cut:
        assert len({row for row in trained | held_out | third if len(row) == 6}) == 64


def test_a_third_side_leaves_the_others_as_they_are() -> None:
    plain, third = Bits().load(), Bits(validation=True).load()
    for left, right in zip(plain.eval_batches(20, 6), third.eval_batches(20, 6), strict=True):
        assert torch.equal(left.inputs, right.inputs)
    assert [b.inputs.tolist() for b in third.validation().eval_batches(20, 6)] != [
        b.inputs.tolist() for b in third.eval_batches(20, 6)
    ]
    assert "validation" not in Bits().to_dict()  # recipes and streams without it are what they were
    with pytest.raises(ConfigError, match=r"keeps no third side .*task.validation = true"):
        plain.validation()
