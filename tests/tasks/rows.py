"""Rows of a task as lists, whatever their padding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridtf.tasks import IGNORE, SyntheticTask


def rows_of(task: SyntheticTask, n: int = 200) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, targets) of ``n`` training rows and of all that are held out, without padding."""
    for batch in [next(task.train_batches(n, task.row_length)), *task.eval_batches(50, task.row_length)]:
        assert batch.n_tokens == int((batch.targets != IGNORE).sum())
        real = torch.ones_like(batch.inputs, dtype=torch.bool) if batch.segments is None else batch.segments.real
        for inputs, targets, mask in zip(batch.inputs, batch.targets, real, strict=True):
            assert (targets[~mask] == IGNORE).all()
            assert (inputs[~mask] == 0).all()  # nothing of an answer is left behind the end
            yield inputs[mask].tolist(), targets[mask].tolist()


def whole(inputs: list[int], targets: list[int]) -> tuple[list[int], int]:
    """The row with the answer that only its last target holds, and how many of its last tokens are scored.

    Asserts that each scored target is the token that follows.
    """
    tokens = [*inputs, targets[-1]]
    assert all(t in (IGNORE, token) for t, token in zip(targets, tokens[1:], strict=True))
    return tokens, sum(t != IGNORE for t in targets)
