"""What every form of ``titans`` checks before it computes, and the state it starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments
from hybridtf.ops.documents import carried_state
from hybridtf.ops.titans.memory import layer_shapes

State = dict[str, Tensor]
MATRICES = ("M", "S", "base")


def check(
    q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], M0: Tensor, initial_state: Mapping[str, Tensor] | None,
    segments: Segments | None, mini_batch: int, depth: int, d_hidden: int,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit."""
    if k.ndim != 4 or q.shape != k.shape or v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        found = [tuple(x.shape) for x in (q, k, v)]
        raise ConfigError(f"titans: q and k must be (b t h k), v (b t h v); got {found[0]}, {found[1]} and {found[2]}")
    for name, number, least in (("mini_batch", mini_batch, 1), ("depth", depth, 1), ("d_hidden", d_hidden, min(depth - 1, 1))):
        if number < least:
            raise ConfigError(f"titans: {name} must be {least} or more with depth = {depth}; got {number}")
    b, t, h, width = k.shape
    n = sum(rows * columns for rows, columns in layer_shapes(width, v.shape[3], depth, d_hidden))
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {name: (x, (b, t, h)) for name, x in gates.items()}
    wanted["M0"] = (M0, (h, n))
    if initial_state is not None:
        if set(initial_state) != {*MATRICES, "n"}:
            raise ConfigError(f"titans: initial_state must have M, S, base and n; got {', '.join(initial_state)}")
        wanted |= {name: (initial_state[name], (b, h, n)) for name in MATRICES}
        wanted["n"] = (initial_state["n"], (b,))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ConfigError(f"titans: {name} must be {shape}; got {tuple(x.shape)}")
    check_segments("titans", segments, b, t)


def start_state(
    initial_state: Mapping[str, Tensor] | None, k: Tensor, M0: Tensor, dtype: torch.dtype, segments: Segments | None
) -> State:
    """The incoming state in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        b = k.shape[0]
        state = {name: M0.new_zeros(b, *M0.shape, dtype=dtype) for name in MATRICES}
        return {**state, "n": torch.zeros(b, dtype=torch.int64, device=k.device)}
    wide = {**dict.fromkeys(MATRICES, dtype), "n": torch.int64}
    return {name: carried_state(initial_state[name], kind, segments) for name, kind in wide.items()}
