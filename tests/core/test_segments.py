"""Segments against a walk over each row, token by token, in plain Python."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from hybridtf.core import ConfigError, Segments

GRIDS = range(60)


def random_grid(seed: int) -> tuple[list[list[int]], list[bool]]:
    """Rows of ids with pads anywhere and documents left out, of any width down to 0."""
    draw = random.Random(seed)
    width = draw.choice([0, 1, 2, 3, 7, 12])
    rows = []
    for _ in range(draw.choice([1, 2, 5])):
        row, now = [], draw.randint(1, 3)
        for _ in range(width):
            now += draw.choice([0, 0, 0, 1, 2])
            row.append(0 if draw.random() < draw.choice([0.0, 0.3, 0.9]) else now)
        rows.append(row)
    return rows, [draw.random() < 0.5 for _ in rows]


def walk(row: list[int], continues: bool, length: int) -> dict[str, Any]:
    """What the contract says about one row, found by walking it; ``length`` tokens of the incoming document."""
    real = [i > 0 for i in row]
    found = [i for i in row if i > 0]
    first, last = (found[0], found[-1]) if found else (0, 0)
    carried = first if continues and found else -1
    starts, position, positions = [], [], []
    now, count, n = (carried, length, 0) if carried > 0 else (None, 0, 0)
    for i in row:
        if i == 0:
            starts.append(False)
            position.append(None)
            positions.append(None)
            continue
        starts.append(i != now)
        if i != now:
            now, count, n = i, 0, 0
        position.append(n)
        positions.append(count)
        count, n = count + 1, n + 1
    ends = count if found else length
    return {
        "real": real, "first_id": first, "last_id": last, "carried": carried, "starts": starts, "position": position,
        "positions": positions, "in_last": [i > 0 and i == last for i in row], "new_length": ends,
        "keeps_state": not found or last == carried,
    }


def same(got: torch.Tensor, want: list[Any]) -> None:
    """Equal where the expected value is not None."""
    for a, b in zip(got.tolist(), want, strict=True):
        assert b is None or a == b


@pytest.mark.parametrize("seed", GRIDS)
def test_derived_values_are_those_of_a_walk(seed: int) -> None:
    rows, continues = random_grid(seed)
    segments = Segments.from_ids(torch.tensor(rows), continues=torch.tensor(continues))
    length = torch.tensor([random.Random(seed + r).randint(0, 5) for r in range(len(rows))])
    for r, row in enumerate(rows):
        want = walk(row, continues[r], int(length[r]))
        for name in ("real", "starts", "position", "in_last"):
            same(getattr(segments, name)[r], want[name])
        for name in ("first_id", "last_id", "carried", "keeps_state"):
            assert getattr(segments, name)[r].item() == want[name], name
        same(segments.positions(length)[r], want["positions"])
        same(segments.positions()[r], want["position"])
        assert segments.new_length(length)[r].item() == want["new_length"]


@pytest.mark.parametrize("seed", GRIDS)
def test_effective_gives_each_pad_the_document_before_it(seed: int) -> None:
    rows, continues = random_grid(seed)
    segments = Segments.from_ids(torch.tensor(rows), continues=torch.tensor(continues))
    for r, row in enumerate(rows):
        now = segments.carried[r].item()
        want = []
        for i in row:
            now = i or now
            want.append(now)
        assert segments.effective[r].tolist() == want


@pytest.mark.parametrize("seed", GRIDS)
def test_narrow_is_the_call_that_follows(seed: int) -> None:
    """Cut anywhere: lengths, positions and starts go on as if there had been no cut."""
    rows, continues = random_grid(seed)
    segments = Segments.from_ids(torch.tensor(rows), continues=torch.tensor(continues))
    width = segments.ids.shape[1]
    draw = random.Random(seed)
    cuts = sorted({0, width, *(draw.randint(0, width) for _ in range(3))})
    if len(cuts) == 1:
        cuts = [0, 0]
    start_length = torch.tensor([4] * len(rows))
    length, positions, starts = start_length, [], []
    for a, b in itertools.pairwise(cuts):
        part = segments.narrow(a, b)
        positions.append(torch.where(part.real, part.positions(length), -1))
        starts.append(part.starts)
        length = part.new_length(length)
    assert torch.equal(torch.cat(starts, 1), segments.starts)
    assert torch.equal(torch.cat(positions, 1), torch.where(segments.real, segments.positions(start_length), -1))
    assert torch.equal(length, segments.new_length(start_length))


def test_narrow_twice_is_narrow_once() -> None:
    segments = Segments.from_ids(torch.tensor([[0, 1, 0, 1, 2, 2, 0, 3]]), continues=True)
    twice, once = segments.narrow(1, 8).narrow(2, 6), segments.narrow(3, 7)
    assert torch.equal(twice.ids, once.ids)
    assert torch.equal(twice.continues, once.continues)


def test_extra_fields_follow_every_view() -> None:
    ids = torch.tensor([[1, 1, 2], [1, 0, 1]])
    segments = Segments(
        ids, torch.tensor([True, False]), prefix_len=torch.arange(6).view(2, 3), global_tokens=ids > 1,
        axes={"row": torch.arange(6, 12).view(2, 3)},
    )
    part, rows, moved = segments.narrow(1, 3), segments.rows(torch.tensor([1, 1, 0])), segments.to("cpu")
    assert part.prefix_len is not None
    assert part.prefix_len.tolist() == [[1, 2], [4, 5]]
    assert part.axes["row"].tolist() == [[7, 8], [10, 11]]
    assert rows.ids.tolist() == [[1, 0, 1], [1, 0, 1], [1, 1, 2]]
    assert rows.continues.tolist() == [False, False, True]
    assert rows.global_tokens is not None
    assert rows.global_tokens.tolist()[2] == [False, False, True]
    assert moved.axes["row"].tolist() == segments.axes["row"].tolist()


# -- constructors ----------------------------------------------------------------------------------------------------


def test_from_lengths_packs_from_the_left() -> None:
    segments = Segments.from_lengths([[2, 0, 1], [4], []], width=5)
    assert segments.ids.tolist() == [[1, 1, 3, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    assert segments.continues.tolist() == [True] * 3
    assert Segments.from_lengths([[2], [1, 2]]).ids.shape == (2, 3)
    assert Segments.from_lengths([]).ids.shape == (0, 0)


def test_from_mask_continues_by_default() -> None:
    segments = Segments.from_mask(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    assert segments.ids.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert segments.continues.tolist() == [True, True]


def test_from_positions_starts_a_document_at_each_zero() -> None:
    segments = Segments.from_positions(torch.tensor([[0, 1, 0, 0, 1], [3, 4, 5, 0, 1]]))
    assert segments.continues.tolist() == [False, True]
    assert segments.ids.tolist() == [[1, 1, 2, 3, 3], [1, 1, 1, 2, 2]]
    assert segments.positions(torch.tensor([0, 3])).tolist()[1] == [3, 4, 5, 0, 1]
    assert Segments.from_positions(torch.zeros(2, 0)).ids.shape == (2, 0)


@pytest.mark.parametrize("seed", GRIDS)
def test_document_length_counts_each_document_to_the_end_of_the_call(seed: int) -> None:
    rows, continues = random_grid(seed)
    ids = torch.tensor(rows, dtype=torch.int64)
    segments = Segments.from_ids(ids, continues=torch.tensor(continues))
    for length in (None, torch.arange(3, 3 + len(rows))):
        got = segments.document_length(length)
        assert got.shape == ids.shape
        for r, row in enumerate(rows):
            first = next((i for i in row if i), None)
            for t, i in enumerate(row):
                before = int(length[r]) if length is not None and continues[r] and i == first else 0
                assert i == 0 or int(got[r, t]) == row.count(i) + before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segments.from_ids(torch.tensor([[2, 1]])), "must not decrease"),
        (lambda: Segments.from_ids(torch.tensor([[2, 0, 1]])), "must not decrease"),
        (lambda: Segments.from_ids(torch.tensor([[-1, 1]])), "0 .padding. or positive"),
        (lambda: Segments(torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool)), r"ids must be int64 of shape \(b, t\)"),
        (lambda: Segments(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)), "ids must be int64"),
        (lambda: Segments(torch.ones(2, 3, dtype=torch.int64), torch.ones(2)), r"continues must be bool of shape"),
        (
            lambda: Segments.from_ids(torch.ones(2, 3), prefix_len=torch.ones(2, 2)),
            r"prefix_len must have the shape of ids \(2, 3\); got \(2, 2\)",
        ),
        (lambda: Segments.from_lengths([[2, 2]], width=3), r"lengths \[2, 2\] of row 0 do not fit in 3"),
        (lambda: Segments.from_lengths([[-1]]), "do not fit"),
    ],
)
def test_bad_segments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
