"""State leaves against Python lists of the tokens of each row's document."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtf.core import (
    Fixed,
    Growing,
    LengthError,
    Ring,
    Segments,
    StateError,
    StateLeaf,
    crop,
    debug_states,
    detach,
    leaves,
    map_state,
    reorder,
    restore,
    snapshot,
    state_bytes,
    state_lengths,
)

F64 = torch.float64
B = 3


def random_call(draw: random.Random) -> tuple[Tensor, Segments | None]:
    """Tokens (b t 2) and their documents."""
    t = draw.choice([0, 1, 1, 2, 5, 9])
    x = torch.randn(B, t, 2, dtype=F64)
    if draw.random() < 0.3:
        return x, None
    rows = []
    for _ in range(B):
        now, row = 1, []
        for _ in range(t):
            now += draw.random() < 0.2
            row.append(0 if draw.random() < 0.3 else now)
        rows.append(row)
    ids = torch.tensor(rows, dtype=torch.int64).view(B, t)
    return x, Segments.from_ids(ids, continues=torch.tensor([draw.random() < 0.6 for _ in range(B)]))


def follow(documents: list[list[Tensor]], x: Tensor, segments: Segments | None) -> None:
    """Add a call's tokens to the lists, forgetting a document where another begins."""
    for i in range(B):
        now = None
        for j in range(x.shape[1]):
            ident = 1 if segments is None else int(segments.ids[i, j])
            if ident == 0:
                continue
            starts = now is None and segments is not None and not bool(segments.continues[i])
            if starts or (now is not None and ident != now):
                documents[i].clear()
            now = ident
            documents[i].append(x[i, j])


def check_growing(leaf: Growing, documents: list[list[Tensor]]) -> None:
    assert leaf.length.tolist() == [len(d) for d in documents]
    assert leaf.valid().sum(1).tolist() == leaf.length.tolist()
    for i, document in enumerate(documents):
        assert leaf["k"].shape[1] >= len(document)
        for p, token in enumerate(document):
            assert torch.equal(leaf["k"][i, p], token)
    assert leaf.used_nbytes() == sum(len(d) for d in documents) * 2 * 8
    assert leaf.nbytes() == leaf["k"].numel() * 8


def check_ring(leaf: Ring, documents: list[list[Tensor]], window: int) -> None:
    assert leaf.length.tolist() == [len(d) for d in documents]
    for i, document in enumerate(documents):
        places = leaf.positions()[i].tolist()
        held = {p for p in places if p >= 0}
        assert held == set(range(int(leaf.oldest[i]), len(document)))
        assert held >= set(range(max(0, len(document) - window + 1), len(document)))
        for slot, p in enumerate(places):
            if p >= 0:
                assert p % leaf.capacity == slot
                assert torch.equal(leaf["k"][i, slot], document[p])


@pytest.mark.parametrize("seed", range(40))
def test_growing_and_ring_hold_what_lists_hold(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    window, keep = draw.randint(1, 5), draw.randint(0, 2)
    ring = Ring.empty(B, {"k": (2,)}, window=window, dtype=F64, device="cpu")
    growing = Growing.empty(B, {"k": (2,)}, max_len=draw.choice([None, 60]), dtype=F64, device="cpu")
    documents: list[list[Tensor]] = [[] for _ in range(B)]
    with torch.set_grad_enabled(draw.random() < 0.5), debug_states():
        for _ in range(5):
            x, segments = random_call(draw)
            follow(documents, x, segments)
            ring, growing = ring.push({"k": x}, segments, keep=keep), growing.append({"k": x}, segments)
            check_growing(growing, documents)
            check_ring(ring, documents, window)
            if keep and draw.random() < 0.5:
                ring, growing = try_crop(ring, growing, documents, draw, keep)
                check_growing(growing, documents)
                check_ring(ring, documents, window)


def try_crop(
    ring: Ring, growing: Growing, documents: list[list[Tensor]], draw: random.Random, keep: int
) -> tuple[Ring, Growing]:
    """Crop all three alike, or see the ring refuse where it must."""
    n = torch.tensor([draw.randint(0, keep) for _ in range(B)])
    kept = [len(d) - int(m) for d, m in zip(documents, n, strict=True)]
    gone = [
        int(n[i]) > 0 and (kept[i] < 0 or int(ring.oldest[i]) > max(0, kept[i] - ring.window + 1)) for i in range(B)
    ]
    if any(gone):
        with pytest.raises(StateError, match=f"row {gone.index(True)}: cannot crop"):
            ring.crop(n)
        return ring, growing
    for document, length in zip(documents, kept, strict=True):
        del document[length:]
    return ring.crop(n), growing.crop(n)


def test_a_ring_with_keep_can_always_be_cropped_by_it() -> None:
    for window in (1, 3):
        ring = Ring.empty(1, {"k": ()}, window=window, dtype=F64, device="cpu")
        for start in range(0, 12, 4):
            ring = ring.push({"k": torch.arange(start, start + 4.0, dtype=F64)[None]}, None, keep=2)
            for n in range(3):
                assert ring.crop(n).length.tolist() == [start + 4 - n]


# -- static buffers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_max_len_keeps_shape_and_address_without_gradients(packed: bool) -> None:
    leaf = Growing.empty(2, {"k": (3,)}, max_len=8, dtype=F64, device="cpu")
    address = leaf["k"].data_ptr()
    with torch.no_grad():
        for t in (3, 1, 0, 2):
            segments = Segments.from_mask(torch.ones(2, t)) if packed else None
            leaf = leaf.append({"k": torch.randn(2, t, 3, dtype=F64)}, segments)
            assert leaf["k"].data_ptr() == address
            assert leaf.capacity == 8
    assert leaf.length.tolist() == [6, 6]


def test_with_gradients_nothing_is_written() -> None:
    leaf = Growing.empty(1, {"k": ()}, max_len=4, dtype=F64, device="cpu")
    x = torch.ones(1, 2, dtype=F64, requires_grad=True)
    new = leaf.append({"k": x}, None)
    assert leaf["k"].tolist() == [[0, 0, 0, 0]]
    new["k"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1]]


@pytest.mark.parametrize("grad", [True, False])
def test_a_token_too_many_is_refused(grad: bool) -> None:
    leaf = Growing.empty(1, {"k": ()}, max_len=3, dtype=F64, device="cpu")
    with torch.set_grad_enabled(grad):
        leaf = leaf.append({"k": torch.ones(1, 2, dtype=F64)}, None)
        with pytest.raises(LengthError, match="made for max_len=3 tokens; this call would reach 4"):
            leaf.append({"k": torch.ones(1, 2, dtype=F64)}, None)


# -- moves -----------------------------------------------------------------------------------------------------------


def _nested() -> dict[str, Any]:
    x = torch.tensor([[1.0, 2], [3, 4]])
    growing = Growing.empty(2, {"k": ()}, dtype=F64, device="cpu").append({"k": x}, None)
    ring = Ring.empty(2, {"u": ()}, window=2, dtype=F64, device="cpu").push({"u": x}, None)
    fixed = Fixed({"h": torch.tensor([[5.0], [6.0]])}, torch.tensor([2, 2]))
    return {"a": (growing, [ring]), "b": {"c": fixed}, "d": ()}


def test_reorder_repeats_rows_as_independent_copies() -> None:
    state = _nested()
    out = reorder(state, torch.tensor([1, 1, 0]))
    growing, ring, fixed = leaves(out)
    assert growing["k"].tolist() == [[3, 4], [3, 4], [1, 2]]
    assert ring["u"].tolist() == [[3, 4], [3, 4], [1, 2]]
    assert fixed["h"].tolist() == [[6], [6], [5]]
    growing["k"][0] = 9
    assert growing["k"][1].tolist() == [3, 4]
    assert leaves(state)[0]["k"].tolist() == [[1, 2], [3, 4]]


def test_snapshot_is_independent_and_lasts() -> None:
    state = _nested()
    kept = snapshot(state)
    for leaf in leaves(state):
        for value in leaf.data.values():
            value.fill_(-1)
    for _ in range(2):
        back = restore(kept)
        assert leaves(back)[0]["k"].tolist() == [[1, 2], [3, 4]]
        for leaf in leaves(back):
            for value in leaf.data.values():
                value.fill_(-2)


def test_detach_cuts_the_graph_and_keeps_the_memory() -> None:
    h = torch.ones(1, 1, requires_grad=True) * 2
    leaf = leaves(detach({"x": Fixed({"h": h}, torch.tensor([1]))}))[0]
    assert not leaf["h"].requires_grad
    assert leaf["h"].data_ptr() == h.data_ptr()


def test_bytes_and_lengths_of_a_whole_state() -> None:
    state = _nested()
    assert state_bytes(state) == 2 * 2 * 8 + 2 * 2 * 8 + 2 * 4
    assert state_bytes(state, used=True) == state_bytes(state)
    lengths = state_lengths(state)
    assert lengths is not None
    assert lengths.tolist() == [2, 2]
    assert state_lengths(()) is None
    with pytest.raises(StateError, match="disagree on its length"):
        state_lengths((Fixed({}, torch.tensor([1])), Fixed({}, torch.tensor([2]))))


def _leaves_with_max_len() -> list[StateLeaf]:
    shapes, where = {"x": ()}, {"max_len": 9, "dtype": F64, "device": "cpu"}
    return [
        Growing.empty(2, shapes, **where), Growing.empty(2, shapes, sparse=True, **where),
        Ring.empty(2, shapes, window=3, **where), Fixed.empty(2, shapes, **where),
    ]


def _called(leaf: StateLeaf, keep: int = 0) -> StateLeaf:
    x = torch.ones(2, 4, dtype=F64)
    if isinstance(leaf, Growing):
        return leaf.append({"x": x}, None, where=torch.ones(2, 4, dtype=torch.bool) if leaf.sparse else None)
    if isinstance(leaf, Ring):
        return leaf.push({"x": x}, None, keep=keep)
    assert isinstance(leaf, Fixed)
    past = {"x": torch.zeros(2, 2, dtype=F64)}
    return leaf.advance({"x": x[:, 0]}, None, 4, past=past, past_length=leaf.length[:, None] + torch.tensor([2, 3]))


MOVES: dict[str, Any] = {
    "call": _called, "call with keep": lambda leaf: _called(leaf, keep=2),
    "reorder": lambda leaf: leaf.reorder(torch.tensor([1])), "clone": lambda leaf: leaf.clone(),
    "snapshot": lambda leaf: leaf.snapshot().restore(), "detach": lambda leaf: leaf.detach(),
    "to": lambda leaf: leaf.to("cpu"), "crop": lambda leaf: _called(leaf, keep=2).crop(1),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("before", [0, 1])
def test_a_length_that_is_known_is_the_one_that_is_held(move: str, before: int) -> None:
    """After calls of four tokens whose rows are of one length; and nothing has to be read for it, but after a crop."""
    for leaf in _leaves_with_max_len():
        for _ in range(before):
            leaf = _called(leaf, keep=2)
        moved = MOVES[move](leaf)
        assert moved.known_length() in (None, int(moved.length[0]))
        assert moved.shared_length() == int(moved.length[0])
        dense = not (isinstance(leaf, Growing) and leaf.sparse)
        if move != "crop" and dense:
            assert moved.known_length() is not None


def test_rows_of_two_lengths_share_none() -> None:
    segments = Segments.from_ids(torch.tensor([[1, 1, 1], [1, 0, 0]]))
    for leaf in _leaves_with_max_len()[::2]:
        x = torch.ones(2, 3, dtype=F64)
        after = leaf.append({"x": x}, segments) if isinstance(leaf, Growing) else leaf.push({"x": x}, segments)  # type: ignore[attr-defined]
        assert after.known_length() is None
        assert after.shared_length() is None
        assert after.reorder(torch.tensor([1, 1])).shared_length() == 1
        assert after.reorder(torch.tensor([0, 0])).shared_length() == 3


def test_slots_of_a_head_lie_side_by_side() -> None:
    """What a query reads of a head is one run of memory, in buffers that are made once and in those that are widened."""
    made: list[Growing | Ring] = [
        Growing.empty(2, {"k": (3, 4)}, max_len=8, dtype=F64, device="cpu"),
        Ring.empty(2, {"k": (3, 4)}, window=8, dtype=F64, device="cpu"),
        Growing.empty(2, {"k": (3, 4)}, max_len=4, dtype=F64, device="cpu").with_capacity(8, static=True),
    ]
    with torch.no_grad():
        for leaf in made:
            new = {"k": torch.randn(2, 2, 3, 4, dtype=F64)}
            after = leaf.append(new, None) if isinstance(leaf, Growing) else leaf.push(new, None)
            assert after["k"].shape == (2, 8, 3, 4)
            assert after["k"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("grad", [True, False])
def test_every_move_keeps_the_declared_length(move: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        for leaf in _leaves_with_max_len():
            assert MOVES[move](leaf).max_len == 9


def test_map_state_keeps_the_nesting() -> None:
    seen: list[str] = []
    out = map_state(lambda leaf: seen.append(type(leaf).__name__) or leaf, _nested())  # type: ignore[func-returns-value]
    assert seen == ["Growing", "Ring", "Fixed"]
    assert isinstance(out["a"], tuple)
    assert out["d"] == ()


# -- fixed states ----------------------------------------------------------------------------------------------------


def test_a_fixed_state_without_snapshots_refuses_to_go_back() -> None:
    leaf = Fixed({"h": torch.zeros(1, 1)}, torch.tensor([5]))
    assert leaf.crop(0).length.tolist() == [5]
    with pytest.raises(StateError, match="was not given keep"):
        leaf.crop(1)


def test_a_fixed_state_goes_back_row_by_row() -> None:
    past = {"h": torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])}
    leaf = Fixed({"h": torch.tensor([[9.0], [9.0]])}, torch.tensor([5, 7]), past, torch.tensor([[3, 4], [-1, 6]]))
    out = leaf.crop(torch.tensor([2, 1]))
    assert out["h"].tolist() == [[1], [4]]
    assert out.length.tolist() == [3, 6]
    assert leaf.crop(torch.tensor([0, 1]))["h"].tolist() == [[9], [4]]
    with pytest.raises(StateError, match="row 1: cannot crop 2 tokens; only the last 2 columns of this document"):
        leaf.crop(2)
    assert leaf.nbytes() == 2 * 4 + 4 * 4


def test_crop_takes_no_negative_number() -> None:
    for leaf in leaves(_nested()):
        with pytest.raises(StateError, match="at least 0"):
            leaf.crop(-1)


def test_growing_forgets_no_more_than_it_has() -> None:
    leaf = leaves(_nested())[0]
    assert crop(leaf, torch.tensor([2, 0])).length.tolist() == [0, 2]
    with pytest.raises(StateError, match="row 1: cannot crop 3 tokens; its document has 2 in the state"):
        leaf.crop(torch.tensor([1, 3]))


# -- the end of a leaf -----------------------------------------------------------------------------------------------


def _consume(leaf: Any) -> Any:
    x = torch.ones(2, 1, dtype=F64)
    if isinstance(leaf, Growing):
        return leaf.append({"k": x}, None)
    if isinstance(leaf, Ring):
        return leaf.push({"u": x}, None)
    return leaf.advance({"h": leaf["h"] + 1}, None, 1)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_a_consumed_leaf_is_dead_in_debug_mode(index: int, grad: bool) -> None:
    leaf = leaves(_nested())[index]
    held = next(iter(leaf.data.values()))
    with debug_states(), torch.set_grad_enabled(grad):
        new = _consume(leaf)
    for read in (lambda: leaf.data, lambda: leaf.length, lambda: leaf["k"], lambda: leaf.crop(0)):
        with pytest.raises(StateError, match="already consumed"):
            read()
    shared = held.data_ptr() in {value.data_ptr() for value in new.data.values()}
    # What a Fixed leaf holds was given to it, and is not its own to poison.
    assert bool(held.isnan().all()) == (not grad and not shared and not isinstance(leaf, Fixed))
    assert not any(bool(value.isnan().any()) for value in new.data.values())


def test_outside_of_debug_mode_a_consumed_leaf_can_be_read() -> None:
    with debug_states(False):
        leaf = leaves(_nested())[2]
        _consume(leaf)
        assert leaf["h"].tolist() == [[5], [6]]


@pytest.mark.parametrize("keep", [0, 2])
def test_one_token_is_written_into_its_slot_and_gives_what_many_calls_with_gradients_give(keep):
    """In place or anew, with pads and rows that start another document: the ring holds the same."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(3, 13, 2, generator=generator)
    states = [Ring.empty(3, {"k": (2,)}, window=4, keep=keep, dtype=tokens.dtype, device="cpu") for _ in range(2)]
    for i in range(13):
        continues = torch.tensor([True, i != 6, True])
        ids = torch.tensor([[1], [1], [0 if i in (2, 7, 8) else 1]])
        segments = None if i % 3 == 1 and i not in (2, 7, 8) else Segments(ids, continues)
        with torch.no_grad():
            address = states[0]["k"].data_ptr()
            states[0] = states[0].push({"k": tokens[:, i : i + 1].clone()}, segments, keep=keep)
            assert states[0]["k"].data_ptr() == address
        states[1] = states[1].push({"k": tokens[:, i : i + 1].clone()}, segments, keep=keep)
        left, right = (torch.where(s.valid()[..., None], s["k"], 0) for s in states)
        assert torch.equal(left, right)
        assert torch.equal(states[0].positions(), states[1].positions())
