"""What a caller does with a whole state: any nesting of dicts, tuples and named tuples over leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core.errors import StateError
from hybridtf.core.states.leaf import StateLeaf

State: TypeAlias = Any
"""A pytree whose leaves are ``Growing``, ``Ring`` or ``Fixed``."""


class OwnClock(NamedTuple):
    """A state whose lengths count something else than the tokens of the rows: blocks of them, or learned tokens before them.

    :func:`state_lengths` passes it by; every other move reaches the leaves inside. ``more``: entries that it holds beside one a
    token, for which :func:`with_room` sees to the room.
    """

    state: Any
    more: int = 0


def is_leaf(x: Any) -> bool:
    """A state leaf, as opposed to what it is nested in."""
    return isinstance(x, StateLeaf)


def leaves(state: State) -> list[StateLeaf]:
    """The leaves of a state, in order."""
    return [x for x in pytree.tree_leaves(state, is_leaf=is_leaf) if isinstance(x, StateLeaf)]


def map_state(fn: Callable[[StateLeaf], StateLeaf], state: State) -> State:
    """``fn`` on every leaf; the nesting stays."""
    return pytree.tree_map(lambda x: fn(x) if isinstance(x, StateLeaf) else x, state, is_leaf=is_leaf)


def declare(state: State, max_len: int | None) -> None:
    """Make ``max_len`` the length that an untouched state was made for, whatever room it has; None: the model's own.

    Positions that depend on a declared length (dynamic NTK, LongRoPE) then do not depend on how a caller allots memory.
    """
    for leaf in leaves(state):
        leaf.max_len = max_len


def reorder(state: State, index: Tensor) -> State:
    """Rows ``index`` of every leaf (beams, finished rows)."""
    return map_state(lambda leaf: leaf.reorder(index), state)


def crop(state: State, n: Tensor | int) -> State:
    """The state before each row's last ``n`` real tokens; consumes it.

    Raises :class:`StateError`, naming the leaf, where one kept too little; the state is then whole.
    """
    for path, leaf in pytree.tree_leaves_with_path(state, is_leaf=is_leaf):
        reason = leaf.crop_refusal(n) if isinstance(leaf, StateLeaf) else None
        if reason is not None:
            raise StateError(f"state{pytree.keystr(path)}: {reason}")
    return map_state(lambda leaf: leaf.crop(n), state)


def snapshot(state: State) -> State:
    """An independent, detached copy of a state (prefix reuse)."""
    return map_state(lambda leaf: leaf.snapshot(), state)


def restore(state: State) -> State:
    """A usable copy of a snapshot, which stays whole."""
    return map_state(lambda leaf: leaf.restore(), state)


def detach(state: State) -> State:
    """The state without its graph."""
    return map_state(lambda leaf: leaf.detach(), state)


def state_bytes(state: State, *, used: bool = False) -> int:
    """Bytes of all leaves: allocated, or only what holds tokens (``used``)."""
    return sum(leaf.used_nbytes() if used else leaf.nbytes() for leaf in leaves(state))


def state_lengths(state: State) -> Tensor | None:
    """(b) int64: tokens of each row's document, which every leaf outside an :class:`OwnClock` must agree on; None for a state
    without such leaves."""
    parts = pytree.tree_leaves(state, is_leaf=lambda x: is_leaf(x) or isinstance(x, OwnClock))
    found = [part for part in parts if isinstance(part, StateLeaf)]
    for leaf in found[1:]:
        if not torch.equal(leaf.length, found[0].length):
            lengths = f"{found[0].length.tolist()} and {leaf.length.tolist()}"
            raise StateError(f"leaves of one state disagree on its length: {lengths}")
    return found[0].length if found else None
