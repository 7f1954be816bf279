"""Whether the parts of one call belong together: tokens, their documents, and the state that they go on from.

What is compared are sizes, which the host knows: nothing is read from a device, and a compiled graph holds no trace of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hybridtf.core.errors import ConfigError, RowsError
from hybridtf.core.segments import Segments
from hybridtf.core.states import State, StateLeaf


def check_call(owner: object, x: Tensor, segments: Segments | None, state: State | None) -> None:
    """For x (b t ...), which the component ``owner`` was called with.

    Raises :class:`ConfigError` for segments that are not (b t), and :class:`RowsError`, which is one too, for a state of more
    or fewer rows than b. Without this a state of one row is broadcast, and what the other rows held is lost.
    """
    if segments is not None and segments.ids.shape != x.shape[:2]:
        b, t = x.shape[:2]
        raise ConfigError(
            f"{type(owner).__name__}: segments are of shape {tuple(segments.ids.shape)}, the input of {tuple(x.shape)}: "
            f"segments must be ({b}, {t}), an id for each token"
        )
    if state is not None and (rows := state_rows(state)) is not None and rows != x.size(0):
        raise RowsError(
            f"{type(owner).__name__}: the state has {rows} rows, the input {x.shape[0]}: "
            f"the state must be one that init_state({x.shape[0]}) or a call of as many rows gave"
        )


def state_rows(state: State | None) -> int | None:
    """Rows of a state, of its first leaf: a step of decoding has no time to see them all. None where it holds none."""
    # Plain types first: whether something is a leaf is a question to an abstract class, which is slow to answer.
    if type(state) is dict:
        parts: Iterable[State] = state.values()
    elif type(state) is tuple or type(state) is list:
        parts = state
    elif isinstance(state, StateLeaf):
        return state.batch_size
    elif isinstance(state, dict):
        parts = state.values()
    elif isinstance(state, tuple | list):
        parts = state
    else:
        return None
    for part in parts:
        if (rows := state_rows(part)) is not None:
            return rows
    return None
