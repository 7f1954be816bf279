import json

import numpy as np
import pytest
import torch

from hybridtf.core import CheckpointError, ConfigError, DataError, RecipeError, active
from hybridtf.tasks import IGNORE, Batch, MQARConfig, SyntheticTask, Totals


def size(length: int, n_pairs: int, n_rows: int) -> dict[str, int]:
    return {"length": length, "n_pairs": n_pairs, "n_rows": n_rows}


def task(seed: int = 0, **more) -> SyntheticTask:
    options = {"vocab_size": 40, "train": [size(32, 4, 50), size(64, 8, 30)], "test": [size(32, 4, 40), size(96, 19, 10)]}
    return MQARConfig(**{**options, **more}).load(seed)


def solve(inputs: list[int], n_pairs: int) -> dict[int, int]:
    """By brute force: what is to be said, and where, from the row's tokens alone."""
    said = dict(zip(inputs[0 : 2 * n_pairs : 2], inputs[1 : 2 * n_pairs : 2], strict=True))
    assert len(said) == n_pairs
    answers, asked = {}, set()
    for place in range(2 * n_pairs, len(inputs), 2):
        token = inputs[place]
        if token in said and token not in asked:
            asked.add(token)
            answers[place] = said[token]
    return answers


def batches() -> list[tuple[Batch, int]]:
    one = task()
    stream = one.train_batches(10, 64)
    return [(b, int(b.group.split()[2])) for b in [*(next(stream) for _ in range(8)), *one.eval_batches(16, 64)]]


def test_every_row_is_solved_by_brute_force() -> None:
    for batch, n_pairs in batches():
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            answers = solve(inputs, n_pairs)
            assert {i: t for i, t in enumerate(targets) if t != IGNORE} == answers
            assert len(answers) == n_pairs
            keys, values = inputs[0 : 2 * n_pairs : 2], inputs[1 : 2 * n_pairs : 2]
            assert all(1 <= key < 20 for key in keys)
            assert all(20 <= value < 40 for value in values)
            assert len(set(values)) == n_pairs
            rest = [token for i, token in enumerate(inputs) if i >= 2 * n_pairs and i not in answers]
            assert set(rest) == {0}
        assert batch.n_tokens == int((batch.targets != IGNORE).sum())


def test_slots_follow_the_power_law() -> None:
    """The first slot drawn falls as i^(power - 1); its key is the first pair's."""
    one = task(train=[size(64, 4, 20_000)], vocab_size=200, power=0.5)
    batch = one.rows(one.config.train[0], (9,), np.arange(20_000))
    first = batch.inputs[:, :1]
    slot = ((batch.inputs[:, 8:] == first).int().argmax(1)) // 2
    want = np.arange(1, 29) ** -0.5
    want = want / want.sum() * 20_000
    counts = np.bincount(slot.numpy(), minlength=28)
    assert ((counts - want) ** 2 / want).sum() < 55.5  # 27 degrees of freedom, p = 0.001


def test_random_fill_leaves_pairs_queries_and_targets_as_they_are() -> None:
    plain, filled = (task(random_fill=fill).rows(task().config.train[1], (0,), np.arange(200)) for fill in (False, True))
    assert torch.equal(plain.targets, filled.targets)
    kept = plain.inputs != 0
    assert torch.equal(plain.inputs[kept], filled.inputs[kept])
    assert filled.inputs[~kept].unique().tolist() == list(range(40))


def test_train_and_test_rows_differ_and_the_seed_draws_only_the_training() -> None:
    def rows(found) -> set[tuple[int, ...]]:
        return {tuple(row) for batch in found for row in batch.inputs.tolist()}

    def trained(seed: int, fresh: bool, steps: int = 8):
        stream = task(seed, fresh=fresh).train_batches(10, 64)
        return rows(next(stream) for _ in range(steps))

    tested = rows(task(0).eval_batches(16, 64))
    assert tested == rows(task(1).eval_batches(7, 32))
    assert not trained(0, False) & tested
    assert not trained(0, False) & trained(1, False)
    assert trained(0, False) == trained(0, False, 24)  # the same rows again
    assert len(trained(0, True, 24)) == 3 * 80


def test_an_epoch_has_every_row_once_and_the_last_batch_is_filled_up() -> None:
    one = task(train=[size(32, 4, 50)])
    stream = one.train_batches(8, 32)
    assert stream.rows_in_epoch == 56
    rows = [tuple(row) for _ in range(7) for row in next(stream).inputs.tolist()]
    want = {tuple(row) for row in one.rows(one.config.train[0], (0, 0, 0), np.arange(50)).inputs.tolist()}
    assert set(rows) == want
    assert len(want) == 50
    assert [tuple(row) for _ in range(7) for row in next(stream).inputs.tolist()] != rows


def test_ranks_share_the_rows() -> None:
    one = task()
    together = one.train_batches(6, 64)
    ranks = [one.train_batches(3, 64, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(12):
        whole, parts = next(together), [next(stream) for stream in ranks]
        assert torch.equal(whole.inputs, torch.cat([part.inputs for part in parts]))
    whole = list(one.eval_batches(14, 64))
    parts = [list(one.eval_batches(7, 64, rank=rank, world_size=2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert sum(b.n_tokens for b in whole) == sum(b.n_tokens for part in parts for b in part) == 40 * 4 + 10 * 19


def test_a_stream_resumes_anywhere() -> None:
    one = task(fresh=True)
    stream = one.train_batches(10, 64)
    for _ in range(11):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    other = task(fresh=True).train_batches(10, 64)
    other.load_state_dict(state)
    for _ in range(12):
        assert torch.equal(next(stream).inputs, next(other).inputs)
    with pytest.raises(CheckpointError, match="seed = 0, this stream has 1"):
        task(1, fresh=True).train_batches(10, 64).load_state_dict(state)
    with pytest.raises(CheckpointError, match="not a place"):
        other.load_state_dict({**state, "step": 99})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": [size(15, 4, 1)]}, r"train\[0\].*4 pairs and a slot for each need 16 tokens; length = 15"),
        ({"test": [size(90, 20, 1)]}, r"test\[0\].n_pairs = 20, and vocab_size = 40 has only 19 keys"),
        ({"test": [size(32, 4, 1), size(32, 4, 9)]}, "test lists one size twice"),
        ({"train": []}, "train"),
        ({"powr": 1.0}, "Did you mean 'power'"),
    ],
)
def test_wrong_options_are_refused(options, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        task(**options)


def test_the_trained_length_must_be_said_right() -> None:
    with pytest.raises(ConfigError, match="rows of up to 64 tokens; set it to 64"):
        task().train_batches(4, 256)


def test_measures_and_baselines() -> None:
    one = task()
    totals = Totals(nats=5.0, n_correct=3, n_tokens=4, n_rows=5, n_rows_correct=1)
    assert one.metrics(totals) == {"accuracy": 0.75, "row_accuracy": 0.2, "loss": 1.25}
    with pytest.raises(DataError, match="no row was scored"):
        one.metrics(Totals(n_tokens=4))
    assert one.baselines() == {"chance": 1 / 20, "own_value": 50 / (40 * 4 + 10 * 19)}


def test_presets_are_the_published_mixture_and_a_small_one() -> None:
    based = active()["tasks"].make({"type": "mqar_based"}).load(0)
    assert sum(rows.n_rows for rows in based.config.train) == 180_000
    assert based.vocab_size == 8192
    assert max(rows.n_pairs for rows in based.config.test) == 256
    small = active()["tasks"].make({"type": "mqar_small"}).load(0)
    batch = next(small.train_batches(4, 64))
    assert batch.inputs.shape == (4, 64)
    assert batch.group == "64 tokens, 8 pairs"
