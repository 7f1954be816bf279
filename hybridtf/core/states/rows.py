"""Rows of states that come and go, and states whose tensors keep their addresses.

Rows of two states can stand side by side where both are states of one component: the nesting and the leaf classes agree, and
slots and snapshots are brought to one form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core.errors import RowsError, StateError
from hybridtf.core.states.growing import Growing
from hybridtf.core.states.leaf import StateLeaf, in_memory_order
from hybridtf.core.states.whole import OwnClock, State, is_leaf, leaves, map_state


def concat_rows(states: Sequence[State]) -> State:
    """The rows of all states, in order, in new memory; the old states stay alive.

    Raises :class:`StateError` where they are not states of one component.
    """
    if not states:
        raise StateError("concat_rows takes at least one state")
    columns = zip(*(_matched(states[0], state) for state in states), strict=True)
    joined = (_joined(column) for column in columns)
    return map_state(lambda _: next(joined), states[0])


def write_rows(state: State, index: Tensor, rows: State) -> None:
    """Row i of ``rows`` into row ``index[i]`` (n) of ``state``, in place: every address stays. ``rows`` stays alive.

    No row of either may need the graph. Raises :class:`StateError` where slots, shapes or dtypes differ, or ``rows`` are not n.
    """
    for path, mine, theirs in _pairs(state, rows):
        for old, new in zip(mine, theirs, strict=True):
            _check_tensor(path, old[:1], new[:1])
            _check_rows(path, index.shape[0], new)
            old.index_copy_(0, index.to(old.device), new)
    _written(state)


def overwrite(state: State, new: State) -> None:
    """All of ``new``, which a call made from ``state``, into the memory of ``state``: the in-place form of a call.

    ``state`` is then the state after the call, with its old addresses. Tensors that the call wrote in place already are
    left alone. It is traced as part of a compiled step. Raises :class:`StateError` where the call changed a shape, rows too, or
    a dtype.
    """
    for path, mine, theirs in _pairs(state, new):
        for old, value in zip(mine, theirs, strict=True):
            if old is not value:
                _check_tensor(path, old, value)
                _check_rows(path, old.shape[0], value)
                old.copy_(value)
    _written(state)


def _written(state: State) -> None:
    for leaf in leaves(state):
        leaf.was_written()


def with_room(state: State, max_len: int) -> State:
    """A copy whose growing leaves have static buffers of at least ``max_len`` slots; the old state stays alive."""
    def roomy(part: State) -> State:
        if isinstance(part, OwnClock):
            return part._replace(state=with_room(part.state, max_len + part.more))
        if isinstance(part, Growing):
            return part.with_capacity(max_len, static=True)
        return part.clone() if isinstance(part, StateLeaf) else part

    return pytree.tree_map(roomy, state, is_leaf=lambda part: is_leaf(part) or isinstance(part, OwnClock))


def own_memory(state: State) -> State:
    """A copy in which no two tensors share memory and all are dense, as states with fixed addresses must be."""
    return map_state(lambda leaf: leaf.with_tensors([t.clone() for t in leaf.every_tensor()]), state)


def _matched(first: State, other: State) -> list[StateLeaf]:
    """The leaves of ``other``, which must be of the form of ``first``."""
    mine, theirs = leaves(first), leaves(other)
    if [type(leaf) for leaf in mine] != [type(leaf) for leaf in theirs]:
        raise StateError("these are states of different components: their leaves differ in number or class")
    return theirs


def _joined(column: tuple[StateLeaf, ...]) -> StateLeaf:
    if any(set(leaf.data) != set(column[0].data) for leaf in column):
        names = " and ".join(str(sorted(leaf.data)) for leaf in column)
        raise StateError(f"these are states of different components: leaves hold {names}")
    declared = sorted({leaf.max_len for leaf in column}, key=str)
    if len(declared) > 1:
        raise StateError(f"these states were made for different lengths ({declared[0]} and {declared[1]} tokens)")
    alike = [leaf.form_of(column) for leaf in column]
    parts = list(zip(*(leaf.every_tensor() for leaf in alike), strict=True))
    for tensors in parts:
        for tensor in tensors:
            _check_tensor(type(column[0]).__name__, tensors[0][:1], tensor[:1])
    return alike[0].with_tensors([in_memory_order(lambda ts: torch.cat(list(ts)), tensors) for tensors in parts])


def _pairs(state: State, other: State) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Path and all tensors of each leaf of two states of one form."""
    found = []
    theirs = _matched(state, other)
    named = [(path, leaf) for path, leaf in pytree.tree_leaves_with_path(state, is_leaf=is_leaf) if is_leaf(leaf)]
    for (path, leaf), twin in zip(named, theirs, strict=True):
        mine, new = leaf.every_tensor(), twin.every_tensor()
        where = f"state{pytree.keystr(path)}"
        if len(mine) != len(new):
            raise StateError(f"{where}: one of the two states has snapshots (keep) that the other lacks")
        found.append((where, mine, new))
    return found


def _check_tensor(where: str, old: Tensor, new: Tensor) -> None:
    """Two tensors of one shape and dtype; rows alone where only one row of each is given."""
    if old.shape[1:] != new.shape[1:] or old.dtype != new.dtype or old.ndim != new.ndim:
        was, now = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[1:])} a row" for t in (old, new))
        raise StateError(f"{where}: {was} cannot take {now}")


def _check_rows(where: str, b: int, new: Tensor) -> None:
    if new.shape[0] != b:
        raise RowsError(f"{where}: {b} rows cannot take {new.shape[0]}")
