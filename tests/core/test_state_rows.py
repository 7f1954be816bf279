"""Rows of states side by side, and in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtf.core import (
    Fixed,
    Growing,
    Ring,
    Segments,
    StateError,
    concat_rows,
    crop,
    debug_states,
    leaves,
    overwrite,
    own_memory,
    reorder,
    with_room,
    write_rows,
)

F64 = torch.float64


def state_of(b: int, t: int, *, keep: int = 0, max_len: int | None = None, start: float = 0.0) -> dict[str, Any]:
    """All leaf classes after ``t`` tokens of ``b`` rows, each with values of its own."""
    x = start + torch.arange(b * t, dtype=F64).view(b, t)
    growing = Growing.empty(b, {"k": ()}, max_len=max_len, dtype=F64, device="cpu").append({"k": x}, None)
    sparse = Growing.empty(b, {"k": ()}, sparse=True, dtype=F64, device="cpu")
    sparse = sparse.append({"k": x}, None, where=x % 2 == 0)
    ring = Ring.empty(b, {"u": ()}, window=2, dtype=F64, device="cpu").push({"u": x}, None, keep=keep)
    fixed: Any = Fixed({"h": x[:, -1:]}, torch.full((b,), t))
    if keep:
        past_length = torch.tensor([[t - 2, t - 1]]).repeat(b, 1)
        fixed = Fixed({"h": x[:, -1:]}, torch.full((b,), t), {"h": x[:, -2:, None] - 1}, past_length)
    return {"a": (growing, [sparse]), "b": {"ring": ring, "fixed": fixed}, "none": ()}


def values(state: Any) -> list[list[Any]]:
    """What each row of each leaf holds, whatever slots it lies in."""
    found = []
    for leaf in leaves(state):
        for row in range(leaf.batch_size):
            if isinstance(leaf, Growing):
                held = [leaf["k"][row, i].item() for i in range(int(leaf.count[row]))]
            elif isinstance(leaf, Ring):
                places = leaf.positions()[row]
                held = [leaf["u"][row, i].item() for i in places.argsort().tolist() if places[i] >= 0]
            else:
                held = leaf["h"][row].tolist()
            found.append([int(leaf.length[row]), held])
    return found


def fixed_of(state: Any) -> dict[str, Any]:
    return {"fixed": state["b"]["fixed"]}


def rowwise(state: Any, row: int) -> list[list[Any]]:
    return values(reorder(state, torch.tensor([row])))


@pytest.mark.parametrize("keeps", [(0, 0, 0), (2, 0, 2)])
@pytest.mark.parametrize("max_len", [None, 9])
def test_rows_side_by_side_hold_what_they_held(keeps: tuple[int, ...], max_len: int | None) -> None:
    sizes = zip((1, 3, 2), (4, 7, 2), keeps, strict=True)
    parts = [state_of(b, t, keep=keep, max_len=max_len, start=100.0 * b) for b, t, keep in sizes]
    with debug_states():
        joined = concat_rows(parts)
    at = 0
    for part in parts:  # alive, and equal
        for row in range(leaves(part)[0].batch_size):
            assert rowwise(joined, at) == rowwise(part, row)
            at += 1
    assert at == 6
    if max_len is not None:
        assert leaves(joined)[0].static  # type: ignore[attr-defined]
    for old, new in zip(leaves(parts[0]), leaves(joined), strict=True):
        for a, b in zip(old.every_tensor(), new.every_tensor(), strict=False):
            assert a.data_ptr() != b.data_ptr() or not a.numel()


def test_joined_rows_go_on_and_go_back() -> None:
    parts = [state_of(1, 4, keep=2), state_of(1, 7, keep=0, start=50)]
    joined = concat_rows(parts)
    ring, fixed = leaves(joined)[2:]
    assert fixed.crop_refusal(torch.tensor([2, 0])) is None
    assert "row 1: cannot crop 1 tokens" in str(fixed.crop_refusal(torch.tensor([0, 1])))
    assert ring.crop_refusal(torch.tensor([2, 1])) is None
    assert "row 1: cannot crop 2 tokens" in str(ring.crop_refusal(torch.tensor([0, 2])))
    back = crop(joined, torch.tensor([1, 0]))
    assert rowwise(back, 0) == values(crop(parts[0], 1))
    growing = leaves(concat_rows([state_of(1, 2), state_of(1, 5)]))[0]
    assert isinstance(growing, Growing)
    more = growing.append({"k": torch.tensor([[8.0], [9.0]], dtype=F64)}, None)
    assert more.length.tolist() == [3, 6]
    assert more["k"][0, :3].tolist() == [0, 1, 8]


def test_gradients_flow_through_rows_side_by_side() -> None:
    x = torch.ones(1, 2, dtype=F64, requires_grad=True)
    leaf = Growing.empty(1, {"k": ()}, dtype=F64, device="cpu").append({"k": x}, None)
    longer = Growing.empty(1, {"k": ()}, dtype=F64, device="cpu").append({"k": torch.ones(1, 5, dtype=F64)}, None)
    leaves(concat_rows([leaf, longer]))[0]["k"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1]]


def test_states_that_have_nothing_in_common() -> None:
    with pytest.raises(StateError, match="at least one state"):
        concat_rows([])
    fixed = Fixed({"h": torch.zeros(1, 2)}, torch.tensor([1]))
    for other, message in (
        (Growing.empty(1, {"h": ()}, dtype=F64, device="cpu"), "differ in number or class"),
        (Fixed({"g": torch.zeros(1, 2)}, torch.tensor([1])), r"leaves hold \['h'\] and \['g'\]"),
        (Fixed({"h": torch.zeros(1, 3)}, torch.tensor([1])), r"Fixed: float32 \[2\] a row cannot take float32 \[3\] a row"),
        (Fixed({"h": torch.zeros(1, 2, dtype=F64)}, torch.tensor([1])), "cannot take float64"),
    ):
        with pytest.raises(StateError, match=message):
            concat_rows([fixed, other])
    rings = [Ring.empty(1, {"u": ()}, window=w, dtype=F64, device="cpu") for w in (2, 3)]
    with pytest.raises(StateError, match=r"rings of windows \[2, 3\]"):
        concat_rows(rings)
    dense = Growing.empty(1, {"k": ()}, dtype=F64, device="cpu")
    with pytest.raises(StateError, match=r"leaves hold \['k'\] and \['k', 'position'\]"):
        concat_rows([dense, Growing.empty(1, {"k": ()}, sparse=True, dtype=F64, device="cpu")])


def test_rows_written_in_place() -> None:
    state, rows = state_of(4, 5), state_of(2, 5, start=70)
    places = [t.data_ptr() for leaf in leaves(state) for t in leaf.every_tensor()]
    other = [rowwise(state, i) for i in (0, 2)]
    with torch.no_grad(), debug_states():
        for leaf, new in zip(leaves(state), leaves(rows), strict=True):
            if isinstance(leaf, Growing) and leaf.sparse:
                assert leaf.capacity == new.capacity  # type: ignore[attr-defined]
        write_rows(state, torch.tensor([3, 1]), rows)
    assert [t.data_ptr() for leaf in leaves(state) for t in leaf.every_tensor()] == places
    assert [rowwise(state, i) for i in (0, 2)] == other
    assert [rowwise(state, i) for i in (3, 1)] == [rowwise(rows, i) for i in (0, 1)]
    with pytest.raises(StateError, match=r"state\['a'\]\[0\]: float64 \[5\] a row cannot take float64 \[6\] a row"):
        write_rows(state, torch.tensor([0]), state_of(1, 6))
    with pytest.raises(StateError, match=r"state\['fixed'\]: .*snapshots"):
        write_rows(fixed_of(state), torch.tensor([0]), fixed_of(state_of(1, 5, keep=2)))


def test_a_call_written_into_its_state() -> None:
    state = own_memory(with_room(state_of(2, 3), 8))
    del state["a"][1][0]  # a sparse leaf may change its size
    want = state_of(2, 4)
    places = [t.data_ptr() for leaf in leaves(state) for t in leaf.every_tensor()]
    x = torch.tensor([[3.0], [7.0]], dtype=F64)
    with torch.no_grad(), debug_states(False):
        growing, ring, fixed = leaves(state)
        assert isinstance(growing, Growing)
        assert isinstance(ring, Ring)
        assert isinstance(fixed, Fixed)
        new = {
            "a": (growing.append({"k": x}, None), []), "none": (),
            "b": {"ring": ring.push({"u": x}, None), "fixed": fixed.advance({"h": fixed["h"] * 2}, None, 1)},
        }
        overwrite(state, new)
    assert [t.data_ptr() for leaf in leaves(state) for t in leaf.every_tensor()] == places
    assert all(leaf.length.tolist() == [4, 4] for leaf in leaves(state))
    assert leaves(state)[0]["k"][:, :4].tolist() == [[0, 1, 2, 3], [3, 4, 5, 7]]
    assert leaves(state)[1]["u"].tolist() == [[2, 3], [5, 7]]
    assert leaves(state)[2]["h"].tolist() == [[4], [10]]
    assert len(leaves(want)) == 4
    with pytest.raises(StateError, match=r"state\['h'\]: float32 \[1\] a row cannot take float32 \[2\] a row"):
        overwrite(*({"h": Fixed({"h": torch.zeros(1, n)}, torch.tensor([1]))} for n in (1, 2)))


def test_a_state_that_was_written_over_goes_on_from_where_it_now_is() -> None:
    """Whatever it knew of its length before: steps written in place, and rows of other lengths that came in."""
    with torch.no_grad():
        state = own_memory(_after(3))
        for i in range(3):
            assert state["growing"].shared_length() == 3 + i
            overwrite(state, _one_more(state, 3.0 + i))
        assert rowwise(state, 0) == rowwise(_after(6), 0)
        both = own_memory(concat_rows([_after(3), _after(3)]))
        assert both["ring"].shared_length() == 3
        write_rows(both, torch.tensor([1]), _after(5))
        assert both["growing"].shared_length() is None
        both = _one_more(both, 9.0)
        for row, n in enumerate((3, 5)):
            assert rowwise(both, row) == rowwise(_one_more(_after(n), 9.0), 0)


def _after(n: int) -> Any:
    x, where = torch.arange(n, dtype=F64)[None], {"dtype": F64, "device": "cpu"}
    growing, ring = Growing.empty(1, {"k": ()}, max_len=9, **where), Ring.empty(1, {"u": ()}, window=4, **where)
    return {"growing": growing.append({"k": x}, None), "ring": ring.push({"u": x}, None)}


def _one_more(state: Any, value: float) -> Any:
    x = torch.full((state["ring"].batch_size, 1), value, dtype=F64)
    return {"growing": state["growing"].append({"k": x}, None), "ring": state["ring"].push({"u": x}, None)}


def test_what_is_side_by_side_in_memory_stays_so() -> None:
    where: dict[str, Any] = {"dtype": F64, "device": "cpu"}
    x = {"k": torch.randn(2, 3, 3, 4, dtype=F64)}
    with torch.no_grad():
        growing = Growing.empty(2, {"k": (3, 4)}, max_len=8, **where).append(x, None)
        ring = Ring.empty(2, {"k": (3, 4)}, window=5, **where).push(x, None)
        moved = [
            *leaves(own_memory((growing, ring))), *(leaf.reorder(torch.tensor([1, 0, 0])) for leaf in (growing, ring)),
            *leaves(concat_rows([(growing, ring), (growing, ring)])), ring.push(x, None, keep=3),
        ]
    assert len(moved) == 7
    for leaf in moved:
        assert leaf["k"].transpose(1, 2).is_contiguous()
    assert torch.equal(moved[2]["k"], growing["k"][[1, 0, 0]])


def test_room_is_made_in_a_copy() -> None:
    state = state_of(2, 3)
    roomy = with_room(state, 10)
    growing, sparse = leaves(roomy)[:2]
    assert isinstance(growing, Growing)
    assert isinstance(sparse, Growing)
    assert (growing.capacity, growing.static, sparse.static) == (10, True, True)
    assert values(roomy) == values(state)
    with torch.no_grad():
        for leaf in leaves(roomy):
            for t in leaf.every_tensor():
                t.fill_(-1)
    assert values(state) == values(state_of(2, 3))
    small = leaves(with_room(state, 1))[0]
    assert isinstance(small, Growing)
    assert small.capacity == 3  # what is held always fits


def test_own_memory_is_shared_by_nothing() -> None:
    x = torch.arange(6.0).view(2, 3).t()  # not contiguous
    length = torch.tensor([1, 1, 1])
    state = own_memory((Fixed({"h": x}, length), Fixed({"h": x}, length)))
    tensors = [t for leaf in leaves(state) for t in leaf.every_tensor()]
    assert len({t.data_ptr() for t in tensors}) == 4
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)  # dense
    assert torch.equal(leaves(state)[0]["h"], x)


def test_every_tensor_can_be_put_back() -> None:
    for leaf in leaves(state_of(2, 5, keep=2)):
        tensors = leaf.every_tensor()
        again = leaf.with_tensors([t.clone() for t in tensors])
        assert type(again) is type(leaf)
        assert all(torch.equal(a, b) for a, b in zip(tensors, again.every_tensor(), strict=True))
    segments = Segments.from_mask(torch.tensor([[1, 0], [1, 1]]))
    ring = leaves(state_of(2, 5))[2]
    assert isinstance(ring, Ring)
    assert len(ring.push({"u": torch.zeros(2, 2, dtype=F64)}, segments).every_tensor()) == 3


@pytest.mark.parametrize("keeps", [(0, 2), (2, 0), (2, 2)])
def test_rows_side_by_side_keep_the_declared_length(keeps: tuple[int, int]) -> None:
    states = [state_of(1, 5, keep=keep) for keep in keeps]
    for leaf in (leaf for state in states for leaf in leaves(state)):
        leaf.max_len = 32
    assert [leaf.max_len for leaf in leaves(concat_rows(states))] == [32] * len(leaves(states[0]))
