"""The task: what is scored, what is the same every time, and how a stream is resumed."""

import pytest
import torch
from hybridtf_example.task import EVAL_ROWS, RepeatConfig

from hybridtf.core import CheckpointError
from hybridtf.tasks import IGNORE, Totals
from hybridtf.testing import check_task


def test_the_laws() -> None:
    check_task(RepeatConfig.tiny())


def test_a_model_that_remembers_is_always_right() -> None:
    batch = next(RepeatConfig(vocab_size=9, period=4).load(seed=3).train_batches(5, 17))
    assert batch.inputs.shape == batch.targets.shape == (5, 17)
    assert batch.n_tokens == int((batch.targets != IGNORE).sum()) == 5 * (17 - 3)
    remembered = batch.inputs.roll(3, dims=1)[:, 3:]
    assert torch.equal(batch.targets[:, 3:], remembered)
    assert bool((batch.targets[:, :3] == IGNORE).all())


@pytest.mark.parametrize(("batch_size", "world_size"), [(32, 1), (7, 1), (48, 3)])
def test_every_row_is_evaluated_once_and_ranks_have_as_many_batches(batch_size: int, world_size: int) -> None:
    task = RepeatConfig.tiny().load(seed=1)
    ranks = [list(task.eval_batches(batch_size, 8, rank=r, world_size=world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    scored = torch.cat([batch.inputs[(batch.targets != IGNORE).any(1)] for batch in in_order])
    assert len(scored) == EVAL_ROWS
    other = RepeatConfig.tiny().load(seed=2)
    assert torch.equal(scored, torch.cat([b.inputs for b in other.eval_batches(EVAL_ROWS, 8)]))


def test_streams_resume_and_differ_by_seed_and_rank() -> None:
    task = RepeatConfig.tiny().load(seed=1)
    stream = task.train_batches(4, 8)
    first, state, second = next(stream), stream.state_dict(), next(stream)
    assert not torch.equal(first.inputs, second.inputs)
    resumed = task.train_batches(4, 8)
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed).inputs, second.inputs)
    assert not torch.equal(next(task.train_batches(4, 8, rank=1, world_size=2)).inputs, first.inputs)
    assert not torch.equal(next(RepeatConfig.tiny().load(seed=2).train_batches(4, 8)).inputs, first.inputs)
    with pytest.raises(CheckpointError, match="is no place in the stream of seed 2"):
        RepeatConfig.tiny().load(seed=2).train_batches(4, 8).load_state_dict(state)


def test_measures() -> None:
    task = RepeatConfig(vocab_size=8).load()
    assert task.metrics(Totals(nats=4.0, n_correct=3, n_tokens=4)) == {"accuracy": 0.75, "loss": 1.0}
    assert task.baselines() == {"chance": 0.125}
    assert task.metric in task.metrics(Totals(n_tokens=1))
    assert task.splits()[0].n_documents == EVAL_ROWS
