import itertools
import json

import numpy as np
import pytest
import torch

from hybridtf.core.errors import CheckpointError, ConfigError
from hybridtf.tasks.base import IGNORE, Batch
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.stream import TextStream

BOS = 10**6
LENGTHS = (1, 2, 5, 7, 13, 16, 17, 31, 40, 97, 1, 3)


def numbered(lengths=LENGTHS, fingerprint: str = "numbered") -> Documents:
    """Documents in which every token is another number; one byte a token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    raw = np.zeros(offsets[-1], dtype=np.uint8)
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    return Documents(tuple(map(str, range(len(lengths)))), tokens, offsets, raw, offsets, fingerprint)


def stream(**options) -> TextStream:
    defaults = {"batch_size": 3, "seq_len": 16, "seed": 5}
    return TextStream(options.pop("documents", numbered()), BOS, **{**defaults, **options})


def same(a: Batch, b: Batch) -> bool:
    assert a.segments is not None
    assert b.segments is not None
    return (
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        and torch.equal(a.segments.ids, b.segments.ids) and (a.n_tokens, a.n_bytes) == (b.n_tokens, b.n_bytes)
    )


def epoch_rows(one: TextStream) -> list[Batch]:
    """The rows of the first epoch, one a batch."""
    return [next(one) for _ in range(one.rows_in_epoch)]


@pytest.mark.parametrize("packing", ["packed", "whole"])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 200])
def test_every_token_is_a_target_once_an_epoch(packing, seq_len) -> None:
    one = stream(batch_size=1, seq_len=seq_len, packing=packing)
    for epoch in range(3):
        rows = epoch_rows(one) if epoch == 0 else [next(one) for _ in range(one.rows_in_epoch)]
        targets = sorted(t for row in rows for t in row.targets[row.targets != IGNORE].tolist())
        assert targets == list(range(sum(LENGTHS)))
        assert sum(row.n_tokens for row in rows) == sum(row.n_bytes for row in rows) == sum(LENGTHS)
        # Move into the next epoch's plan without taking a row of it.
        state = one.state_dict()
        assert (state["epoch"], state["row"]) == (epoch, one.rows_in_epoch)
        one.load_state_dict({**state, "epoch": epoch + 1, "row": 0})


@pytest.mark.parametrize("packing", ["packed", "whole"])
def test_documents_never_mix(packing) -> None:
    offsets = numbered().offsets.tolist()
    for row in epoch_rows(stream(batch_size=1, packing=packing)):
        assert row.segments is not None
        ids = row.segments.ids[0]
        real = int((ids > 0).sum())
        assert (ids[real:] == 0).all(), "padding is on the right"
        assert (row.targets[0, real:] == IGNORE).all()
        for i in range(1, int(ids.max()) + 1):
            targets, inputs = row.targets[0, ids == i].tolist(), row.inputs[0, ids == i].tolist()
            assert targets == list(range(targets[0], targets[0] + len(targets)))
            first = max(o for o in offsets[:-1] if o <= targets[0])
            assert targets[-1] < min(o for o in offsets if o > targets[0]), "two documents under one id"
            assert inputs == [BOS if t == first else t - 1 for t in targets]
        if packing == "whole":
            assert int(ids.max()) == 1


def test_packing_needs_fewer_rows_than_whole_documents() -> None:
    assert stream().rows_in_epoch < stream(packing="whole").rows_in_epoch
    assert stream().rows_in_epoch * 16 < sum(LENGTHS) + 3 * 16


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
def test_resumes_bit_for_bit_at_every_step(rank, world_size) -> None:
    def fresh() -> TextStream:
        return stream(rank=rank, world_size=world_size)

    running, states, batches = fresh(), [], []
    for _ in range(30):
        states.append(json.dumps(running.state_dict()))
        batches.append(next(running))
    assert json.loads(states[-1])["epoch"] >= 3, "the run must cross epochs"
    worn = fresh()
    for step, state in enumerate(states):
        resumed = fresh()
        for one in (resumed, worn):  # a new stream, and one that was somewhere else
            one.load_state_dict(json.loads(state))
            assert one.state_dict() == json.loads(state)
            for expected in batches[step : step + 4]:
                assert same(next(one), expected)


def test_ranks_share_one_list_and_a_run_may_change_their_number() -> None:
    alone = stream(batch_size=6)
    ranks = [stream(batch_size=2, rank=r, world_size=3) for r in range(3)]
    for _ in range(7):
        whole, parts = next(alone), [next(one) for one in ranks]
        assert torch.equal(whole.inputs, torch.cat([part.inputs for part in parts]))
        assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
        assert whole.n_tokens == sum(part.n_tokens for part in parts)
        assert all(one.state_dict() == alone.state_dict() for one in ranks)
    other = [stream(batch_size=3, rank=r, world_size=2) for r in range(2)]
    for one in other:
        one.load_state_dict(ranks[1].state_dict())
    assert torch.equal(next(alone).inputs, torch.cat([next(one).inputs for one in other]))


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    documents = numbered([3, 4])
    batch = next(stream(documents=documents, batch_size=5, seq_len=8))
    assert batch.inputs.shape == (5, 8)
    assert batch.n_tokens == 35


def test_order_follows_from_the_seed() -> None:
    first, again, other = (list(itertools.islice(stream(seed=s), 5)) for s in (1, 1, 2))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not all(same(a, b) for a, b in zip(first, other, strict=True))


def test_epochs_have_different_orders() -> None:
    one = stream(batch_size=1, documents=numbered([16] * 12))
    first, second = [epoch_rows(one) for _ in range(2)]
    assert one.epoch == 1
    assert [int(r.targets[0, 0]) for r in first] != [int(r.targets[0, 0]) for r in second]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 8}, "seq_len = 16, this stream has 8"),
        ({"seed": 6}, "seed = 5, this stream has 6"),
        ({"packing": "whole"}, "packing = 'packed'"),
        ({"documents": numbered(fingerprint="other")}, "documents = 'numbered', this stream has 'other'"),
    ],
)
def test_state_of_other_data_is_refused_and_changes_nothing(change, message) -> None:
    other = stream(**change)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(stream().state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [({"row": 10**6}, "is at row 1000000"), ({"row": None}, "not a place"), ({"epoch": -1}, "not a place")],
)
def test_broken_state_is_refused(change, message) -> None:
    one = stream()
    with pytest.raises(CheckpointError, match=message):
        one.load_state_dict({**one.state_dict(), **change})
    with pytest.raises(CheckpointError, match="no 'documents'"):
        one.load_state_dict({"step": 3})


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"seq_len": 0}, {"world_size": 0}, {"rank": 1}, {"rank": -1}])
def test_sizes_are_checked(sizes) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        stream(**sizes)


def test_rows_come_in_no_order_of_length() -> None:
    lengths = list(range(1, 61))
    rows = epoch_rows(stream(batch_size=1, seq_len=60, packing="packed", documents=numbered(lengths)))
    longest = [int(row.segments.ids[0].bincount()[1:].max()) for row in rows if row.segments is not None]
    assert longest != sorted(longest, reverse=True)
    assert sum(longest[: len(longest) // 2]) < 1.5 * sum(longest[len(longest) // 2 :])
